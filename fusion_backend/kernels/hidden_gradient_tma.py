# mypy: ignore-errors
"""The hidden_gradient kernel by tensor descriptors; the mathematics is in ``hidden_gradient``."""

from __future__ import annotations

import triton.language as tl

from fusion_backend.kernels.tiles import column_parts, tile_coordinates
from fusion_backend.kernels.tma import describe_weight, described_products

# Bound by specialize(): (f, df/dup) of one fp32 tensor or (f, df/dgate, df/dup) of two.
activation_gradient: tl.constexpr


def fusedmlp_hidden_gradient_tma(
    grad_output,
    weight_down,
    preact_gate,
    preact_up,
    grad_gate,
    grad_up,
    postact,
    rows,
    grad_output_row_units,
    GRAD_OUTPUT_ROW_UNIT: tl.constexpr,
    DOWN_ROW_STRIDE: tl.constexpr,
    DOWN_COLUMN_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    OUT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PARTS: tl.constexpr,
    SPECIALIZE: tl.constexpr,
):
    PART_N: tl.constexpr = BLOCK_N // PARTS
    grad_output_tiles = tl.make_tensor_descriptor(
        grad_output,
        [rows, OUT],
        [grad_output_row_units * GRAD_OUTPUT_ROW_UNIT, 1],
        [BLOCK_M, BLOCK_K],
    )
    down_tiles = describe_weight(
        weight_down, OUT, HIDDEN, DOWN_ROW_STRIDE, DOWN_COLUMN_STRIDE, BLOCK_K, BLOCK_N
    )
    up_tiles = tl.make_tensor_descriptor(preact_up, [rows, HIDDEN], [HIDDEN, 1], [BLOCK_M, PART_N])
    grad_up_tiles = tl.make_tensor_descriptor(
        grad_up, [rows, HIDDEN], [HIDDEN, 1], [BLOCK_M, PART_N]
    )
    post_tiles = tl.make_tensor_descriptor(postact, [rows, HIDDEN], [HIDDEN, 1], [BLOCK_M, PART_N])
    if preact_gate is not None:
        gate_tiles = tl.make_tensor_descriptor(
            preact_gate, [rows, HIDDEN], [HIDDEN, 1], [BLOCK_M, PART_N]
        )
        grad_gate_tiles = tl.make_tensor_descriptor(
            grad_gate, [rows, HIDDEN], [HIDDEN, 1], [BLOCK_M, PART_N]
        )
    tiles = tl.cdiv(rows, BLOCK_M) * tl.cdiv(HIDDEN, BLOCK_N)
    for tile in tl.range(
        tl.program_id(0),
        tiles,
        tl.num_programs(0),
        flatten=not SPECIALIZE,
        warp_specialize=SPECIALIZE,
    ):
        row_start, column_start = tile_coordinates(tile, rows, HIDDEN, BLOCK_M, BLOCK_N, GROUP_M)
        _, grad_hidden = described_products(
            grad_output_tiles,
            None,
            down_tiles,
            row_start,
            column_start,
            OUT,
            0,
            DOWN_ROW_STRIDE,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            PRECISION,
        )
        parts = column_parts(grad_hidden, PARTS)
        for part in tl.static_range(PARTS):
            grad = parts[part]
            column = column_start + part * PART_N
            up = up_tiles.load([row_start, column]).to(tl.float32)
            if preact_gate is None:
                result, slope_up = activation_gradient(up)
            else:
                gate = gate_tiles.load([row_start, column]).to(tl.float32)
                result, slope_gate, slope_up = activation_gradient(gate, up)
                gradient_gate = (grad * slope_gate).to(grad_gate.dtype.element_ty)
                grad_gate_tiles.store([row_start, column], gradient_gate)
            gradient_up = (grad * slope_up).to(grad_up.dtype.element_ty)
            grad_up_tiles.store([row_start, column], gradient_up)
            post_tiles.store([row_start, column], result.to(postact.dtype.element_ty))
