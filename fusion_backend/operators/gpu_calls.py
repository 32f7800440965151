"""Launches that generated code calls, because Inductor cannot inline them.

It inlines Triton's kernels, but not Gluon's (``back_to_back``, ``epilogue``), and it passes no
attribute of a launch (``stream``, whose second kernel starts before the first has ended). In a
graph an operator of ``torch.ops.fusedmlp`` stands for such launches, and generated code calls a
function that launches the kernels of one MLP. Those of training have several results:

epilogue_saving    postact and the pre-activations
hidden_gradient    gradients of the pre-activations, postact again, and sums over rows
input_gradient     that of x, where there is a gate
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusion_backend.compat import extern_calls
from fusion_backend.compat.extern_calls import Made, Result, contiguous, fixed
from fusion_backend.kernels import registry
from fusion_backend.kernels.family import Call
from fusion_backend.operators import flops
from fusion_backend.operators.launches import (
    Launch,
    Operand,
    described,
    prepare,
    read_transposed,
    split,
)


def _calls() -> list[Call]:
    return [call for family in registry.FAMILIES for call in family.calls]


def register(library: torch.library.Library) -> None:
    """Define the operators, of ``(rows, features)`` each."""
    for call in _calls():
        schema = f"{call.name}({call.arguments}) -> Tensor{'[]' if call.results else ''}"
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(call.name, Launch(call), "CUDA")
        torch.library.register_fake(f"{library.ns}::{call.name}", _Fake(call), lib=library)
        flops.register(getattr(torch.ops.fusedmlp, call.name).default)


class _Fake:
    """What an operator returns, as far as shapes and dtypes go."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Tensor | list[Tensor]:
        first, weight, second = arguments[:3]
        if self._call.results is None:
            out = (weight if second is None else second).shape[0]
            single: Tensor = first.new_empty((first.shape[0], out))
            return single
        sizes = [tuple(each.shape) if isinstance(each, Tensor) else None for each in arguments]
        found = self._call.results(sizes, first.dtype, split(arguments)[1], operator.floordiv)
        return [first.new_empty(shape, dtype=dtype) for shape, dtype in found]


def install_lowering() -> None:
    """Teach Inductor to call the functions; once a process, and only where Inductor is used."""
    for call in _calls():
        overload = getattr(torch.ops.fusedmlp, call.name).default
        extern_calls.install(overload, partial(_lowering, call))


def _lowering(call: Call) -> Callable[..., Any]:
    def lower(*arguments: Any) -> Any:
        tensors, rest = split(arguments)
        nodes = [None if tensor is None else fixed(tensor) for tensor in tensors]
        operands = [None if node is None else Operand.of_node(node) for node in nodes]
        inputs = [
            node if as_it_is else contiguous(node)
            for node, as_it_is in zip(nodes, read_transposed(call, operands), strict=True)
        ]
        known = described(call, operands, rest)
        first, weight, second = tensors[:3]
        rows, dtype = first.get_size()[0], first.get_dtype()
        prepare(call, rows, known)
        taken = extern_calls.spent(inputs, call.spends)
        if call.spends:
            known = (*known, taken is not None)
        function = Made(f"fusedmlp_{call.name}", call.module, call.caller, known)
        if call.results is None:
            out = (weight if second is None else second).get_size()[0]
            return extern_calls.returning(function, inputs, Result((rows, out), (out, 1), dtype))
        sizes = [None if operand is None else operand.size for operand in operands]
        found = call.results(sizes, dtype, rest, extern_calls.floor_divided)
        results = [Result(shape, (shape[1], 1), kept) for shape, kept in found]
        return extern_calls.returning_list(function, inputs, results, taken or ())

    return lower
