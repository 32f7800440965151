"""Views on nodes that take some features of another node: the parts of packed projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from fusion_backend.views import argument, operation, tensor_of, value_of


@dataclass(frozen=True)
class SliceView:
    """A node that takes the features ``start:stop:step`` of another node's last dimension."""

    node: Node
    source: Node
    start: int
    stop: int
    step: int = 1


def slice_view(node: Any) -> SliceView | None:
    """The slice of the last dimension that a node takes, or ``None``."""
    if not isinstance(node, Node) or tensor_of(node) is None or not node.args:
        return None
    source = node.args[0]
    if not isinstance(source, Node):
        return None
    name = operation(node)
    if name == "getitem" and tensor_of(source) is None:
        return _part_of_split(node, source, node.args[1])
    if name == "getitem":
        return _getitem_slice(node, source, node.args[1])
    if name == "slice":
        dim, start, stop, step = (
            argument(node, i + 1, n, d)
            for i, (n, d) in enumerate((("dim", 0), ("start", 0), ("end", None), ("step", 1)))
        )
        return _slice_of(node, source, dim, slice(start, stop, step))
    if name == "narrow":
        dim, start, length = (
            argument(node, i, n) for i, n in ((1, "dim"), (2, "start"), (3, "length"))
        )
        if not isinstance(start, int) or not isinstance(length, int):
            return None
        return _slice_of(node, source, dim, slice(start, start + length))
    return None


def _slice_of(node: Node, source: Node, dim: Any, part: slice) -> SliceView | None:
    tensor = tensor_of(source)
    if tensor is None or not isinstance(dim, int) or not isinstance(tensor.shape[-1], int):
        return None
    if dim % tensor.dim() != tensor.dim() - 1:
        return None
    bounds = (part.start, part.stop, part.step)
    if any(not isinstance(bound, (int, type(None))) for bound in bounds):
        return None
    return SliceView(node, source, *part.indices(tensor.shape[-1]))


def _getitem_slice(node: Node, source: Node, index: Any) -> SliceView | None:
    """``x[..., a:b:c]`` or the same with a full slice for every leading dimension."""
    tensor = tensor_of(source)
    index = index if isinstance(index, tuple) else (index,)
    if tensor is None or not index or not isinstance(index[-1], slice):
        return None
    leading = index[:-1]
    if leading != (Ellipsis,) and not (
        len(leading) == tensor.dim() - 1 and all(part == slice(None) for part in leading)
    ):
        return None
    return _slice_of(node, source, -1, index[-1])


def _part_of_split(node: Node, split: Node, index: Any) -> SliceView | None:
    """``chunk``, ``split`` and ``tensor_split`` of the last dimension: the sizes are the parts'."""
    name = operation(split)
    if name not in (
        "chunk",
        "split",
        "split_with_sizes",
        "tensor_split",
        "unsafe_chunk",
        "unsafe_split",
    ):
        return None
    source, parts = split.args[0], value_of(split)
    dim = argument(split, 2, "dim", 0)
    if (
        not isinstance(source, Node)
        or not isinstance(index, int)
        or not isinstance(parts, (tuple, list))
    ):
        return None
    sizes = [part.shape[dim] for part in parts]
    if not all(isinstance(size, int) for size in sizes):
        return None
    index %= len(sizes)
    start = sum(sizes[:index])
    return _slice_of(node, source, dim, slice(start, start + sizes[index]))
