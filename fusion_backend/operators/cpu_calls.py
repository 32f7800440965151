"""``torch.ops.fusedmlp.rows``: a call of the family ``rows``, as a graph names it.

Generated code calls a function that was made for one MLP, as with those of ``gpu_calls``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusion_backend.compat import extern_calls
from fusion_backend.compat.extern_calls import Made, Result, contiguous
from fusion_backend.kernels.registry import ROWS
from fusion_backend.mlp.norms import Norm
from fusion_backend.operators import cpu_training_calls, flops
from fusion_backend.operators.cpu_buffers import (
    can_be_called,
    in_rows,
    kinds,
    readable,
    strides,
)

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
    extern_calls.install(torch.ops.fusedmlp.rows.default, _lowering)
    cpu_training_calls.install_lowering()


def _lowering() -> Callable[..., Any]:
    by_dispatcher = extern_calls.by_dispatcher(torch.ops.fusedmlp.rows.default)

    def lower(x: Any, weights: Any, biases: Any, operands: Any, residual: Any, *rest: Any) -> Any:
        norm_weight, norm_bias, activations, gated, norm = rest
        if not can_be_called(weights):
            return by_dispatcher(x, weights, biases, operands, residual, *rest)
        operands = operands or ()
        x, layers = in_rows(x), [*map(readable, weights)]
        others = map(contiguous, (*biases, *operands, residual, norm_weight, norm_bias))
        widths = [layers[0].get_size()[1], *(layer.get_size()[0] for layer in layers[gated:])]
        known = (
            str(x.get_dtype()),
            tuple(activations),
            bool(gated),
            kinds(operands),
            tuple(map(int, widths)),
            tuple(map(strides, layers)),
            norm,
        )
        function = Made("fusedmlp_rows", f"{cpu_training_calls.KERNELS}.launch", "caller_of", known)
        result = Result((x.get_size()[0], widths[-1]), (widths[-1], 1), x.get_dtype())
        return extern_calls.returning(function, (x, *layers, *others), result)

    return lower
