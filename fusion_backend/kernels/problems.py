"""What is known of a launch when its configuration is chosen."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from fusion_backend.kernels.targets import Target

# Upper bounds of the classes of rows. Beyond the last, rows are many. They are few because each
# comparison with a symbolic number of rows becomes a guard of the compiled graph.
ROW_CLASSES = (16, 64, 1024)
MANY_ROWS = 1 << 16

_DESCRIPTOR_ALIGNMENT = 16  # bytes


class Problem(NamedTuple):
    """One MLP, as a kernel sees it; 0 for a width that the kernel has nothing to do with.

    Attributes:
        rows: upper bound of the class of rows: one of ROW_CLASSES, or MANY_ROWS.
        in_features: width of x.
        hidden_features: width between the layers.
        out_features: width of y.
        gated: whether there are two first layers.
        dtype: dtype of all operands.
        precision: how fp32 operands are multiplied: ``ieee`` or ``tf32``.
        describable: whether all operands are laid out as tensor descriptors want them.
    """

    rows: int
    in_features: int
    hidden_features: int
    out_features: int
    gated: bool
    dtype: torch.dtype
    precision: str = "ieee"
    describable: bool = False

    @property
    def matrix_units(self) -> bool:
        """Whether products run on matrix units; there is none for exact products of fp32."""
        return self.dtype.itemsize == 2 or self.precision == "tf32"


def epilogue_problem(
    x: Tensor, weight_gate: Tensor | None, weight_up: Tensor, target: Target
) -> Problem:
    """The problem of ``launch.epilogue``."""
    hidden, inner = weight_up.shape
    weights = [weight for weight in (weight_gate, weight_up) if weight is not None]
    return Problem(
        rows=row_class(x.shape[0]),
        in_features=inner,
        hidden_features=hidden,
        out_features=0,
        gated=weight_gate is not None,
        dtype=x.dtype,
        precision=precision(x.dtype, target),
        describable=_is_describable(x, weights, hidden),
    )


def hidden_gradient_problem(
    grad_output: Tensor, weight_down: Tensor, preact_gate: Tensor | None, target: Target
) -> Problem:
    """The problem of ``launch.hidden_gradient``."""
    out, hidden = weight_down.shape
    return Problem(
        rows=row_class(grad_output.shape[0]),
        in_features=0,
        hidden_features=hidden,
        out_features=out,
        gated=preact_gate is not None,
        dtype=grad_output.dtype,
        precision=precision(grad_output.dtype, target),
        describable=_is_describable(grad_output, [weight_down], hidden),
    )


def back_to_back_problem(
    x: Tensor, weight_gate: Tensor | None, weight_up: Tensor, weight_down: Tensor, target: Target
) -> Problem:
    """The problem of ``launch.back_to_back``."""
    hidden, inner = weight_up.shape
    return Problem(
        rows=row_class(x.shape[0]),
        in_features=inner,
        hidden_features=hidden,
        out_features=weight_down.shape[0],
        gated=weight_gate is not None,
        dtype=x.dtype,
        precision=precision(x.dtype, target),
    )


def row_class(rows: Any) -> int:
    """The class of a number of rows, which may be symbolic.

    Rows of which nothing is known before the run (unbacked symbols) are taken to be many.
    """
    for bound in ROW_CLASSES:
        if guard_or_false(rows <= bound):
            return bound
    return MANY_ROWS


def precision(dtype: torch.dtype, target: Target) -> str:
    """How operands are multiplied: ``tf32`` for fp32 where PyTorch's settings allow it to cuBLAS."""
    allowed = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if dtype == torch.float32 and allowed and target.has_tf32 else "ieee"


def _is_describable(rows: Tensor, weights: list[Tensor], hidden: int) -> bool:
    """Whether ``rows``, all weights and contiguous (rows, hidden) results suit descriptors."""
    return (
        rows.stride(1) == 1
        and all(_is_describable_matrix(matrix) for matrix in (rows, *weights))
        and hidden * rows.itemsize % _DESCRIPTOR_ALIGNMENT == 0
    )


def _is_describable_matrix(matrix: Tensor) -> bool:
    """Whether rows or columns are contiguous, and start at multiples of 16 bytes."""
    starts = [matrix.storage_offset()]
    if matrix.stride(1) == 1:
        starts.append(matrix.stride(0))
    elif matrix.stride(0) == 1:
        starts.append(matrix.stride(1))
    else:
        return False
    return all(
        isinstance(start, int) and start * matrix.itemsize % _DESCRIPTOR_ALIGNMENT == 0
        for start in starts
    )
