"""How the operators differentiate. The functions named after them are their autograd kernels.

``mlp`` has a backward pass of its own, one operator again. Whoever differentiates in another way
(twice, in forward mode, or under a transform of ``torch.func``) gets the same function composed of
ATen operators, which is right to any order, though not fused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fusion_backend.compat.dispatcher import below_autograd, transforming
from fusion_backend.kernels import registry
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.operands import as_rows_of
from fusion_backend.mlp.weights import Weights
from fusion_backend.operators import dispatch
from fusion_backend.operators.fakes import check

ops = torch.ops.fusedmlp

_OWN = 7  # tensors of an MLP; operands of its activation follow


def mlp(*arguments: Any, residual: Tensor | None = None, **of_norm: Any) -> Any:
    """Keep the pre-activations if a gradient is wanted, else run the leaner operator.

    With gradients a norm and a residual are calls of their own, which autograd knows.
    """
    if transforming():
        return composed(*arguments, residual=residual, **of_norm)
    if wants_gradients((*arguments, residual, *of_norm.values())):
        x, *tensors, operands, activation, plan = arguments
        norm, operands = _norm(**of_norm), operands or ()
        x = x if norm is None else norm(x)
        check(x, Weights(*tensors), operands)
        rows, values = in_rows(x, operands)
        y = out_of_rows(_MLP.apply(activation, plan, rows, *tensors, *values)[0], x)
        return y if residual is None else y + residual.contiguous()
    with below_autograd():
        return ops.mlp.default(*arguments, residual=residual, **of_norm)


def in_rows(x: Tensor, operands: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Input and operands as matrices, in views that autograd knows, as for ATen's linear layers.

    A function of autograd must not return a view that it made itself, which in compiled code it
    would: autograd then refuses to have the result written to in place.
    """
    if x.dim() == 2:
        return x, list(operands)
    return dispatch.as_rows(x), [*map(as_rows_of, operands)]


def out_of_rows(rows: Tensor, x: Tensor) -> Tensor:
    """What was computed of :func:`in_rows`, with the leading dimensions of ``x``."""
    return rows if x.dim() == 2 else rows.view(*x.shape[:-1], rows.shape[-1])


def mlp_forward(*arguments: Any) -> Any:
    """A part of ``mlp``: its results cannot be differentiated."""
    if wants_gradients(arguments):
        return _not_differentiable(ops.mlp_forward.default, arguments)
    with below_autograd():
        return ops.mlp_forward.default(*arguments)


def mlp_backward(*arguments: Any) -> Any:
    """A part of ``mlp``: its results cannot be differentiated."""
    if wants_gradients(arguments):
        return list(_not_differentiable(ops.mlp_backward.default, arguments))
    with below_autograd():
        return ops.mlp_backward.default(*arguments)


def composed(x: Tensor, *arguments: Any, residual: Tensor | None = None, **of_norm: Any) -> Tensor:
    """``mlp`` as ATen operators, for all that looks at each of them."""
    *weights, operands, activation, _ = arguments
    others = (residual, _norm(**of_norm))
    values = operands or ()
    return dispatch.forward(
        x, Weights(*weights), values, activation, registry.REFERENCE.name, *others
    )


def _norm(
    norm_weight: Tensor | None = None, norm_bias: Tensor | None = None, norm: str = ""
) -> Norm | None:
    return Norm.of(norm, norm_weight, norm_bias)


def wants_gradients(arguments: tuple[Any, ...]) -> bool:
    """Whether autograd records a call: a tensor among the arguments needs a gradient."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors(arguments))


def _tensors(arguments: tuple[Any, ...]) -> list[Tensor]:
    """The tensors among the arguments and in lists of them, which autograd does not look into."""
    flat = itertools.chain.from_iterable(
        argument if isinstance(argument, (list, tuple)) else (argument,) for argument in arguments
    )
    return [argument for argument in flat if isinstance(argument, Tensor)]


class Unread:
    """Tensors of an operator that only a second derivative reads again, not the first.

    Autograd keeps none of them for an MLP of eager PyTorch, so they may be written to before the
    backward pass, or be inference tensors, and they are not saved.
    """

    def __init__(self, tensors: Sequence[Tensor | None], positions: Iterable[int]) -> None:
        self._kept = {i: (tensors[i], _version(tensors[i])) for i in positions}

    def left_out(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The tensors with ``None`` in place of those."""
        return [None if i in self._kept else tensor for i, tensor in enumerate(tensors)]

    def put_back(self, tensors: Sequence[Tensor | None], read: bool) -> list[Tensor | None]:
        """The tensors, with those again.

        Args:
            tensors: what :meth:`left_out` returned.
            read: whether their values will be read, and not only their shapes.

        Raises:
            RuntimeError: one that will be read has been written to.
        """
        for tensor, version in self._kept.values():
            if read and _version(tensor) != version:
                raise RuntimeError(
                    "what a fused MLP read must not be written to in place before a backward pass "
                    "with create_graph=True, got a tensor of shape "
                    f"{() if tensor is None else tuple(tensor.shape)}"
                )
        return [self._kept[i][0] if i in self._kept else t for i, t in enumerate(tensors)]


def unread_of_first(
    x: Tensor, weight_gate: Tensor | None, _: Any, weight_up: Tensor, *others: Any
) -> Iterator[int]:
    """Positions of what the backward pass of first layers does not read."""
    yield from (2, 4)  # biases
    if not any(w is not None and w.requires_grad for w in (weight_gate, weight_up)):
        yield 0
    if not x.requires_grad:
        yield from (1, 3)


def _unread(tensors: Sequence[Any], plan: str) -> Iterator[int]:
    """Positions of what the backward pass of a whole MLP does not read."""
    x, *weights = tensors[:_OWN]
    if dispatch.recomputes(plan, x, Weights(*weights), tensors[_OWN:]):
        yield from (2, 4, 6)
        return
    yield from unread_of_first(*tensors[:5])
    yield 6
    before = (*tensors[:5], *tensors[_OWN:])
    if not any(tensor is not None and tensor.requires_grad for tensor in before):
        yield 5


def _version(tensor: Tensor | None) -> int | None:
    return None if tensor is None or tensor.is_inference() else tensor._version


class _MLP(torch.autograd.Function):
    """Takes activation, plan and the tensors of ``mlp``; returns what ``mlp_forward`` returns."""

    @staticmethod
    def forward(activation: str, plan: str, *tensors: Any) -> Any:
        with below_autograd():
            return ops.mlp_forward.default(*tensors[:_OWN], tensors[_OWN:], activation, plan)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        ctx.activation, ctx.plan, *tensors = inputs
        _, preact_gate, preact_up = output
        ctx.unread = Unread(tensors, _unread(tensors, ctx.plan))
        ctx.save_for_backward(preact_gate, preact_up, *ctx.unread.left_out(tensors))
        ctx.mark_non_differentiable(preact_gate, preact_up)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return (None,) * len(ctx.needs_input_grad)
        preact_gate, preact_up, *tensors = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[2:])
        tensors = ctx.unread.put_back(tensors, read=torch.is_grad_enabled())
        if torch.is_grad_enabled():
            y = composed(*tensors[:_OWN], tensors[_OWN:], ctx.activation, ctx.plan)
            gradients = gradients_of_composed(y, tensors, grad_output, needs)
        else:
            x, weight_gate, _, weight_up, _, weight_down, _, *operands = tensors
            saved = (x, weight_gate, weight_up, weight_down, preact_gate, preact_up, operands)
            rest = (ctx.activation, ctx.plan, needs)
            gradients = ops.mlp_backward.default(grad_output, *saved, *rest)
        asked = (g if need else None for g, need in zip(gradients, needs, strict=True))
        return (None, None, *asked)


def gradients_of_composed(
    result: Tensor, tensors: Sequence[Any], grad_result: Tensor, needs: Sequence[bool]
) -> list[Tensor | None]:
    """The backward pass under ``create_graph=True``: recomputed, and so differentiable itself.

    Args:
        result: composed of ATen operators.
        tensors: that it was composed of.
        grad_result: its gradient.
        needs: of which tensors the gradient is asked for; the others get ``None``. It is zero for
            those that the result does not depend on, as in the first derivative.
    """
    asked = [tensor for tensor, need in zip(tensors, needs, strict=True) if need]
    found = iter(
        torch.autograd.grad(result, asked, grad_result, create_graph=True, allow_unused=True)
    )
    return [
        _or_zeros(next(found), tensor) if need else None
        for tensor, need in zip(tensors, needs, strict=True)
    ]


def _or_zeros(gradient: Tensor | None, tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if gradient is None else gradient


def _not_differentiable(operator: Any, arguments: tuple[Any, ...]) -> Any:
    return _NotDifferentiable.apply(operator, arguments, *_tensors(arguments))


class _NotDifferentiable(torch.autograd.Function):
    """Takes an operator, its arguments and all tensors among them; returns its tensors."""

    @staticmethod
    def forward(ctx: Any, operator: Any, arguments: Any, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.name = operator.name()
        with below_autograd():
            return tuple(operator(*arguments))

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise NotImplementedError(
            f"{ctx.name} has no derivative: call fusedmlp::mlp, which is differentiable"
        )
