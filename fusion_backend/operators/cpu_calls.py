"""``torch.ops.fusedmlp.rows``: a call of the family ``rows``, as a graph names it.

By itself Inductor calls an operator through PyTorch's dispatcher and back into Python. With the
lowering here it calls a function that was made for one MLP, as with those of ``kernel_calls``.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusion_backend.compat.inductor import compiles_to_cpp
from fusion_backend.kernels.registry import ROWS
from fusion_backend.mlp.norms import Norm
from fusion_backend.operators import cpu_training_calls, flops
from fusion_backend.operators.cpu_buffers import contiguous, has_known_sizes, in_rows, readable

_SCHEMA = (
    "rows(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor[]? operands, Tensor? residual, "
    "Tensor? norm_weight, Tensor? norm_bias, str[] activations, bool gated, str norm) -> Tensor"
)


def register(library: torch.library.Library) -> None:
    """Define the operator: layers joined by activations, of ``(rows, in)``."""
    library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(ROWS.name, _run, "CPU")
    torch.library.register_fake(f"{library.ns}::{ROWS.name}", _fake, lib=library)
    flops.register(torch.ops.fusedmlp.rows, _SCHEMA)
    cpu_training_calls.register(library)


def _run(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    operands: Sequence[Tensor] | None,
    residual: Tensor | None,
    *norm_and_layers: Any,
) -> Tensor:
    from fusion_backend.kernels.cpu_rows import launch

    norm_weight, norm_bias, activations, gated, norm = norm_and_layers
    around = (residual, Norm.of(norm, norm_weight, norm_bias))
    return launch.run(x, weights, biases, operands or (), around, activations, gated)


def _fake(x: Tensor, weights: Sequence[Tensor], *others: Any) -> Tensor:
    return x.new_empty((x.shape[0], weights[-1].shape[0]))


def install_lowering() -> None:
    """Teach Inductor to call the function; once a process, and only where Inductor is used."""
    from torch._inductor import lowering

    operator = torch.ops.fusedmlp.rows.default
    if operator not in lowering.lowerings or operator in lowering.fallbacks:
        lowering.fallbacks.discard(operator)
        lowering.register_lowering(operator, type_promotion_kind=None)(_lowering())
    cpu_training_calls.install_lowering()


def _lowering() -> Any:
    from torch._inductor import ir
    from torch._inductor.lowering import fallback_handler

    by_dispatcher = fallback_handler(torch.ops.fusedmlp.rows.default, add_to_fallback_set=False)

    class Rows(ir.ExternKernelAlloc):
        given: tuple[bool, ...]
        made: str

        def codegen(self, wrapper: Any) -> None:
            wrapper.add_import_once("import torch")
            wrapper.add_import_once(
                "from fusion_backend.kernels.cpu_rows.launch import caller_of as rows_caller_of"
            )
            wrapper.add_import_once(self.made)
            super().codegen(wrapper)

        def codegen_args(self) -> list[str]:
            following = iter(super().codegen_args())
            return [next(following) if given else "None" for given in self.given]

    def lower(
        x: Any,
        weights: Any,
        biases: Any,
        operands: Any,
        residual: Any,
        *rest: Any,
    ) -> Any:
        norm_weight, norm_bias, activations, gated, norm = rest
        # C++ that Inductor generates calls no function of Python.
        if compiles_to_cpp() or not all(map(has_known_sizes, weights)):
            return by_dispatcher(x, weights, biases, operands, residual, *rest)
        operands = operands or ()
        x = in_rows(x)
        layers = [*map(readable, weights)]
        others = [*map(contiguous, (*biases, *operands, residual, norm_weight, norm_bias))]
        tensors = [x, *layers, *others]
        kinds = [(len(operand.get_size()), str(operand.get_dtype())) for operand in operands]
        widths = [layers[0].get_size()[1], *(layer.get_size()[0] for layer in layers[gated:])]
        what = (
            str(x.get_dtype()),
            tuple(activations),
            bool(gated),
            tuple(kinds),
            tuple(map(int, widths)),
            tuple(tuple(map(int, layer.get_stride())) for layer in layers),
            norm,
        )
        function = f"fusedmlp_rows_{zlib.crc32(repr(what).encode()):08x}"
        size, stride = [x.get_size()[0], widths[-1]], [widths[-1], 1]
        call = Rows(
            ir.FixedLayout(x.get_device(), x.get_dtype(), size, stride),
            [tensor for tensor in tensors if tensor is not None],
            python_kernel_name=function,
        )
        call.given = tuple(tensor is not None for tensor in tensors)
        call.made = f"{function} = rows_caller_of{what!r}"
        return ir.TensorBox.create(call)

    return lower
