"""Nodes of Inductor's graph as the C++ kernels of ``rows`` read them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fusion_backend.compat.extern_calls import contiguous, fixed
from fusion_backend.compat.inductor import compiles_to_cpp


def can_be_called(weights: Iterable[Any]) -> bool:
    """Whether generated code can call what is made for weights, without PyTorch's dispatcher.

    C++ that Inductor generates calls no function of Python.
    """
    return not compiles_to_cpp() and all(map(_has_known_sizes, weights))


def _has_known_sizes(weight: Any) -> bool:
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


def kinds(operands: Any) -> tuple[tuple[int, str], ...]:
    """The number of dimensions and the dtype of each of an activation's operands."""
    return tuple((len(operand.get_size()), str(operand.get_dtype())) for operand in operands)


def strides(layer: Any) -> tuple[int, ...]:
    """Those of a weight."""
    return tuple(map(int, layer.get_stride()))
