"""Operands of launches that generated code calls: what it knows, how they must lie in memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusion_backend.compat.tensors import starts_aligned

# Elements of 16 bits that one copy moves: rows of x start at multiples of so many.
PIECE = 8
_ALIGNMENT = 16


class Known(NamedTuple):
    """What generated code knows of the tensors that it calls a function with.

    It stands in the text of that code, so it is no MLP: it has numbers and names only.

    Attributes:
        widths: of x, between the layers, and of the result.
        dtype: of all tensors.
        given: which of the tensors of the module's function there are.
        transposed: which of them are the transposes of contiguous ones.
        device: where they are, by its number.
    """

    widths: tuple[int, int, int]
    dtype: torch.dtype
    given: tuple[bool, ...]
    transposed: tuple[bool, ...]
    device: int


def suits(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether 16-bit x and weights and biases lie in memory as the kernels want them."""
    present = [parameter for parameter in parameters if parameter is not None]
    return (
        has_pieces(x)
        and all(parameter.is_contiguous() for parameter in present)
        and all(starts_aligned(tensor, _ALIGNMENT) for tensor in (x, *present))
    )


def in_pieces(x: Tensor) -> Tensor:
    """x, which is real, or a copy of it that :func:`suits`."""
    row_stride, column_stride = x.stride()
    if column_stride == 1 and row_stride % PIECE == 0 and x.data_ptr() % _ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def address(tensor: Tensor | None) -> int | None:
    """Where its data start: Triton need not ask what an address is."""
    return None if tensor is None else tensor.data_ptr()


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
