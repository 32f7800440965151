"""The family of kernels that a call names, and what is the same for all.

Everything here is written in ATen operators and kernel launches, so that the same functions run on
real tensors and under tracing. Products want matrices: the leading dimensions of ``x`` become rows
on the way in and are restored on the way out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from fusion_backend.errors import PlanError
from fusion_backend.kernels import registry
from fusion_backend.kernels.family import Family
from fusion_backend.mlp.expression import Expression, parse
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.operands import as_rows_of, check_use, kind_of, projections
from fusion_backend.mlp.weights import Weights


def forward(
    x: Tensor,
    weights: Weights,
    operands: Sequence[Tensor],
    activation: str,
    plan: str,
    residual: Tensor | None = None,
    norm: Norm | None = None,
) -> Tensor:
    """The MLP of ``x`` ``(..., in)``, plus the residual, as a contiguous ``(..., out)``.

    A norm comes before the MLP.

    Raises:
        PlanError: the plan is unknown or cannot run on this device, dtype, activation or operands.
    """
    family = family_of(plan, x.device)
    f = checked(family, activation, weights.weight_gate is not None, operands)
    rows, values = as_rows(x), [*map(as_rows_of, operands)]
    if norm is not None and not family.computes_norm:
        rows, norm = norm(rows), None
    if residual is None or not family.adds_residual:
        y = restore_rows(family.run(rows, weights, f, values, norm=norm), x)
        return y if residual is None else y + residual.contiguous()
    return restore_rows(family.run(rows, weights, f, values, as_rows(residual), norm), x)


def forward_saving(
    x: Tensor, weights: Weights, operands: Sequence[Tensor], activation: str, plan: str
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The MLP and its pre-activations ``(..., hidden)``; ``None`` for the gate of a plain MLP.

    Where they are recomputed, biases take their place, empty without one: copies, because they may
    be written to before the backward pass.

    Raises:
        PlanError: as :func:`forward`.
    """
    family = family_of(plan, x.device)
    f = checked(family, activation, weights.weight_gate is not None, operands, training=True)
    rows, values = as_rows(x), [*map(as_rows_of, operands)]
    if recomputes(plan, x, weights, operands):
        y = family.run(rows, weights, f, values)
        gate, up = (_copied(bias, x) for bias in (weights.bias_gate, weights.bias_up))
        return restore_rows(y, x), None if weights.weight_gate is None else gate, up
    y, preact_gate, preact_up = family.run_saving(rows, weights, f, values)
    if preact_gate is not None:
        preact_gate = restore_rows(preact_gate, x)
    return restore_rows(y, x), preact_gate, restore_rows(preact_up, x)


def recomputes(plan: str, x: Tensor, weights: Weights, operands: Sequence[Tensor]) -> bool:
    """Whether a plan's backward pass computes the pre-activations again, from x."""
    hidden, inner = weights.weight_up.shape
    widths = (inner, hidden, weights.weight_down.shape[0])
    gated = weights.weight_gate is not None
    family = registry.named(plan, registry.of_mlps())
    return family.saves(widths, gated, x.dtype, operands) == "x"


def _copied(bias: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if bias is None else bias.clone()


def family_of(plan: str, device: torch.device) -> Family:
    """The family of an MLP's plan.

    Raises:
        PlanError: there is none, or its kernels cannot run on ``device``.
    """
    family = registry.named(plan, registry.of_mlps())
    family.check_device(device)
    return family


def checked(
    family: Family,
    activation: str,
    gated: bool,
    operands: Sequence[Tensor],
    training: bool = False,
) -> Expression:
    """The activation, where a family can run it.

    Raises:
        PlanError: the family cannot run this activation or these operands.
    """
    f = _expression(activation, gated)
    check_use(f, operands)
    kinds = [*map(kind_of, operands)]
    index = family.untaken(kinds, training)
    if index is not None:
        raise PlanError(
            f"plan {family.name!r} cannot take the {kinds[index]} p{index} of {f}; "
            f"use plan {registry.REFERENCE.name!r}"
        )
    return f


def as_rows(tensor: Tensor) -> Tensor:
    """``(..., features)`` as ``(rows, features)``."""
    return tensor.unsqueeze(0) if tensor.dim() == 1 else tensor.flatten(0, -2)


def restore_rows(rows: Tensor, like: Tensor) -> Tensor:
    """``(rows, features)``, to which nothing else refers, with the leading dimensions of ``like``.

    The result is no view to autograd, as that of ATen's own products is not: in compiled code it
    may be written to in place.
    """
    if like.dim() == 2:
        return rows
    result: Tensor = torch.ops.aten._unsafe_view.default(rows, (*like.shape[:-1], rows.shape[-1]))
    return result


@functools.cache
def _expression(activation: str, gated: bool) -> Expression:
    """Read the activation, which speaks of ``x``, or of ``g`` and ``u`` where the MLP is gated."""
    expression = parse(activation)
    known = {"g", "u"} if gated else {"x"}
    if not known.issuperset(projections(expression)):
        raise PlanError(
            f"the activation of a {'gated' if gated else 'plain'} MLP must be an expression of "
            f"{' and '.join(sorted(known))}, got {activation!r}"
        )
    return expression
