"""What a call of a family's launches is made of, of tensors and of Inductor's nodes alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusion_backend.compat import inductor
from fusion_backend.kernels.family import Call
from fusion_backend.mlp import weights


class Launch:
    """The function of an operator on real tensors."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return getattr(self._module, self._call.name)(*arguments)

    @cached_property
    def _module(self) -> ModuleType:
        return import_module(self._call.module)


class Operand(NamedTuple):
    """A tensor, as far as kernels are chosen by it.

    Attributes:
        size: that of the tensor; numbers of rows may be symbols.
        dtype: that of its elements.
        is_transposed: whether it is a contiguous matrix's transpose.
        device: the number of its GPU.
    """

    size: tuple[Any, ...]
    dtype: torch.dtype
    is_transposed: bool
    device: int | None

    @classmethod
    def of_tensor(cls, tensor: Tensor) -> Operand:
        """A tensor; one without data will do."""
        is_transposed = weights.is_transposed(tensor)
        return cls(tuple(tensor.shape), tensor.dtype, is_transposed, tensor.get_device())

    @classmethod
    def of_node(cls, node: Any) -> Operand:
        """A node of Inductor's whose layout is fixed."""
        size, device = tuple(node.get_size()), node.get_device()
        return cls(size, node.get_dtype(), is_transposed(node), device.index)


def is_transposed(node: Any) -> bool:
    """Whether a node of Inductor's whose layout is fixed is a contiguous matrix's transpose."""
    size, stride = list(node.get_size()), list(node.get_stride())
    return len(size) == 2 and 1 not in size and stride == [1, size[0]]


def split(arguments: Sequence[Any]) -> tuple[Sequence[Any], list[Any]]:
    """An operator's tensors, and the texts and truth values that follow them."""
    rest = [each for each in arguments if isinstance(each, (str, bool))]
    return arguments[: len(arguments) - len(rest)], rest


def read_transposed(call: Call, operands: Sequence[Operand | None]) -> Iterator[bool]:
    """Which operands a call reads as they are, because they are transposes of contiguous ones."""
    takes = call.transposed == "always" or (call.transposed == "plain" and operands[2] is None)
    weighs = range(1, len(operands)) if call.results is None else (1,)
    for i, operand in enumerate(operands):
        yield takes and i in weighs and operand is not None and operand.is_transposed


def described(
    call: Call, operands: Sequence[Operand | None], rest: Sequence[Any]
) -> tuple[Any, ...]:
    """By what a call's ``caller`` and ``prepare`` choose kernels, after the number of rows."""
    x, weight, second = operands[:3]
    assert x is not None
    assert weight is not None
    given = tuple(operand is not None for operand in operands)
    turned = tuple(read_transposed(call, operands))
    if call.results is not None:
        widths = tuple(map(int, weight.size))
        return (*rest, widths, x.dtype, given, turned[1], x.device)
    hidden, inner = map(int, weight.size)
    out = hidden if second is None else int(second.size[0])
    return (*rest, (inner, hidden, out), x.dtype, given, turned, x.device)


def prepare(call: Call, rows: Any, known: tuple[Any, ...]) -> None:
    """Let kernels be compiled while Inductor compiles, unless it was told not to do so itself."""
    hint = inductor.optimization_hint(rows)
    if hint and inductor.compiles_in_parallel():
        getattr(import_module(call.module), call.prepare)(hint, *known)
