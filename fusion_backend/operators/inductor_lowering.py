"""Kernels that Inductor calls, because it cannot inline their launches.

It inlines Triton's kernels, but not Gluon's (``back_to_back``, ``epilogue``), and it passes no
attribute of a launch (``stream``, whose second kernel starts before the first has ended). In a
graph an operator of ``torch.ops.fusedmlp`` stands for such launches. By itself Inductor calls an
operator through PyTorch's dispatcher and back into Python, which takes the host longer than the GPU
computes; with the lowering here it calls a function that launches the kernels of one MLP, and that
is made once.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from fusion_backend.compat.inductor import fixed
from fusion_backend.kernels import registry
from fusion_backend.kernels.family import Call
from fusion_backend.operators import flops, training_calls
from fusion_backend.operators.launches import Launch, is_transposed, prepare


def _calls() -> list[Call]:
    """Those with one result."""
    return [call for family in registry.FAMILIES for call in family.calls if not call.results]


def register(library: torch.library.Library) -> None:
    """Define the operators: an MLP of ``(rows, in)`` each."""
    for call in _calls():
        name, tags = call.name, (torch.Tag.pt2_compliant_tag,)
        library.define(f"{name}({call.arguments}) -> Tensor", tags=tags)
        library.impl(name, Launch(call), "CUDA")
        torch.library.register_fake(f"{library.ns}::{name}", _fake, lib=library)
        flops.register(getattr(torch.ops.fusedmlp, name), f"{name}({call.arguments}) -> Tensor")
    training_calls.register(library)


def _fake(x: Tensor, weight_up: Tensor, second: Tensor | None, *others: Any) -> Tensor:
    return x.new_empty((x.shape[0], (weight_up if second is None else second).shape[0]))


def install_lowering() -> None:
    """Teach Inductor to call the functions; once a process, and only where Inductor is used.

    If it met an operator before, it has made itself a lowering by which it calls the dispatcher.
    """
    from torch._inductor import lowering

    for call in _calls():
        operator = getattr(torch.ops.fusedmlp, call.name).default
        if operator not in lowering.lowerings or operator in lowering.fallbacks:
            lowering.fallbacks.discard(operator)
            lower = _lowering(call)
            lowering.register_lowering(operator, type_promotion_kind=None)(lower)
    training_calls.install_lowering()


def _lowering(operator: Call) -> Any:
    from torch._inductor import ir

    name = operator.name

    class Caller(ir.ExternKernelAlloc):
        given: tuple[bool, ...]
        made: str

        def codegen(self, wrapper: Any) -> None:
            wrapper.add_import_once(
                f"from {operator.module} import {operator.caller} as {name}_caller"
            )
            wrapper.add_import_once(self.made)
            super().codegen(wrapper)

        def codegen_args(self) -> list[str]:
            following = iter(super().codegen_args())
            return [next(following) if given else "None" for given in self.given]

    def lower(*arguments: Any) -> Any:
        texts = [argument for argument in arguments if isinstance(argument, str)]
        operands = arguments[: len(arguments) - len(texts)]
        x, weight_up, second = operands[:3]
        takes_transposed = operator.transposed == "always" or (
            operator.transposed == "plain" and second is None
        )
        given = tuple(operand is not None for operand in operands)
        realized = [None if operand is None else fixed(operand) for operand in operands]
        transposed = tuple(
            takes_transposed and i > 0 and operand is not None and is_transposed(operand)
            for i, operand in enumerate(realized)
        )
        inputs = [
            operand if as_it_is else ir.ExternKernel.require_contiguous(operand)
            for operand, as_it_is in zip(realized, transposed, strict=True)
            if operand is not None
        ]
        hidden_features, in_features = map(int, weight_up.get_size())
        out_features = hidden_features if second is None else int(second.get_size()[0])
        widths = (in_features, hidden_features, out_features)
        what = (*texts, widths, x.get_dtype(), given, transposed, x.get_device().index)
        function = f"fusedmlp_{name}_{zlib.crc32(repr(what).encode()):08x}"
        layout = [x.get_size()[0], out_features], [out_features, 1]
        prepare(operator, x.get_size()[0], what)
        call = Caller(
            ir.FixedLayout(x.get_device(), x.get_dtype(), *layout),
            inputs,
            python_kernel_name=function,
        )
        call.given, call.made = given, f"{function} = {name}_caller{what!r}"
        return ir.TensorBox.create(call)

    return lower
