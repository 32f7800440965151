"""What the operators and their parts return, as far as shapes, dtypes and strides go."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusion_backend.operators.arguments import Given
from fusion_backend.operators.gradients import empty_weight_gradient
from fusion_backend.operators.operator import Operator


def forward(operator: Operator, *arguments: Any, **around: Any) -> Tensor:
    """``(..., out)``."""
    return result(operator.checked(*arguments, **around))


def result(given: Given) -> Tensor:
    """``(..., out)`` of a call that fits."""
    x = given.x
    return x.new_empty((*x.shape[:-1], given.out_features))


def forward_saving(
    operator: Operator, *arguments: Any, recompute: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and two of ``(..., hidden)``, the first of them empty where no gate is.

    Where pre-activations are computed again, biases take the place of these two.
    """
    given = operator.checked(*arguments)
    x, first = given.x, given.first
    if recompute and operator.recomputes(given):
        biases = (first.bias_gate, first.bias_up)
        gate, up = (x.new_empty(0 if bias is None else bias.shape) for bias in biases)
        return result(given), gate, up
    preact = (*x.shape[:-1], first.weight_up.shape[0])
    return result(given), x.new_empty(preact if given.gated else 0), x.new_empty(preact)


def backward(operator: Operator, *arguments: Any, **how: bool) -> list[Tensor]:
    """Each gradient as its tensor is; empty where it is not asked for."""
    call = operator.read_backward(*arguments, **how)
    given = call.given
    x, (weight_gate, _, weight_up, _) = given.x, given.first
    layers = [weight_up, *(layer.weight for layer in given.further)]
    if not operator.is_chain:
        layers.insert(0, weight_up if weight_gate is None else weight_gate)
    weights = [*map(empty_weight_gradient, layers)]
    found = [x.new_empty(x.shape)]
    found += operator.in_order(weights, [x.new_empty(weight.shape[0]) for weight in layers])
    found += [operand.new_empty(operand.shape) for operand in given.operands]
    asked = zip(found, call.needs, strict=True)
    return [tensor if need else x.new_empty(0) for tensor, need in asked]
