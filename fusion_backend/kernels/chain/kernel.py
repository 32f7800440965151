# mypy: ignore-errors
"""A chain of narrow linear layers in one launch; the hidden values never leave the chip.

    h_0 = f_0(x W_0ᵀ + b_0)
    h_i = f_i(h_{i-1} W_iᵀ + b_i)
    y   = h_{n-2} W_{n-1}ᵀ + b_{n-1}

x is (rows, in), W_i is (features_i, features_{i-1}), y is (rows, out). Nothing is saved.

Where a layer reads the input beside the value before it, ``W_i cat([x, h_{i-1}])``, it is a sum of
two products: of x, loaded again, with some columns of W_i, and of h_{i-1} with the others.

A program owns BLOCK_M rows and takes them through all layers. A hidden value is computed in fp32
and rounded to the operands' dtype, as the unfused program does when it stores it; widths are padded
to powers of two. The number of layers, their widths and activations are known at compile time, so
the kernel is printed for each chain, by ``chain_source``, out of the functions below. It has one of
two shapes:

- Where all weights fit in shared memory (resident), each program loads them once, and streams rows.
  The next tile of x is in registers then, as in ``back_to_back``.
- Elsewhere weights stream through the chip once for each tile of rows. Hidden values of which no
  two follow one another are computed in blocks of their features, each multiplied at once into the
  next layer's sum: such a value may have any width. The others are held whole. So may the input
  and the output: the first layer sums over blocks of the one, the last layer stores blocks of the
  other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusion_backend.kernels.device.tiles import load_tile, multiply_biased, tile_offsets


@triton.jit
def weight_tile(
    weight,
    IN,
    OUT,
    ROW_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The (BLOCK_IN, BLOCK_OUT) tile of weight^T, with zeros from (IN, OUT) on unless WHOLE."""
    k = tl.arange(0, BLOCK_IN)
    n = tl.arange(0, BLOCK_OUT)
    offsets = tile_offsets(k, COLUMN_STRIDE, n, ROW_STRIDE, WIDE)
    return load_tile(weight + offsets, k, IN, n, OUT, WHOLE, WHOLE)


@triton.jit
def rows_block(
    x,
    row_start,
    rows,
    x_row_stride,
    X_COLUMN_STRIDE: tl.constexpr,
    left,
    BLOCK_M: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The first BLOCK_IN columns of BLOCK_M rows of x, with zeros from ``left`` on unless WHOLE.

    Rows are those from row_start on; rows beyond the last are the last again.
    """
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_IN)
    x += row_start.to(tl.int64) * x_row_stride
    last = rows - row_start - 1
    offsets = tile_offsets(tl.minimum(m, last), x_row_stride, k, X_COLUMN_STRIDE, WIDE)
    return load_tile(x + offsets, m, BLOCK_M, k, left, True, WHOLE)


@triton.jit
def layer(
    value, tile, bias, start, OUT: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr
):
    """The fp32 sum value @ tile + bias[start:]."""
    columns = start + tl.arange(0, tile.shape[1])
    return multiply_biased(value, tile, bias, columns, OUT, WHOLE, PRECISION, False)


@triton.jit
def unpadded(values, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """A tile with zeros where it is padded: an infinity times a weight of zero is none."""
    if not WHOLE:
        columns = tl.arange(0, values.shape[1])
        values = tl.where(columns[None, :] < WIDTH, values, 0.0)
    return values
