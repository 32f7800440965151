"""The plan ``reference``: an MLP written in ATen operators, right on every device and dtype.

    preact  = x W_1ᵀ + b_1                    one or two products
    postact = f(preact)                       in float32 at least, rounded once
    y       = postact W_downᵀ + b_down

It is what Inductor would have compiled without us, and what the kernels are measured against. All
tensors here have two dimensions, rows and features; operands of f broadcast with
``(rows, hidden)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend.mlp.expression import Expression, differentiate, evaluate
from fusion_backend.mlp.expression.operand_names import name_of
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.operands import kind_of, reduced
from fusion_backend.mlp.steps import LINEAR, Steps
from fusion_backend.mlp.weights import Weights

NAME = "reference"

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


def chain(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activations: Sequence[Expression],
    steps: Steps | None = None,
    norms: Sequence[Norm] = (),
) -> Tensor:
    """A chain of linear layers of ``x`` ``(rows, in)``, step by step.

    Between two layers values are in float32 at least; they are rounded as :mod:`steps` says.
    """
    layers = zip(weights, biases, strict=True)
    left, functions, rest = iter(layers), iter(activations), iter(norms)
    values = [x]
    steps = steps or Steps.of("", len(weights))
    for index, step in enumerate(steps.all):
        value = values[-1]
        if step.kind == LINEAR:
            value = F.linear(_read(x, value.to(x.dtype), step.beside), *next(left))
        elif step.is_norm:
            value = next(rest).wide()(_at_least_float32(value))
        else:
            operands = {name_of(i): values[read] for i, read in enumerate(step.reads)}
            variables = {"x": value, **operands}
            wide = {name: _at_least_float32(each) for name, each in variables.items()}
            value = evaluate(next(functions), wide)
        values.append(value.to(x.dtype) if index + 1 in steps.read_again else value)
    return values[-1].to(x.dtype)


def _read(x: Tensor, value: Tensor, beside: str) -> Tensor:
    """What a layer of a chain reads: a value, perhaps with the chain's input on one side."""
    if not beside:
        return value
    return torch.cat([x, value] if beside == "before" else [value, x], -1)


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
    preacts = (preact_gate, preact_up)
    return hidden_and_operand_gradients(
        grad_output, weight_down, *preacts, activation, operands, ()
    )[:3]


def hidden_and_operand_gradients(
    grad_output: Tensor,
    weight_down: Tensor,
    preact_gate: Tensor | None,
    preact_up: Tensor,
    activation: Expression,
    operands: Operands,
    wanted: Sequence[int],
) -> tuple[Tensor | None, Tensor, Tensor, list[Tensor]]:
    """:func:`hidden_gradient`, and the gradients of those operands that are ``wanted``.

    grad_operand = Σ grad_hidden · ∂f/∂operand     over all elements, over rows or over nothing

    These are summed in float32 at least, and have shape and dtype of the operands.
    """
    preacts = (preact_gate, preact_up, activation, operands)
    grad_hidden = torch.mm(grad_output, weight_down)
    grad_gate, grad_up, found = preact_and_operand_gradients(grad_hidden, *preacts, wanted)
    return grad_gate, grad_up, activate(*preacts), found


def preact_and_operand_gradients(
    grad_hidden: Tensor,
    preact_gate: Tensor | None,
    preact_up: Tensor,
    activation: Expression,
    operands: Operands,
    wanted: Sequence[int],
) -> tuple[Tensor | None, Tensor, list[Tensor]]:
    """:func:`hidden_and_operand_gradients` from the activation's gradient ``(rows, hidden)`` on."""
    wide = _at_least_float32(grad_hidden)
    variables = _variables(preact_gate, preact_up, operands)

    def gradient(name: str) -> Tensor:
        return wide * evaluate(differentiate(activation, name), variables)

    names = ("x",) if preact_gate is None else ("g", "u")
    grads = [gradient(name).to(preact_up.dtype) for name in names]
    found = [reduced(gradient(name_of(index)), operands[index]) for index in wanted]
    return grads[0] if len(grads) == 2 else None, grads[-1], found


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
