"""Calls that put the dimensions of a tensor in another order."""

from __future__ import annotations

import torch
from torch.fx import Node

from fusion_backend.fusion.views.node import operation, tensor_of

REORDERING = (
    *("transpose", "permute", "t", "T", "mT", "numpy_T"),
    *("movedim", "moveaxis", "swapaxes", "swapdims"),
)


def permutation(node: Node) -> tuple[int, ...] | None:
    """The dimensions of its operand in the order that a call gives them; ``None`` for others."""
    name = operation(node)
    attribute = node.args[1] if name == "getattr" and len(node.args) == 2 else name
    source = tensor_of(node.args[0]) if node.args else None
    if attribute not in REORDERING or source is None or len(node.all_input_nodes) != 1:
        return None
    told_apart = torch.empty(tuple(range(1, source.dim() + 1)), device="meta")
    rest = node.args[1:]
    if node.op == "call_method":
        moved = getattr(told_apart, str(node.target))(*rest, **node.kwargs)
    else:
        moved = node.target(told_apart, *rest, **node.kwargs)  # type: ignore[operator]
    return tuple(size - 1 for size in moved.shape)


def composed(first: tuple[int, ...], then: tuple[int, ...]) -> tuple[int, ...]:
    """The permutation that two make, one after the other."""
    return tuple(first[dim] for dim in then)


def is_identity(order: tuple[int, ...]) -> bool:
    """Whether all dimensions stay where they are."""
    return order == tuple(range(len(order)))
