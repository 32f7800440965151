"""The graphs that a node of a graph calls."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusion_backend.compat.operators import HigherOrderOperator
from fusion_backend.compat.tracing import tree_leaves
from fusion_backend.fusion.views.node import value_of


def attribute_of(node: Node) -> Any:
    """The attribute of its graph module that a ``get_attr`` or ``call_module`` node names."""
    try:
        return operator.attrgetter(str(node.target))(node.graph.owning_module)
    except AttributeError:
        return None


def bodies(node: Node) -> tuple[GraphModule, ...] | None:
    """The graphs that a node calls, none for a plain call; ``None`` where one is not readable.

    A higher-order operator is known by its bodies. One that has none (a Triton launch, a print), or
    is given a function of Python, is not.
    """
    if node.op == "call_module":
        called = attribute_of(node)
        return (called,) if isinstance(called, GraphModule) else None
    if not isinstance(node.target, HigherOrderOperator):
        return ()
    found = tuple(_callables(node))
    return found if found and all(map(_is_readable, found)) else None


def _is_readable(body: Any) -> bool:
    """Whether a body is a graph, and one whose example values tell what is a view of what."""
    if not isinstance(body, GraphModule):
        return False
    inputs = body.graph.find_nodes(op="placeholder")
    return all(value_of(node) is not None for node in inputs if node.users)


def _callables(node: Node) -> Iterator[Any]:
    for given in tree_leaves((node.args, dict(node.kwargs))):
        if isinstance(given, Node) and given.op == "get_attr":
            given = attribute_of(given)
        is_value = isinstance(given, (Node, torch.Tensor, torch.dtype, type))
        if callable(given) and not is_value:
            yield given
