"""``torch.ops.fusedmlp.mlp``: one call is one MLP.

mlp            y, or y + residual; of x or of its norm
mlp_forward    y and the pre-activations, which training keeps
mlp_backward   the gradients that are asked for
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusion_backend.kernels import registry
from fusion_backend.kernels.family import Family
from fusion_backend.mlp.expression import Expression
from fusion_backend.operators import gradients
from fusion_backend.operators.arguments import Backward, Given
from fusion_backend.operators.operator import Operator


class Mlp(Operator):
    """``y = f(x W_1ᵀ + b_1) W_downᵀ + b_down`` with the last dimension of ``x`` as features.

    A residual is added to y. A family whose kernel adds it does so before y is rounded, unless
    gradients are recorded; otherwise y is rounded before, as in eager. A norm comes before all
    else.

    Args:
        x: ``(..., in)``.
        weight_gate: ``(hidden, in)``, or ``None`` for a plain MLP.
        bias_gate: ``(hidden,)`` or ``None``.
        weight_up: ``(hidden, in)``.
        bias_up: ``(hidden,)`` or ``None``.
        weight_down: ``(out, hidden)``.
        bias_down: ``(out,)`` or ``None``.
        operands: other tensors that ``f`` is of, as in :class:`Given`. ``None`` is as good as none.
        activation: ``f`` as an expression of ``x``, or of ``g`` and ``u`` where there is a gate.
        plan: the family that runs it, of ``registry.of_mlps``.
        residual: ``(..., out)`` with the dtype of ``x``, or ``None``.
        norm_weight: ``(in,)`` or ``None``.
        norm_bias: ``(in,)`` or ``None``.
        norm: of ``x``: ``layer_norm(eps)``, ``rms_norm(eps)`` or nothing, as in ``norms``.
        grad_output: ``(..., out)``.
        preact_gate: as ``mlp_forward`` returned it: ``(..., hidden)``; ignored without a gate.
        preact_up: as ``mlp_forward`` returned it.
        needs: which gradients to compute: one of seven, then one for each operand.
        recompute: whether a family may keep x in place of the pre-activations, and compute them
            again.

    Returns:
        ``(..., out)``, contiguous, with the dtype of ``x``. ``mlp_backward``: gradients of x,
        weight_gate, bias_gate, weight_up, bias_up, weight_down, bias_down, operands; those not
        asked for are empty.

    Raises:
        PlanError: the plan is unknown or cannot run on this device, activation or operands.
        ExpressionError: the activation speaks of operands that there are not.
        ValueError: tensors do not fit, or the norm is not known.
    """

    name = "mlp"
    # AOTInductor's runtime passes None in place of an empty list.
    arguments = (
        "Tensor x, Tensor? weight_gate, Tensor? bias_gate, Tensor weight_up, Tensor? bias_up, "
        "Tensor weight_down, Tensor? bias_down, Tensor[]{} operands, str activation, str plan"
    )
    around = (
        ", *, Tensor? residual=None, Tensor? norm_weight=None, Tensor? norm_bias=None, str norm=''"
    )
    saved = "Tensor y, Tensor preact_gate, Tensor preact_up"
    how_parts_save = ", *, bool recompute=True"
    backward = (
        "Tensor grad_output, Tensor x, Tensor? weight_gate, Tensor weight_up, Tensor weight_down, "
        "Tensor preact_gate, Tensor preact_up, Tensor[] operands, str activation, str plan, "
        "bool[] needs"
    )
    families = staticmethod(registry.of_mlps)

    def run(self, family: Family, rows: Given, activations: Sequence[Expression]) -> Tensor:
        what = (rows.x, rows.weights, activations[0], rows.operands)
        return family.run(*what, residual=rows.residual, norm=rows.norm)

    def run_saving(
        self, family: Family, rows: Given, activations: Sequence[Expression]
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        return family.run_saving(rows.x, rows.weights, activations[0], rows.operands)

    def recomputes(self, given: Given) -> bool:
        family = registry.named(given.plan, registry.of_mlps())
        (hidden, inner), out = given.first.weight_up.shape, given.out_features
        how = (given.gated, given.x.dtype, given.operands)
        return family.saves((inner, hidden, out), *how) == "x"

    def differentiate(self, call: Backward) -> Sequence[Tensor | None]:
        family = registry.named(call.given.plan, registry.of_mlps())
        *own, of_operands = gradients.backward(
            call, family, call.recompute and self.recomputes(call.given)
        )
        return (*own, *of_operands)
