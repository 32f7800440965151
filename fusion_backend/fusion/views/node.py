"""Small views on FX nodes: what a node computes, whatever the spelling.

A view never changes the graph. It reads the graph that Dynamo hands to a backend (torch-level
calls), that ``torch.export`` produces (ATen calls) and that ``symbolic_trace`` produces alike.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.compat.operators import OpOverload, OpOverloadPacket

_TORCH_MODULES = (
    "torch",
    "torch._C",
    "torch._C._nn",
    "torch._C._special",
    "torch.nn.functional",
    "torch.functional",
    "_operator",
    "builtins",
)


def value_of(node: Any) -> Any:
    """The example value that tracing left on a node: a fake tensor, a symbol, or ``None``."""
    if not isinstance(node, Node):
        return node
    return node.meta.get("example_value", node.meta.get("val"))


def tensor_of(node: Any) -> torch.Tensor | None:
    """The example tensor of a node, or ``None`` where it is no tensor or was never traced."""
    value = value_of(node)
    return value if isinstance(node, Node) and isinstance(value, torch.Tensor) else None


def operation(node: Node) -> str:
    """The canonical name of what a node calls: ``gelu`` for every spelling of GELU.

    Methods, functions of ``torch`` and ``operator``, and ATen overloads share one namespace, since
    they share their meaning; anything else keeps its qualified name and matches nothing.
    """
    target = node.target
    if node.op == "call_method":
        return str(target)
    if node.op != "call_function":
        return node.op
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        namespace, name = _qualified_name(target).split("::")
        return name if namespace == "aten" else f"{namespace}.{name}"
    name = getattr(target, "__name__", str(target))
    module = getattr(target, "__module__", None)
    if module in _TORCH_MODULES or (module is None and inspect.isroutine(target)):
        return name
    return f"{module}.{name}"


def _qualified_name(target: OpOverload | OpOverloadPacket) -> str:
    if isinstance(target, OpOverload):
        return target._schema.name
    return target._qualified_op_name


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call, by position or by name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def same_size(left: Any, right: Any) -> bool:
    """Whether two sizes are known to be equal, without adding a guard."""
    return statically_known_true(left == right)


def same_shape(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two shapes are known to be equal, without adding a guard."""
    return left.dim() == right.dim() and all(map(same_size, left.shape, right.shape))


def _sizes(node: Node) -> torch.Size:
    tensor = tensor_of(node)
    if tensor is None:
        raise TypeError(f"{node.name} carries no example tensor")
    return tensor.shape


def producer(node: Node) -> Node:
    """The call whose tuple of results a ``getitem`` opens, or the node itself."""
    source = node.args[0] if node.args else None
    opens = operation(node) == "getitem" and isinstance(source, Node) and tensor_of(source) is None
    return source if opens and isinstance(source, Node) else node
