"""The backward pass of a chain of linear layers, in ATen operators, under every plan.

    p_i = h_{i-1} W_iᵀ + b_i          h_{-1} = x
    h_i = f_i(p_i)                    in float32 at least, rounded once
    y   = p_{n-1}

The backward pass starts from the input: layers are narrow, so computing them again is less work
than keeping every pre-activation, and Inductor fuses what is pointwise in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend.mlp.expression import Expression, differentiate, evaluate
from fusion_backend.mlp.weights import is_transposed
from fusion_backend.operators.dispatch import as_rows, restore_rows

Biases = Sequence[Tensor | None]


def backward(
    grad_output: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Biases,
    activations: Sequence[Expression],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of x, of each weight and of each bias; ``None`` where ``needs`` asks for none.

    Args:
        grad_output: ``(..., out)``.
        x: ``(..., in)``.
        weights: as in the forward pass.
        biases: as in the forward pass.
        activations: as in the forward pass.
        needs: one a gradient, in the order in which they are returned.
    """
    layers = len(weights)
    of_weights, of_biases = needs[1 : layers + 1], needs[layers + 1 :]
    found: list[Tensor | None] = [None] * len(needs)
    values = list(_values(as_rows(x), weights, biases, activations))
    # d_preact of the last layer is dy
    grad = as_rows(grad_output)
    for i in reversed(range(layers)):
        if of_weights[i]:
            # dW = d_preactᵀ h
            found[1 + i] = _weight_gradient(grad, values[i][0], weights[i])
        if of_biases[i]:
            # db = Σ_rows d_preact
            found[1 + layers + i] = grad.sum(0)
        if not (needs[0] or any(of_weights[:i]) or any(of_biases[:i])):
            break
        # dh = d_preact W
        grad = torch.mm(grad, weights[i])
        if i:
            # d_preact = dh · f'(preact)
            preact = _at_least_float32(values[i - 1][1])
            partial = evaluate(differentiate(activations[i - 1], "x"), {"x": preact})
            grad = (_at_least_float32(grad) * partial).to(x.dtype)
    else:
        found[0] = restore_rows(grad, x) if needs[0] else None
    return found


def _values(
    x: Tensor, weights: Sequence[Tensor], biases: Biases, activations: Sequence[Expression]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Input and pre-activation of each layer but the last, and the last one's input twice."""
    for weight, bias, f in zip(weights, biases, activations, strict=False):
        preact = F.linear(x, weight, bias)
        yield x, preact
        x = _activate(preact, f)
    yield x, x


def _weight_gradient(grad: Tensor, operand: Tensor, weight: Tensor) -> Tensor:
    """``gradᵀ operand``, laid out as ``weight`` is: autograd copies gradients that are not."""
    if is_transposed(weight):
        return torch.mm(operand.t(), grad).t()
    return torch.mm(grad.t(), operand)


def _activate(preact: Tensor, activation: Expression) -> Tensor:
    return evaluate(activation, {"x": _at_least_float32(preact)}).to(preact.dtype)


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
