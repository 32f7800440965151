# mypy: ignore-errors
"""The epilogue kernel by tensor descriptors (see ``tma``); mathematics in ``epilogue``.

A program owns every num_programs-th tile: one where the grid has a program for each tile.

FLATTEN makes one loop of those over tiles and over blocks of a sum, so that the operands of the
next tile are loaded while this one is finished and stored. The accumulators are reset between the
two, and it is left to ptxas to wait until Hopper's matrix units have written them: the tests look
at its code. With two accumulators it does so by waiting for every product, hence not for gated
pairs. Warps of their own for loads (``warp_specialize`` of ``tl.range``) are no way out: with two
accumulators Triton 3.6 gives wrong numbers in every run.

Many rows of wide layers run ``epilogue_hopper`` in its place where nothing but bias and activation
comes after the product: there the matrix units go on during the activation.
"""

from __future__ import annotations

import triton.language as tl

from fusion_backend.kernels.device.tiles import tile_coordinates
from fusion_backend.kernels.device.tma import describe_weight, described_products
from fusion_backend.kernels.epilogue.kernel import store_results

# Bound by specialize(): the activation as a device function of one or two fp32 tensors, of their
# place and of the operands p0 to p3, of which those that do not exist are None.
activation = None


def fusedmlp_epilogue_tma(
    x,
    weight_gate,
    bias_gate,
    weight_up,
    bias_up,
    postact,
    preact_gate,
    preact_up,
    p0,
    p1,
    p2,
    p3,
    rows,
    X_ROW_STRIDE: tl.constexpr,
    GATE_ROW_STRIDE: tl.constexpr,
    GATE_COLUMN_STRIDE: tl.constexpr,
    UP_ROW_STRIDE: tl.constexpr,
    UP_COLUMN_STRIDE: tl.constexpr,
    IN: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PARTS: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """Tiles of the results; a pre-activation that is None is not stored."""
    x_tiles = tl.make_tensor_descriptor(x, [rows, IN], [X_ROW_STRIDE, 1], [BLOCK_M, BLOCK_K])
    up_tiles = describe_weight(
        weight_up, IN, HIDDEN, UP_ROW_STRIDE, UP_COLUMN_STRIDE, BLOCK_K, BLOCK_N
    )
    gate_tiles = up_tiles
    if weight_gate is not None:
        gate_tiles = describe_weight(
            weight_gate, IN, HIDDEN, GATE_ROW_STRIDE, GATE_COLUMN_STRIDE, BLOCK_K, BLOCK_N
        )
    tiles = tl.cdiv(rows, BLOCK_M) * tl.cdiv(HIDDEN, BLOCK_N)
    if FLATTEN:
        postact = tl.make_tensor_descriptor(
            postact, [rows, HIDDEN], [HIDDEN, 1], [BLOCK_M, BLOCK_N // PARTS]
        )
        if preact_up is not None:
            preact_up = tl.make_tensor_descriptor(
                preact_up, [rows, HIDDEN], [HIDDEN, 1], [BLOCK_M, BLOCK_N // PARTS]
            )
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
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
            weight_gate is not None,
        )
        store_results(
            activation,
            gate,
            bias_gate,
            up,
            bias_up,
            postact,
            preact_gate,
            preact_up,
            row_start,
            column_start,
            rows,
            HIDDEN,
            BLOCK_N,
            PARTS,
            WIDE,
            weight_gate is not None,
            FLATTEN,
            (p0, p1, p2, p3),
        )
