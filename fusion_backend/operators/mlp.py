"""``torch.ops.fusedmlp``: one call is one MLP.

    mlp            y, or y + residual; of x or of its norm
    mlp_forward    y and the pre-activations, which training keeps
    mlp_backward   the gradients that are asked for

(Where only the first layers and the activation are fused: see ``activated_operators``. Three and
more linear layers are one call of ``chain``: see ``chain_operators``.)

The activation travels as text, such as ``silu(g) * u``, and the family of kernels as the name of a
plan: a graph that calls these operators shows all that they do, and needs nothing but them to run.

Ahead-of-time autograd takes the operators apart into kernel launches and ATen products, so that
Inductor inlines the former and compiles the latter. They stay whole where launches cannot be
traced or should not be seen; see :mod:`fusion_backend.operators.registration`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.weights import Weights
from fusion_backend.operators import autocast, autograd, cpu_calls, dispatch, fakes, gradients
from fusion_backend.operators import inductor_lowering as kernel_calls
from fusion_backend.operators.fakes import check
from fusion_backend.operators.registration import register

_ARGUMENTS = (
    "Tensor x, Tensor? weight_gate, Tensor? bias_gate, Tensor weight_up, Tensor? bias_up, "
    "Tensor weight_down, Tensor? bias_down, Tensor[]{} operands, str activation, str plan"
)
_SCHEMAS = {
    # AOTInductor's runtime passes None in place of an empty list.
    "mlp": f"mlp({_ARGUMENTS.format('?')}, *, Tensor? residual=None, Tensor? norm_weight=None, "
    "Tensor? norm_bias=None, str norm='') -> Tensor",
    "mlp_forward": f"mlp_forward({_ARGUMENTS.format('')}) "
    "-> (Tensor y, Tensor preact_gate, Tensor preact_up)",
    "mlp_backward": "mlp_backward(Tensor grad_output, Tensor x, Tensor? weight_gate, "
    "Tensor weight_up, Tensor weight_down, Tensor preact_gate, Tensor preact_up, "
    "Tensor[] operands, str activation, str plan, bool[] needs) -> Tensor[]",
}
_PLAN = 9  # its position among the arguments of each operator


def mlp(
    x: Tensor,
    weight_gate: Tensor | None,
    bias_gate: Tensor | None,
    weight_up: Tensor,
    bias_up: Tensor | None,
    weight_down: Tensor,
    bias_down: Tensor | None,
    operands: Sequence[Tensor] | None,
    activation: str,
    plan: str,
    *,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    norm: str = "",
) -> Tensor:
    """``y = f(x W_1ᵀ + b_1) W_downᵀ + b_down`` with the last dimension of ``x`` as features.

    A residual is added to y. ``back_to_back`` and ``rows`` add it before y is rounded, and so does
    ``epilogue`` on Hopper, unless gradients are recorded; otherwise y is rounded before, as in
    eager. A norm comes before all else.

    Args:
        x: ``(..., in)``.
        weight_gate: ``(hidden, in)``, or ``None`` for a plain MLP.
        bias_gate: ``(hidden,)`` or ``None``.
        weight_up: ``(hidden, in)``.
        bias_up: ``(hidden,)`` or ``None``.
        weight_down: ``(out, hidden)``.
        bias_down: ``(out,)`` or ``None``.
        operands: other tensors that ``f`` is of, as the variables ``p0``, ``p1`` and so on: scalars
            ``()``, vectors ``(hidden,)`` and tensors ``(..., hidden)`` of any floating dtype, and
            int64 seeds ``()`` of dropouts. ``None`` is as good as none.
        activation: ``f`` as an expression of ``x``, or of ``g`` and ``u`` where there is a gate.
        plan: ``back_to_back``, ``stream``, ``epilogue``, ``library``, ``rows``, ``onednn`` or
            ``reference``.
        residual: ``(..., out)`` with the dtype of ``x``, or ``None``.
        norm_weight: ``(in,)`` or ``None``.
        norm_bias: ``(in,)`` or ``None``.
        norm: of ``x``: ``layer_norm(eps)``, ``rms_norm(eps)`` or nothing, as in ``norms``.

    Returns:
        ``(..., out)``, contiguous, with the dtype of ``x``.

    Raises:
        PlanError: the plan is unknown or cannot run on this device, activation or operands.
        ExpressionError: the activation speaks of operands that there are not.
        ValueError: tensors do not fit, or the norm is not known.
    """
    operands = operands or ()
    weights = Weights(weight_gate, bias_gate, weight_up, bias_up, weight_down, bias_down)
    before = Norm.of(norm, norm_weight, norm_bias)
    check(x, weights, operands, residual, before)
    return dispatch.forward(x, weights, operands, activation, plan, residual, before)


def mlp_forward(
    x: Tensor,
    weight_gate: Tensor | None,
    bias_gate: Tensor | None,
    weight_up: Tensor,
    bias_up: Tensor | None,
    weight_down: Tensor,
    bias_down: Tensor | None,
    operands: Sequence[Tensor],
    activation: str,
    plan: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`mlp` and its pre-activations ``(..., hidden)``; an empty gate when there is none."""
    weights = Weights(weight_gate, bias_gate, weight_up, bias_up, weight_down, bias_down)
    check(x, weights, operands)
    y, preact_gate, preact_up = dispatch.forward_saving(x, weights, operands, activation, plan)
    return y, x.new_empty(0) if preact_gate is None else preact_gate, preact_up


def mlp_backward(
    grad_output: Tensor,
    x: Tensor,
    weight_gate: Tensor | None,
    weight_up: Tensor,
    weight_down: Tensor,
    preact_gate: Tensor,
    preact_up: Tensor,
    operands: Sequence[Tensor],
    activation: str,
    plan: str,
    needs: Sequence[bool],
) -> list[Tensor]:
    """Gradients of x, weight_gate, bias_gate, weight_up, bias_up, weight_down, bias_down, operands.

    Args:
        grad_output: ``(..., out)``.
        x: the input ``(..., in)``.
        weight_gate: ``(hidden, in)`` or ``None``.
        weight_up: ``(hidden, in)``.
        weight_down: ``(out, hidden)``.
        preact_gate: as :func:`mlp_forward` returned it; ignored without a gate.
        preact_up: as :func:`mlp_forward` returned it.
        operands: as in the forward pass.
        activation: as in the forward pass.
        plan: as in the forward pass.
        needs: which gradients to compute: one of seven, then one for each operand.

    Returns:
        As many tensors; those not asked for are empty.
    """
    gate = None if weight_gate is None else preact_gate
    saved = gradients.Saved(x, weight_gate, weight_up, weight_down, gate, preact_up, operands)
    asked = gradients.Needs._make((*needs[:7], tuple(needs[7:])))
    *own, of_operands = gradients.backward(grad_output, saved, activation, plan, asked)
    return [x.new_empty(0) if found is None else found for found in (*own, *of_operands)]


def _register(library: torch.library.Library) -> None:
    for implementation in (mlp, mlp_forward, mlp_backward):
        name = implementation.__name__
        register(
            library,
            implementation,
            _SCHEMAS[name],
            _PLAN,
            fake=getattr(fakes, name),
            differentiable=getattr(autograd, name),
            autocasting=autocast.passing if implementation is mlp_backward else autocast.casting,
        )
    library.impl("mlp", autograd.composed, "FuncTorchBatched")
    kernel_calls.register(library)
    cpu_calls.register(library)


_LIBRARY = torch.library.Library("fusedmlp", "DEF")
_register(_LIBRARY)
