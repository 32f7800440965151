"""Where a variable of an activation comes from: a linear layer, or some features of one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch.fx import Node

from fusion_backend.fusion.views.convolutions import convolution_view
from fusion_backend.fusion.views.experts import expert_view
from fusion_backend.fusion.views.linear import LinearView, linear_view
from fusion_backend.fusion.views.reshape import row_reshape_source
from fusion_backend.fusion.views.slices import SliceView, halves, slice_view
from fusion_backend.fusion.views.sums import layer_sum
from fusion_backend.mlp.expression import Expression


@dataclass(frozen=True)
class Source:
    """Where a variable of the activation comes from: a linear layer, or a slice of its features."""

    linear: LinearView
    part: SliceView | None = None

    @property
    def node(self) -> Node:
        return self.linear.node if self.part is None else self.part.node

    @property
    def features(self) -> Any:
        """How many features of the layer it has."""
        return self.linear.out_features if self.part is None else self.part.features

    def same_as(self, other: Source) -> bool:
        """Whether both are the same features, although two calls may take them."""
        if self.part is None or other.part is None:
            return self == other
        bounds = [(p.start, p.stop, p.step) for p in (self.part, other.part)]
        return self.linear == other.linear and bounds[0] == bounds[1]


def layer_view(node: Node) -> LinearView | None:
    """The linear layer, the 1×1 convolution or the layer of experts that a node computes."""
    return linear_view(node) or convolution_view(node) or expert_view(node)


def is_product_of_layer(node: Node) -> bool:
    """Whether the only user of a product adds the bias of the layer."""
    users = tuple(node.users)
    layer = linear_view(users[0]) if len(users) == 1 else None
    return layer is not None and layer.product is node


def source_of(node: Node) -> Source | None:
    """The linear layer, or the part of one, that a node computes."""
    linear = layer_view(node)
    if linear is not None:
        return Source(linear)
    part = slice_view(node)
    if part is None:
        return None
    packed = _packed_layer(part)
    return None if packed is None else Source(packed, part)


def gate_sources(node: Node) -> tuple[Source, Source] | None:
    """The two halves of a packed layer that a node combines, if it is a ``glu`` of one."""
    parts = halves(node)
    packed = None if parts is None else _packed_layer(parts[0])
    if parts is None or packed is None:
        return None
    return Source(packed, parts[0]), Source(packed, parts[1])


class SumOfParts(NamedTuple):
    """The same features of several layers, added up.

    Attributes:
        expression: the sum, of ``l0``, ``l1``, ...
        sources: what these are.
        calls: the calls that add and scale the layers.
    """

    expression: Expression
    sources: dict[str, Source]
    calls: frozenset[Node]


def sum_of_parts(node: Node) -> SumOfParts | None:
    """The sum that a node takes some features of, or ``None``."""
    part = slice_view(node)
    if part is None or part.dim != -1:
        return None
    whole = layer_sum(_behind_reshapes(part.source), layer_view)
    if whole is None:
        return None
    sources = {
        f"l{index}": Source(layer, replace(part, source=layer.node))
        for index, layer in enumerate(whole.layers)
    }
    return SumOfParts(whole.expression, sources, whole.calls)


def _packed_layer(part: SliceView) -> LinearView | None:
    """The layer of whose features this is a part, or ``None``."""
    layer = layer_view(_behind_reshapes(part.source))
    if layer is None or part.dim != layer.feature_dim:
        return None
    reshaped = layer.node is not part.source
    return None if layer.positions and reshaped else layer


def _behind_reshapes(node: Node) -> Node:
    while (source := row_reshape_source(node)) is not None:
        node = source
    return node


def slicing_calls(source: Source) -> Iterator[Node]:
    """The calls between a packed linear layer and one slice of it."""
    if source.part is None:
        return
    yield from source.part.calls
    node = source.part.source
    while node is not source.linear.node:
        yield node
        node = row_reshape_source(node)  # type: ignore[assignment]
