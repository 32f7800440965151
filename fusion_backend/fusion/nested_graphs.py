"""A graph module together with the graphs that it calls."""

from __future__ import annotations

import copy
import operator

import torch
from torch.fx import GraphModule


def copy_graphs(graph_module: GraphModule) -> GraphModule:
    """A graph module with graphs of its own, at all levels, and the same tensors."""
    tensors = [*graph_module.parameters(), *graph_module.buffers()]
    for module in graph_module.modules():
        tensors.extend(v for v in vars(module).values() if isinstance(v, torch.Tensor))
    return copy.deepcopy(graph_module, {id(tensor): tensor for tensor in tensors})


def nested_graphs(graph_module: GraphModule) -> tuple[GraphModule, ...]:
    """A graph module, and those that it calls (checkpointed regions, branches, loop bodies).

    Dynamo leaves graphs behind that nothing calls any more: those of regions that it inlines.
    """
    found, pending = dict.fromkeys([graph_module]), [graph_module]
    while pending:
        caller = pending.pop()
        nodes = caller.graph.find_nodes
        for node in (*nodes(op="get_attr"), *nodes(op="call_module")):
            nested = operator.attrgetter(str(node.target))(caller)
            if isinstance(nested, GraphModule) and nested not in found:
                found[nested] = None
                pending.append(nested)
    return tuple(found)
