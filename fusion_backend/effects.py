"""What a call is to those around it: one that only measures, sets a state, or runs other graphs.

What calls write to is observed; see ``observation``. Here stand the few that are known by name to
have no effect, since nothing else may be erased, and what can be told of a call by what it is given
and gives.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fusion_backend.storages import storages
from fusion_backend.views import value_of

_aten = torch.ops.aten

# What is known of a tensor without its elements.
_MEASURING_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "get_device"),
    *("element_size", "is_contiguous", "is_floating_point", "is_complex", "is_signed", "__len__"),
)
_MEASURED_ATTRIBUTES = ("shape", "ndim", "dtype", "device", "layout", "itemsize")
_MEASURING_FUNCTIONS = (
    *(len, torch.numel, torch.is_floating_point, torch.is_complex),
    *(_aten.sym_size.default, _aten.sym_size.int, _aten.sym_numel.default),
    *(_aten.sym_stride.default, _aten.sym_stride.int, _aten.sym_storage_offset.default),
    _aten._assert_tensor_metadata.default,
)
# What may be done with sizes: arithmetic, and assertions.
_OF_NUMBERS = (operator, math)
_ASSERTIONS = (
    *(torch._check, torch._check_value, torch._check_index, torch._check_type, torch._assert),
    *(torch._check_is_size, _aten._assert_scalar.default, _aten.sym_constrain_range.default),
    _aten.sym_constrain_range_for_size.default,
)


def measures(node: Node) -> bool:
    """Whether a call is known to have no effect and to read no element of any tensor.

    Only such a call may be erased with the tensor that it is given.
    """
    if node.op == "call_method":
        return node.target in _MEASURING_METHODS and not storages(value_of(node))
    if node.op != "call_function":
        return False
    if node.target is builtins.getattr:
        return node.args[1] in _MEASURED_ATTRIBUTES
    if node.target in _MEASURING_FUNCTIONS:
        return True
    return not reads_tensors(node) and _is_of_numbers(node.target)


def _is_of_numbers(target: Any) -> bool:
    if target in _ASSERTIONS:
        return True
    name = getattr(target, "__name__", "")
    known = any(getattr(module, name, None) is target for module in _OF_NUMBERS)
    return known or (name.startswith("sym_") and getattr(torch, name, None) is target)


def reads_tensors(node: Node) -> bool:
    """Whether a node is given a tensor, directly or in a list."""
    return any(storages(value_of(source)) for source in node.all_input_nodes)


def sets_state(node: Node) -> bool:
    """Whether a call may change how those after it run: it gets no tensor and gives nothing.

    Such are those that switch autocast, grad mode, inference mode, deterministic algorithms.
    """
    return (
        node.op in ("call_function", "call_method")
        and value_of(node) is None
        and not reads_tensors(node)
        and not measures(node)
    )


def is_transformed(node: Node) -> bool:
    """Whether a call is one of ``torch.func``'s transforms (``vmap``, ``grad``, ``jvp``)."""
    return "_functorch" in str(getattr(node.target, "__module__", "")).split(".")


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
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
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
    for given in pytree.tree_leaves((node.args, dict(node.kwargs))):
        if isinstance(given, Node) and given.op == "get_attr":
            given = attribute_of(given)
        is_value = isinstance(given, (Node, torch.Tensor, torch.dtype, type))
        if callable(given) and not is_value:
            yield given
