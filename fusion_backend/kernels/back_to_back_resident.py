# mypy: ignore-errors
"""The back_to_back kernel for weights that fit in shared memory; mathematics in ``back_to_back``.

A persistent program loads all weights once and then only streams rows: tiles of x come in through
the software pipeline, tiles of y go out. The loop over hidden blocks is unrolled, because the
blocks of the weights are separate allocations.
"""

from __future__ import annotations

import triton.language as tl

from fusion_backend.kernels.tiles import add_bias, load_tile, store_tile, tile_offsets

# Bound by specialize(): the activation as a device function of one or two fp32 tensors.
activation = None


def fusedmlp_back_to_back_resident(
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
    """Weights are loaded before the loop over tiles of rows; see the module."""
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
    gate_tiles = ()
    up_tiles = ()
    down_tiles = ()
    for start in tl.static_range(0, HIDDEN, BLOCK_H):
        if weight_gate is not None:
            gates = weight_gate + start * GATE_ROW_STRIDE + gate_offsets
            gate_tiles += (load_tile(gates, k, IN, h, HIDDEN - start, whole_in, whole_h),)
        ups = weight_up + start * UP_ROW_STRIDE + up_offsets
        up_tiles += (load_tile(ups, k, IN, h, HIDDEN - start, whole_in, whole_h),)
        downs = weight_down + start * DOWN_COLUMN_STRIDE + down_offsets
        down_tiles += (load_tile(downs, h, HIDDEN - start, n, OUT, whole_h, whole_out),)

    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.num_programs(0)):
        row_start = tile * BLOCK_M
        last_row = rows - row_start - 1
        x_start = x + row_start.to(tl.int64) * x_row_stride
        x_offsets = tile_offsets(tl.minimum(m, last_row), x_row_stride, k, X_COLUMN_STRIDE, WIDE)
        x_tile = load_tile(x_start + x_offsets, m, BLOCK_M, k, IN, True, whole_in)
        result = tl.zeros((BLOCK_M, BLOCK_OUT), tl.float32)
        for block in tl.static_range((HIDDEN + BLOCK_H - 1) // BLOCK_H):
            hidden_columns = block * BLOCK_H + h
            up = tl.dot(x_tile, up_tiles[block], input_precision=PRECISION)
            up = add_bias(up, bias_up, hidden_columns, HIDDEN, whole_h)
            if weight_gate is None:
                hidden = activation(up)
            else:
                gate = tl.dot(x_tile, gate_tiles[block], input_precision=PRECISION)
                gate = add_bias(gate, bias_gate, hidden_columns, HIDDEN, whole_h)
                hidden = activation(gate, up)
            result = tl.dot(
                hidden.to(x_tile.dtype), down_tiles[block], result, input_precision=PRECISION
            )
        result = add_bias(result, bias_down, n, OUT, whole_out)
        store_tile(y, result, row_start, rows, 0, OUT, whole_out, WIDE)
