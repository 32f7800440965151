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
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.steps import Steps
from fusion_backend.mlp.weights import FirstLayer, Layer
from fusion_backend.operators import checks, gradients
from fusion_backend.operators.arguments import Backward, Given
from fusion_backend.operators.operator import Operator

_ARGUMENTS = "Tensor x, Tensor[] weights, Tensor?[] biases, str[] activations, str plan"


class Chain(Operator):
    """``y = … f_1(f_0(x W_0ᵀ + b_0) W_1ᵀ + b_1) …`` with the last dimension as features.

    Args:
        x: ``(..., in)``.
        weights: at least two, each ``(out_features, in_features)`` with the ``out_features`` of the
            one before as ``in_features``, and those of ``x`` too where a step says so; of the dtype
            of ``x``.
        biases: one a weight, ``(out_features,)`` or ``None``.
        activations: expressions of ``x``: one less than weights, between the layers; where there
            are ``steps``, one for each activation of theirs, also of the values that it reads, as
            its variables ``p0`` and so on.
        plan: the family that runs it, of ``registry.of_chains``.
        steps: what is computed, as in :mod:`fusion_backend.mlp.steps`; nothing for the layers, and
            an activation between each two. With steps, autograd differentiates the ATen operators
            that the chain is composed of.
        norms: weight and bias of each norm of the steps, ``(features,)`` of any floating dtype or
            ``None``, one after the other.
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
    around = ", *, str steps='', Tensor?[]? norms=None"
    kept_by_autocast = ("norms",)
    backward = f"Tensor grad_output, {_ARGUMENTS}, bool[] needs"
    families = staticmethod(registry.of_chains)
    whose_plan = "the plan of a chain"
    is_chain = True

    def read(self, *arguments: Any) -> Given:
        return self.given(*arguments)

    def given(  # type: ignore[override]
        self, *arguments: Any, steps: str = "", norms: Sequence[Tensor | None] | None = None
    ) -> Given:
        x, weights, biases, activations, plan = arguments
        if len(weights) < 2 or len(weights) != len(biases):
            raise ValueError(
                f"a chain must have a bias (or None) for each of at least two weights, "
                f"got {len(weights)} weights and {len(biases)} biases"
            )
        inner = Steps.of(steps, len(weights))
        if len(activations) != inner.activations:
            where = "of its steps that is one" if steps else "two weights that follow each other"
            raise ValueError(
                f"a chain must have an activation for each {where}, {inner.activations} in all, "
                f"got {len(activations)} activations"
            )
        norms = norms or ()
        if len(norms) != 2 * len(inner.norms):
            raise ValueError(
                f"a chain must have a weight and a bias (or None) for each of its "
                f"{len(inner.norms)} norms, got {len(norms)} tensors"
            )
        (weight, bias), *further = map(Layer, weights, biases)
        first = FirstLayer(None, None, weight, bias)
        found = map(Norm.of, (step.text for step in inner.norms), norms[::2], norms[1::2])
        return Given(
            x,
            first,
            tuple(further),
            tuple(activations),
            plan,
            steps=None if inner.is_plain else inner,
            norms=tuple(norm for norm in found if norm is not None),
        )

    def check(self, given: Given) -> None:
        checks.check_chain(given)

    def run(self, family: Family, rows: Given, activations: Sequence[Expression]) -> Tensor:
        inner = () if rows.steps is None else (rows.steps, rows.norms)
        return family.run_chain(rows.x, *rows.chained, activations, *inner)

    def read_backward(self, *arguments: Any, recompute: bool = True) -> Backward:
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
