"""Tensors without data, their alignment, and how Inductor's code allocates them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no data, because it stands for others in a trace."""
    from torch._subclasses.fake_tensor import is_fake

    return is_fake(tensor)


def empty_strided_cuda() -> Callable[..., torch.Tensor]:
    """Allocates on the current GPU, given sizes, strides and dtype, as fast as Inductor's code."""
    guards: Any = torch._C._dynamo.guards
    function: Callable[..., torch.Tensor] = guards._empty_strided_cuda
    return function


def empty_strided_cpu() -> Callable[..., torch.Tensor]:
    """As :func:`empty_strided_cuda`, on the CPU."""
    guards: Any = torch._C._dynamo.guards
    function: Callable[..., torch.Tensor] = guards._empty_strided_cpu
    return function


def starts_aligned(tensor: torch.Tensor, alignment: int) -> bool:
    """Whether the data of ``tensor`` start at a multiple of ``alignment`` bytes, at most 16.

    A tensor that is traced has no address yet. Inductor takes its storage to be aligned to 16
    bytes, and copies an input that turns out not to be when the compiled graph is called.
    """
    if not is_traced(tensor):
        return tensor.data_ptr() % alignment == 0
    offset: Any = tensor.storage_offset()
    return isinstance(offset, int) and offset * tensor.dtype.itemsize % alignment == 0


def fake_mode_of_its_own() -> Any:
    """A mode for fake tensors with symbols of its own, so that no other's grow by what it runs."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)


@contextmanager
def nothing_else_traced() -> Iterator[None]:
    """Run as if no compiler were at work, without gradients, as ahead-of-time autograd dispatches.

    Under the Python dispatcher operators whose schemas do not tell what they write to (batch norms)
    are replaced by those whose schemas do.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._guards import tracing
    from torch.utils._python_dispatch import _disable_current_modes

    log = logging.getLogger("torch._subclasses.fake_tensor")  # tells of calls that cannot be run
    was_disabled, log.disabled = log.disabled, True
    try:
        with (
            _disable_current_modes(),
            tracing(None),
            torch.inference_mode(False),
            torch.no_grad(),
            enable_python_dispatcher(),
        ):
            yield
    finally:
        log.disabled = was_disabled


def number_of(value: Any) -> Any:
    """The number that a symbol had when the graph was traced, without a guard."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
    if value.node.hint is not None:
        return kind(value.node.hint)
    environment: Any = value.node.shape_env
    known = getattr(environment, "backed_var_to_val", None)
    if known is None:  # 2.13 and before
        known = environment.var_to_val
    symbols = value.node.expr.free_symbols
    return kind(value.node.expr.xreplace({s: known.get(s, _UNKNOWN_SIZE) for s in symbols}))


# What stands for a size that only the data tell. Zero and one have meanings of their own.
_UNKNOWN_SIZE = 8


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Which memory a tensor, perhaps a fake one, is a view of, and how many bytes that has."""
    from torch.multiprocessing.reductions import StorageWeakRef

    storage = tensor.untyped_storage()
    return StorageWeakRef(storage).cdata, number_of(storage.nbytes())
