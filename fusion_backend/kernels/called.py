"""How operands of launches that generated code calls must lie in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusion_backend.compat import starts_aligned

# Elements of 16 bits that one copy moves: rows of x start at multiples of so many.
PIECE = 8
_ALIGNMENT = 16


def suits(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether 16-bit x and weights and biases lie in memory as the kernels want them."""
    present = [parameter for parameter in parameters if parameter is not None]
    return (
        has_pieces(x)
        and all(parameter.is_contiguous() for parameter in present)
        and all(starts_aligned(tensor, _ALIGNMENT) for tensor in (x, *present))
    )


def in_pieces(x: Tensor) -> Tensor:
    """x, or a copy of it that :func:`suits`."""
    if has_pieces(x) and x.data_ptr() % _ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def has_pieces(x: Tensor) -> bool:
    """Whether a matrix is contiguous along its rows, and each starts at a piece."""
    row_stride, column_stride = map(_known, x.stride())
    return row_stride is not None and row_stride % PIECE == 0 and column_stride == 1


def _known(stride: Any) -> int | None:
    """A stride as a number; ``None`` where it is symbolic, and not equal to one number only."""
    if isinstance(stride, int):
        return stride
    number: int | None = stride.node.maybe_as_int()
    return number
