# mypy: ignore-errors
"""Tiles of a matrix product by tensor descriptors: the copy engine of Hopper and later GPUs (TMA).

The same product as in ``tiles``, but whole tiles are moved by one instruction each, which also
fills what lies outside of a matrix with zeros: there are no addresses and no masks. It asks for
matrices whose rows (or columns) are contiguous and 16-byte aligned.

Programs are persistent: making descriptors takes about a microsecond, and a program that stays can
load the next tile while it finishes the last.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def describe_weight(
    weight,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Descriptor of a (columns, inner) weight in whichever order it is contiguous."""
    if INNER_STRIDE == 1:
        return tl.make_tensor_descriptor(
            weight, [COLUMNS, INNER], [COLUMN_STRIDE, 1], [BLOCK_N, BLOCK_K]
        )
    else:
        return tl.make_tensor_descriptor(
            weight, [INNER, COLUMNS], [INNER_STRIDE, 1], [BLOCK_K, BLOCK_N]
        )


@triton.jit
def load_weight(descriptor, inner, column, INNER_STRIDE: tl.constexpr):
    """The (BLOCK_K, BLOCK_N) tile of a weight's transpose."""
    if INNER_STRIDE == 1:
        return descriptor.load([column, inner]).T
    else:
        return descriptor.load([inner, column])


@triton.jit
def described_products(
    x,
    weight_gate,
    weight_up,
    row_start,
    column_start,
    INNER: tl.constexpr,
    GATE_INNER_STRIDE: tl.constexpr,
    UP_INNER_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The fp32 tiles (gate, up) of descriptors; without a gate, (up, up)."""
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if weight_gate is not None:
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for inner in range(0, INNER, BLOCK_K):
        x_tile = x.load([row_start, inner])
        if weight_gate is not None:
            gate_tile = load_weight(weight_gate, inner, column_start, GATE_INNER_STRIDE)
            gate = tl.dot(x_tile, gate_tile, gate, input_precision=PRECISION)
        up_tile = load_weight(weight_up, inner, column_start, UP_INNER_STRIDE)
        up = tl.dot(x_tile, up_tile, up, input_precision=PRECISION)
    if weight_gate is None:
        return up, up
    else:
        return gate, up
