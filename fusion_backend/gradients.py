"""The backward pass of an MLP: gradients of whatever is asked for, and of nothing else.

    preact  = x W_1ᵀ + b_1          W_1 is the pair W_gate, W_up where the MLP is gated
    postact = f(preact)
    y       = postact W_downᵀ + b_down

Saved are the input and the pre-activations; the activation is recomputed beside its derivative.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusion_backend import reference
from fusion_backend.dispatch import as_rows, hidden_gradient, restore_rows
from fusion_backend.expression import parse


class Needs(NamedTuple):
    """Which gradients are asked for, in the order of the operator's tensors."""

    x: bool
    weight_gate: bool
    bias_gate: bool
    weight_up: bool
    bias_up: bool
    weight_down: bool
    bias_down: bool

    @property
    def preact(self) -> bool:
        """Whether the pre-activations' gradients are needed on the way."""
        return any(self[:5])


class Gradients(NamedTuple):
    """One gradient a tensor, with its shape and dtype; ``None`` where none was asked for."""

    x: Tensor | None = None
    weight_gate: Tensor | None = None
    bias_gate: Tensor | None = None
    weight_up: Tensor | None = None
    bias_up: Tensor | None = None
    weight_down: Tensor | None = None
    bias_down: Tensor | None = None


class Saved(NamedTuple):
    """What the backward pass needs of the forward pass, and the weights themselves."""

    x: Tensor
    weight_gate: Tensor | None
    weight_up: Tensor
    weight_down: Tensor
    preact_gate: Tensor | None
    preact_up: Tensor


def backward(
    grad_output: Tensor, saved: Saved, activation: str, plan: str, needs: Needs
) -> Gradients:
    """Differentiate ``y`` ``(..., out)`` with respect to all that ``needs`` asks for.

    Raises:
        PlanError: the plan is unknown or cannot run on this device.
    """
    f = parse(activation)
    dy, x = as_rows(grad_output), as_rows(saved.x)
    preact_gate = None if saved.preact_gate is None else as_rows(saved.preact_gate)
    preact_up = as_rows(saved.preact_up)
    gradients, postact = Gradients(), None
    if needs.preact:
        # d_preact = (dy W_down) · f'(preact)
        d_gate, d_up, postact = hidden_gradient(plan, x.device)(
            dy, saved.weight_down, preact_gate, preact_up, f
        )
        gradients = _first_layer(d_gate, d_up, x, saved, needs)
    if needs.weight_down:
        if postact is None:
            postact = reference.activate(preact_gate, preact_up, f)
        # dW_down = dyᵀ postact
        gradients = gradients._replace(weight_down=_weight(dy, postact, saved.weight_down))
    if needs.bias_down:
        # db_down = Σ_rows dy
        gradients = gradients._replace(bias_down=dy.sum(0))
    return gradients


def _first_layer(
    d_gate: Tensor | None, d_up: Tensor, x: Tensor, saved: Saved, needs: Needs
) -> Gradients:
    """Gradients of the input and of one projection, or of both where the MLP is gated."""
    # dx = d_up W_up,  dW_up = d_upᵀ x,  db_up = Σ_rows d_up
    gradients = Gradients(
        x=torch.mm(d_up, saved.weight_up) if needs.x else None,
        weight_up=_weight(d_up, x, saved.weight_up) if needs.weight_up else None,
        bias_up=d_up.sum(0) if needs.bias_up else None,
    )
    if d_gate is not None and saved.weight_gate is not None:
        # dx += d_gate W_gate, added to the float32 accumulator; the others as above
        grad_x = gradients.x
        gradients = gradients._replace(
            x=None if grad_x is None else torch.addmm(grad_x, d_gate, saved.weight_gate),
            weight_gate=_weight(d_gate, x, saved.weight_gate) if needs.weight_gate else None,
            bias_gate=d_gate.sum(0) if needs.bias_gate else None,
        )
    if gradients.x is not None:
        gradients = gradients._replace(x=restore_rows(gradients.x, saved.x))
    return gradients


def _weight(d_result: Tensor, operand: Tensor, weight: Tensor) -> Tensor:
    """``d_resultᵀ operand``, laid out as ``weight`` is: autograd copies gradients that are not."""
    if is_transposed(weight):
        return torch.mm(operand.t(), d_result).t()
    return torch.mm(d_result.t(), operand)


def is_transposed(weight: Tensor) -> bool:
    """Whether ``weight`` is the transpose of a contiguous matrix, as ``Conv1D`` keeps it."""
    return weight.t().is_contiguous() and not weight.is_contiguous()


def empty_weight_gradient(weight: Tensor) -> Tensor:
    """An uninitialised tensor with the shape, dtype and layout that ``weight``'s gradient has."""
    if is_transposed(weight):
        return weight.new_empty(weight.t().shape).t()
    return weight.new_empty(weight.shape)
