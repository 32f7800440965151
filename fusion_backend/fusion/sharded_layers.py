"""Tensor parallelism: sharded layers, put as what each rank computes of them.

``parallelize_module`` leaves a graph in which layers read and give sharded tensors (DTensor), and
hooks convert between these and a rank's own:

    h = to_local(linear(from_local(x), W_up, b_up))          W_up split by its rows
    y = linear(from_local(gelu(h)), W_down, b_down)          partial sums, which are reduced after

A layer that each rank computes from its own parts alone is put as such, so the site between two of
them is an MLP like any other, of a rank's sizes:

    y = from_local(linear(gelu(linear(x', W_up', b_up')), W_down', share(b_down)))

Gradients stay as they were: that of x is partial, so one reduction makes it whole, for both layers
of a gated pair at once. What redistributes tensors stays in the graph.

Layers of which no site may be fused come back as they were: the pass starts anew without them.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fusion_backend.compat.sharding import closing, opening
from fusion_backend.compat.tracing import FakeTensor
from fusion_backend.fusion.views.linear import LinearView, linear_view
from fusion_backend.fusion.views.memory import Memory
from fusion_backend.fusion.views.node import operation, tensor_of, value_of
from fusion_backend.fusion.views.observation import Observer
from fusion_backend.fusion.views.obstacles import is_pointwise_operator
from fusion_backend.fusion.views.sharding import (
    LocalLayer,
    conversion,
    is_elementwise_on_parts,
    is_plain,
    is_sharded_call,
    keeps_placements,
    local_layer,
    placements_of,
    writes_in_place,
)


def has_sharded_layers(graph: Graph) -> bool:
    """Whether a graph has layers of sharded tensors."""
    return any(is_sharded_call(node) and linear_view(node) is not None for node in graph.nodes)


def localize(
    graph: Graph, observer: Observer, wanted: AbstractSet[str] | None = None
) -> dict[Node, str]:
    """Put sharded layers as what each rank computes; the new layers, with the names of the old.

    Args:
        graph: its nodes carry example values.
        observer: shared with other graphs of the program.
        wanted: the names of the layers; ``None`` for all.
    """
    found: dict[Node, str] = {}
    parts = _Parts(graph, observer)
    for node in tuple(graph.nodes):
        if not is_sharded_call(node) or (wanted is not None and node.name not in wanted):
            continue
        layer = linear_view(node)
        how = None if layer is None else local_layer(layer)
        if layer is not None and how is not None and not any(map(writes_in_place, node.users)):
            found[parts.put(layer, how)] = node.name
    return found


class _Parts:
    """The parts that a rank has of the sharded tensors of a graph, as nodes."""

    def __init__(self, graph: Graph, observer: Observer) -> None:
        self._graph = graph
        self._first = _conversions_alike(graph, Memory(graph, observer))
        self._parts: dict[Node, Node] = {}
        self._opened: dict[tuple[Node, Any], Node] = {}
        self._erased: set[Node] = set()

    def put(self, layer: LinearView, how: LocalLayer) -> Node:
        """Put a layer as what each rank computes of it; returns the new layer."""
        old, graph = layer.node, self._graph
        of_weight, of_bias = how.parameter_gradients
        with graph.inserting_before(old):
            x = self._part(layer.input, how.input_gradient, old)
            weight = self._part(layer.weight, of_weight, old)
            bias = layer.bias
            if bias is not None:
                bias = self._part(bias, of_bias, old)
                bias = bias if how.shares == 1 else self._share(bias, how.shares, old)
            new = graph.call_function(F.linear, (x, weight, bias))
            new.meta = {**old.meta, _key(old): _opened_value(old)}
        self._open(old, new)
        if old.users:
            closed = self._closed(layer, new)
            old.replace_all_uses_with(closed)
            self._parts[closed] = new
        self._erase_unread(old)
        return new

    def _part(self, node: Node, gradient: tuple[Any, ...], at: Node) -> Node:
        """The part of a tensor of which the gradient has these placements."""
        own = placements_of(node)
        if gradient == own and (known := self._known(node)) is not None:
            return known
        first = self._first.get(node, node)
        node = node if first in self._erased else first
        key = (node, gradient)
        if key not in self._opened:
            target, options = opening(None if gradient == own else gradient)
            operation = "call_method" if isinstance(target, str) else "call_function"
            self._opened[key] = self._graph.create_node(operation, target, (node,), options)
            value = _opened_value(node)
            self._opened[key].meta = {**at.meta, _key(node): value}
        return self._opened[key]

    def _known(self, node: Node) -> Node | None:
        """The part of a tensor that the graph has already, or may have."""
        if node in self._parts:
            return self._parts[node]
        source = node.args[0] if node.args else None
        if not isinstance(source, Node):
            return None
        if keeps_placements(node):
            return self._known(source)
        if conversion(node) == "from_local" and is_plain(node) and _is_split(node):
            return source
        return self._pointwise(node)

    def _pointwise(self, node: Node) -> Node | None:
        """A pointwise call of parts, where there are parts of all that it reads."""
        if not is_pointwise_operator(operation(node)) or not is_elementwise_on_parts(node):
            return None
        parts = {source: self._known(source) for source in node.all_input_nodes}
        if None in parts.values() or operation(node) == "rrelu":
            return None
        args, kwargs = map_arg((node.args, node.kwargs), lambda source: parts[source])
        with self._graph.inserting_after(node):
            part = self._graph.create_node(node.op, node.target, args, kwargs)
        part.meta = {**node.meta, _key(node): _opened_value(node)}
        self._parts[node] = part
        return part

    def _share(self, bias: Node, ranks: int, at: Node) -> Node:
        """A rank's share of a bias that all ranks add to their partial sums."""
        value, key = tensor_of(bias), _key(bias)
        assert value is not None
        target = torch.ops.fusedmlp.share.default
        node = self._graph.call_function(target, (bias, ranks))
        with _mode_of(value), torch.set_grad_enabled(value.requires_grad):
            node.meta = {**at.meta, key: target(value, ranks)}
        return node

    def _open(self, node: Node, part: Node) -> None:
        """Let those read the part who opened the tensor, maybe after asking for its placements."""
        for user in tuple(node.users):
            if conversion(user) == "to_local" and is_plain(user):
                user.replace_all_uses_with(part)
                self._graph.erase_node(user)
            elif keeps_placements(user):
                self._open(user, part)
                if not user.users:
                    self._graph.erase_node(user)
                    self._erased.add(user)

    def _closed(self, layer: LinearView, part: Node) -> Node:
        """The sharded result, of which a rank has this part."""
        old, graph = layer.node, self._graph
        placed = placements_of(old)
        assert placed is not None
        target, others = closing(placed)
        with graph.inserting_before(old):
            mesh = graph.call_function(getattr, (layer.weight, "device_mesh"))
            value: Any = value_of(layer.weight)
            mesh.meta = {**old.meta, _key(old): value.device_mesh}
            options: dict[str, Any] = {"run_check": False} if others else {}
            closed = graph.call_function(target, (part, mesh, *others), options)
        closed.meta = dict(old.meta)
        return closed

    def _erase_unread(self, node: Node) -> None:
        """Erase a call of sharded tensors, and before it others, that nothing reads any more."""
        if node.users or not is_sharded_call(node):
            return
        replaced = node in self._parts or conversion(node) or linear_view(node) is not None
        if not replaced:
            return
        sources = tuple(node.all_input_nodes)
        self._graph.erase_node(node)
        self._erased.add(node)
        for source in sources:
            self._erase_unread(source)


def _conversions_alike(graph: Graph, memory: Memory) -> dict[Node, Node]:
    """Conversions that give the same tensor as one before them, with the first such.

    Each layer of a pair has hooks of its own, which convert the same input.
    """
    alike: dict[tuple[Any, ...], Node] = {}
    found: dict[Node, Node] = {}
    for node in graph.nodes:
        source = node.args[0] if node.args else None
        if not isinstance(source, Node) or not is_sharded_call(node):
            continue
        if not conversion(node) or not is_plain(node):
            continue
        source, value = found.get(source, source), value_of(node)
        key = (conversion(node), source, tuple(value.placements), value.device_mesh)
        first = alike.setdefault(key, node)
        start, end = memory.position[first], memory.position[node]
        if any(memory.writes_to(memory.storages(source), start, end)):
            alike[key] = first = node
        found[node] = first
    return found


def _is_split(node: Node) -> bool:
    """Whether each rank has a part of its own of a tensor, on all dimensions of the mesh."""
    return all(each.is_shard() for each in placements_of(node) or ())


def _opened_value(node: Node) -> torch.Tensor:
    """The example value of a rank's part."""
    value: Any = value_of(node)
    with torch.set_grad_enabled(value.requires_grad):
        part: torch.Tensor = value.to_local()
    return part


def _key(node: Node) -> str:
    return "example_value" if "example_value" in node.meta else "val"


def _mode_of(value: torch.Tensor) -> AbstractContextManager[Any]:
    return value.fake_mode if isinstance(value, FakeTensor) else nullcontext()
