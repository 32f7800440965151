"""How much memory a graph's intermediate results take, statement by statement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from fusion_backend.compat.tensors import storage_of
from fusion_backend.compat.tracing import tree_leaves
from fusion_backend.fusion.views.names import parameter_path
from fusion_backend.fusion.views.node import value_of


class Memory(NamedTuple):
    """What one run of a graph holds at a time, in bytes.

    Attributes:
        live: intermediate results, inputs and outputs, after each statement.
        weights: parameters and buffers.
    """

    live: tuple[int, ...]
    weights: int

    @property
    def peak(self) -> int:
        """The most that is held at a time, weights aside."""
        return max(self.live, default=0)


def memory_of(graph: Graph) -> Memory:
    """The memory of a graph whose statements run one after the other, without a compiler.

    A result is held up to its last use; inputs and outputs are held throughout. Views take none.
    """
    nodes = list(graph.nodes)
    parameters = dict(each for node in nodes if _is_parameter(node) for each in _storages(node))
    last: dict[int, int] = {}
    for i, node in enumerate(nodes):
        for source in (node, *node.all_input_nodes):
            for key, _ in _storages(source):
                last[key] = (
                    len(nodes) if node.op in ("placeholder", "output") else max(i, last.get(key, 0))
                )
    held: dict[int, int] = {}
    live = []
    for i, node in enumerate(nodes):
        held.update((key, size) for key, size in _storages(node) if key not in parameters)
        if node.op not in ("placeholder", "output"):
            live.append(sum(held.values()))
        for key in [key for key in held if last[key] <= i]:
            del held[key]
    return Memory(tuple(live), sum(parameters.values()))


def _is_parameter(node: Node) -> bool:
    named = node.op == "placeholder" and parameter_path(node) != node.name
    return node.op == "get_attr" or named


def _storages(node: Node) -> Iterator[tuple[int, int]]:
    values: Sequence[Any] = tree_leaves(value_of(node))
    for value in values:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            yield storage_of(value)
