"""What is known of a launch when its configuration is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from fusion_backend.compat.tensors import starts_aligned
from fusion_backend.compat.tf32 import multiplies_in_tf32
from fusion_backend.kernels.host.called import PIECE
from fusion_backend.kernels.host.targets import Target
from fusion_backend.mlp.operands import kind_of

# Upper bounds of the classes of rows. Beyond the last, rows are many. They are few because each
# comparison with a symbolic number of rows becomes a guard of the compiled graph.
ROW_CLASSES = (16, 64, 1024)
MANY_ROWS = 1 << 16

# Copies of tiles start, and stride over, multiples of so many bytes.
_TMA_BYTES = 16

# Dropouts draw so many bytes for an element.
_RANDOM_BYTES = 4


class Problem(NamedTuple):
    """One MLP, as a kernel sees it; 0 for a width that the kernel has nothing to do with.

    It is no copy of ``mlp.record.MLP``: it is made of tensors when a kernel is launched, and of
    rows that are symbolic it knows the class only.

    Attributes:
        rows: upper bound of the class of rows: one of ROW_CLASSES, or MANY_ROWS; or a single row.
        in_features: width of x.
        hidden_features: width between the layers.
        out_features: width of y.
        gated: whether there are two first layers.
        dtype: dtype of all operands.
        precision: how fp32 operands are multiplied: ``ieee`` or ``tf32x3``.
        tma: whether the operands are laid out as TMA asks for, see :func:`suits_tma`.
        exchanged: bytes of operands of the activation for each element of a hidden tile, which
            threads exchange through shared memory that nothing else has used before.
        exact_rows: how many rows there are; 0 where that is not known, or where configurations
            were compared for no problem of the kind, see :func:`measured_kind`.
        exact_functions: how many functions of the activation are computed exactly, if
            ``exact_rows`` are known and ``config_times`` speaks of the kernel.
    """

    rows: int
    in_features: int
    hidden_features: int
    out_features: int
    gated: bool
    dtype: torch.dtype
    precision: str = "ieee"
    tma: bool = False
    exchanged: int = 0
    exact_rows: int = 0
    exact_functions: int = 0

    @property
    def matrix_units(self) -> bool:
        """Whether products run on matrix units; there is none for exact products of fp32."""
        return self.dtype.itemsize == 2 or self.splits_operands

    @property
    def splits_operands(self) -> bool:
        """Whether each operand is split in two that are multiplied as tf32."""
        return self.precision == "tf32x3"


def epilogue_problem(
    x: Tensor,
    weight_gate: Tensor | None,
    weight_up: Tensor,
    target: Target,
    operands: Sequence[Tensor] = (),
) -> Problem:
    """The problem of ``launch.epilogue``."""
    hidden, inner = map(int, weight_up.shape)
    return Problem(
        rows=row_class(x.shape[0]),
        in_features=inner,
        hidden_features=hidden,
        out_features=0,
        gated=weight_gate is not None,
        dtype=x.dtype,
        precision=precision(x.dtype, target),
        tma=suits_tma(x, weight_gate, weight_up),
        exchanged=_exchanged(operands),
    )


def measured_kind(problem: Problem, x: Tensor, exact_functions: int, *weights: Any) -> Problem:
    """The same problem with its number of rows, if x and weights lie as they were measured.

    Args:
        problem: in inference, without anything that enters the kernel beside x and the layers.
        x: ``(rows, in)``.
        exact_functions: how many functions of the activation are computed exactly.
        weights: of the layers, of which one may be ``None``.
    """
    rows: Any = x.shape[0]
    columns = [each.stride(1) for each in (x, *weights) if each is not None]
    if not isinstance(rows, int) or any(stride != 1 for stride in columns):
        return problem
    return problem._replace(exact_rows=rows, exact_functions=exact_functions)


def hidden_gradient_problem(
    grad_output: Tensor, weight_down: Tensor, preact_gate: Tensor | None, target: Target
) -> Problem:
    """The problem of ``launch.hidden_gradient``."""
    out, hidden = map(int, weight_down.shape)
    return Problem(
        rows=row_class(grad_output.shape[0]),
        in_features=0,
        hidden_features=hidden,
        out_features=out,
        gated=preact_gate is not None,
        dtype=grad_output.dtype,
        precision=precision(grad_output.dtype, target),
    )


def back_to_back_problem(
    x: Tensor,
    weight_gate: Tensor | None,
    weight_up: Tensor,
    weight_down: Tensor,
    target: Target,
    operands: Sequence[Tensor] = (),
) -> Problem:
    """The problem of ``launch.back_to_back``."""
    hidden, inner = map(int, weight_up.shape)
    return Problem(
        rows=row_class(x.shape[0]),
        in_features=inner,
        hidden_features=hidden,
        out_features=int(weight_down.shape[0]),
        gated=weight_gate is not None,
        dtype=x.dtype,
        precision=precision(x.dtype, target),
        exchanged=_exchanged(operands),
    )


def inference_problem(
    rows: Any, widths: Sequence[int], gated: bool, dtype: torch.dtype, target: Target
) -> Problem | None:
    """The problem of an MLP for kernels made for Hopper; ``None`` where no such kernel takes it.

    Args:
        rows: how many there are.
        widths: of x, between the layers, and of y.
        gated: whether there are two first layers.
        dtype: of all tensors.
        target: the GPU.
    """
    if dtype.itemsize != 2 or any(width % PIECE for width in widths):
        return None
    in_features, hidden_features, out_features = widths
    sizes = (row_class(rows), in_features, hidden_features, out_features)
    return Problem(*sizes, gated, dtype, precision(dtype, target))


def stream_problems(
    x: Tensor, weight_gate: Tensor | None, weight_up: Tensor, weight_down: Tensor, target: Target
) -> tuple[Problem, Problem]:
    """The problems of the two kernels of ``launch.stream``, the hidden features' and y's.

    A single row, where that is known, is a class of its own: it needs no matrix units.
    """
    hidden, inner = map(int, weight_up.shape)
    single = isinstance(x.shape[0], int) and x.shape[0] == 1
    rows = 1 if single else row_class(x.shape[0])
    how = (x.dtype, precision(x.dtype, target))
    first = Problem(rows, inner, hidden, 0, weight_gate is not None, *how)
    return first, Problem(rows, 0, hidden, int(weight_down.shape[0]), False, *how)


def _exchanged(operands: Sequence[Tensor]) -> int:
    """Bytes an element of what is loaded or drawn tile by tile."""
    kinds = [kind_of(operand) for operand in operands]
    loaded = zip(kinds, operands, strict=True)
    values = sum(operand.dtype.itemsize for kind, operand in loaded if kind == "elementwise")
    return values + _RANDOM_BYTES * kinds.count("seed")


def suits_tma(x: Tensor, *weights: Tensor | None) -> bool:
    """Whether tensor descriptors can describe 16-bit operands.

    x must be contiguous along its rows, a weight along either dimension; the other dimension must
    stride over a known multiple of 16 bytes, and the data must start at one.
    """
    return (
        x.dtype.itemsize == 2
        and isinstance(x.stride(1), int)
        and x.stride(1) == 1
        and _strides_over_units(x.stride(0))
        and starts_aligned(x, _TMA_BYTES)
        and all(_weight_suits_tma(weight) for weight in weights if weight is not None)
    )


def _weight_suits_tma(weight: Tensor) -> bool:
    inner, outer = sorted(weight.stride())
    return inner == 1 and _strides_over_units(outer) and starts_aligned(weight, _TMA_BYTES)


def _strides_over_units(stride: Any) -> bool:
    return isinstance(stride, int) and stride > 0 and stride * 2 % _TMA_BYTES == 0


def row_class(rows: Any, bounds: Sequence[int] = ROW_CLASSES) -> int:
    """The class of a number of rows, which may be symbolic: its bound, or ``MANY_ROWS``.

    Rows of which nothing is known before the run (unbacked symbols) are taken to be many.
    """
    for bound in bounds:
        if guard_or_false(rows <= bound):
            return bound
    return MANY_ROWS


def precision(dtype: torch.dtype, target: Target) -> str:
    """How operands are multiplied: in tf32 where PyTorch's settings allow cuBLAS to.

    Triton truncates operands to tf32 where cuBLAS rounds them, which doubles the error; three tf32
    products (``tf32x3``) stay below that of cuBLAS.
    """
    rounds = dtype == torch.float32 and target.has_tf32 and multiplies_in_tf32()
    return "tf32x3" if rounds else "ieee"
