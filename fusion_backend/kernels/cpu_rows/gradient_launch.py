"""Calls of the family's kernels for gradients, as those of ``launch``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusion_backend.compat import tensors
from fusion_backend.compat.dispatcher import named_range
from fusion_backend.kernels.cpu_rows.compiling import compiled
from fusion_backend.kernels.cpu_rows.cutting import PANEL, GradientCut, cut_gradients
from fusion_backend.kernels.cpu_rows.gradient_source import GradientKernel
from fusion_backend.kernels.cpu_rows.launch import (
    addresses,
    as_pair,
    dtype_named,
    is_readable,
    kinds_of,
    strides_of,
)
from fusion_backend.mlp.expression import parse, passing_gradients
from fusion_backend.mlp.operands import kind_of
from fusion_backend.mlp.weights import Weights, is_transposed


class Call(NamedTuple):
    """What is known of a call beside its rows.

    Attributes:
        kernel: that is called.
        widths: of input, hidden layer and result.
        strides: of each weight, along its output and its input features; one of the two is 1.
        turned: which weights' gradients are laid out as transposes of contiguous matrices.
        needs: of what the gradient is asked for: x, gate weight and bias, up's, down's, operands.
        computes: whether pre-activations are computed, not read.
    """

    kernel: GradientKernel
    widths: tuple[int, int, int]
    strides: tuple[tuple[int, int], ...]
    turned: tuple[bool, ...]
    needs: tuple[bool, ...]
    computes: bool


def gradients(
    grad_output: Tensor,
    x: Tensor,
    weights: Weights,
    preacts: tuple[Tensor | None, Tensor | None],
    operands: Sequence[Tensor],
    activation: str,
    needs: Sequence[bool],
) -> list[Tensor]:
    """Gradients of an MLP of ``x`` ``(rows, in)``.

    Args:
        grad_output: ``(rows, out)``, with any strides.
        x: with any strides, like all that follow.
        weights: those of the forward pass; biases are read where pre-activations are computed.
        preacts: gate's, ``None`` without a gate, and up's; or ``None`` twice: they are computed.
        operands: of the activation, as in the forward pass.
        activation: as text.
        needs: which gradients are asked for: of x, gate weight and bias, up's, down's, operands.

    Returns:
        The gradients that are asked for, with dtype and shape of what they are of. Weights' are
        laid out as ``gradients.empty_weight_gradient`` says, others are contiguous.

    Raises:
        CompilationError: there is no C++ compiler, or it refuses the kernel.
    """
    # A call that does not read x must not keep it: it may be written to before.
    read = x if preacts[1] is None or needs[1] or needs[3] else None
    if tensors.is_traced(x):
        found: list[Tensor] = torch.ops.fusedmlp.rows_gradients(
            grad_output, read, *weights[:5], *preacts, operands or None, activation, needs
        )
        return found
    return run(grad_output, read, weights, preacts, operands, activation, needs)


def run(
    grad_output: Tensor,
    x: Tensor | None,
    weights: Weights,
    preacts: tuple[Tensor | None, Tensor | None],
    operands: Sequence[Tensor],
    activation: str,
    needs: Sequence[bool],
) -> list[Tensor]:
    """:func:`gradients` of real tensors; x may be missing where nothing reads it."""
    matrices = [_readable(matrix) for matrix in weights[::2]]
    biases = [None if bias is None else bias.contiguous() for bias in weights[1:5:2]]
    values = [operand if is_readable(operand) else operand.contiguous() for operand in operands]
    saved = [None if preact is None else preact.contiguous() for preact in preacts]
    if x is not None and x.stride(1) != 1 and x.shape[1] != 1:
        x = x.contiguous()
    kinds = tuple((kind_of(operand), operand.dtype) for operand in values)
    wanted = tuple(i for i, need in enumerate(needs[7:]) if need)
    gate, up, down = matrices
    assert up is not None
    assert down is not None
    call = Call(
        GradientKernel(grad_output.dtype, activation, gate is not None, kinds, wanted),
        (up.shape[1], up.shape[0], down.shape[0]),
        tuple((0, 0) if matrix is None else strides_of(matrix) for matrix in matrices),
        tuple(map(is_transposed, weights[::2])),
        (*map(bool, needs),),
        preacts[1] is None,
    )
    layers = (gate, biases[0], up, biases[1], down)
    return caller(call)(grad_output, x, *layers, *saved, *values)


def _readable(weight: Tensor | None) -> Tensor | None:
    return weight if weight is None or 1 in weight.stride() else weight.contiguous()


def caller_of(
    dtype: str,
    activation: str,
    gated: bool,
    operands: Sequence[tuple[int, str]],
    widths: tuple[int, int, int],
    *of_call: Any,
) -> Callable[..., list[Tensor]]:
    """:func:`caller` by what generated code can say, as in ``launch``.

    The last are strides, turned, needs and computes of a :class:`Call`.
    """
    strides, turned, needs, computes = of_call
    wanted = tuple(i for i, need in enumerate(needs[7:]) if need)
    kernel = GradientKernel(dtype_named(dtype), activation, gated, kinds_of(operands), wanted)
    _, hidden, out = widths
    pairs = tuple(map(as_pair, strides, (hidden, hidden, out)))
    return caller(Call(kernel, widths, pairs, turned, needs, computes))


@functools.cache
def caller(call: Call) -> Callable[..., list[Tensor]]:
    """What computes the gradients of one MLP.

    It takes the result's gradient, x, gate weight and bias, up's, down's weight, pre-activations
    of gate and up, and operands. Those that there are not are ``None``.

    Raises:
        CompilationError: as :func:`gradients`.
    """
    kernel, widths, strides, turned, needs, computes = call
    function, library = compiled(kernel)
    inner, hidden, out = widths
    passing = passing_gradients(parse(kernel.activation))
    passes_gate = kernel.gated and "g" in passing
    passes_up = ("u" if kernel.gated else "x") in passing
    needs_preact = any(needs[:5]) or any(needs[7:])
    shapes = _shapes(widths, turned)
    direct = _direct(kernel, widths, turned)
    offered = (library.product, library.pack, library.weight_product)
    known: list[int] = [*offered, inner, hidden, out, needs_preact, passes_gate, passes_up]
    for i, pair in enumerate(strides):
        known += (*pair, turned[i], direct[i])
    cuts: dict[tuple[int, int], tuple[GradientCut, int]] = {}
    asked = needs[:7]

    def run_gradients(dy: Tensor, x: Tensor | None, *others: Tensor | None) -> list[Tensor]:
        count, threads = dy.shape[0], torch.get_num_threads()
        layers, saved, operands = others[:5], others[5:7], others[7:]
        found: list[Tensor | None] = [
            torch.empty((count, inner), dtype=dy.dtype) if asked[0] else None,
            *(
                _empty(shape, is_turned, dy.dtype) if need else None
                for need, (shape, is_turned) in zip(asked[1:], shapes, strict=True)
            ),
        ]
        of_operands = [_of_operand(kernel, i, operands[i], hidden) for i in kernel.wanted]
        if not count:
            return _results(found, of_operands, kernel, operands, empty=True)
        how = cuts.get((count, threads))
        if how is None:
            cut = cut_gradients(count, widths, kernel.gated, threads)
            how = cuts[count, threads] = (cut, _floats(call, cut, count, direct))
        cut, floats = how
        memory = torch.empty(floats, dtype=torch.float32) if floats else None
        to_x, *sums = found
        # in the order of SUMS: weights, then biases
        sums = [*sums[::2], *sums[1::2]]
        with named_range("fusedmlp::rows_gradients"):
            function(
                *addresses(x, dy, memory, *saved, *layers, *operands),
                *addresses(to_x, *sums, *of_operands),
                *(count, 0 if x is None else x.stride(0), *dy.stride()),
                *(cut.part_rows, cut.block_rows, cut.chunk, cut.parts, cut.shares),
                *(min(threads, cut.parts * cut.shares), cut.packs, cut.groups, computes),
                *(_row_distance(operands[i]) for i in kernel.row_distances),
                *known,
            )
        return _results(found, of_operands, kernel, operands)

    return run_gradients


Shape = tuple[tuple[int, ...], bool]


def _shapes(widths: tuple[int, int, int], turned: Sequence[bool]) -> list[Shape]:
    """Shapes of gradients of weights and biases in turn, and whether they are laid out turned."""
    inner, hidden, out = widths
    weights = ((hidden, inner), (hidden, inner), (out, hidden))
    return [
        pair
        for shape, is_turned in zip(weights, turned, strict=True)
        for pair in ((shape, is_turned), (shape[:1], False))
    ]


def _empty(shape: tuple[int, ...], is_turned: bool, dtype: torch.dtype) -> Tensor:
    return (
        torch.empty(shape[::-1], dtype=dtype).t() if is_turned else torch.empty(shape, dtype=dtype)
    )


def _direct(
    kernel: GradientKernel, widths: tuple[int, int, int], turned: Sequence[bool]
) -> list[bool]:
    """Which weights' gradients are laid out as the sums that they are."""
    inner, hidden, _ = widths
    return [
        kernel.dtype == torch.float32 and width % PANEL == 0 and not is_turned
        for width, is_turned in zip((inner, inner, hidden), turned, strict=True)
    ]


def _floats(call: Call, cut: GradientCut, rows: int, direct: Sequence[bool]) -> int:
    """Floats of memory that the kernel takes for panels and sums, at most."""
    return sum(_memory(call, cut, rows, direct))


def _memory(call: Call, cut: GradientCut, rows: int, direct: Sequence[bool]) -> Iterator[int]:
    kernel, (inner, hidden, out), _, _, needs, computes = call

    def wide(features: int) -> int:
        return -(-features // PANEL) * PANEL

    firsts = 1 + kernel.gated
    if cut.packs:
        yield wide(hidden) * (inner + 1) * firsts * computes
        yield wide(hidden) * (out + 1)
        yield wide(inner) * (hidden + 1) * firsts * needs[0]
    sizes = (hidden * wide(inner), hidden * wide(inner), out * wide(hidden))
    for need, size, is_direct in zip(needs[1:7:2], sizes, direct, strict=True):
        yield need * size * (cut.parts * (1 + cut.groups) - is_direct)
    for need, size in zip(needs[2:7:2], (hidden, hidden, out), strict=True):
        yield need * 2 * wide(size) * cut.parts
    yield 2 * wide(hidden) * cut.parts * sum(needs[7:])
    if needs[0] and cut.shares > 1:
        yield cut.shares * rows * wide(inner)


def _of_operand(kernel: GradientKernel, index: int, operand: Tensor | None, hidden: int) -> Tensor:
    """What the kernel writes the gradient of an operand to, or the sums of one over rows."""
    assert operand is not None
    kind, _ = kernel.operands[index]
    shape = operand.shape if kind == "elementwise" else (hidden,)
    return torch.empty(shape, dtype=kernel.dtype_of_gradient(index))


def _results(
    found: Sequence[Tensor | None],
    of_operands: Sequence[Tensor],
    kernel: GradientKernel,
    operands: Sequence[Tensor | None],
    empty: bool = False,
) -> list[Tensor]:
    """Those that were asked for; zeros where there were no rows to sum over."""
    results = [gradient for gradient in found if gradient is not None]
    for index, gradient in zip(kernel.wanted, of_operands, strict=True):
        kind, dtype = kernel.operands[index]
        gradient = gradient.zero_() if empty else gradient
        results.append((gradient.sum() if kind == "scalar" else gradient).to(dtype))
    return [each.zero_() for each in results] if empty else results


def _row_distance(operand: Tensor | None) -> int:
    assert operand is not None  # it is one of the values that the activation reads
    return operand.stride(0)
