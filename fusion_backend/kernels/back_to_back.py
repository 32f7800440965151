# mypy: ignore-errors
"""A whole narrow MLP in one launch; the hidden activation never leaves the chip.

    hidden = f(x @ weight_gate^T + bias_gate, x @ weight_up^T + bias_up)
             or, without a gate,  f(x @ weight_up^T + bias_up)
    y      = hidden @ weight_down^T + bias_down

x is (rows, in), the first weights are (hidden, in), weight_down is (out, hidden), y is (rows, out).

A program owns BLOCK_M rows. It keeps their tile of x and the fp32 tile of y, both at full width,
and walks over the hidden dimension in blocks: a block of ``hidden`` is computed in fp32, rounded to
the operands' dtype (as the unfused program does when it stores it) and multiplied at once into y.
in and out are padded to powers of two (BLOCK_IN, BLOCK_OUT) with zeros.
"""

from __future__ import annotations

import triton.language as tl

from fusion_backend.kernels.tiles import (
    add_bias,
    load_tile,
    multiply_add,
    store_tile,
    tile_offsets,
)

# Bound by specialize(): the activation as a device function of one or two fp32 tensors.
activation = None


def fusedmlp_back_to_back(
    x,
    weight_gate,
    bias_gate,
    weight_up,
    bias_up,
    weight_down,
    bias_down,
    y,
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
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """Blocks of weights stream through the chip once for each tile of rows; see the module."""
    whole_in: tl.constexpr = IN == BLOCK_IN
    whole_out: tl.constexpr = OUT == BLOCK_OUT
    whole_h: tl.constexpr = HIDDEN % BLOCK_H == 0
    m = tl.arange(0, BLOCK_M)
    h = tl.arange(0, BLOCK_H)
    k = tl.arange(0, BLOCK_IN)
    n = tl.arange(0, BLOCK_OUT)
    x_row_stride = x_row_units * X_ROW_UNIT
    gate_offsets = tile_offsets(k, GATE_COLUMN_STRIDE, h, GATE_ROW_STRIDE, WIDE)
    up_offsets = tile_offsets(k, UP_COLUMN_STRIDE, h, UP_ROW_STRIDE, WIDE)
    down_offsets = tile_offsets(h, DOWN_COLUMN_STRIDE, n, DOWN_ROW_STRIDE, WIDE)

    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.num_programs(0)):
        row_start = tile * BLOCK_M
        last_row = rows - row_start - 1
        x_start = x + row_start.to(tl.int64) * x_row_stride
        x_offsets = tile_offsets(tl.minimum(m, last_row), x_row_stride, k, X_COLUMN_STRIDE, WIDE)
        x_tile = load_tile(x_start + x_offsets, m, BLOCK_M, k, IN, True, whole_in)
        result = tl.zeros((BLOCK_M, BLOCK_OUT), tl.float32)
        gate_start = weight_gate
        up_start = weight_up
        down_start = weight_down
        for start in range(0, HIDDEN, BLOCK_H):
            up_tile = load_tile(up_start + up_offsets, k, IN, h, HIDDEN - start, whole_in, whole_h)
            up = tl.dot(x_tile, up_tile, input_precision=PRECISION)
            up = add_bias(up, bias_up, start + h, HIDDEN, whole_h)
            if weight_gate is None:
                hidden = activation(up)
            else:
                gate_tile = load_tile(
                    gate_start + gate_offsets, k, IN, h, HIDDEN - start, whole_in, whole_h
                )
                gate = tl.dot(x_tile, gate_tile, input_precision=PRECISION)
                gate = add_bias(gate, bias_gate, start + h, HIDDEN, whole_h)
                hidden = activation(gate, up)
                gate_start += BLOCK_H * GATE_ROW_STRIDE
            down_tile = load_tile(
                down_start + down_offsets, h, HIDDEN - start, n, OUT, whole_h, whole_out
            )
            result = multiply_add(result, hidden.to(x_tile.dtype), down_tile, PRECISION)
            up_start += BLOCK_H * UP_ROW_STRIDE
            down_start += BLOCK_H * DOWN_COLUMN_STRIDE
        result = add_bias(result, bias_down, n, OUT, whole_out)
        store_tile(y, result, row_start, rows, 0, OUT, whole_out, WIDE)
