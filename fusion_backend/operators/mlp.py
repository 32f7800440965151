"""``torch.ops.fusedmlp``: one call is one MLP.

    mlp            y, or y + residual; of x or of its norm
    mlp_forward    y and the pre-activations, which training keeps
    mlp_backward   the gradients that are asked for

(Where only the first layers and the activation are fused: see ``activated_operators``. Three and
more linear layers are one call of ``chain``: see ``chain_operators``.)

The activation travels as text, such as ``silu(g) * u``, and the family of kernels as the name of a
plan: a graph that calls these operators shows all that they do, and needs nothing but them to run.

Ahead-of-time autograd takes the operators apart into kernel launches and ATen products, so that
Inductor inlines the former and compiles the latter. They stay whole where launches cannot be
traced or should not be seen; see :mod:`fusion_backend.operators.registration`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusion_backend.mlp.norms import Norm
from fusion_backend.operators import autocast, autograd, cpu_calls, dispatch, fakes, gradients
from fusion_backend.operators import inductor_lowering as kernel_calls
from fusion_backend.operators.arguments import Arguments, BackwardArguments
from fusion_backend.operators.fakes import check
from fusion_backend.operators.registration import register

_ARGUMENTS = (
    "Tensor x, Tensor? weight_gate, Tensor? bias_gate, Tensor weight_up, Tensor? bias_up, "
    "Tensor weight_down, Tensor? bias_down, Tensor[]{} operands, str activation, str plan"
)
_SCHEMAS = {
    # AOTInductor's runtime passes None in place of an empty list.
    "mlp": f"mlp({_ARGUMENTS.format('?')}, *, Tensor? residual=None, Tensor? norm_weight=None, "
    "Tensor? norm_bias=None, str norm='') -> Tensor",
    "mlp_forward": f"mlp_forward({_ARGUMENTS.format('')}) "
    "-> (Tensor y, Tensor preact_gate, Tensor preact_up)",
    "mlp_backward": "mlp_backward(Tensor grad_output, Tensor x, Tensor? weight_gate, "
    "Tensor weight_up, Tensor weight_down, Tensor preact_gate, Tensor preact_up, "
    "Tensor[] operands, str activation, str plan, bool[] needs) -> Tensor[]",
}


def mlp(
    *arguments: Any,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    norm: str = "",
) -> Tensor:
    """``y = f(x W_1ᵀ + b_1) W_downᵀ + b_down`` with the last dimension of ``x`` as features.

    A residual is added to y. A family whose kernel adds it does so before y is rounded, unless
    gradients are recorded; otherwise y is rounded before, as in eager. A norm comes before all
    else.

    Args:
        arguments: as in :class:`~fusion_backend.operators.arguments.Arguments`.
        residual: ``(..., out)`` with the dtype of ``x``, or ``None``.
        norm_weight: ``(in,)`` or ``None``.
        norm_bias: ``(in,)`` or ``None``.
        norm: of ``x``: ``layer_norm(eps)``, ``rms_norm(eps)`` or nothing, as in ``norms``.

    Returns:
        ``(..., out)``, contiguous, with the dtype of ``x``.

    Raises:
        PlanError: the plan is unknown or cannot run on this device, activation or operands.
        ExpressionError: the activation speaks of operands that there are not.
        ValueError: tensors do not fit, or the norm is not known.
    """
    given = Arguments(*arguments)
    operands, before = given.operands or (), Norm.of(norm, norm_weight, norm_bias)
    check(given.x, given.weights, operands, residual, before)
    what = (given.x, given.weights, operands, given.activation, given.plan)
    return dispatch.forward(*what, residual, before)


def mlp_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`mlp` and its pre-activations ``(..., hidden)``; an empty gate when there is none."""
    given = Arguments(*arguments)
    x, operands = given.x, given.operands or ()
    check(x, given.weights, operands)
    what = (x, given.weights, operands, given.activation, given.plan)
    y, preact_gate, preact_up = dispatch.forward_saving(*what)
    return y, x.new_empty(0) if preact_gate is None else preact_gate, preact_up


def mlp_backward(*arguments: Any) -> list[Tensor]:
    """Gradients of x, weight_gate, bias_gate, weight_up, bias_up, weight_down, bias_down, operands.

    Args:
        arguments: as in :class:`~fusion_backend.operators.arguments.BackwardArguments`.

    Returns:
        As many tensors; those not asked for are empty.
    """
    given = BackwardArguments(*arguments)
    gate = None if given.weight_gate is None else given.preact_gate
    layers = (given.weight_gate, given.weight_up, given.weight_down)
    saved = gradients.Saved(given.x, *layers, gate, given.preact_up, given.operands)
    asked = gradients.Needs._make((*given.needs[:7], tuple(given.needs[7:])))
    how = (given.activation, given.plan, asked)
    *own, of_operands = gradients.backward(given.grad_output, saved, *how)
    return [given.x.new_empty(0) if found is None else found for found in (*own, *of_operands)]


def _register(library: torch.library.Library) -> None:
    for implementation in (mlp, mlp_forward, mlp_backward):
        name = implementation.__name__
        register(
            library,
            implementation,
            _SCHEMAS[name],
            fake=getattr(fakes, name),
            differentiable=getattr(autograd, name),
            autocasting=autocast.passing if implementation is mlp_backward else autocast.casting,
        )
    library.impl("mlp", autograd.composed, "FuncTorchBatched")
    kernel_calls.register(library)
    cpu_calls.register(library)


_LIBRARY = torch.library.Library("fusedmlp", "DEF")
_register(_LIBRARY)
