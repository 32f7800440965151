"""How operands of launches that generated code calls must lie in memory."""

from __future__ import annotations

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
        _has_pieces(x)
        and all(parameter.is_contiguous() for parameter in present)
        and all(starts_aligned(tensor, _ALIGNMENT) for tensor in (x, *present))
    )


def in_pieces(x: Tensor) -> Tensor:
    """x, or a copy of it that :func:`suits`."""
    if _has_pieces(x) and x.data_ptr() % _ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _has_pieces(x: Tensor) -> bool:
    stride = x.stride(0)
    return isinstance(stride, int) and stride % PIECE == 0 and x.stride(1) == 1
