"""Example values for graphs that come without: matching reads shapes, dtypes, views from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node, Tracer
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fusion_backend.compat.tracing import FakeTensorMode, detect_fake_mode, tree_leaves
from fusion_backend.errors import FusionError
from fusion_backend.fusion.views.node import value_of

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_SIMPLE_MODULES = (*_LAYERS, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity)


def with_example_values(graph_module: GraphModule, example_inputs: Sequence[Any]) -> GraphModule:
    """The graph with an example value on every call.

    Graphs of Dynamo and ``torch.export`` carry them. Others, as ``symbolic_trace`` makes them, are
    run on fake tensors; layers, activations and norms of ``torch.nn`` in them are opened first.

    Raises:
        FusionError: the graph does not run on these inputs.
    """
    _value_attributes(graph_module)
    if _is_traced(graph_module.graph):
        return graph_module
    opened = _open_modules(graph_module)
    mode = detect_fake_mode(example_inputs) or FakeTensorMode(allow_non_fake_inputs=True)
    try:
        _Propagation(opened, mode).propagate(*example_inputs)
    except Exception as error:
        raise FusionError(
            f"the graph must run on its example inputs, got {type(error).__name__}: {error}"
        ) from error
    _value_attributes(opened)
    return opened


class _Propagation(FakeTensorProp):
    """Keeps which results require gradients: a copy of an example value does not by itself."""

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        copies = tree_leaves(n.meta.get("val"))
        for value, copied in zip(tree_leaves(result), copies, strict=False):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                copied.requires_grad_()
        return result


def _value_attributes(graph_module: GraphModule) -> None:
    """Parameters that the graph reads by name are their own example values."""
    for node in graph_module.graph.find_nodes(op="get_attr"):
        if value_of(node) is None:
            value: Any = graph_module
            for name in str(node.target).split("."):
                value = getattr(value, name, None)
            if isinstance(value, torch.Tensor):
                node.meta["val"] = value


def _is_traced(graph: Graph) -> bool:
    """Whether calls carry values; those for an effect (modes, assertions) never do."""
    calls = [node for node in graph.nodes if node.op in ("call_function", "call_method")]
    if not calls:
        return not _module_calls(graph)
    return any(value_of(node) is not None for node in calls)


def _module_calls(graph: Graph) -> list[Node]:
    return list(graph.find_nodes(op="call_module"))


def _open_modules(graph_module: GraphModule) -> GraphModule:
    if not _module_calls(graph_module.graph):
        return graph_module
    tracer = _OpeningTracer()
    return GraphModule(graph_module, tracer.trace(graph_module))


class _OpeningTracer(Tracer):
    """Traces into layers, norms, dropout and activations, and leaves other modules closed."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        opens = isinstance(m, _SIMPLE_MODULES) or type(m).__module__.endswith("modules.activation")
        closed = isinstance(m, nn.MultiheadAttention) or not opens
        return closed and super().is_leaf_module(m, module_qualified_name)
