"""Nodes of Inductor's graph as the C++ kernels of ``rows`` read them."""

from __future__ import annotations

from typing import Any

from fusion_backend.compat.inductor import fixed


def has_known_sizes(weight: Any) -> bool:
    """Whether the sizes of a node of Inductor's are numbers."""
    return all(isinstance(size, int) or size.is_number for size in weight.get_size())


def readable(weight: Any) -> Any:
    """A weight whose features are neighbours along a dimension, copied where they are not."""
    weight = fixed(weight)
    return weight if 1 in weight.get_stride() else contiguous(weight)


def in_rows(matrix: Any) -> Any:
    """A matrix whose rows are contiguous, copied where they are not."""
    matrix = fixed(matrix)
    # Inductor's require_stride1 also takes a matrix whose columns are contiguous.
    return matrix if matrix.get_stride()[-1] == 1 else contiguous(matrix)


def contiguous(node: Any) -> Any:
    """A contiguous node, if there is one, copied where it is not."""
    from torch._inductor import ir

    if node is None:
        return None
    return ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(node))
