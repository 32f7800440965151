"""What random programs call beside PyTorch: operators and functions that write, log or nest.

``LOG`` keeps what the effectful operator was given, in order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch._higher_order_ops import while_loop as _while_loop
from torch._library.effects import EffectType
from torch.utils.checkpoint import checkpoint

LOG: list[torch.Tensor] = []


@torch.library.custom_op("random_programs::grow", mutates_args={"x"})
def _grow(x: torch.Tensor) -> None:
    x.add_(1.0)


@torch.library.custom_op("random_programs::keep", mutates_args={"kept"})
def _keep(x: torch.Tensor, kept: torch.Tensor) -> None:
    kept.copy_(x)


@torch.library.custom_op("random_programs::shrink_all", mutates_args={"xs"})
def _shrink_all(xs: list[torch.Tensor]) -> None:
    for x in xs:
        x.mul_(0.5)


@torch.library.custom_op("random_programs::grow_and_sum", mutates_args={"x"})
def _grow_and_sum(x: torch.Tensor) -> torch.Tensor:
    return x.add_(0.5).sum()


@torch.library.custom_op("random_programs::note", mutates_args=())
def _note(x: torch.Tensor) -> None:
    LOG.append(x.detach().clone())


@torch.library.custom_op("random_programs::tripled", mutates_args=())
def _tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


_grow_and_sum.register_fake(lambda x: x.new_empty(()))
_note.register_fake(lambda x: None)
_note.register_effect(EffectType.ORDERED)
_tripled.register_fake(torch.empty_like)
_tripled.register_autograd(lambda context, gradient: gradient * 3)


class Steep(torch.autograd.Function):
    """The identity, with another gradient than it has."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 5


class Doubled(torch.autograd.Function):
    """Doubles a tensor in place."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        context.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class Layers(torch.autograd.Function):
    """An MLP with ReLU, differentiated by hand."""

    @staticmethod
    def forward(
        context: Any, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        hidden = F.linear(x, up)
        context.save_for_backward(x, up, down, hidden)
        return F.linear(F.relu(hidden), down)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, up, down, hidden = context.saved_tensors
        inner = F.linear(gradient, down.t()) * (hidden > 0)
        rows, wide = gradient.reshape(-1, gradient.shape[-1]), inner.reshape(-1, inner.shape[-1])
        return (
            inner @ up,
            wide.t() @ x.reshape(-1, x.shape[-1]),
            rows.t() @ F.relu(hidden).reshape(-1, hidden.shape[-1]),
        )


def cond(condition, if_true, if_false, operands):
    """``torch.cond``; eagerly it is an ``if``, as PyTorch would compile it even there."""
    if torch.compiler.is_compiling():
        return torch.cond(condition, if_true, if_false, operands)
    return (if_true if condition else if_false)(*operands)


def while_loop(condition, body, carried):
    """PyTorch's ``while_loop``; eagerly it is a ``while``."""
    if torch.compiler.is_compiling():
        return _while_loop(condition, body, carried)
    while condition(*carried):
        carried = body(*carried)
    return carried


def hook(value: torch.Tensor) -> None:
    """Doubles a gradient on its way."""
    # Eager crashes in register_hook on a view that was written to through another view, unless its
    # grad_fn was asked for before (torch 2.11 to 2.14).
    if value.requires_grad and value.grad_fn is not None:
        value.register_hook(lambda gradient: gradient * 2)


def scope() -> dict[str, Any]:
    """The names that programs use."""
    return {
        "torch": torch,
        "F": F,
        "ops": torch.ops.random_programs,
        **{f.__name__: f for f in (checkpoint, cond, while_loop, hook, Steep, Doubled, Layers)},
    }
