"""Kernels of training that Inductor calls, as those of ``kernel_calls``; they have several results.

epilogue_saving    postact and the pre-activations
hidden_gradient    gradients of the pre-activations, postact again, and sums over rows
input_gradient     that of x, where there is a gate
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from fusion_backend.compat import inductor

_ARGUMENTS = {
    "epilogue_saving": "Tensor x, Tensor weight_up, Tensor? weight_gate, Tensor? bias_up, "
    "Tensor? bias_gate, str activation",
    "hidden_gradient": "Tensor grad_output, Tensor weight_down, Tensor? preact_gate, "
    "Tensor preact_up, str activation, bool has_sums",
    "input_gradient": "Tensor grad_preact, Tensor weight_gate, Tensor weight_up",
}
_MODULES = {
    "epilogue_saving": "epilogue.launch_sm90",
    "hidden_gradient": "hidden_gradient.launch_sm90",
    "input_gradient": "epilogue.launch_sm90",
}
# Which operand is read as it is where it is the transpose of a contiguous matrix.
_TURNED = {"epilogue_saving": 1, "hidden_gradient": 1}

Shapes = list[tuple[tuple[Any, Any], torch.dtype]]


def register(library: torch.library.Library) -> None:
    """Define the operators, of ``(rows, features)`` each."""
    for name, arguments in _ARGUMENTS.items():
        library.define(f"{name}({arguments}) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, _Launch(name), "CUDA")
        torch.library.register_fake(f"{library.ns}::{name}", _Fake(name), lib=library)


class _Launch:
    """The function of an operator's name, whose module is imported when it is called first."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *arguments: Any) -> list[Tensor]:
        module = import_module(f"fusion_backend.kernels.{_MODULES[self._name]}")
        results: list[Tensor] = getattr(module, self._name)(*arguments)
        return results


class _Fake:
    """What an operator returns, as far as shapes and dtypes go."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, first: Tensor, *others: Any) -> list[Tensor]:
        sizes = [tuple(t.shape) if isinstance(t, Tensor) else None for t in (first, *others)]
        found = _shapes(self._name, sizes, first.dtype, others[-1], _blocks)
        return [first.new_empty(shape, dtype=dtype) for shape, dtype in found]


def _blocks(rows: Any) -> Any:
    from fusion_backend.kernels.hidden_gradient.launch_sm90 import blocks

    return blocks(rows)


def _shapes(
    name: str,
    sizes: Sequence[tuple[Any, ...] | None],
    dtype: torch.dtype,
    last: Any,
    blocks: Callable[[Any], Any],
) -> Shapes:
    """Shapes and dtypes of the results, from those of the operands and the last argument."""
    first, second, third = sizes[0], sizes[1], sizes[2]
    assert first is not None
    assert second is not None
    rows = first[0]
    if name == "epilogue_saving":
        return [((rows, second[0]), dtype)] * (2 if third is None else 3)
    if name == "input_gradient":
        return [((rows, second[1]), dtype)]
    hidden = second[1]
    width = hidden if third is None else 2 * hidden
    summed = ((blocks(rows) if last else 0, width), torch.float32)
    return [((rows, width), dtype), ((rows, hidden), dtype), summed]


def install_lowering() -> None:
    """Teach Inductor to call the functions, as :func:`kernel_calls.install_lowering` does."""
    from torch._inductor import lowering

    for name in _ARGUMENTS:
        operator = getattr(torch.ops.fusedmlp, name).default
        if operator not in lowering.lowerings or operator in lowering.fallbacks:
            lowering.fallbacks.discard(operator)
            lower = _lowering(name)
            lowering.register_lowering(operator, type_promotion_kind=None)(lower)


def _lowering(name: str) -> Any:
    from torch._inductor import ir
    from torch.utils._sympy.functions import FloorDiv

    from fusion_backend.kernels.hidden_gradient.launch_sm90 import BLOCK_M, SUMS_OF_BLOCK

    module = _MODULES[name]

    class Call(ir.ExternKernelAlloc):
        given: tuple[bool, ...]
        made: str

        def codegen(self, wrapper: Any) -> None:
            wrapper.add_import_once(
                f"from fusion_backend.kernels.{module} import {name}_caller as {name}_caller"
            )
            wrapper.add_import_once(self.made)
            super().codegen(wrapper)

        def codegen_args(self) -> list[str]:
            following = iter(super().codegen_args())
            return [next(following) if given else "None" for given in self.given]

    def blocks(rows: Any) -> Any:
        return FloorDiv(rows + BLOCK_M - 1, BLOCK_M) * SUMS_OF_BLOCK

    def lower(*arguments: Any) -> Any:
        rest = [argument for argument in arguments if isinstance(argument, (str, bool))]
        operands = arguments[: len(arguments) - len(rest)]
        realized = [o if o is None else ir.ExternKernel.realize_input(o) for o in operands]
        turned = _TURNED.get(name, -1)
        is_turned = turned > 0 and realized[2] is None and _is_transposed(realized[turned])
        if name == "hidden_gradient":
            is_turned = _is_transposed(realized[turned])
        inputs = [
            o if i == turned and is_turned else ir.ExternKernel.require_contiguous(o)
            for i, o in enumerate(realized)
            if o is not None
        ]
        x = operands[0]
        sizes = [None if o is None else tuple(o.get_size()) for o in operands]
        given = tuple(o is not None for o in operands)
        widths = tuple(int(n) for size in sizes[1:2] if size is not None for n in size)
        what = (*rest, widths, x.get_dtype(), given, is_turned, x.get_device().index)
        function = f"fusedmlp_{name}_{zlib.crc32(repr(what).encode()):08x}"
        _prepare(name, x.get_size()[0], what)
        call = Call(
            ir.MultiOutputLayout(device=x.get_device()), inputs, python_kernel_name=function
        )
        call.given, call.made = given, f"{function} = {name}_caller{what!r}"
        results = [
            ir.MultiOutput(
                ir.FixedLayout(x.get_device(), dtype, [*shape], [shape[1], 1]), call, [(list, i)]
            )
            for i, (shape, dtype) in enumerate(
                _shapes(name, sizes, x.get_dtype(), arguments[-1], blocks)
            )
        ]
        call.outputs = results
        return [ir.TensorBox.create(result) for result in results]

    return lower


def _prepare(name: str, rows: Any, what: tuple[Any, ...]) -> None:
    """As in ``kernel_calls``."""
    hint = inductor.optimization_hint(rows)
    if hint and inductor.compiles_in_parallel():
        module = import_module(f"fusion_backend.kernels.{_MODULES[name]}")
        getattr(module, f"prepare_{name}")(hint, *what)


def _is_transposed(node: Any) -> bool:
    """Whether a realized node of Inductor's is the transpose of a contiguous matrix."""
    size, stride = list(node.get_size()), list(node.get_stride())
    return len(size) == 2 and min(size) > 1 and stride == [1, size[0]]
