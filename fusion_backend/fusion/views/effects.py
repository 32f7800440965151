"""What a call is to those around it: one that only measures, or one that sets a state.

What calls write to is observed; see ``observation``. Here stand the few that are known by name to
have no effect, since nothing else may be erased, and what can be told of a call by what it is given
and gives.
"""

from __future__ import annotations

import builtins
import math
import operator
from typing import Any

import torch
from torch.fx import Node

from fusion_backend.compat.operators import ASSERTIONS
from fusion_backend.fusion.views.node import value_of
from fusion_backend.fusion.views.storages import storages

_aten = torch.ops.aten

# What is known of a tensor without its elements.
_MEASURING_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "get_device"),
    *("element_size", "is_contiguous", "is_floating_point", "is_complex", "is_signed", "__len__"),
)
_MEASURED_ATTRIBUTES = ("shape", "ndim", "dtype", "device", "layout", "itemsize", "device_mesh")
_MEASURING_FUNCTIONS = (
    *(len, torch.numel, torch.is_floating_point, torch.is_complex),
    *(_aten.sym_size.default, _aten.sym_size.int, _aten.sym_numel.default),
    *(_aten.sym_stride.default, _aten.sym_stride.int, _aten.sym_storage_offset.default),
    _aten._assert_tensor_metadata.default,
)
# What may be done with sizes and dtypes: arithmetic, broadcasting, promotion, and assertions.
_OF_NUMBERS = (operator, math)
_OF_SIZES = (torch.broadcast_shapes, torch.promote_types)
_ASSERTIONS = (
    *ASSERTIONS,
    *(_aten._assert_scalar.default, _aten.sym_constrain_range.default),
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
    if target in _ASSERTIONS or target in _OF_SIZES:
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
