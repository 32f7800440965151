# mypy: ignore-errors
# Each branch that is chosen at compile time must end in a return of its own.
# ruff: noqa: RET505
"""A whole MLP of few rows, as two streams of weights: one launch each.

    gate   = x @ weight_gate^T + bias_gate      (rows, hidden), only when there is a gate
    up     = x @ weight_up^T + bias_up          (rows, hidden)
    hidden = f(gate, up)  or  f(up)             (rows, hidden)

    y      = hidden @ weight_down^T + bias_down (rows, out)

x is (rows, in); the first weights are (hidden, in), the last is (out, hidden). Products are
accumulated and f is evaluated in fp32; hidden and y are rounded once, to the dtype of x. Nothing is
saved: this is for inference.

With few rows, reading the weights is all the work. A program owns a share of the features that its
kernel computes. All shares have one size, which need not be a power of two: so as many programs as
run at one time have equally much to read, and each reads x once. Sums have a fixed order:
results are the same bit for bit from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusion_backend.kernels.device.tiles import (
    add_bias,
    load_tile,
    multiply_add,
    rows_to_load,
    tile_offsets,
)

# Bound by specialize(): the activation as a device function of one or two fp32 tensors, of their
# place and of the operands p0 to p3, of which those that do not exist are None.
activation = None


def fusedmlp_stream_hidden(
    x,
    weight_gate,
    bias_gate,
    weight_up,
    bias_up,
    hidden,
    p0,
    p1,
    p2,
    p3,
    rows,
    x_row_units,
    X_ROW_UNIT: tl.constexpr,
    X_COLUMN_STRIDE: tl.constexpr,
    GATE_ROW_STRIDE: tl.constexpr,
    GATE_COLUMN_STRIDE: tl.constexpr,
    UP_ROW_STRIDE: tl.constexpr,
    UP_COLUMN_STRIDE: tl.constexpr,
    IN: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A share of hidden."""
    x_row_stride = x_row_units * X_ROW_UNIT
    first, row_start = share_coordinates(HIDDEN, SHARE, BLOCK_M)
    n = first + tl.arange(0, BLOCK_N)
    gate, up = share_products(
        x,
        row_start,
        rows,
        x_row_stride,
        X_COLUMN_STRIDE,
        weight_gate,
        GATE_ROW_STRIDE,
        GATE_COLUMN_STRIDE,
        weight_up,
        UP_ROW_STRIDE,
        UP_COLUMN_STRIDE,
        first,
        SHARE,
        HIDDEN,
        IN,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        STAGES,
        WIDE,
        PRECISION,
    )
    up = add_bias(up, bias_up, n, HIDDEN, False)
    if weight_gate is None:
        result = activation(up, (row_start, rows, first, HIDDEN, False, WIDE), (p0, p1, p2, p3))
    else:
        gate = add_bias(gate, bias_gate, n, HIDDEN, False)
        result = activation(
            gate, up, (row_start, rows, first, HIDDEN, False, WIDE), (p0, p1, p2, p3)
        )
    store_share(hidden, result, row_start, rows, first, SHARE, HIDDEN, WIDE)


def fusedmlp_stream_out(
    hidden,
    weight_down,
    bias_down,
    y,
    rows,
    DOWN_ROW_STRIDE: tl.constexpr,
    DOWN_COLUMN_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    OUT: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A share of y."""
    first, row_start = share_coordinates(OUT, SHARE, BLOCK_M)
    n = first + tl.arange(0, BLOCK_N)
    _, result = share_products(
        hidden,
        row_start,
        rows,
        HIDDEN,
        1,
        None,
        0,
        0,
        weight_down,
        DOWN_ROW_STRIDE,
        DOWN_COLUMN_STRIDE,
        first,
        SHARE,
        OUT,
        HIDDEN,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        STAGES,
        WIDE,
        PRECISION,
    )
    result = add_bias(result, bias_down, n, OUT, False)
    store_share(y, result, row_start, rows, first, SHARE, OUT, WIDE)


@triton.jit
def share_coordinates(COLUMNS: tl.constexpr, SHARE: tl.constexpr, BLOCK_M: tl.constexpr):
    """First feature and first row of a program."""
    shares = tl.cdiv(COLUMNS, SHARE)
    return tl.program_id(0) % shares * SHARE, tl.program_id(0) // shares * BLOCK_M


@triton.jit
def share_products(
    x,
    row_start,
    rows,
    x_row_stride,
    X_COLUMN_STRIDE: tl.constexpr,
    weight_gate,
    GATE_ROW_STRIDE: tl.constexpr,
    GATE_COLUMN_STRIDE: tl.constexpr,
    weight_up,
    UP_ROW_STRIDE: tl.constexpr,
    UP_COLUMN_STRIDE: tl.constexpr,
    first,
    SHARE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The fp32 tiles (gate, up) of some rows and of the SHARE features from first on.

    A single row is no matrix: its products are multiplied and added without the matrix units.
    """
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    WHOLE: tl.constexpr = COLUMNS % SHARE == 0 and SHARE == BLOCK_N
    end = tl.minimum(SHARE, COLUMNS - first)
    WHOLE_K: tl.constexpr = DEPTH % BLOCK_K == 0
    GATED: tl.constexpr = weight_gate is not None
    SINGLE: tl.constexpr = BLOCK_M == 1
    x += row_start.to(tl.int64) * x_row_stride
    loaded = rows_to_load(m, rows - row_start)
    x_offsets = tile_offsets(loaded, x_row_stride, k, X_COLUMN_STRIDE, WIDE)
    weight_up += first.to(tl.int64) * UP_ROW_STRIDE
    up_offsets = tile_offsets(n, UP_ROW_STRIDE, k, UP_COLUMN_STRIDE, WIDE)
    shape: tl.constexpr = (BLOCK_N, BLOCK_K) if SINGLE else (BLOCK_M, BLOCK_N)
    up = tl.zeros(shape, tl.float32)
    gate = up
    if GATED:
        weight_gate += first.to(tl.int64) * GATE_ROW_STRIDE
        gate_offsets = tile_offsets(n, GATE_ROW_STRIDE, k, GATE_COLUMN_STRIDE, WIDE)
    for start in tl.range(0, DEPTH, BLOCK_K, num_stages=STAGES):
        k_end = DEPTH - start
        x_tile = load_tile(x + x_offsets, m, BLOCK_M, k, k_end, True, WHOLE_K)
        if GATED:
            tile = load_tile(weight_gate + gate_offsets, n, end, k, k_end, WHOLE, WHOLE_K)
            gate = share_step(gate, x_tile, tile, SINGLE, PRECISION)
            weight_gate += BLOCK_K * GATE_COLUMN_STRIDE
        tile = load_tile(weight_up + up_offsets, n, end, k, k_end, WHOLE, WHOLE_K)
        up = share_step(up, x_tile, tile, SINGLE, PRECISION)
        x += BLOCK_K * X_COLUMN_STRIDE
        weight_up += BLOCK_K * UP_COLUMN_STRIDE
    if SINGLE:
        up = tl.sum(up, 1)[None, :]
        gate = tl.sum(gate, 1)[None, :]
    return gate, up


@triton.jit
def share_step(total, x_tile, weight_tile, SINGLE: tl.constexpr, PRECISION: tl.constexpr):
    """One step of a sum over blocks."""
    if SINGLE:
        return total + x_tile.to(tl.float32) * weight_tile.to(tl.float32)
    else:
        return multiply_add(total, x_tile, tl.trans(weight_tile), PRECISION)


@triton.jit
def store_share(
    matrix,
    tile,
    row_start,
    rows,
    first,
    SHARE: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Round a tile to the dtype of a contiguous (rows, COLUMNS) matrix; store what is owned."""
    m = tl.arange(0, tile.shape[0])
    n = tl.arange(0, tile.shape[1])
    matrix += row_start.to(tl.int64) * COLUMNS + first
    valid = (m[:, None] < rows - row_start) & (n[None, :] < tl.minimum(SHARE, COLUMNS - first))
    pointers = matrix + tile_offsets(m, COLUMNS, n, 1, WIDE)
    tl.store(pointers, tile.to(matrix.dtype.element_ty), mask=valid)
