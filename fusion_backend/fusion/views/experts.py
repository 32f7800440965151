"""Layers of experts: one weight a group of rows. They are recognised to be reported, not fused."""

from __future__ import annotations

from typing import Any

from fusion_backend.fusion.views.linear import LinearView, is_weight
from fusion_backend.fusion.views.node import argument, operation, tensor_of

_NAMES = {
    "bmm": ("input", "mat2"),
    "matmul": ("input", "other"),
    "grouped_mm": ("mat_a", "mat_b"),
    "_grouped_mm": ("self", "mat2"),
    "grouped_mm_fallback": ("input", "weight"),
}


def expert_view(node: Any) -> LinearView | None:
    """A product with a three-dimensional weight ``(experts, in, out)``, or ``None``."""
    if tensor_of(node) is None:
        return None
    name = operation(node).rsplit(".", 1)[-1]
    position = 0
    if name == "baddbmm":
        names, position = ("batch1", "batch2"), 1
    elif name in _NAMES:
        names = _NAMES[name]
    else:
        return None
    source, weight = (argument(node, position + i, names[i]) for i in range(2))
    tensor = tensor_of(weight)
    if tensor is None or tensor.dim() != 3 or not is_weight(weight):
        return None
    return LinearView(node, source, weight, None, transposed=True)


def has_experts(layer: LinearView) -> bool:
    """Whether a layer is one of experts."""
    weight = tensor_of(layer.weight)
    return weight is not None and weight.dim() == 3 and not layer.positions
