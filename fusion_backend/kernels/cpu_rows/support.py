"""Which MLPs the family can run on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusion_backend.kernels.cpu_rows import compiling
from fusion_backend.kernels.cpu_rows.gradient_source import GradientKernel
from fusion_backend.kernels.cpu_rows.printed import is_printable, partial_derivatives
from fusion_backend.kernels.cpu_rows.source import ELEMENTS, Kernel
from fusion_backend.mlp.expression import parse
from fusion_backend.mlp.operands import Kind

# Input features up to which pre-activations are computed again in the backward pass, not kept: that
# takes about as long as to write and to read them.
_RECOMPUTED_FROM = 128

# What is computed of a chain for one block of rows is to stay in cache, and one thread computes it.
_WIDEST_CHAIN = 1024


def why_not(dtype: torch.dtype, activations: Sequence[str]) -> str | None:
    """Why the family has no kernel for an MLP; ``None`` where it has.

    Args:
        dtype: of all tensors.
        activations: after each layer but the last, as text.
    """
    if dtype not in ELEMENTS:
        return f"the CPU's kernels compute no {str(dtype).removeprefix('torch.')}"
    for activation in activations:
        if not is_printable(parse(activation)):
            return f"the CPU's kernels compute no integers, and {activation} has some"
    return None


def why_not_chained(widths: Sequence[int] | None, training: bool) -> str | None:
    """Why the family runs no chain of these widths; ``None`` where it does."""
    if training:
        return "the CPU's kernels train MLPs of two layers only"
    if widths is None:
        return "widths of a chain must be known"
    if max(widths) > _WIDEST_CHAIN:
        return f"the CPU's kernels run chains of up to {_WIDEST_CHAIN} features, not {max(widths)}"
    return None


def why_no_gradients(activation: str, gated: bool) -> str | None:
    """Why the family computes no gradients of an MLP that it runs; ``None`` where it does."""
    for partial in partial_derivatives(parse(activation), gated, ()):
        if not is_printable(partial):
            return (
                f"the CPU's kernels compute no integers, and a derivative of {activation} has some"
            )
    return None


def recomputes_from(in_features: Any) -> bool:
    """Whether the backward pass computes pre-activations again, from x."""
    return isinstance(in_features, int) and in_features <= _RECOMPUTED_FROM


def why_not_compiled(
    dtype: torch.dtype,
    activations: Sequence[str],
    gated: bool,
    operands: Sequence[Kind],
    training: bool = False,
) -> str | None:
    """Why the kernels of an MLP cannot be compiled on this machine; ``None`` where they were.

    What a compiler refuses is so known before a graph depends on it.

    Args:
        dtype: of all tensors.
        activations: after each layer but the last, as text.
        gated: whether there are two first layers.
        operands: what enters the activation beside.
        training: whether gradients are wanted.
    """
    kinds = tuple((kind, torch.int64 if kind == "seed" else dtype) for kind in operands)
    message = compiling.why_not(Kernel(dtype, tuple(activations), gated, kinds))
    if message is None and training:
        message = compiling.why_not(GradientKernel(dtype, activations[0], gated, kinds))
    return None if message is None else f"its C++ kernel could not be compiled: {message}"
