"""``torch.ops.fusedmlp.chain``: one call is a chain of linear layers, joined by activations.

    chain            y
    chain_backward   the gradients that are asked for

They are to :mod:`fusion_backend.operators` what three and more layers are to two: activations
travel as text, the plan is ``chain`` (one Triton kernel), ``rows`` (one C++ kernel) or
``reference``, and ahead-of-time autograd
takes calls apart. ``chain_backward`` computes the hidden values again and is made of ATen operators
under every plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusion_backend.compat import dispatcher
from fusion_backend.errors import PlanError
from fusion_backend.kernels import registry
from fusion_backend.kernels.family import Family
from fusion_backend.mlp.expression import Expression, parse, variables
from fusion_backend.operators import chain_reference
from fusion_backend.operators.autocast import cast, passing
from fusion_backend.operators.autograd import (
    gradients_of_composed,
    in_rows,
    out_of_rows,
    wants_gradients,
)
from fusion_backend.operators.dispatch import as_rows, restore_rows
from fusion_backend.operators.fakes import check_tensor
from fusion_backend.operators.gradients import empty_weight_gradient
from fusion_backend.operators.registration import register

_ARGUMENTS = "Tensor x, Tensor[] weights, Tensor?[] biases, str[] activations, str plan"
_SCHEMA = f"chain({_ARGUMENTS}) -> Tensor"
_BACKWARD_SCHEMA = f"chain_backward(Tensor grad_output, {_ARGUMENTS}, bool[] needs) -> Tensor[]"

ops = torch.ops.fusedmlp


def chain(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activations: Sequence[str],
    plan: str,
) -> Tensor:
    """``y = … f_1(f_0(x W_0ᵀ + b_0) W_1ᵀ + b_1) …`` with the last dimension as features.

    Args:
        x: ``(..., in)``.
        weights: at least two, each ``(out_features, in_features)`` with the ``out_features`` of the
            one before as ``in_features``; of the dtype of ``x``.
        biases: one a weight, ``(out_features,)`` or ``None``.
        activations: between the layers, expressions of ``x``: one less than weights.
        plan: the family that runs it, of ``registry.of_chains``.

    Returns:
        ``(..., out)``, contiguous, with the dtype of ``x``.

    Raises:
        PlanError: the plan is unknown or cannot run on this device, or an activation is none of x.
        ValueError: numbers, shapes, dtypes or devices of the operands do not fit.
    """
    _check(x, weights, biases, activations)
    functions = [*map(_expression, activations)]
    family = _family_of(plan, x.device)
    return restore_rows(family.run_chain(as_rows(x), weights, biases, functions), x)


def chain_backward(
    grad_output: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activations: Sequence[str],
    plan: str,
    needs: Sequence[bool],
) -> list[Tensor]:
    """Gradients of x, of each weight and of each bias.

    Args:
        grad_output: ``(..., out)``.
        x: as in the forward pass, like all that follow.
        weights: see there.
        biases: see there.
        activations: see there.
        plan: see there.
        needs: which of the gradients to compute.

    Returns:
        One tensor a gradient; those not asked for are empty.
    """
    _family_of(plan, x.device)
    functions = [*map(_expression, activations)]
    found = chain_reference.backward(grad_output, x, weights, biases, functions, needs)
    return [x.new_empty(0) if gradient is None else gradient for gradient in found]


def _check(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activations: Sequence[str],
) -> None:
    """Refuse operands that do not fit: a kernel would read beyond its tensors."""
    if not len(weights) == len(biases) == len(activations) + 1 >= 2:
        raise ValueError(
            f"a chain must have a bias (or None) for each of at least two weights and an "
            f"activation between two, got {len(weights)} weights, {len(biases)} biases and "
            f"{len(activations)} activations"
        )
    width = x.shape[-1]
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        out = weight.shape[0]
        check_tensor(f"weights[{i}]", weight, (out, width), x, "x")
        check_tensor(f"biases[{i}]", bias, (out,), x, "x")
        width = out


def _family_of(plan: str, device: torch.device) -> Family:
    family = registry.named(plan, registry.of_chains(), "the plan of a chain")
    family.check_device(device)
    return family


@functools.cache
def _expression(activation: str) -> Expression:
    expression = parse(activation)
    if variables(expression) != ("x",):
        raise PlanError(f"an activation of a chain must be an expression of x, got {activation!r}")
    return expression


def _fake(x: Tensor, weights: Sequence[Tensor], biases: Any, activations: Any, plan: str) -> Tensor:
    """``(..., out)``."""
    _check(x, weights, biases, activations)
    return x.new_empty((*x.shape[:-1], weights[-1].shape[0]))


def _fake_backward(
    grad_output: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Any,
    activations: Any,
    plan: str,
    needs: Sequence[bool],
) -> list[Tensor]:
    """Each gradient as its tensor is; empty where it is not asked for."""
    found = [x.new_empty(x.shape), *map(empty_weight_gradient, weights)]
    found += [x.new_empty(weight.shape[0]) for weight in weights]
    return [tensor if need else x.new_empty(0) for tensor, need in zip(found, needs, strict=True)]


def _differentiable(
    x: Tensor, weights: Sequence[Tensor], biases: Any, activations: Any, plan: str
) -> Any:
    """The autograd kernel of ``chain``: keeps its operands, if a gradient is wanted."""
    if dispatcher.transforming():
        return _composed(x, weights, biases, activations, plan)
    if wants_gradients((x, weights, biases)):
        rows, _ = in_rows(x, ())
        return out_of_rows(_Chain.apply(activations, plan, rows, *weights, *biases), x)
    with dispatcher.below_autograd():
        return ops.chain.default(x, weights, biases, activations, plan)


def _not_differentiable(*arguments: Any) -> Any:
    """The autograd kernel of ``chain_backward``, which ``chain`` calls below autograd."""
    if wants_gradients(arguments):
        raise NotImplementedError(
            "fusedmlp::chain_backward has no derivative: call fusedmlp::chain, which is "
            "differentiable"
        )
    with dispatcher.below_autograd():
        return ops.chain_backward.default(*arguments)


def _composed(
    x: Tensor, weights: Sequence[Tensor], biases: Any, activations: Any, _: str
) -> Tensor:
    """``chain`` as ATen operators, for all that looks at each of them."""
    return chain(x, weights, biases, activations, registry.REFERENCE.name)


class _Chain(torch.autograd.Function):
    """Takes activations, plan, x, all weights and all biases."""

    @staticmethod
    def forward(activations: Any, plan: str, x: Tensor, *parameters: Any) -> Tensor:
        layers = len(activations) + 1
        with dispatcher.below_autograd():
            result: Tensor = ops.chain.default(
                x, parameters[:layers], parameters[layers:], activations, plan
            )
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.activations, ctx.plan, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return (None,) * len(ctx.needs_input_grad)
        x, *parameters = ctx.saved_tensors
        layers = len(ctx.activations) + 1
        operands = (x, parameters[:layers], parameters[layers:], ctx.activations)
        needs = list(ctx.needs_input_grad[2:])
        if torch.is_grad_enabled():  # create_graph=True: what is composed is differentiable itself
            y = _composed(*operands, ctx.plan)
            found = gradients_of_composed(y, (x, *parameters), grad_output, needs)
            return (None, None, *found)
        gradients = ops.chain_backward.default(grad_output, *operands, ctx.plan, needs)
        asked = (g if need else None for g, need in zip(gradients, needs, strict=True))
        return (None, None, *asked)


def _autocasting(operator: Callable[..., Any], device: str) -> Callable[..., Any]:
    """As :mod:`fusion_backend.operators.autocast` does it, and once for the whole chain."""

    def kernel(x: Tensor, weights: Any, biases: Any, *rest: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        operands = [[cast(t, dtype, device) for t in tensors] for tensors in (weights, biases)]
        with dispatcher.below_autocast(device):
            return operator(cast(x, dtype, device), *operands, *rest)

    return kernel


def _register(library: torch.library.Library) -> None:
    register(
        library,
        chain,
        _SCHEMA,
        fake=_fake,
        differentiable=_differentiable,
        autocasting=_autocasting,
    )
    register(
        library,
        chain_backward,
        _BACKWARD_SCHEMA,
        fake=_fake_backward,
        differentiable=_not_differentiable,
        autocasting=passing,
    )
    library.impl(chain.__name__, _composed, "FuncTorchBatched")


_LIBRARY = torch.library.Library("fusedmlp", "FRAGMENT")
_register(_LIBRARY)
