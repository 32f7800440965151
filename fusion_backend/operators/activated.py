"""``torch.ops.fusedmlp.activated_linear``: the first layers of an MLP and its activation.

    activated_linear            h = f(x W_gateᵀ + b_gate, x W_upᵀ + b_up)
    activated_linear_forward    h and the pre-activations, which training keeps
    activated_linear_backward   the gradients that are asked for

They serve where something else than the second layer reads the hidden value, such as a norm.

The backward pass is made of ATen operators under both plans: a compiler joins the product with f′,
and the sums over rows that bias gradients are, with what it has computed the hidden value's
gradient by.
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


class ActivatedLinear(Operator):
    """``h = f(x W_1ᵀ + b_1)`` with the last dimension of ``x`` as features.

    Args:
        x: ``(..., in)``.
        weight_gate: ``(hidden, in)``, or ``None`` where one projection enters the activation.
        bias_gate: ``(hidden,)`` or ``None``.
        weight_up: ``(hidden, in)``.
        bias_up: ``(hidden,)`` or ``None``.
        operands: other tensors that ``f`` is of, as for ``mlp``.
        activation: ``f`` as an expression of ``x``, or of ``g`` and ``u`` where there is a gate.
        plan: the family that runs it, of ``registry.of_first_layers``.

    Returns:
        ``(..., hidden)``, contiguous, with the dtype of ``x``.

    Raises:
        PlanError: the plan is none of these, or cannot run on this device, activation or
            operands.
        ExpressionError: the activation speaks of operands that there are not.
        ValueError: tensors do not fit.
    """

    name = "activated_linear"
    arguments = (
        "Tensor x, Tensor? weight_gate, Tensor? bias_gate, Tensor weight_up, Tensor? bias_up, "
        "Tensor[]{} operands, str activation, str plan"
    )
    saved = "Tensor hidden, Tensor preact_gate, Tensor preact_up"
    backward = (
        "Tensor grad_hidden, Tensor x, Tensor? weight_gate, Tensor weight_up, Tensor preact_gate, "
        "Tensor preact_up, Tensor[] operands, str activation, str plan, bool[] needs"
    )
    families = staticmethod(registry.of_first_layers)
    whose_plan = "the plan of activated_linear"

    def run(self, family: Family, rows: Given, activations: Sequence[Expression]) -> Tensor:
        hidden, _, _ = family.run_first_layers(
            rows.x, rows.first, activations[0], rows.operands, False
        )
        return hidden

    def run_saving(
        self, family: Family, rows: Given, activations: Sequence[Expression]
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        hidden, gate, up = family.run_first_layers(
            rows.x, rows.first, activations[0], rows.operands, True
        )
        assert up is not None
        return hidden, gate, up

    def differentiate(self, call: Backward) -> Sequence[Tensor | None]:
        *own, of_operands = gradients.backward_of_hidden(call)
        return (*own[:5], *of_operands)
