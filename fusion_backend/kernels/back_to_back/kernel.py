# mypy: ignore-errors
"""A whole narrow MLP in one launch; the hidden activation never leaves the chip.

    hidden = f(x @ weight_gate^T + bias_gate, x @ weight_up^T + bias_up)
             or, without a gate,  f(x @ weight_up^T + bias_up)
    y      = hidden @ weight_down^T + bias_down (+ residual)

x is (rows, in), the first weights are (hidden, in), weight_down is (out, hidden), y and the
residual are (rows, out), contiguous. Where there is a norm, its result takes the place of x: a
program holds whole rows anyway.

A program owns BLOCK_M rows. It keeps their tile of x and the fp32 tile of y, both at full width,
and walks over the hidden dimension in blocks: a block of ``hidden`` is computed in fp32, rounded to
the operands' dtype (as the unfused program does when it stores it) and multiplied at once into y.
in and out are padded to powers of two (BLOCK_IN, BLOCK_OUT) with zeros.

Blocks of the weights stream through the chip once for each tile of rows. Where all weights fit in
shared memory (RESIDENT), a persistent program loads them once and streams only rows. The next tile
of x is in registers then: a buffer in shared memory would cost one program on a multiprocessor. The
loop over blocks is unrolled, because the blocks of the weights are separate allocations.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusion_backend.kernels.device.normalization import normalized
from fusion_backend.kernels.device.tiles import (
    add_bias,
    column_parts,
    load_saved,
    load_tile,
    multiply_add,
    multiply_biased,
    rounded,
    store_tile,
    tile_offsets,
)

# Bound by specialize(): the activation as a device function of one or two fp32 tensors, of their
# place and of the operands p0 to p3, of which those that do not exist are None.
activation = None


@triton.jit
def load_rows(
    x,
    row_start,
    rows,
    x_row_stride,
    X_COLUMN_STRIDE: tl.constexpr,
    IN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The BLOCK_M rows of x from row_start on; rows beyond the last are the last again."""
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_IN)
    x += row_start.to(tl.int64) * x_row_stride
    last = rows - row_start - 1
    offsets = tile_offsets(tl.minimum(m, last), x_row_stride, k, X_COLUMN_STRIDE, WIDE)
    return load_tile(x + offsets, m, BLOCK_M, k, IN, True, IN == BLOCK_IN)


@triton.jit
def store_sum(
    y,
    tile,
    residual,
    row_start,
    rows,
    OUT: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Store tile + residual; in two parts where registers have no room for both of them."""
    PARTS: tl.constexpr = 2 if tile.shape[1] > 128 else 1
    COLUMNS: tl.constexpr = tile.shape[1] // PARTS
    parts = column_parts(tile, PARTS)
    for part in tl.static_range(PARTS):
        start = part * COLUMNS
        added = load_saved(
            residual, row_start, rows, start, OUT, tile.shape[0], COLUMNS, WHOLE, WIDE
        )
        store_tile(y, parts[part] + added, row_start, rows, start, OUT, WHOLE, WIDE)


def fusedmlp_back_to_back(
    x,
    norm_weight,
    norm_bias,
    weight_gate,
    bias_gate,
    weight_up,
    bias_up,
    weight_down,
    bias_down,
    residual,
    y,
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
    DOWN_ROW_STRIDE: tl.constexpr,
    DOWN_COLUMN_STRIDE: tl.constexpr,
    IN: tl.constexpr,
    HIDDEN: tl.constexpr,
    OUT: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    RESIDENT: tl.constexpr,
    LATE_BIAS: tl.constexpr,
):
    """See the module."""
    whole_in: tl.constexpr = IN == BLOCK_IN
    whole_out: tl.constexpr = OUT == BLOCK_OUT
    whole_h: tl.constexpr = HIDDEN % BLOCK_H == 0
    h = tl.arange(0, BLOCK_H)
    k = tl.arange(0, BLOCK_IN)
    n = tl.arange(0, BLOCK_OUT)
    x_row_stride = x_row_units * X_ROW_UNIT
    gate_offsets = tile_offsets(k, GATE_COLUMN_STRIDE, h, GATE_ROW_STRIDE, WIDE)
    up_offsets = tile_offsets(k, UP_COLUMN_STRIDE, h, UP_ROW_STRIDE, WIDE)
    down_offsets = tile_offsets(h, DOWN_COLUMN_STRIDE, n, DOWN_ROW_STRIDE, WIDE)
    gate_tiles = ()
    up_tiles = ()
    down_tiles = ()
    if RESIDENT:
        for start in tl.static_range(0, HIDDEN, BLOCK_H):
            if weight_gate is not None:
                gates = weight_gate + start * GATE_ROW_STRIDE + gate_offsets
                gate_tiles += (load_tile(gates, k, IN, h, HIDDEN - start, whole_in, whole_h),)
            ups = weight_up + start * UP_ROW_STRIDE + up_offsets
            up_tiles += (load_tile(ups, k, IN, h, HIDDEN - start, whole_in, whole_h),)
            downs = weight_down + start * DOWN_COLUMN_STRIDE + down_offsets
            down_tiles += (load_tile(downs, h, HIDDEN - start, n, OUT, whole_h, whole_out),)

    if RESIDENT:
        row_start = tl.minimum(tl.program_id(0) * BLOCK_M, rows - 1)
        next_tile = load_rows(
            x, row_start, rows, x_row_stride, X_COLUMN_STRIDE, IN, BLOCK_M, BLOCK_IN, WIDE
        )

    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.num_programs(0)):
        row_start = tile * BLOCK_M
        if RESIDENT:
            x_tile = next_tile
            ahead = tl.minimum(tl.num_programs(0) * BLOCK_M, rows - row_start - 1)
            next_start = row_start + ahead
            next_tile = load_rows(
                x, next_start, rows, x_row_stride, X_COLUMN_STRIDE, IN, BLOCK_M, BLOCK_IN, WIDE
            )
        else:
            x_tile = load_rows(
                x, row_start, rows, x_row_stride, X_COLUMN_STRIDE, IN, BLOCK_M, BLOCK_IN, WIDE
            )
        if NORM is not None:
            x_tile = normalized(x_tile, norm_weight, norm_bias, NORM, EPS, IN, whole_in)
        result = tl.zeros((BLOCK_M, BLOCK_OUT), tl.float32)
        if RESIDENT:
            for block in tl.static_range((HIDDEN + BLOCK_H - 1) // BLOCK_H):
                columns = block * BLOCK_H + h
                up = multiply_biased(
                    x_tile, up_tiles[block], bias_up, columns, HIDDEN, whole_h, PRECISION, False
                )
                if weight_gate is None:
                    hidden = activation(
                        up,
                        (row_start, rows, block * BLOCK_H, HIDDEN, whole_h, WIDE),
                        (p0, p1, p2, p3),
                    )
                else:
                    gate = multiply_biased(
                        x_tile,
                        gate_tiles[block],
                        bias_gate,
                        columns,
                        HIDDEN,
                        whole_h,
                        PRECISION,
                        False,
                    )
                    hidden = activation(
                        gate,
                        up,
                        (row_start, rows, block * BLOCK_H, HIDDEN, whole_h, WIDE),
                        (p0, p1, p2, p3),
                    )
                hidden = rounded(hidden, block * BLOCK_H, HIDDEN, whole_h, x)
                result = multiply_add(result, hidden, down_tiles[block], PRECISION)
        else:
            gate_start = weight_gate
            up_start = weight_up
            down_start = weight_down
            for start in range(0, HIDDEN, BLOCK_H):
                left = HIDDEN - start
                up_tile = load_tile(up_start + up_offsets, k, IN, h, left, whole_in, whole_h)
                up = multiply_biased(
                    x_tile, up_tile, bias_up, start + h, HIDDEN, whole_h, PRECISION, LATE_BIAS
                )
                if weight_gate is None:
                    hidden = activation(
                        up, (row_start, rows, start, HIDDEN, whole_h, WIDE), (p0, p1, p2, p3)
                    )
                else:
                    gates = gate_start + gate_offsets
                    gate_tile = load_tile(gates, k, IN, h, left, whole_in, whole_h)
                    gate = multiply_biased(
                        x_tile,
                        gate_tile,
                        bias_gate,
                        start + h,
                        HIDDEN,
                        whole_h,
                        PRECISION,
                        LATE_BIAS,
                    )
                    hidden = activation(
                        gate, up, (row_start, rows, start, HIDDEN, whole_h, WIDE), (p0, p1, p2, p3)
                    )
                    gate_start += BLOCK_H * GATE_ROW_STRIDE
                down_tile = load_tile(
                    down_start + down_offsets, h, left, n, OUT, whole_h, whole_out
                )
                hidden = rounded(hidden, start, HIDDEN, whole_h, x)
                result = multiply_add(result, hidden, down_tile, PRECISION)
                up_start += BLOCK_H * UP_ROW_STRIDE
                down_start += BLOCK_H * DOWN_COLUMN_STRIDE
        result = add_bias(result, bias_down, n, OUT, whole_out)
        if residual is None:
            store_tile(y, result, row_start, rows, 0, OUT, whole_out, WIDE)
        else:
            store_sum(y, result, residual, row_start, rows, OUT, whole_out, WIDE)
