# mypy: ignore-errors
# Each branch that is chosen at compile time must end in a return of its own.
# ruff: noqa: RET505
"""Tiles of a matrix product by tensor descriptors: the copy engine of Hopper and later GPUs (TMA).

The same product as in ``tiles``, but one instruction moves a whole tile, and fills with zeros what
lies outside of a matrix: there are no addresses, no masks, and no registers for them. It asks for
matrices of which one dimension is contiguous and the other strides over multiples of 16 bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusion_backend.kernels.device.tiles import multiply_add


@triton.jit
def describe_weight(
    weight,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Descriptor of a (columns, inner) weight, in whichever order it is contiguous."""
    if COLUMN_STRIDE == 1:
        return tl.make_tensor_descriptor(
            weight, [COLUMNS, INNER], [ROW_STRIDE, 1], [BLOCK_N, BLOCK_K]
        )
    else:
        return tl.make_tensor_descriptor(
            weight, [INNER, COLUMNS], [COLUMN_STRIDE, 1], [BLOCK_K, BLOCK_N]
        )


@triton.jit
def load_weight(described, inner, column, COLUMN_STRIDE: tl.constexpr):
    """The (BLOCK_K, BLOCK_N) tile of a weight's transpose."""
    if COLUMN_STRIDE == 1:
        return described.load([column, inner]).T
    else:
        return described.load([inner, column])


@triton.jit
def described_products(
    x,
    weight_gate,
    weight_up,
    row_start,
    column_start,
    INNER: tl.constexpr,
    GATE_COLUMN_STRIDE: tl.constexpr,
    UP_COLUMN_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    GATED: tl.constexpr,
):
    """The fp32 tiles (gate, up) of descriptors; without a gate, (up, up)."""
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if GATED:
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for inner in range(0, INNER, BLOCK_K):
        x_tile = x.load([row_start, inner])
        if GATED:
            gate_tile = load_weight(weight_gate, inner, column_start, GATE_COLUMN_STRIDE)
            gate = multiply_add(gate, x_tile, gate_tile, PRECISION)
        up_tile = load_weight(weight_up, inner, column_start, UP_COLUMN_STRIDE)
        up = multiply_add(up, x_tile, up_tile, PRECISION)
    if GATED:
        return gate, up
    else:
        return up, up
