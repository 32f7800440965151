"""FX graphs as text for people, one line a node."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from fusion_backend.compat.operators import OpOverload
from fusion_backend.fusion.views.names import parameter_path

CONTEXT_LINES = 3


def diff_text(before: GraphModule, after: GraphModule) -> str:
    """A unified diff of two graphs, nested ones included."""
    lines = difflib.unified_diff(
        graph_text(before).splitlines(),
        graph_text(after).splitlines(),
        "before",
        "after",
        lineterm="",
        n=CONTEXT_LINES,
    )
    return "\n".join(lines)


def graph_text(graph_module: GraphModule) -> str:
    """The graph, then each graph nested in it under its name."""
    blocks = []
    for name, module in graph_module.named_modules():
        if isinstance(module, GraphModule):
            lines = "\n".join(f"    {line}" for line in statements(module))
            blocks.append(f"{name or 'graph'}:\n{with_short_names(module, lines)}")
    return "\n\n".join(blocks)


def statements(graph_module: GraphModule) -> Iterator[str]:
    """Every node as a line."""
    return map(statement, graph_module.graph.nodes)


def statement(node: Node) -> str:
    """A node as a line."""
    if node.op == "placeholder":
        return f"input {typed_name(node)}"
    if node.op == "output":
        return f"return {node.args[0]!r}"
    if node.op == "get_attr":
        return f"{typed_name(node)} = self.{node.target}"
    arguments = [repr(argument) for argument in node.args]
    arguments += [f"{key}={value!r}" for key, value in node.kwargs.items()]
    return f"{typed_name(node)} = {callee(node)}({', '.join(arguments)})"


def callee(node: Node) -> str:
    """What a node calls."""
    if isinstance(node.target, str):  # a method, or a module of the graph
        return node.target
    if isinstance(node.target, OpOverload):
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))


def typed_name(node: Node) -> str:
    """``name: bfloat16[8, 64]`` where the node's value is known to be a tensor."""
    value: Any = node.meta.get("example_value", node.meta.get("val"))
    if not isinstance(value, Tensor):
        return node.name
    sizes = ", ".join(str(size) for size in value.shape)
    return f"{node.name}: {str(value.dtype).removeprefix('torch.')}[{sizes}]"


def with_short_names(graph_module: GraphModule, text: str) -> str:
    """The text with parameters and buffers called as the model calls them: ``mlp.fc.weight``."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    short = {node.name: parameter_path(node) for node in placeholders}
    return re.sub(r"\w+", lambda word: short.get(word.group(), word.group()), text)
