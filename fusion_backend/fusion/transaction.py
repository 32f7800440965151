"""Building nodes of a graph all or none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx import Graph


@contextmanager
def transaction(graph: Graph) -> Iterator[None]:
    """Erase the nodes that were inserted within, should an exception leave the block.

    The block may insert nodes and nothing else: what changes other nodes belongs after it.
    """
    before = frozenset(graph.nodes)
    try:
        yield
    except BaseException:
        for node in [node for node in reversed(graph.nodes) if node not in before]:
            graph.erase_node(node)
        raise
