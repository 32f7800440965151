"""What depends on what in a graph, through data and through memory; networkx does the search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

import networkx as nx
from torch.fx import Node

from fusion_backend.fusion.views.constants import constant_of
from fusion_backend.fusion.views.effects import is_transformed, measures, sets_state
from fusion_backend.fusion.views.memory import Memory
from fusion_backend.fusion.views.node import tensor_of


class Dependence(Memory):
    """Data and memory dependence of one graph, and the modes that its calls run in."""

    @cached_property
    def mode_changes(self) -> tuple[int, ...]:
        """Positions at which autocast, grad mode or inference mode changes."""
        return tuple(position for node, position in self.position.items() if sets_state(node))

    @cached_property
    def in_transform(self) -> bool:
        """Whether the graph opens a level of ``torch.func``."""
        return any(map(is_transformed, self.position))

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
        return measures(node) and all(
            user in nodes or self._only_measures(user, nodes) for user in node.users
        )

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
