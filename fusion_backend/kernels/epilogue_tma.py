# mypy: ignore-errors
"""The epilogue kernel by tensor descriptors, for GPUs with TMA; the mathematics is in ``epilogue``."""

from __future__ import annotations

import triton.language as tl

from fusion_backend.kernels.tiles import add_bias, column_parts, tile_coordinates
from fusion_backend.kernels.tma import describe_weight, described_products

# Bound by specialize(): the activation as a device function of one or two fp32 tensors.
activation: tl.constexpr


def fusedmlp_epilogue_tma(
    x,
    weight_gate,
    bias_gate,
    weight_up,
    bias_up,
    postact,
    preact_gate,
    preact_up,
    rows,
    x_row_units,
    X_ROW_UNIT: tl.constexpr,
    GATE_ROW_STRIDE: tl.constexpr,
    GATE_COLUMN_STRIDE: tl.constexpr,
    UP_ROW_STRIDE: tl.constexpr,
    UP_COLUMN_STRIDE: tl.constexpr,
    IN: tl.constexpr,
    HIDDEN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PARTS: tl.constexpr,
    SPECIALIZE: tl.constexpr,
):
    whole: tl.constexpr = HIDDEN % BLOCK_N == 0
    PART_N: tl.constexpr = BLOCK_N // PARTS
    x_tiles = tl.make_tensor_descriptor(
        x, [rows, IN], [x_row_units * X_ROW_UNIT, 1], [BLOCK_M, BLOCK_K]
    )
    up_tiles = describe_weight(
        weight_up, IN, HIDDEN, UP_COLUMN_STRIDE, UP_ROW_STRIDE, BLOCK_K, BLOCK_N
    )
    post_tiles = tl.make_tensor_descriptor(postact, [rows, HIDDEN], [HIDDEN, 1], [BLOCK_M, PART_N])
    if weight_gate is None:
        gate_tiles = None
    else:
        gate_tiles = describe_weight(
            weight_gate, IN, HIDDEN, GATE_COLUMN_STRIDE, GATE_ROW_STRIDE, BLOCK_K, BLOCK_N
        )
    if preact_gate is not None:
        preact_gate_tiles = tl.make_tensor_descriptor(
            preact_gate, [rows, HIDDEN], [HIDDEN, 1], [BLOCK_M, PART_N]
        )
    if preact_up is not None:
        preact_up_tiles = tl.make_tensor_descriptor(
            preact_up, [rows, HIDDEN], [HIDDEN, 1], [BLOCK_M, PART_N]
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
        gate, up = described_products(
            x_tiles,
            gate_tiles,
            up_tiles,
            row_start,
            column_start,
            IN,
            GATE_COLUMN_STRIDE,
            UP_COLUMN_STRIDE,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            PRECISION,
        )
        gate_parts = column_parts(gate, PARTS)
        up_parts = column_parts(up, PARTS)
        for part in tl.static_range(PARTS):
            column = column_start + part * PART_N
            n = column + tl.arange(0, PART_N)
            up = add_bias(up_parts[part], bias_up, n, HIDDEN, whole)
            if weight_gate is None:
                result = activation(up)
            else:
                gate = add_bias(gate_parts[part], bias_gate, n, HIDDEN, whole)
                result = activation(gate, up)
                if preact_gate is not None:
                    preact_gate_tiles.store([row_start, column], gate.to(x.dtype.element_ty))
            if preact_up is not None:
                preact_up_tiles.store([row_start, column], up.to(x.dtype.element_ty))
            post_tiles.store([row_start, column], result.to(x.dtype.element_ty))
