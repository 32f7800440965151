"""What depends on what in a graph through memory: who has it, who writes to it, who reads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property

import networkx as nx
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from fusion_backend.fusion.views.bodies import attribute_of, bodies
from fusion_backend.fusion.views.node import value_of
from fusion_backend.fusion.views.observation import Effect, Observer, reaches_further
from fusion_backend.fusion.views.storages import ANYWHERE, storages


@dataclass(frozen=True)
class Write:
    """A call that writes to tensors in place, at its position in program order."""

    node: Node
    position: int
    storages: frozenset[int]


class Memory:
    """The storages behind the values of one graph, and the calls that write to them.

    What calls write to is observed when it is asked for, once a call.

    Args:
        graph: a traced graph; its nodes carry example values, whose storages tell which nodes are
            views of one another.
        observer: shared with other graphs of the program.
    """

    def __init__(self, graph: Graph, observer: Observer | None = None) -> None:
        self._order = tuple(graph.nodes)
        self.position: dict[Node, int] = {node: i for i, node in enumerate(self._order)}
        self._observer = Observer() if observer is None else observer
        self._effects: dict[Node, Effect] = {}
        self._nested: dict[GraphModule, Memory] = {}

    def storages(self, node: Node) -> frozenset[int]:
        """Identities of the storages behind a node's tensors; those that may be one are one."""
        return self._storages[node]

    def makes(self, nodes: AbstractSet[Node], storage: int) -> bool:
        """Whether one of the nodes is the first that has a tensor in a storage."""
        return self._makers.get(storage) in nodes

    def readers(self, storages: AbstractSet[int], after: int) -> Iterator[Node]:
        """Nodes past a position that read a tensor in one of the storages."""
        return (node for node in self._readers(storages) if self.position[node] > after)

    def writes_to(
        self, storages: AbstractSet[int], start: int, end: int | None = None
    ) -> Iterator[Write]:
        """The calls from position ``start`` to ``end``, inclusive, that write to the storages.

        Calls elsewhere that give tensors in them other sizes or storages are among them: of such
        tensors example values do not tell what calls before saw.
        """
        for node in self._readers(storages):
            effect, position = self.effect(node), self.position[node]
            within = start <= position and (end is None or position <= end)
            found = effect.remakes | (effect.writes if within else frozenset())
            if _meet(found, storages):
                yield Write(node, position, effect.writes)

    def effect(self, node: Node) -> Effect:
        """What a node writes to; all that it can reach where that cannot be observed."""
        if node not in self._effects:
            self._effects[node] = self._observed(node)
        return self._effects[node]

    def _observed(self, node: Node) -> Effect:
        reach = self._reach(node)
        if node.op in ("placeholder", "get_attr", "output"):
            return Effect()
        if not reach and not reaches_further(node):
            return Effect()
        graphs = bodies(node)
        if graphs:
            return self._effect_of(graphs, reach)
        observed = None if graphs is None else self._observer.effect(node)
        if observed is None:
            return Effect(reach | ({ANYWHERE} if reaches_further(node) else frozenset()))
        return Effect(self._merged(observed.writes), self._merged(observed.remakes))

    def _effect_of(self, graphs: Iterable[GraphModule], reach: frozenset[int]) -> Effect:
        """A write within bodies to what they were given is taken for one to all arguments."""
        nested = [self._body(each) for each in graphs]
        found = [body.effect(n) for body in nested for n in body._readers(body.given)]
        given = frozenset[int]().union(*(body.given for body in nested))
        writes = any(_meet(effect.writes, given) for effect in found)
        remakes = any(_meet(effect.remakes, given) for effect in found)
        return Effect(reach if writes else frozenset(), reach if remakes else frozenset())

    def _body(self, graph_module: GraphModule) -> Memory:
        if graph_module not in self._nested:
            self._nested[graph_module] = Memory(graph_module.graph, self._observer)
        return self._nested[graph_module]

    @cached_property
    def given(self) -> frozenset[int]:
        """The storages that the graph does not make itself."""
        given = (node for node in self._order if node.op in ("placeholder", "get_attr"))
        return frozenset[int]().union(*map(self.storages, given))

    def _returns_given(self) -> bool:
        (output,) = self._order[-1:]
        return _meet(self._reach(output), self.given)

    def _reach(self, node: Node) -> frozenset[int]:
        """The storages of all that a node is given, and of a module that it calls."""
        given = (self.storages(source) for source in node.all_input_nodes)
        called = self.storages(node) if node.op == "call_module" else frozenset[int]()
        return called.union(*given)

    def _readers(self, storages: AbstractSet[int]) -> list[Node]:
        """The calls that can reach some of the storages, in program order."""
        if ANYWHERE in storages:
            return list(self._order)
        lists = [self._by_storage.get(storage, []) for storage in {*storages, ANYWHERE}]
        return sorted({node for nodes in lists for node in nodes}, key=self.position.__getitem__)

    @cached_property
    def _by_storage(self) -> dict[int, list[Node]]:
        index: dict[int, list[Node]] = {}
        for node in self._order:
            anywhere = {ANYWHERE} if reaches_further(node) else set[int]()
            for storage in self._reach(node) | anywhere:
                index.setdefault(storage, []).append(node)
        return index

    @cached_property
    def _makers(self) -> dict[int, Node]:
        return {s: node for node in reversed(self._order) for s in self.storages(node)}

    @cached_property
    def _storages(self) -> dict[Node, frozenset[int]]:
        found = {node: _own_storages(node) for node in self._order}
        for node in self._order:
            together = found[node]
            if self._may_return_arguments(node):
                together = together.union(*(found[source] for source in node.all_input_nodes))
            if node.op == "get_attr" or together is not found[node]:
                self._one.union(*(together - {ANYWHERE}))
        return {node: self._merged(own) for node, own in found.items()}

    def _may_return_arguments(self, node: Node) -> bool:
        """Whether a result may be a view of an argument although example values do not show it."""
        graphs = bodies(node)
        return graphs is None or any(self._body(each)._returns_given() for each in graphs)

    @cached_property
    def _one(self) -> nx.utils.UnionFind:
        return nx.utils.UnionFind()

    def _merged(self, found: AbstractSet[int]) -> frozenset[int]:
        return frozenset(self._one[storage] for storage in found)


def _meet(left: AbstractSet[int], right: AbstractSet[int]) -> bool:
    """Whether two sets of storages may have one in common."""
    if not left or not right:
        return False
    return ANYWHERE in left or ANYWHERE in right or not left.isdisjoint(right)


def _own_storages(node: Node) -> frozenset[int]:
    """Those of the example value, of the attribute, and of the tensors of a module."""
    found = storages(value_of(node))
    if node.op not in ("get_attr", "call_module"):
        return found
    named = attribute_of(node)
    return found | storages(_tensors_of(named) if isinstance(named, nn.Module) else named)


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    plain = [value for each in module.modules() for value in vars(each).values()]
    tensors = [value for value in plain if isinstance(value, torch.Tensor)]
    return [*module.parameters(), *module.buffers(), *tensors]
