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
import torch.nn.functional as F
from torch import Tensor

from fusion_backend.compat import inductor, tensors
from fusion_backend.compat.dispatcher import named_range
from fusion_backend.kernels.cpu_rows.compiling import compiled, compiled_products
from fusion_backend.kernels.cpu_rows.cutting import Cut, cut
from fusion_backend.kernels.cpu_rows.source import Kernel
from fusion_backend.mlp.norms import KINDS, Norm
from fusion_backend.mlp.operands import Kind, kind_of

#: Stands for the strides of a weight that is in :func:`panels`.
IN_PANELS = (0, 0)


class Call(NamedTuple):
    """What is known of a call beside its rows.

    Attributes:
        kernel: that is called.
        widths: of the input, after each layer.
        strides: of each weight, along its output and its input features; one of the two is 1, or
            both are 0 where it is in :func:`panels`.
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
        others = (biases, operands or None, residual, *of_norm, activations, gated, text)
        result: Tensor
        if inductor.weights_are_frozen() and all(map(_can_be_constant, weights)):
            made = [torch.ops.fusedmlp.rows_panels(weight) for weight in weights]
            features = [weight.shape[0] for weight in weights]
            result = torch.ops.fusedmlp.rows_of_panels(x, made, features, *others)
        else:
            result = torch.ops.fusedmlp.rows(x, weights, *others)
        return result
    return run(x, weights, biases, operands, (residual, norm), activations, gated)


def run(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    operands: Sequence[Tensor],
    around: tuple[Tensor | None, Norm | None],
    activations: Sequence[str],
    gated: bool,
    kept: Sequence[Tensor] = (),
) -> Tensor:
    """:func:`rows` of real tensors, residual and norm ``around`` them.

    Pre-activations are written to what is to be ``kept``.
    """
    residual, norm = around
    of_norm = (None, None) if norm is None else (norm.weight, norm.bias)
    weights = [weight if 1 in weight.stride() else weight.contiguous() for weight in weights]
    values = [operand if is_readable(operand) else operand.contiguous() for operand in operands]
    vectors = [None if each is None else each.contiguous() for each in (*biases, *of_norm)]
    added = None if residual is None else residual.contiguous()
    x = x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
    kinds = tuple((kind_of(operand), operand.dtype) for operand in values)
    kernel = Kernel(x.dtype, tuple(activations), gated, kinds)
    widths = (x.shape[1], *(layer.shape[0] for layer in weights[gated:]))
    call = Call(kernel, widths, (*map(strides_of, weights),), "" if norm is None else norm.text)
    layers, parameters = vectors[: len(biases)], vectors[len(biases) :]
    return caller(call)(x, *weights, *layers, *values, added, *parameters, kept=kept)


def rows_saving(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    operands: Sequence[Tensor],
    activation: str,
    gated: bool,
) -> list[Tensor]:
    """:func:`rows` of two layers for training: the result and the pre-activations, up's last.

    Returns:
        ``(rows, out)``, and ``(rows, hidden)`` one or two times, with the dtype of x.
    """
    if tensors.is_traced(x):
        found: list[Tensor] = torch.ops.fusedmlp.rows_saving(
            x, weights, biases, operands or None, activation, gated
        )
        return found
    return run_saving(x, weights, biases, operands, activation, gated)


def run_saving(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    operands: Sequence[Tensor],
    activation: str,
    gated: bool,
) -> list[Tensor]:
    """:func:`rows_saving` of real tensors."""
    hidden = weights[0].shape[0]
    kept = [torch.empty((x.shape[0], hidden), dtype=x.dtype) for _ in range(1 + gated)]
    y = run(x, weights, biases, operands, (None, None), (activation,), gated, kept)
    return [y, *kept]


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
    kernel = Kernel(dtype_named(dtype), activations, gated, kinds_of(operands))
    pairs = zip(strides, (*widths[1:][:gated], *widths[1:]), strict=True)
    readable = tuple(as_pair(pair, features) for pair, features in pairs)
    return caller(Call(kernel, widths, readable, norm))


def saving_caller_of(
    dtype: str,
    activations: tuple[str, ...],
    gated: bool,
    operands: Sequence[tuple[int, str]],
    widths: tuple[int, ...],
    strides: Sequence[tuple[int, int]],
    norm: str,
) -> Callable[..., list[Tensor]]:
    """:func:`caller_of` for training; its result takes x, weights, biases and operands."""
    call = caller_of(dtype, activations, gated, operands, widths, strides, norm)
    element, hidden = dtype_named(dtype), widths[1]

    def run_saving_preacts(x: Tensor, *tensors: Tensor | None) -> list[Tensor]:
        kept = [torch.empty((x.shape[0], hidden), dtype=element) for _ in range(1 + gated)]
        return [call(x, *tensors, None, None, None, kept=kept), *kept]

    return run_saving_preacts


def dtype_named(name: str) -> torch.dtype:
    """The dtype that prints as ``name``."""
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype


def kinds_of(operands: Sequence[tuple[int, str]]) -> tuple[tuple[Kind, torch.dtype], ...]:
    """Kinds and dtypes of operands that are given by dimensions and names."""
    return tuple((_kind(dimensions, name), dtype_named(name)) for dimensions, name in operands)


def _kind(dimensions: int, dtype: str) -> Kind:
    if dtype == "torch.int64":
        return "seed"
    kinds: tuple[Kind, ...] = ("scalar", "vector", "elementwise")
    return kinds[dimensions]


@functools.cache
def caller(call: Call) -> Callable[..., Tensor]:
    """What runs one MLP: it takes x, weights, biases, operands, residual, norm weight and bias.

    Those that there are not are ``None``. What is to be kept, the gate's pre-activation first, are
    contiguous tensors ``(rows, hidden)``.

    Raises:
        CompilationError: as :func:`rows`.
    """
    kernel, widths, strides, text = call
    function, library = compiled(kernel)
    norm = Norm.of(text)
    kind = 0 if norm is None else 1 + KINDS.index(norm.kind)
    offered = (library.product, library.element_product, library.pack)
    known = (*offered, kind, _bits(0.0 if norm is None else norm.eps), *widths)
    known += tuple(stride for pair in strides for stride in pair)
    with_rows = [2 * kernel.weights + i for i in kernel.row_distances]
    out_features, dtype = widths[-1], kernel.dtype
    ready = dtype == torch.float32 and all(pair == IN_PANELS for pair in strides)
    cuts: dict[tuple[int, int], Cut] = {}
    empty_strided = tensors.empty_strided_cpu()

    def run_layers(x: Tensor, *tensors: Tensor | None, kept: Sequence[Tensor] = ()) -> Tensor:
        count, threads = x.shape[0], torch.get_num_threads()
        y = empty_strided((count, out_features), (out_features, 1), dtype)
        if not count or not out_features:
            return y
        how = cuts.get((count, threads))
        if how is None:
            how = cuts[count, threads] = cut(count, widths, kernel.gated, threads, ready)
        memory = torch.empty(how.floats, dtype=torch.float32) if how.floats else None
        saved = (*(None for _ in range(2 - len(kept))), *kept)
        with named_range("fusedmlp::rows"):
            function(
                *addresses(x, y, memory, *tensors, *saved),
                *(count, x.stride(0), how.block_rows, how.chunk),
                *(how.shares, how.threads, how.packs),
                *(_row_distance(tensors[i]) for i in with_rows),
                *known,
            )
        return y

    return run_layers


def panels(weight: Tensor) -> Tensor:
    """A weight as kernels read it best: ``(panels, in_features, width)``, filled up with zeros.

    A panel has ``width`` output features, as many as two of this CPU's vectors of float32 hold.

    Args:
        weight: ``(out_features, in_features)``, any strides.

    Raises:
        CompilationError: as :func:`rows`.
    """
    out_features, in_features = weight.shape
    width = panel_width(weight.dtype)
    number = -(-out_features // width)
    filled = F.pad(weight, (0, 0, 0, number * width - out_features))
    return filled.reshape(number, width, in_features).transpose(1, 2).contiguous()


def panel_width(dtype: torch.dtype) -> int:
    """Output features of a panel on this CPU.

    Raises:
        CompilationError: as :func:`rows`.
    """
    return compiled_products(dtype).panel


def from_panels(made: Tensor, out_features: int) -> Tensor:
    """The weight that :func:`panels` were made of."""
    number, in_features, width = made.shape
    return made.transpose(1, 2).reshape(number * width, in_features)[:out_features]


def _can_be_constant(weight: Tensor) -> bool:
    """Whether generated code can be told all of a weight's sizes."""
    return all(isinstance(size, int) for size in weight.shape)


def addresses(*tensors: Tensor | None) -> list[int]:
    """Where the data of tensors are; 0 for ``None``."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _bits(number: float) -> int:
    """Those of a float32."""
    (bits,) = struct.unpack("i", struct.pack("f", number))
    return int(bits)


def _row_distance(operand: Tensor | None) -> int:
    assert operand is not None  # it is one of the values that the activation reads
    return operand.stride(0)


def is_readable(operand: Tensor) -> bool:
    """Whether rows of an operand are contiguous."""
    return operand.dim() == 0 or operand.stride(-1) == 1 or operand.shape[-1] == 1


def strides_of(weight: Tensor) -> tuple[int, int]:
    """Those of a weight that is readable, as :func:`as_pair`."""
    n, k = weight.stride()
    return as_pair((n, k), weight.shape[0])


def as_pair(strides: tuple[int, int], out_features: int) -> tuple[int, int]:
    """Of output and of input features; that of a dimension of one element is of no account."""
    n, k = strides
    if strides == IN_PANELS:
        return strides
    if 1 not in (n, k) or (out_features == 1 and k != 1):
        return (1, k)
    return (n, k)
