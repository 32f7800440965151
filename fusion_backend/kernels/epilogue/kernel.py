# mypy: ignore-errors
"""First product(s) of an MLP, with the activation in the epilogue: one launch.

    gate    = x @ weight_gate^T + bias_gate          (rows, hidden), only when there is a gate
    up      = x @ weight_up^T + bias_up              (rows, hidden)
    postact = f(gate, up)  or  f(up)                 (rows, hidden)

x is (rows, in); the weights are (hidden, in). Products are accumulated and f is evaluated in fp32;
each result is rounded once, to its tensor's dtype. For training, the pre-activations gate and up
are stored too: they are all that the backward needs besides x and the weights.

A program owns one tile of postact. A gated pair is computed by one program, so that x is read once
and the gate and up tiles never leave registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusion_backend.kernels.device.tiles import (
    add_bias,
    column_parts,
    products,
    store_tile,
    tile_coordinates,
)

# Bound by specialize(): the activation as a device function of one or two fp32 tensors, of their
# place and of the operands p0 to p3, of which those that do not exist are None.
activation = None


def fusedmlp_epilogue(
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One tile of the results; a pre-activation that is None is not stored."""
    x_row_stride = x_row_units * X_ROW_UNIT
    row_start, column_start = tile_coordinates(
        tl.program_id(0), rows, HIDDEN, BLOCK_M, BLOCK_N, GROUP_M
    )
    gate, up = products(
        x,
        weight_gate,
        weight_up,
        row_start,
        column_start,
        rows,
        x_row_stride,
        IN,
        HIDDEN,
        X_COLUMN_STRIDE,
        GATE_ROW_STRIDE,
        GATE_COLUMN_STRIDE,
        UP_ROW_STRIDE,
        UP_COLUMN_STRIDE,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        WIDE,
        PRECISION,
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
        False,
        (p0, p1, p2, p3),
    )


@triton.jit
def store_results(
    activation: tl.constexpr,
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
    HIDDEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    WIDE: tl.constexpr,
    GATED: tl.constexpr,
    DESCRIBED: tl.constexpr,
    operands,
):
    """Finish a tile of products: biases, activation, stores; ``gate`` is read only if GATED.

    Results are pointers to contiguous matrices, or their tensor descriptors if DESCRIBED.

    It goes part by part: that needs fewer registers at a time, and less shared memory to bring the
    accumulators into the order of coalesced stores.
    """
    whole: tl.constexpr = HIDDEN % BLOCK_N == 0
    up_parts = column_parts(up, PARTS)
    if GATED:
        gate_parts = column_parts(gate, PARTS)
    for part in tl.static_range(PARTS):
        column = column_start + part * (BLOCK_N // PARTS)
        n = column + tl.arange(0, BLOCK_N // PARTS)
        up_part = add_bias(up_parts[part], bias_up, n, HIDDEN, whole)
        if not GATED:
            result = activation(up_part, (row_start, rows, column, HIDDEN, whole, WIDE), operands)
        else:
            gate_part = add_bias(gate_parts[part], bias_gate, n, HIDDEN, whole)
            result = activation(
                gate_part, up_part, (row_start, rows, column, HIDDEN, whole, WIDE), operands
            )
            if preact_gate is not None:
                store_tile(preact_gate, gate_part, row_start, rows, column, HIDDEN, whole, WIDE)
        if DESCRIBED:
            if preact_up is not None:
                preact_up.store([row_start, column], up_part.to(preact_up.dtype))
            postact.store([row_start, column], result.to(postact.dtype))
        else:
            if preact_up is not None:
                store_tile(preact_up, up_part, row_start, rows, column, HIDDEN, whole, WIDE)
            store_tile(postact, result, row_start, rows, column, HIDDEN, whole, WIDE)
