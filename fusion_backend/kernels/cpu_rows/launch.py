"""Calls of the family's kernels.

Code that Inductor generates calls what :func:`caller` returns. All that follows from shapes,
strides and dtypes is made ready beforehand, and how the work is cut is kept for each number of
rows.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusion_backend.compat import tensors
from fusion_backend.compat.dispatcher import named_range
from fusion_backend.kernels.cpu_rows.compiling import compiled
from fusion_backend.kernels.cpu_rows.cutting import Cut, cut
from fusion_backend.kernels.cpu_rows.source import Kernel
from fusion_backend.mlp.norms import KINDS, Norm
from fusion_backend.mlp.operands import Kind, kind_of


class Call(NamedTuple):
    """What is known of a call beside its rows.

    Attributes:
        kernel: that is called.
        widths: of the input, after each layer.
        strides: of each weight, along its output and its input features; one of the two is 1.
        norm: of x, as text, or empty.
    """

    kernel: Kernel
    widths: tuple[int, ...]
    strides: tuple[tuple[int, int], ...]
    norm: str = ""


def rows(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    operands: Sequence[Tensor],
    activations: Sequence[str],
    gated: bool,
    residual: Tensor | None = None,
    norm: Norm | None = None,
) -> Tensor:
    """Layers joined by activations, of ``x`` ``(rows, in)``.

    Args:
        x: ``(rows, in)``; float32, bfloat16 or float16, like all that follow but operands; any
            strides.
        weights: ``(out_features, in_features)`` each, any strides; the gate first where there is
            one.
        biases: one a weight, ``(out_features,)`` or ``None``.
        operands: of the one activation: scalars ``()``, vectors ``(hidden,)``, tensors
            ``(rows, hidden)`` and seeds ``()``.
        activations: one less than layers that follow each other.
        gated: whether the first two weights are of the same input.
        residual: ``(rows, out)``, added to the result before it is rounded.
        norm: of x, before all else.

    Returns:
        ``(rows, out)``, contiguous, with the dtype of x.

    Raises:
        CompilationError: there is no C++ compiler, or it refuses the kernel.
    """
    if tensors.is_traced(x):
        text, *of_norm = ("", None, None) if norm is None else (norm.text, norm.weight, norm.bias)
        result: Tensor = torch.ops.fusedmlp.rows(
            x, weights, biases, operands or None, residual, *of_norm, activations, gated, text
        )
        return result
    return run(x, weights, biases, operands, residual, norm, activations, gated)


def run(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    operands: Sequence[Tensor],
    residual: Tensor | None,
    norm: Norm | None,
    activations: Sequence[str],
    gated: bool,
) -> Tensor:
    """:func:`rows` of real tensors."""
    of_norm = (None, None) if norm is None else (norm.weight, norm.bias)
    weights = [weight if 1 in weight.stride() else weight.contiguous() for weight in weights]
    values = [operand if _is_readable(operand) else operand.contiguous() for operand in operands]
    vectors = [None if each is None else each.contiguous() for each in (*biases, *of_norm)]
    added = None if residual is None else residual.contiguous()
    x = x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
    kinds = tuple((kind_of(operand), operand.dtype) for operand in values)
    kernel = Kernel(x.dtype, tuple(activations), gated, kinds)
    widths = (x.shape[1], *(layer.shape[0] for layer in weights[gated:]))
    call = Call(kernel, widths, (*map(_strides, weights),), "" if norm is None else norm.text)
    layers, parameters = vectors[: len(biases)], vectors[len(biases) :]
    return caller(call)(x, *weights, *layers, *values, added, *parameters)


def caller_of(
    dtype: str,
    activations: tuple[str, ...],
    gated: bool,
    operands: Sequence[tuple[int, str]],
    widths: tuple[int, ...],
    strides: Sequence[tuple[int, int]],
    norm: str,
) -> Callable[..., Tensor]:
    """:func:`caller` by what generated code can say: dtypes by name, operands by dimensions."""
    kinds = tuple(
        (_kind(dimensions, name), getattr(torch, name.removeprefix("torch.")))
        for dimensions, name in operands
    )
    kernel = Kernel(getattr(torch, dtype.removeprefix("torch.")), activations, gated, kinds)
    pairs = zip(strides, (*widths[1:][:gated], *widths[1:]), strict=True)
    readable = tuple(_as_pair(pair, features) for pair, features in pairs)
    return caller(Call(kernel, widths, readable, norm))


def _kind(dimensions: int, dtype: str) -> Kind:
    if dtype == "torch.int64":
        return "seed"
    kinds: tuple[Kind, ...] = ("scalar", "vector", "elementwise")
    return kinds[dimensions]


@functools.cache
def caller(call: Call) -> Callable[..., Tensor]:
    """What runs one MLP: it takes x, weights, biases, operands, residual, norm weight and bias.

    Those that there are not are ``None``.

    Raises:
        CompilationError: as :func:`rows`.
    """
    kernel, widths, strides, text = call
    function, library = compiled(kernel)
    norm = Norm.of(text)
    kind = 0 if norm is None else 1 + KINDS.index(norm.kind)
    known = (*library, kind, _bits(0.0 if norm is None else norm.eps), *widths)
    known += tuple(stride for pair in strides for stride in pair)
    with_rows = [2 * kernel.weights + i for i in kernel.row_distances]
    out_features, dtype = widths[-1], kernel.dtype
    cuts: dict[tuple[int, int], Cut] = {}

    def run_layers(x: Tensor, *tensors: Tensor | None) -> Tensor:
        count, threads = x.shape[0], torch.get_num_threads()
        y = torch.empty((count, out_features), dtype=dtype)
        if not y.numel():
            return y
        how = cuts.get((count, threads))
        if how is None:
            how = cuts[count, threads] = cut(count, widths, kernel.gated, threads)
        memory = torch.empty(how.floats, dtype=torch.float32) if how.floats else None
        with named_range("fusedmlp::rows"):
            function(
                *(address(tensor) for tensor in (x, y, memory, *tensors)),
                *(count, x.stride(0), how.block_rows, how.chunk),
                *(how.shares, how.threads, how.packs),
                *(_row_distance(tensors[i]) for i in with_rows),
                *known,
            )
        return y

    return run_layers


def address(tensor: Tensor | None) -> int:
    """Where a tensor's data are, or 0."""
    return 0 if tensor is None else tensor.data_ptr()


def _bits(number: float) -> int:
    """Those of a float32."""
    (bits,) = struct.unpack("i", struct.pack("f", number))
    return int(bits)


def _row_distance(operand: Tensor | None) -> int:
    assert operand is not None  # it is one of the values that the activation reads
    return operand.stride(0)


def _is_readable(operand: Tensor) -> bool:
    """Whether rows of an operand are contiguous."""
    return operand.dim() == 0 or operand.stride(-1) == 1 or operand.shape[-1] == 1


def _strides(weight: Tensor) -> tuple[int, int]:
    n, k = weight.stride()
    return _as_pair((n, k), weight.shape[0])


def _as_pair(strides: tuple[int, int], out_features: int) -> tuple[int, int]:
    """Of output and of input features; that of a dimension of one element is of no account."""
    n, k = strides
    if 1 not in (n, k) or (out_features == 1 and k != 1):
        return (1, k)
    return (n, k)
