"""Kernels of training that Inductor calls, as those of ``kernel_calls``; they have several results.

epilogue_saving    postact and the pre-activations
hidden_gradient    gradients of the pre-activations, postact again, and sums over rows
input_gradient     that of x, where there is a gate
"""

from __future__ import annotations

import operator
import zlib
from typing import Any

import torch
from torch import Tensor

from fusion_backend.compat.inductor import fixed
from fusion_backend.kernels import registry
from fusion_backend.kernels.family import Call
from fusion_backend.operators import flops
from fusion_backend.operators.launches import Launch, is_transposed, prepare


def _calls() -> list[Call]:
    """Those with several results."""
    return [call for family in registry.FAMILIES for call in family.calls if call.results]


def register(library: torch.library.Library) -> None:
    """Define the operators, of ``(rows, features)`` each."""
    for call in _calls():
        name, tags = call.name, (torch.Tag.pt2_compliant_tag,)
        library.define(f"{name}({call.arguments}) -> Tensor[]", tags=tags)
        library.impl(name, Launch(call), "CUDA")
        torch.library.register_fake(f"{library.ns}::{name}", _Fake(call), lib=library)
        flops.register(getattr(torch.ops.fusedmlp, name), f"{name}({call.arguments}) -> Tensor[]")


class _Fake:
    """What an operator returns, as far as shapes and dtypes go."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def __call__(self, first: Tensor, *others: Any) -> list[Tensor]:
        assert self._call.results is not None
        sizes = [tuple(t.shape) if isinstance(t, Tensor) else None for t in (first, *others)]
        found = self._call.results(sizes, first.dtype, others[-1], operator.floordiv)
        return [first.new_empty(shape, dtype=dtype) for shape, dtype in found]


def install_lowering() -> None:
    """Teach Inductor to call the functions, as :func:`kernel_calls.install_lowering` does."""
    from torch._inductor import lowering

    for call in _calls():
        overload = getattr(torch.ops.fusedmlp, call.name).default
        if overload not in lowering.lowerings or overload in lowering.fallbacks:
            lowering.fallbacks.discard(overload)
            lower = _lowering(call)
            lowering.register_lowering(overload, type_promotion_kind=None)(lower)


def _lowering(launch: Call) -> Any:
    from torch._inductor import ir
    from torch.utils._sympy.functions import FloorDiv

    name, shapes = launch.name, launch.results
    assert shapes is not None

    class Caller(ir.ExternKernelAlloc):
        given: tuple[bool, ...]
        made: str

        def codegen(self, wrapper: Any) -> None:
            wrapper.add_import_once(f"from {launch.module} import {launch.caller} as {name}_caller")
            wrapper.add_import_once(self.made)
            super().codegen(wrapper)

        def codegen_args(self) -> list[str]:
            following = iter(super().codegen_args())
            return [next(following) if given else "None" for given in self.given]

    def lower(*arguments: Any) -> Any:
        rest = [argument for argument in arguments if isinstance(argument, (str, bool))]
        operands = arguments[: len(arguments) - len(rest)]
        realized = [o if o is None else fixed(o) for o in operands]
        _, weight, second, *_ = realized
        takes_transposed = launch.transposed == "always" or (
            launch.transposed == "plain" and second is None
        )
        is_turned = takes_transposed and is_transposed(weight)
        inputs = [
            o if i == 1 and is_turned else ir.ExternKernel.require_contiguous(o)
            for i, o in enumerate(realized)
            if o is not None
        ]
        x = operands[0]
        sizes = [None if o is None else tuple(o.get_size()) for o in operands]
        given = tuple(o is not None for o in operands)
        widths = tuple(int(n) for size in sizes[1:2] if size is not None for n in size)
        what = (*rest, widths, x.get_dtype(), given, is_turned, x.get_device().index)
        function = f"fusedmlp_{name}_{zlib.crc32(repr(what).encode()):08x}"
        prepare(launch, x.get_size()[0], what)
        call = Caller(
            ir.MultiOutputLayout(device=x.get_device()), inputs, python_kernel_name=function
        )
        call.given, call.made = given, f"{function} = {name}_caller{what!r}"
        results = [
            ir.MultiOutput(
                ir.FixedLayout(x.get_device(), dtype, [*shape], [shape[1], 1]), call, [(list, i)]
            )
            for i, (shape, dtype) in enumerate(
                shapes(sizes, x.get_dtype(), arguments[-1], FloorDiv)
            )
        ]
        call.outputs = results
        return [ir.TensorBox.create(result) for result in results]

    return lower
