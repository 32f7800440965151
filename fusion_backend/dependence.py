"""What depends on what in a graph, through data and through memory; networkx does the search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import networkx as nx
import torch
from torch.fx import Graph, Node

from fusion_backend.constants import constant_of
from fusion_backend.effects import changes_mode, enters_transform, mutates
from fusion_backend.views import tensor_of, value_of


@dataclass(frozen=True)
class Write:
    """A call that writes to tensors in place, at its position in program order."""

    node: Node
    position: int
    storages: frozenset[int]


class Dependence:
    """Data and memory dependence of one graph.

    Args:
        graph: a traced graph; its nodes carry example values, whose storages tell which nodes are
            views of one another.
    """

    def __init__(self, graph: Graph) -> None:
        self._order = tuple(graph.nodes)
        self.position: dict[Node, int] = {node: i for i, node in enumerate(self._order)}

    @cached_property
    def writes(self) -> tuple[Write, ...]:
        """Every in-place write, in program order."""
        found = []
        for node, position in self.position.items():
            storages = frozenset().union(*(storages_of(target) for target in mutates(node)))
            if storages:
                found.append(Write(node, position, storages))
        return tuple(found)

    @cached_property
    def mode_changes(self) -> tuple[int, ...]:
        """Positions at which autocast, grad mode or inference mode changes."""
        return tuple(position for node, position in self.position.items() if changes_mode(node))

    @cached_property
    def in_transform(self) -> bool:
        """Whether the graph opens a level of ``torch.func``."""
        return any(enters_transform(node) for node in self.position)

    def span(self, nodes: Iterable[Node]) -> tuple[int, int]:
        """First and last position of some nodes."""
        positions = [self.position[node] for node in nodes]
        return min(positions), max(positions)

    def escapes(self, inner: frozenset[Node], last: Node) -> Iterator[Node]:
        """Nodes outside that read a tensor computed inside, other than the result ``last``.

        A size taken of an inner tensor does not count where only inner nodes read it, nor does a
        tensor of one number.
        """
        nodes = inner | {last}
        for node in inner:
            if constant_of(node) is not None:
                continue
            for user in node.users:
                if user not in nodes and not self._only_measures(user, nodes):
                    yield user

    def _only_measures(self, node: Node, nodes: frozenset[Node]) -> bool:
        if tensor_of(node) is not None or node.op == "output" or mutates(node):
            return False
        if _holds_tensors(node):
            return False
        return all(user in nodes or self._only_measures(user, nodes) for user in node.users)

    def between(self, nodes: frozenset[Node]) -> set[Node]:
        """Nodes outside that depend on some of ``nodes`` and on which others of them depend.

        Empty exactly if ``nodes`` is convex, that is, can run in one piece.
        """
        start, end = self.span(nodes)
        # Nothing beyond the last of them feeds any: the rest of a deep model is not searched.
        flow = nx.DiGraph(
            (node, user)
            for node in self._order[start:end]
            for user in node.users
            if self.position[user] < end
        )
        boundary = [
            node for node in flow if node not in nodes and nodes & set(node.all_input_nodes)
        ]
        after = set(boundary).union(*(nx.descendants(flow, node) for node in boundary))
        entries = {source for node in nodes for source in node.all_input_nodes} - nodes
        return {node for node in after & entries if tensor_of(node) is not None}

    def readers(self, storages: frozenset[int], after: int) -> Iterator[Node]:
        """Nodes past a position that read a tensor in one of the storages."""
        for node, position in self.position.items():
            if position > after and any(storages_of(i) & storages for i in node.all_input_nodes):
                yield node


def storages_of(node: Node) -> frozenset[int]:
    """Identities of the storages behind a node's example tensors; views share them."""
    value = value_of(node)
    values = value if isinstance(value, (tuple, list)) else (value,)
    return frozenset(filter(None, map(_storage, values)))


def _storage(value: object) -> int | None:
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return int(value.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None  # sparse tensors and some subclasses have no storage


def _holds_tensors(node: Node) -> bool:
    value = value_of(node)
    return isinstance(value, (tuple, list)) and any(isinstance(v, torch.Tensor) for v in value)
