"""Views on nodes that take a part of one dimension of another: the parts of packed projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from fusion_backend.fusion.views.node import argument, operation, same_size, tensor_of, value_of
from fusion_backend.fusion.views.permutations import composed, permutation
from fusion_backend.fusion.views.reshape import reshape_source


@dataclass(frozen=True)
class SliceView:
    """A node that takes the features ``start:stop:step`` of another node.

    Attributes:
        node: the node itself.
        source: what it takes them of.
        dim: the dimension of ``source`` that they are of, counted from the last, which is -1.
        calls: the calls from ``source``, exclusive, to ``node``, inclusive.
    """

    node: Node
    source: Node
    dim: int
    start: int
    stop: int
    step: int
    calls: tuple[Node, ...]

    @property
    def features(self) -> int:
        """How many there are."""
        return len(range(self.start, self.stop, self.step))


def slice_view(node: Any) -> SliceView | None:
    """The slice of one dimension that a node takes, or ``None``."""
    if not isinstance(node, Node) or tensor_of(node) is None or not node.args:
        return None
    source = node.args[0]
    if not isinstance(source, Node):
        return None
    name = operation(node)
    if name == "getitem" and tensor_of(source) is None:
        return _part_of_tuple(node, source, node.args[1])
    if name == "getitem":
        return _getitem_slice(node, source, node.args[1])
    if name == "select":
        dim, index = argument(node, 1, "dim"), argument(node, 2, "index")
        return _unflattened_slice(source, dim, index, (node,))
    if name == "slice":
        dim, start, stop, step = (
            argument(node, i + 1, n, d)
            for i, (n, d) in enumerate((("dim", 0), ("start", 0), ("end", None), ("step", 1)))
        )
        return _slice_of(source, dim, slice(start, stop, step), (node,))
    if name == "narrow":
        dim, start, length = (
            argument(node, i, n) for i, n in ((1, "dim"), (2, "start"), (3, "length"))
        )
        if not isinstance(start, int) or not isinstance(length, int):
            return None
        return _slice_of(source, dim, slice(start, start + length), (node,))
    return None


def halves(node: Node) -> tuple[SliceView, SliceView] | None:
    """The two halves of a dimension that ``glu`` combines, or ``None``."""
    source, dim = argument(node, 0, "input"), argument(node, 1, "dim", -1)
    tensor = tensor_of(source)
    if operation(node) != "glu" or tensor is None or not isinstance(tensor.shape[dim], int):
        return None
    half = tensor.shape[dim] // 2
    first = _slice_of(source, dim, slice(0, half), (node,))
    second = _slice_of(source, dim, slice(half, 2 * half), (node,))
    return None if first is None or second is None else (first, second)


def _slice_of(source: Node, dim: Any, part: slice, calls: tuple[Node, ...]) -> SliceView | None:
    tensor = tensor_of(source)
    if tensor is None or not isinstance(dim, int) or not isinstance(tensor.shape[dim], int):
        return None
    bounds = (part.start, part.stop, part.step)
    if any(not isinstance(bound, (int, type(None))) for bound in bounds):
        return None
    dim = dim % tensor.dim() - tensor.dim()
    return SliceView(calls[-1], source, dim, *part.indices(tensor.shape[dim]), calls)


def _unflattened_slice(
    split: Node, dim: Any, index: Any, calls: tuple[Node, ...]
) -> SliceView | None:
    """One of the parts into which a reshape before it splits the last dimension.

    ``x.view(..., parts, n)[..., i, :]`` are neighbouring features of x, and
    ``x.view(..., n, parts)[..., i]`` is every ``parts``-th of them. The parts' dimension may have
    been moved in between: ``x.view(..., parts, n).movedim(-2, 0)[i]``.
    """
    if permutation(split) is not None:
        return _moved_slice(split, dim, index, calls)
    source, tensor = reshape_source(split), tensor_of(split)
    whole = tensor_of(source)
    if source is None or whole is None or tensor is None or tensor.dim() < 2 or whole.dim() < 1:
        return None
    if not isinstance(dim, int) or not isinstance(index, int):
        return None
    outer, inner = tuple[Any, ...](tensor.shape)[-2:]
    if not isinstance(outer, int) or not isinstance(inner, int):
        return None
    if not same_size(whole.shape[-1], outer * inner):
        return None
    dim %= tensor.dim()
    if dim == tensor.dim() - 2:
        start = index % outer * inner
        return _slice_of(source, -1, slice(start, start + inner), (split, *calls))
    if dim == tensor.dim() - 1:
        return _slice_of(source, -1, slice(index % inner, None, inner), (split, *calls))
    return None


def _moved_slice(moved: Node, dim: Any, index: Any, calls: tuple[Node, ...]) -> SliceView | None:
    """One of the parts, taken after their dimension was moved; the others must stay in order."""
    tensor = tensor_of(moved)
    if tensor is None or not isinstance(dim, int):
        return None
    source, order = moved, tuple(range(tensor.dim()))
    while (step := permutation(source)) is not None:
        calls = (source, *calls)
        source, order = source.all_input_nodes[0], composed(step, order)
    others = [other for other in order if other != order[dim]]
    if others != sorted(others):
        return None
    return _unflattened_slice(source, order[dim], index, calls)


def _getitem_slice(node: Node, source: Node, index: Any) -> SliceView | None:
    """``x[..., a:b:c]``, ``x[..., i, :]`` or ``x[..., i]``, with ``...`` or as many full slices."""
    tensor = tensor_of(source)
    index = index if isinstance(index, tuple) else (index,)
    if tensor is None or not index or any(item is None or isinstance(item, bool) for item in index):
        return None
    if Ellipsis in index:
        position = index.index(Ellipsis)
        full = (slice(None),) * (tensor.dim() - len(index) + 1)
        index = (*index[:position], *full, *index[position + 1 :])
    index = (*index, *(slice(None),) * (tensor.dim() - len(index)))
    taking = [dim for dim, item in enumerate(index) if item != slice(None)]
    if len(taking) != 1 or len(index) != tensor.dim():
        return None
    (dim,) = taking
    if isinstance(index[dim], slice):
        return _slice_of(source, dim, index[dim], (node,))
    return _unflattened_slice(source, dim, index[dim], (node,))


_SPLITS = (
    "chunk",
    "split",
    "split_with_sizes",
    "tensor_split",
    "unsafe_chunk",
    "unsafe_split",
    "unsafe_split_with_sizes",
)


def _part_of_tuple(node: Node, split: Node, index: Any) -> SliceView | None:
    """One result of ``unbind``, or of a split (``chunk`` and so on), whose sizes are its parts'."""
    source, parts = split.args[0] if split.args else None, value_of(split)
    if not isinstance(source, Node) or not isinstance(parts, (tuple, list)):
        return None
    if not isinstance(index, int) or not all(hasattr(part, "shape") for part in parts):
        return None
    name = operation(split)
    if name == "unbind":
        return _unflattened_slice(source, argument(split, 1, "dim", 0), index, (split, node))
    if name not in _SPLITS:
        return None
    dim = argument(split, 2, "dim", 0)
    sizes = [part.shape[dim] for part in parts]
    if not all(isinstance(size, int) for size in sizes):
        return None
    index %= len(sizes)
    start = sum(sizes[:index])
    return _slice_of(source, dim, slice(start, start + sizes[index]), (split, node))
