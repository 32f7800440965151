"""Nodes of Inductor's graph as the C++ kernels of ``rows`` read them."""

from __future__ import annotations

from typing import Any


def has_known_sizes(weight: Any) -> bool:
    """Whether the sizes of a node of Inductor's are numbers."""
    return all(isinstance(size, int) or size.is_number for size in weight.get_size())


def readable(weight: Any) -> Any:
    """A realized weight, copied where its features are neighbours along neither dimension."""
    from torch._inductor import ir

    weight = ir.ExternKernel.realize_input(weight)
    return weight if 1 in weight.get_stride() else ir.ExternKernel.require_contiguous(weight)


def realized(node: Any, rows_only: bool = False) -> Any:
    """A realized node, if there is one, contiguous or at least in rows that are."""
    from torch._inductor import ir

    if node is None:
        return None
    required = ir.ExternKernel.require_stride1 if rows_only else ir.ExternKernel.require_contiguous
    return required(ir.ExternKernel.realize_input(node))
