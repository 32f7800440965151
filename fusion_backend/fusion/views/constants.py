"""Calls that make a tensor of one number: ``torch.tensor(0.5)``, ``zeros_like``, ``full``."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from fusion_backend.fusion.views.node import argument, operation, tensor_of

_FILLED = {
    "new_ones": 1.0,
    "new_zeros": 0.0,
    "ones": 1.0,
    "ones_like": 1.0,
    "zeros": 0.0,
    "zeros_like": 0.0,
}
# Where the number stands among the arguments, and what it is called.
_GIVEN = {
    "full": (1, "fill_value"),
    "full_like": (1, "fill_value"),
    "new_full": (2, "fill_value"),
    "new_tensor": (1, "data"),
    "scalar_tensor": (0, "s"),
    "tensor": (0, "data"),
}


def constant_of(node: Any) -> Any:
    """The number (or the node of a number) that fills a newly made tensor; ``None`` otherwise."""
    tensor = tensor_of(node)
    if tensor is None or not tensor.dtype.is_floating_point:
        return None
    name = operation(node)
    if name in _FILLED:
        return _FILLED[name]
    if name not in _GIVEN:
        return None
    number = argument(node, *_GIVEN[name])
    holds_a_tensor = isinstance(number, Node) and tensor_of(number) is not None
    return None if holds_a_tensor or not isinstance(number, (int, float, Node)) else number
