"""Tensors that stand side by side: concatenations of features."""

from __future__ import annotations

from torch.fx import Node

from fusion_backend.fusion.views.node import argument, operation, tensor_of

_CONCATENATIONS = ("cat", "concat", "concatenate")


def concatenated_features(node: Node) -> tuple[Node, ...]:
    """The different tensors whose features a node puts side by side, in their order.

    Empty for any other node, for a concatenation along another dimension, and where a tensor stands
    there twice.
    """
    result, parts = tensor_of(node), argument(node, 0, "tensors")
    if operation(node) not in _CONCATENATIONS or result is None or "out" in node.kwargs:
        return ()
    dim = argument(node, 1, "dim", node.kwargs.get("axis", 0))
    if not isinstance(parts, (list, tuple)) or not isinstance(dim, int):
        return ()
    if dim % result.dim() != result.dim() - 1 or len(set(parts)) != len(parts):
        return ()
    values = [tensor_of(part) for part in parts]
    # An empty vector among the parts is passed over, whatever its number of dimensions.
    if any(value is None or value.dim() != result.dim() for value in values):
        return ()
    return tuple(parts)
