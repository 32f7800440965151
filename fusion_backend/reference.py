"""The plan ``reference``: an MLP written in ATen operators, right on every device and dtype.

    preact  = x W_1ᵀ + b_1                    one or two products
    postact = f(preact)                       in float32 at least, rounded once
    y       = postact W_downᵀ + b_down

It is what Inductor would have compiled without us, and what the kernels are measured against. All
tensors here have two dimensions, rows and features; operands of f broadcast with
``(rows, hidden)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend.expression import Expression, differentiate, evaluate
from fusion_backend.operands import kind_of, name_of, reduced
from fusion_backend.weights import Weights

Operands = Sequence[Tensor]


def forward(x: Tensor, weights: Weights, activation: Expression, operands: Operands = ()) -> Tensor:
    """The MLP of ``x`` ``(rows, in)`` as ``(rows, out)``."""
    return forward_saving(x, weights, activation, operands)[0]


def forward_saving(
    x: Tensor, weights: Weights, activation: Expression, operands: Operands = ()
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The MLP and its pre-activations ``(rows, hidden)``, rounded to the dtype of ``x``."""
    preact_gate = None
    if weights.weight_gate is not None:
        preact_gate = F.linear(x, weights.weight_gate, weights.bias_gate)
    preact_up = F.linear(x, weights.weight_up, weights.bias_up)
    postact = activate(preact_gate, preact_up, activation, operands)
    return F.linear(postact, weights.weight_down, weights.bias_down), preact_gate, preact_up


def activate(
    preact_gate: Tensor | None,
    preact_up: Tensor,
    activation: Expression,
    operands: Operands = (),
) -> Tensor:
    """The hidden activation, with the shape and dtype of ``preact_up``."""
    postact = evaluate(activation, _variables(preact_gate, preact_up, operands))
    return postact.to(preact_up.dtype)


def hidden_gradient(
    grad_output: Tensor,
    weight_down: Tensor,
    preact_gate: Tensor | None,
    preact_up: Tensor,
    activation: Expression,
    operands: Operands = (),
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of the pre-activations, and the recomputed activation.

    grad_hidden  = grad_output W_down
    grad_preact  = grad_hidden · ∂f/∂preact

    Returns:
        ``grad_gate`` (``None`` when plain), ``grad_up`` and ``postact``, each ``(rows, hidden)``.
    """
    grad_hidden = torch.mm(grad_output, weight_down)
    postact = activate(preact_gate, preact_up, activation, operands)
    gradients = preact_gradients(grad_hidden, preact_gate, preact_up, activation, operands)
    return *gradients, postact


def preact_gradients(
    grad_hidden: Tensor,
    preact_gate: Tensor | None,
    preact_up: Tensor,
    activation: Expression,
    operands: Operands = (),
) -> tuple[Tensor | None, Tensor]:
    """``grad_hidden · ∂f/∂preact`` for the gate (``None`` when plain) and for the other one."""
    variables = _variables(preact_gate, preact_up, operands)
    names = ("x",) if preact_gate is None else ("g", "u")
    found = [
        _gradient(grad_hidden, name, activation, variables).to(preact_up.dtype) for name in names
    ]
    return None if preact_gate is None else found[0], found[-1]


def operand_gradients(
    grad_hidden: Tensor,
    preact_gate: Tensor | None,
    preact_up: Tensor,
    activation: Expression,
    operands: Operands,
    wanted: Sequence[int],
) -> list[Tensor]:
    """``Σ grad_hidden · ∂f/∂operand``, over all elements, over rows or over nothing.

    Args:
        grad_hidden: ``(rows, hidden)``.
        preact_gate: ``(rows, hidden)``, or ``None`` when plain.
        preact_up: ``(rows, hidden)``.
        activation: f.
        operands: all of them, as they broadcast with ``(rows, hidden)``.
        wanted: which of them.

    Returns:
        A gradient for each that is wanted, summed in float32 at least, with its shape and dtype.
    """
    variables = _variables(preact_gate, preact_up, operands)
    found = []
    for index in wanted:
        gradient = _gradient(grad_hidden, name_of(index), activation, variables)
        found.append(reduced(gradient, operands[index]))
    return found


def _gradient(
    grad_hidden: Tensor, name: str, activation: Expression, variables: Mapping[str, Tensor]
) -> Tensor:
    partial = evaluate(differentiate(activation, name), variables)
    return _at_least_float32(grad_hidden) * partial


def _variables(
    preact_gate: Tensor | None, preact_up: Tensor, operands: Operands
) -> dict[str, Tensor]:
    """The projections and then the operands: what is first tells the dtype to compute in."""
    if preact_gate is None:
        projections = {"x": _at_least_float32(preact_up)}
    else:
        projections = {"g": _at_least_float32(preact_gate), "u": _at_least_float32(preact_up)}
    dtype = next(iter(projections.values())).dtype
    return projections | {
        name_of(index): operand if kind_of(operand) == "seed" else operand.to(dtype)
        for index, operand in enumerate(operands)
    }


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
