"""``torch.ops.fusedmlp.chain``: one call is a chain of linear layers, joined by activations.

    chain            y
    chain_backward   the gradients that are asked for

The plan is ``chain`` (one Triton kernel), ``rows`` (one C++ kernel) or ``reference``.
``chain_backward`` computes the hidden values again and is made of ATen operators under every plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusion_backend.kernels import registry
from fusion_backend.kernels.family import Family
from fusion_backend.mlp.expression import Expression
from fusion_backend.mlp.weights import FirstLayer, Layer
from fusion_backend.operators import fakes, gradients
from fusion_backend.operators.arguments import Backward, Given
from fusion_backend.operators.operator import Operator

_ARGUMENTS = "Tensor x, Tensor[] weights, Tensor?[] biases, str[] activations, str plan"


class Chain(Operator):
    """``y = … f_1(f_0(x W_0ᵀ + b_0) W_1ᵀ + b_1) …`` with the last dimension as features.

    Args:
        x: ``(..., in)``.
        weights: at least two, each ``(out_features, in_features)`` with the ``out_features`` of the
            one before as ``in_features``; of the dtype of ``x``.
        biases: one a weight, ``(out_features,)`` or ``None``.
        activations: between the layers, expressions of ``x``: one less than weights.
        plan: the family that runs it, of ``registry.of_chains``.
        grad_output: ``(..., out)``.
        needs: which of the gradients to compute.

    Returns:
        ``(..., out)``, contiguous, with the dtype of ``x``. ``chain_backward``: gradients of x, of
        each weight and of each bias; those not asked for are empty.

    Raises:
        PlanError: the plan is unknown or cannot run on this device, or an activation is none of x.
        ValueError: numbers, shapes, dtypes or devices of the operands do not fit.
    """

    name = "chain"
    arguments = _ARGUMENTS
    backward = f"Tensor grad_output, {_ARGUMENTS}, bool[] needs"
    families = staticmethod(registry.of_chains)
    whose_plan = "the plan of a chain"
    is_chain = True

    def read(self, *arguments: Any) -> Given:
        x, weights, biases, activations, plan = arguments
        if not len(weights) == len(biases) == len(activations) + 1 >= 2:
            raise ValueError(
                f"a chain must have a bias (or None) for each of at least two weights and an "
                f"activation between two, got {len(weights)} weights, {len(biases)} biases and "
                f"{len(activations)} activations"
            )
        (weight, bias), *further = map(Layer, weights, biases)
        first = FirstLayer(None, None, weight, bias)
        return Given(x, first, tuple(further), tuple(activations), plan)

    def check(self, given: Given) -> None:
        fakes.check_chain(given)

    def run(self, family: Family, rows: Given, activations: Sequence[Expression]) -> Tensor:
        return family.run_chain(rows.x, *rows.chained, activations)

    def read_backward(self, *arguments: Any) -> Backward:
        grad_output, *call, needs = arguments
        return Backward(grad_output, self.read(*call), (), needs)

    def arguments_of(self, call: Backward) -> Sequence[Any]:
        given = call.given
        whole = (given.x, *given.chained, list(given.activations), given.plan)
        return (call.grad_output, *whole, call.needs)

    def differentiate(self, call: Backward) -> Sequence[Tensor | None]:
        self.family_of(call.given.plan, call.given.x.device)
        return gradients.backward_of_chain(call)

    def in_order(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
        return [*weights, *biases]
