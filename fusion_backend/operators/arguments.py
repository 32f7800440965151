"""The arguments of ``mlp`` and of its two parts, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fusion_backend.mlp.weights import Weights


class Arguments(NamedTuple):
    """Those of ``mlp`` and ``mlp_forward``.

    Attributes:
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
        plan: the family that runs it, of ``registry.of_mlps``.
    """

    x: Tensor
    weight_gate: Tensor | None
    bias_gate: Tensor | None
    weight_up: Tensor
    bias_up: Tensor | None
    weight_down: Tensor
    bias_down: Tensor | None
    operands: Sequence[Tensor] | None
    activation: str
    plan: str

    @property
    def weights(self) -> Weights:
        """Weights and biases."""
        return Weights(*self[1:7])


class BackwardArguments(NamedTuple):
    """Those of ``mlp_backward``.

    Attributes:
        grad_output: ``(..., out)``.
        x: the input ``(..., in)``.
        weight_gate: ``(hidden, in)`` or ``None``.
        weight_up: ``(hidden, in)``.
        weight_down: ``(out, hidden)``.
        preact_gate: as ``mlp_forward`` returned it; ignored without a gate.
        preact_up: as ``mlp_forward`` returned it.
        operands: as in the forward pass.
        activation: as in the forward pass.
        plan: as in the forward pass.
        needs: which gradients to compute: one of seven, then one for each operand.
    """

    grad_output: Tensor
    x: Tensor
    weight_gate: Tensor | None
    weight_up: Tensor
    weight_down: Tensor
    preact_gate: Tensor
    preact_up: Tensor
    operands: Sequence[Tensor]
    activation: str
    plan: str
    needs: Sequence[bool]
