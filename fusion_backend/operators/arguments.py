"""What a call of an operator is given, whichever operator it is of, and as rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.operands import as_rows_of
from fusion_backend.mlp.steps import ACTIVATION, Steps
from fusion_backend.mlp.weights import FirstLayer, Layer, Weights


class Given(NamedTuple):
    """The tensors of one call, how they are joined, and what is to run it.

    Attributes:
        x: ``(..., in)``.
        first: the layers before the activation; of a chain the first one.
        further: the layers after it: none where only first layers and activation are fused, one of
            an MLP, the others of a chain.
        activations: as text, one less than layers that follow each other, but at least one.
        plan: the name of a family.
        operands: other tensors that the activation is of, as the variables ``p0``, ``p1`` and so
            on: scalars ``()``, vectors ``(hidden,)`` and tensors ``(..., hidden)`` of any floating
            dtype, and int64 seeds ``()`` of dropouts.
        residual: ``(..., out)``, which is added to the result.
        norm: of ``x``, before all else.
        steps: of a chain, what it computes; ``None`` where that is its layers, and an activation
            between each two.
        norms: those of the steps, in their order.
    """

    x: Tensor
    first: FirstLayer
    further: tuple[Layer, ...]
    activations: tuple[str, ...]
    plan: str
    operands: Sequence[Tensor] = ()
    residual: Tensor | None = None
    norm: Norm | None = None
    steps: Steps | None = None
    norms: tuple[Norm, ...] = ()

    @property
    def weights(self) -> Weights:
        """Those of an MLP of two layers."""
        (down,) = self.further
        return Weights(*self.first, *down)

    @property
    def chained(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """The weights of a chain, and a bias or ``None`` for each."""
        weights, biases = zip(self.first[2:], *self.further, strict=True)
        return list(weights), list(biases)

    @property
    def reads(self) -> tuple[int, ...]:
        """Of each activation of a chain, of how many earlier values it is."""
        if self.steps is None:
            return (0,) * len(self.activations)
        return tuple(len(step.reads) for step in self.steps.all if step.kind == ACTIVATION)

    @property
    def gated(self) -> bool:
        """Whether there are two first layers."""
        return self.first.weight_gate is not None

    @property
    def out_features(self) -> Any:
        """The width of the result."""
        last = self.further[-1].weight if self.further else self.first.weight_up
        return last.shape[0]

    def in_rows(self) -> Given:
        """The same, with matrices in place of tensors of more dimensions, or fewer."""
        return self._replace(
            x=as_rows(self.x),
            operands=[*map(as_rows_of, self.operands)],
            residual=None if self.residual is None else as_rows(self.residual),
        )


class Backward(NamedTuple):
    """What a backward pass starts from.

    Attributes:
        grad_output: ``(..., out)``.
        given: the call; biases that are not read may be missing.
        kept: the pre-activations of gate, empty without one, and of up; nothing of a chain.
        needs: which gradients to compute: of x, of weights and biases, of operands.
        recompute: whether x may be kept in place of the pre-activations.
    """

    grad_output: Tensor
    given: Given
    kept: Sequence[Tensor]
    needs: Sequence[bool]
    recompute: bool = True


def as_rows(tensor: Tensor) -> Tensor:
    """``(..., features)`` as ``(rows, features)``."""
    return tensor.unsqueeze(0) if tensor.dim() == 1 else tensor.flatten(0, -2)


def restore_rows(rows: Tensor, like: Tensor) -> Tensor:
    """``(rows, features)``, to which nothing else refers, with the leading dimensions of ``like``.

    The result is no view to autograd, as that of ATen's own products is not: in compiled code it
    may be written to in place.
    """
    if like.dim() == 2:
        return rows
    result: Tensor = torch.ops.aten._unsafe_view.default(rows, (*like.shape[:-1], rows.shape[-1]))
    return result


def or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    """What an operator returns in place of ``None``."""
    return like.new_empty(0) if tensor is None else tensor


def tensors_of(arguments: Sequence[Any]) -> list[Tensor]:
    """The tensors among arguments and in lists of them."""
    flat = itertools.chain.from_iterable(
        argument if isinstance(argument, (list, tuple)) else (argument,) for argument in arguments
    )
    return [argument for argument in flat if isinstance(argument, Tensor)]
