"""How the operators differentiate: the autograd kernels of all of them and of their parts.

Each has a backward pass of its own. Whoever differentiates in another way (twice, in forward mode,
or under a transform of ``torch.func``) gets the same function composed of ATen operators, which is
right to any order, though not fused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusion_backend.compat.dispatcher import below_autograd, transforming
from fusion_backend.compat.dynamo import kept_whole
from fusion_backend.mlp.operands import as_rows_of
from fusion_backend.operators.arguments import Backward, Given, as_rows, tensors_of
from fusion_backend.operators.dispatch import composed
from fusion_backend.operators.operator import Operator


def differentiable(operator: Operator, overload: Callable[..., Any]) -> Callable[..., Any]:
    """The autograd kernel of an operator: it keeps what a gradient needs, where one is wanted.

    With gradients a norm and a residual are calls of their own, which autograd knows, and so are
    all steps of a chain that are no layers and activations.
    """

    def kernel(*arguments: Any, **around: Any) -> Any:
        if transforming():
            return composed(operator, *arguments, **around)
        if not wants_gradients((*arguments, *around.values())):
            with below_autograd():
                return overload(*arguments, **around)
        given = operator.given(*arguments, **around)
        if given.steps is not None:
            return composed(operator, *arguments, **around)
        residual, (x, *others) = given.residual, arguments
        x = x if given.norm is None else given.norm(x)
        operator.check(operator.read(x, *others))
        rows = in_rows(x, others, operator.position_of_operands)
        call, tensors = _Call.of(operator, rows)
        y = _Recorded.apply(call, *tensors)[0]
        y = y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])
        return y if residual is None else y + residual.contiguous()

    return kernel


def not_differentiable(whole: str, part: Any) -> Callable[..., Any]:
    """The autograd kernel of a part of an operator: it runs, and raises if it is differentiated."""

    def kernel(*arguments: Any, **others: Any) -> Any:
        if not wants_gradients(arguments):
            with below_autograd():
                return part(*arguments, **others)
        given = arguments, others
        return list(_NotDifferentiable.apply(part, whole, given, *tensors_of(arguments)))

    return kernel


def wants_gradients(arguments: Sequence[Any]) -> bool:
    """Whether autograd records a call: a tensor among the arguments needs a gradient.

    Autograd itself does not look into lists.
    """
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors_of(arguments))


def in_rows(x: Tensor, others: Sequence[Any], of_operands: int | None) -> list[Any]:
    """Arguments with matrices in views that autograd knows, as for ATen's linear layers.

    A function of autograd must not return a view that it made itself, which in compiled code it
    would: autograd then refuses to have the result written to in place.
    """
    rows = [x if x.dim() == 2 else as_rows(x), *others]
    if of_operands is not None:
        operands = rows[of_operands] or ()
        rows[of_operands] = [o if x.dim() == 2 else as_rows_of(o) for o in operands]
    return rows


class _Call(NamedTuple):
    """A call without its tensors.

    Attributes:
        operator: that is called.
        sizes: of the arguments that are lists of tensors; ``None`` for tensors.
        others: what follows: activations and plan.
    """

    operator: Operator
    sizes: tuple[int | None, ...]
    others: tuple[Any, ...]

    @classmethod
    def of(cls, operator: Operator, arguments: Sequence[Any]) -> tuple[_Call, list[Tensor | None]]:
        """A call, and its tensors one after the other, which is how autograd takes them."""
        *given, activations, plan = arguments
        sizes = tuple(len(each) if isinstance(each, (list, tuple)) else None for each in given)
        tensors: list[Tensor | None] = []
        for each in given:
            tensors += each if isinstance(each, (list, tuple)) else [each]
        return cls(operator, sizes, (activations, plan)), tensors

    def arguments(self, tensors: Iterable[Any]) -> list[Any]:
        """The arguments, with these tensors."""
        rest = iter(tensors)
        given = [next(rest) if size is None else list(islice(rest, size)) for size in self.sizes]
        return [*given, *self.others]


class _Recorded(torch.autograd.Function):
    """Takes a call and its tensors; returns the result, and what else the forward pass keeps."""

    # No setup_context: torch would read a signature for each call, 14 µs of an eager step. Only
    # transforms of torch.func need one, under which the operator is composed.
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Any) -> tuple[Tensor, ...]:
        arguments = call.arguments(tensors)
        given = call.operator.read(*arguments)
        # Autograd keeps x for the gradient of a first weight only: else it may be written to.
        recompute = _require_gradients(given.first.weight_gate, given.first.weight_up)
        with below_autograd():
            result, *kept = call.operator.keeping(*arguments, recompute=recompute)
        recomputes = recompute and call.operator.recomputes(given)
        positions = _unread(given, recomputes) if kept else ()
        ctx.call, ctx.unread, ctx.kept = call, Unread(tensors, positions), len(kept)
        ctx.recompute = recompute
        ctx.save_for_backward(*kept, *ctx.unread.left_out(tensors))
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        return (result, *kept)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors  # unpacked once: checkpointing computes it again
        kept, tensors = saved[: ctx.kept], saved[ctx.kept :]
        needs = list(ctx.needs_input_grad[1:])
        tensors = ctx.unread.put_back(tensors, read=torch.is_grad_enabled())
        operator, arguments = ctx.call.operator, ctx.call.arguments(tensors)
        if torch.is_grad_enabled():  # create_graph=True: what is composed is differentiable itself
            y = kept_whole(composed)(operator, *arguments)
            found = gradients_of_composed(y, tensors, grad_output, needs)
        else:
            given = operator.read(*arguments)
            found = operator.gradients(Backward(grad_output, given, kept, needs, ctx.recompute))
        return (None, *(g if need else None for g, need in zip(found, needs, strict=True)))


def _unread(given: Given, recomputes: bool) -> Iterator[int]:
    """Positions of what the backward pass does not read, where the forward pass keeps something.

    Tensors are x, weight and bias of each layer, and operands.
    """
    x, (weight_gate, bias_gate, weight_up, bias_up) = given.x, given.first
    yield from (2, 4, 6)[: 2 + len(given.further)]  # biases
    if recomputes:
        return
    if not _require_gradients(weight_gate, weight_up):
        yield 0
    if not _require_gradients(x):
        yield from (1, 3)
    before = (x, weight_gate, bias_gate, weight_up, bias_up, *given.operands)
    if given.further and not _require_gradients(*before):
        yield 5


def _require_gradients(*tensors: Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


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


def _version(tensor: Tensor | None) -> int | None:
    return None if tensor is None or tensor.is_inference() else tensor._version


def gradients_of_composed(
    result: Tensor | Sequence[Tensor],
    tensors: Sequence[Any],
    grad_result: Tensor | Sequence[Tensor],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """The backward pass under ``create_graph=True``: recomputed, and so differentiable itself.

    Args:
        result: composed of ATen operators, or several.
        tensors: that it was composed of.
        grad_result: its gradient, or one for each.
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


class _NotDifferentiable(torch.autograd.Function):
    """Takes a part, what it is a part of, its arguments, and all tensors among them."""

    @staticmethod
    def forward(ctx: Any, part: Any, whole: str, given: Any, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.names, (arguments, others) = (part.name(), whole), given
        with below_autograd():
            return tuple(part(*arguments, **others))

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        part, whole = ctx.names
        raise NotImplementedError(
            f"{part} has no derivative: call {whole}, which is differentiable"
        )
