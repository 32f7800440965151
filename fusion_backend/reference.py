"""The plan ``reference``: an MLP written in ATen operators, right on every device and dtype.

    preact  = x W_1ᵀ + b_1                    one or two products
    postact = f(preact)                       in float32 at least, rounded once
    y       = postact W_downᵀ + b_down

It is what Inductor would have compiled without us, and what the kernels are measured against. All
tensors here have two dimensions: rows and features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend.expression import Expression, differentiate, evaluate
from fusion_backend.weights import Weights


def forward(x: Tensor, weights: Weights, activation: Expression) -> Tensor:
    """The MLP of ``x`` ``(rows, in)`` as ``(rows, out)``."""
    return forward_saving(x, weights, activation)[0]


def forward_saving(
    x: Tensor, weights: Weights, activation: Expression
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The MLP and its pre-activations ``(rows, hidden)``, rounded to the dtype of ``x``."""
    preact_gate = None
    if weights.weight_gate is not None:
        preact_gate = F.linear(x, weights.weight_gate, weights.bias_gate)
    preact_up = F.linear(x, weights.weight_up, weights.bias_up)
    postact = activate(preact_gate, preact_up, activation)
    return F.linear(postact, weights.weight_down, weights.bias_down), preact_gate, preact_up


def activate(preact_gate: Tensor | None, preact_up: Tensor, activation: Expression) -> Tensor:
    """The hidden activation, with the shape and dtype of ``preact_up``."""
    postact = evaluate(activation, _variables(preact_gate, preact_up))
    return postact.to(preact_up.dtype)


def hidden_gradient(
    grad_output: Tensor,
    weight_down: Tensor,
    preact_gate: Tensor | None,
    preact_up: Tensor,
    activation: Expression,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of the pre-activations, and the recomputed activation.

    grad_hidden  = grad_output W_down
    grad_preact  = grad_hidden · ∂f/∂preact

    Returns:
        ``grad_gate`` (``None`` when plain), ``grad_up`` and ``postact``, each ``(rows, hidden)``.
    """
    grad_hidden = _at_least_float32(torch.mm(grad_output, weight_down))
    variables = _variables(preact_gate, preact_up)

    def gradient(name: str) -> Tensor:
        partial = evaluate(differentiate(activation, name), variables)
        return (grad_hidden * partial).to(preact_up.dtype)

    postact = activate(preact_gate, preact_up, activation)
    if preact_gate is None:
        return None, gradient("x"), postact
    return gradient("g"), gradient("u"), postact


def _variables(preact_gate: Tensor | None, preact_up: Tensor) -> dict[str, Tensor]:
    if preact_gate is None:
        return {"x": _at_least_float32(preact_up)}
    return {"g": _at_least_float32(preact_gate), "u": _at_least_float32(preact_up)}


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
