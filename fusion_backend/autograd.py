"""How the operators differentiate. The functions named after them are their autograd kernels.

``mlp`` has a backward pass of its own, one operator again. Whoever differentiates in another way
(twice, in forward mode, or under a transform of ``torch.func``) gets the same function composed of
ATen operators, which is right to any order, though not fused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusion_backend import dispatch
from fusion_backend.compat import below_autograd, transforming
from fusion_backend.weights import Weights

ops = torch.ops.fusedmlp


def mlp(*arguments: Any) -> Any:
    """Keep the pre-activations if a gradient is wanted, else run the leaner operator."""
    if transforming():
        return composed(*arguments)
    if _wants_gradients(arguments):
        return _MLP.apply(*arguments)[0]
    with below_autograd():
        return ops.mlp.default(*arguments)


def mlp_forward(*arguments: Any) -> Any:
    """A part of ``mlp``: its results cannot be differentiated."""
    if _wants_gradients(arguments):
        return _NotDifferentiable.apply(ops.mlp_forward.default, *arguments)
    with below_autograd():
        return ops.mlp_forward.default(*arguments)


def mlp_backward(*arguments: Any) -> Any:
    """A part of ``mlp``: its results cannot be differentiated."""
    if _wants_gradients(arguments):
        return list(_NotDifferentiable.apply(ops.mlp_backward.default, *arguments))
    with below_autograd():
        return ops.mlp_backward.default(*arguments)


def composed(x: Tensor, *arguments: Any) -> Tensor:
    """``mlp`` as ATen operators, for all that looks at each of them."""
    *weights, activation, _ = arguments
    return dispatch.forward(x, Weights(*weights), activation, "reference")


def _wants_gradients(arguments: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(argument, Tensor) and argument.requires_grad for argument in arguments
    )


class _MLP(torch.autograd.Function):
    """Takes the nine arguments of ``mlp``, returns what ``mlp_forward`` returns."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        with below_autograd():
            return ops.mlp_forward.default(*arguments)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        *tensors, ctx.activation, ctx.plan = inputs
        _, preact_gate, preact_up = output
        ctx.save_for_backward(*tensors, preact_gate, preact_up)
        ctx.mark_non_differentiable(preact_gate, preact_up)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return (None,) * len(ctx.needs_input_grad)
        *tensors, preact_gate, preact_up = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[: len(tensors)])
        if torch.is_grad_enabled():
            gradients = _backward_of_composed(grad_output, tensors, ctx.activation, needs)
        else:
            x, weight_gate, _, weight_up, _, weight_down, _ = tensors
            operands = (x, weight_gate, weight_up, weight_down, preact_gate, preact_up)
            rest = (ctx.activation, ctx.plan, needs)
            gradients = ops.mlp_backward.default(grad_output, *operands, *rest)
        asked = (g if need else None for g, need in zip(gradients, needs, strict=True))
        return (*asked, None, None)


def _backward_of_composed(
    grad_output: Tensor, tensors: list[Any], activation: str, needs: list[bool]
) -> list[Tensor | None]:
    """The backward pass under ``create_graph=True``: recomputed, and so differentiable itself."""
    y = composed(*tensors, activation, "reference")
    asked = [tensor for tensor, need in zip(tensors, needs, strict=True) if need]
    found = iter(torch.autograd.grad(y, asked, grad_output, create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in needs]


class _NotDifferentiable(torch.autograd.Function):
    """Takes an operator and its arguments, returns its tensors."""

    @staticmethod
    def forward(ctx: Any, operator: Any, *arguments: Any) -> tuple[Tensor, ...]:
        ctx.name = operator.name()
        with below_autograd():
            return tuple(operator(*arguments))

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise NotImplementedError(
            f"{ctx.name} has no derivative: call fusedmlp::mlp, which is differentiable"
        )
