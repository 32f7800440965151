"""What a node does beside computing a result: writes to its arguments, changes of modes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from fusion_backend.views import argument, operation

# Position of the flag ``inplace`` in the functions of torch.nn.functional.
_INPLACE_POSITION = {
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d"), 3),
    **dict.fromkeys(("alpha_dropout", "feature_alpha_dropout"), 3),
    "celu": 2,
    "elu": 2,
    "hardsigmoid": 1,
    "hardswish": 1,
    "hardtanh": 3,
    "leaky_relu": 2,
    "mish": 1,
    "relu": 1,
    "relu6": 1,
    "rrelu": 4,
    "selu": 1,
    "silu": 1,
    "threshold": 3,
}
_WRITING_OPERATORS = ("setitem", "iadd", "isub", "imul", "itruediv", "ipow", "iand", "ior", "ixor")

# These keep running statistics of what they normalise, of which no schema tells.
_KEEPING_STATISTICS = ("batch_norm", "cudnn_batch_norm", "instance_norm", "native_batch_norm")
# These may shrink the rows of their table that are looked up.
_SHRINKING = (F.embedding, F.embedding_bag)

# Calls that change how the calls after them are run: autocast, grad mode, functorch levels.
_MODE_CHANGES = (
    "_enter_autocast",
    "_exit_autocast",
    "_set_grad_enabled",
    "_enter_inference_mode",
    "_exit_inference_mode",
    "_saved_tensors_hooks_disable",
    "_saved_tensors_hooks_enable",
)
_FUNCTORCH = ("_vmap_increment_nesting", "_grad_increment_nesting", "_jvp_increment_nesting")


def changes_mode(node: Node) -> bool:
    """Whether a call switches autocast, grad mode or inference mode for the calls after it."""
    return node.op == "call_function" and _last_name(node) in _MODE_CHANGES


def enters_transform(node: Node) -> bool:
    """Whether a call opens a level of ``torch.func`` (``vmap``, ``grad``, ``jvp``)."""
    return node.op == "call_function" and _last_name(node) in _FUNCTORCH


def _last_name(node: Node) -> str:
    return operation(node).rsplit(".", 1)[-1]


def mutates(node: Node) -> tuple[Node, ...]:
    """The argument nodes whose tensors a call writes to, as far as can be known.

    A call of an unknown Python function is taken to write to all of its arguments.
    """
    if node.op == "call_method":
        name = str(node.target)
        writes = name.endswith("_") and not name.endswith("__")
        return tuple(node.all_input_nodes[:1]) if writes else ()
    if node.op == "call_module":
        return tuple(node.all_input_nodes)
    if node.op != "call_function":
        return ()
    if operation(node) in _KEEPING_STATISTICS:
        return _statistics(node)
    if node.target in _SHRINKING and argument(node, 3, "max_norm") is not None:
        return tuple(node.all_input_nodes)
    if isinstance(node.target, torch._ops.OpOverload):
        return _mutated_by_schema(node, node.target)
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return ()  # their bodies are functional but for what Dynamo itself refuses
    if isinstance(node.kwargs.get("out"), Node):
        return (node.kwargs["out"],)  # type: ignore[return-value]
    name = operation(node)
    if "." in name:
        return _mutated_by_unknown(node)
    in_place = name.endswith("_") and not name.endswith("__")
    operator_writes = name in ("setitem", "iadd", "isub", "imul", "itruediv", "ipow", "iand", "ior")
    if in_place or operator_writes or _inplace_flag(node):
        return tuple(node.all_input_nodes[:1])
    return ()


def _statistics(norm: Node) -> tuple[Node, ...]:
    """The running mean and variance of a norm that takes both from its input."""
    by_default = norm.target is not F.batch_norm
    if argument(norm, 5, "training", norm.kwargs.get("use_input_stats", by_default)) is False:
        return ()
    first = 1 if norm.target in (F.batch_norm, F.instance_norm) else 3
    kept = (argument(norm, first, "running_mean"), argument(norm, first + 1, "running_var"))
    return tuple(item for item in kept if isinstance(item, Node))


def _inplace_flag(node: Node) -> bool:
    position = _INPLACE_POSITION.get(operation(node))
    if position is None:
        return bool(node.kwargs.get("inplace", False))
    return bool(argument(node, position, "inplace", False))


def _mutated_by_schema(node: Node, overload: torch._ops.OpOverload) -> tuple[Node, ...]:
    if not overload._schema.is_mutable:
        return ()
    written: list[Any] = []
    for position, parameter in enumerate(overload._schema.arguments):
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            value = argument(node, position, parameter.name)
            written.extend(value if isinstance(value, (list, tuple)) else [value])
    return tuple(item for item in written if isinstance(item, Node))


def _mutated_by_unknown(node: Node) -> tuple[Node, ...]:
    module = str(getattr(node.target, "__module__", ""))
    return () if module.split(".")[0] == "torch" else tuple(node.all_input_nodes)
