"""``torch.ops.fusedmlp.activated_linear``: the first layers of an MLP and its activation.

    activated_linear           h = f(x W_gateᵀ + b_gate, x W_upᵀ + b_up)
    activated_linear_forward   h and the pre-activations, which training keeps

They serve where something else than the second layer reads the hidden value, such as a norm. Text,
plans, operands and lowering are those of :mod:`fusion_backend.operators`.

The backward pass is made of ATen operators under both plans: a compiler joins the product with f′,
and the sums over rows that bias gradients are, with what it has computed the hidden value's
gradient by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusion_backend.compat import dispatcher
from fusion_backend.kernels import registry
from fusion_backend.mlp.weights import FirstLayer
from fusion_backend.operators import activated_dispatch as activated
from fusion_backend.operators import autocast, gradients
from fusion_backend.operators.autograd import (
    Unread,
    gradients_of_composed,
    in_rows,
    out_of_rows,
    unread_of_first,
    wants_gradients,
)
from fusion_backend.operators.fakes import check_first_layer
from fusion_backend.operators.registration import register

_ARGUMENTS = (
    "Tensor x, Tensor? weight_gate, Tensor? bias_gate, Tensor weight_up, Tensor? bias_up, "
    "Tensor[]{} operands, str activation, str plan"
)
_SCHEMAS = {
    "activated_linear": f"activated_linear({_ARGUMENTS.format('?')}) -> Tensor",
    "activated_linear_forward": f"activated_linear_forward({_ARGUMENTS.format('')}) "
    "-> (Tensor hidden, Tensor preact_gate, Tensor preact_up)",
}
_OWN = 5  # tensors of the layers; operands of the activation follow

ops = torch.ops.fusedmlp


def activated_linear(
    x: Tensor,
    weight_gate: Tensor | None,
    bias_gate: Tensor | None,
    weight_up: Tensor,
    bias_up: Tensor | None,
    operands: Sequence[Tensor] | None,
    activation: str,
    plan: str,
) -> Tensor:
    """``h = f(x W_1ᵀ + b_1)`` with the last dimension of ``x`` as features.

    Args:
        x: ``(..., in)``.
        weight_gate: ``(hidden, in)``, or ``None`` where one projection enters the activation.
        bias_gate: ``(hidden,)`` or ``None``.
        weight_up: ``(hidden, in)``.
        bias_up: ``(hidden,)`` or ``None``.
        operands: other tensors that ``f`` is of, as for ``mlp``.
        activation: ``f`` as an expression of ``x``, or of ``g`` and ``u`` where there is a gate.
        plan: the family that runs it, of ``registry.of_first_layers``.

    Returns:
        ``(..., hidden)``, contiguous, with the dtype of ``x``.

    Raises:
        PlanError: the plan is none of the two, or cannot run on this device, activation or
            operands.
        ExpressionError: the activation speaks of operands that there are not.
    """
    operands = operands or ()
    first = FirstLayer(weight_gate, bias_gate, weight_up, bias_up)
    check_first_layer(x, first, operands)
    return activated.forward(x, first, operands, activation, plan)


def activated_linear_forward(
    x: Tensor,
    weight_gate: Tensor | None,
    bias_gate: Tensor | None,
    weight_up: Tensor,
    bias_up: Tensor | None,
    operands: Sequence[Tensor],
    activation: str,
    plan: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`activated_linear` and its pre-activations; an empty gate when there is none."""
    first = FirstLayer(weight_gate, bias_gate, weight_up, bias_up)
    check_first_layer(x, first, operands)
    hidden, preact_gate, preact_up = activated.forward_saving(x, first, operands, activation, plan)
    return hidden, x.new_empty(0) if preact_gate is None else preact_gate, preact_up


def _fake(x: Tensor, *arguments: Any) -> Tensor:
    """``(..., hidden)``."""
    first, operands = FirstLayer(*arguments[:4]), arguments[4] or ()
    check_first_layer(x, first, operands)
    return x.new_empty((*x.shape[:-1], first.weight_up.shape[0]))


def _fake_forward(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Three of ``(..., hidden)``, the second of them empty where no gate is."""
    hidden = _fake(x, *arguments)
    gate = x.new_empty(0 if arguments[0] is None else hidden.shape)
    return hidden, gate, x.new_empty(hidden.shape)


def _differentiable(*arguments: Any) -> Any:
    """Keep the pre-activations if a gradient is wanted, else run the leaner operator."""
    if dispatcher.transforming():
        return _composed(*arguments)
    if wants_gradients(arguments):
        x, *tensors, operands, activation, plan = arguments
        operands = operands or ()
        check_first_layer(x, FirstLayer(*tensors), operands)
        rows, values = in_rows(x, operands)
        return out_of_rows(_Activated.apply(activation, plan, rows, *tensors, *values)[0], x)
    with dispatcher.below_autograd():
        return ops.activated_linear.default(*arguments)


def _not_differentiable(*arguments: Any) -> Any:
    """The autograd kernel of ``activated_linear_forward``, a part of ``activated_linear``."""
    if wants_gradients(arguments):
        raise NotImplementedError(
            "fusedmlp::activated_linear_forward has no derivative: call "
            "fusedmlp::activated_linear, which is differentiable"
        )
    with dispatcher.below_autograd():
        return ops.activated_linear_forward.default(*arguments)


def _composed(x: Tensor, *arguments: Any) -> Tensor:
    """``activated_linear`` as ATen operators, for all that looks at each of them."""
    *first, operands, activation, _ = arguments
    return activated.forward(
        x, FirstLayer(*first), operands or (), activation, registry.REFERENCE.name
    )


class _Activated(torch.autograd.Function):
    """Takes activation, plan and all tensors; returns what ``activated_linear_forward`` does."""

    @staticmethod
    def forward(activation: str, plan: str, *tensors: Any) -> Any:
        arguments = (*tensors[:_OWN], tensors[_OWN:], activation, plan)
        with dispatcher.below_autograd():
            return ops.activated_linear_forward.default(*arguments)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        ctx.activation, _, *tensors = inputs
        _, preact_gate, preact_up = output
        ctx.unread = Unread(tensors, unread_of_first(*tensors))
        ctx.save_for_backward(preact_gate, preact_up, *ctx.unread.left_out(tensors))
        ctx.mark_non_differentiable(preact_gate, preact_up)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_hidden: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad_hidden is None:
            return (None,) * len(ctx.needs_input_grad)
        preact_gate, preact_up, *tensors = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        tensors = ctx.unread.put_back(tensors, read=torch.is_grad_enabled())
        if torch.is_grad_enabled():  # create_graph=True: what is composed is differentiable itself
            hidden = _composed(
                *tensors[:_OWN], tensors[_OWN:], ctx.activation, registry.REFERENCE.name
            )
            return (None, None, *gradients_of_composed(hidden, tensors, grad_hidden, needs))
        x, weight_gate, _, weight_up, _, *operands = tensors
        gate = None if weight_gate is None else preact_gate
        saved = gradients.Hidden(x, weight_gate, weight_up, gate, preact_up, operands)
        wanted = gradients.Needs._make((*needs[:_OWN], False, False, tuple(needs[_OWN:])))
        *own, of_operands = gradients.backward_of_hidden(grad_hidden, saved, ctx.activation, wanted)
        return (None, None, *own[:_OWN], *of_operands)


def _register(library: torch.library.Library) -> None:
    rules: list[tuple[Any, Any, Any]] = [
        (activated_linear, _fake, _differentiable),
        (activated_linear_forward, _fake_forward, _not_differentiable),
    ]
    for implementation, fake, differentiable in rules:
        register(
            library,
            implementation,
            _SCHEMAS[implementation.__name__],
            fake=fake,
            differentiable=differentiable,
            autocasting=autocast.casting,
        )
    library.impl("activated_linear", _composed, "FuncTorchBatched")


_LIBRARY = torch.library.Library("fusedmlp", "FRAGMENT")
_register(_LIBRARY)
