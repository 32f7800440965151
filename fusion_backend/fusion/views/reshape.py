"""Calls that give the same elements in the same order: reshapes and copies."""

from __future__ import annotations

from torch.fx import Node

from fusion_backend.fusion.views.node import operation, same_size, tensor_of

_RESHAPES = (
    "view",
    "reshape",
    "_unsafe_view",
    "flatten",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "view_as",
    "reshape_as",
)


_COPIES = ("contiguous", "clone")


def reshape_source(node: Node) -> Node | None:
    """What a node reshapes or copies: the same elements in the same order. Else ``None``."""
    if operation(node) not in (*_RESHAPES, *_COPIES):
        return None
    source = node.args[0] if node.args else node.kwargs.get("input")
    before, after = tensor_of(source), tensor_of(node)
    if before is None or after is None or before.dtype != after.dtype:
        return None  # a view as another dtype
    return source if isinstance(source, Node) else None


def copy_source(node: Node) -> Node | None:
    """What a node copies, whatever the layout of the copy. Else ``None``."""
    return reshape_source(node) if operation(node) in _COPIES else None


def row_reshape_source(node: Node) -> Node | None:
    """What a node reshapes without mixing rows: the last dimension stays as it is."""
    source = reshape_source(node)
    before, after = tensor_of(source), tensor_of(node)
    if before is None or after is None or before.dim() < 1 or after.dim() < 1:
        return None
    return source if same_size(before.shape[-1], after.shape[-1]) else None
