# mypy: ignore-errors
"""Gradient of an MLP's pre-activations, with the activation recomputed: one launch of the backward.

    grad_hidden = grad_output @ weight_down                     (rows, hidden), never stored
    postact     = f(preact_gate, preact_up)  or  f(preact_up)   (rows, hidden)
    grad_gate   = grad_hidden * df/dgate                        (rows, hidden), only with a gate
    grad_up     = grad_hidden * df/dup                          (rows, hidden)

    grad_p      = grad_hidden * df/dp, for operands p of f      (rows, hidden)

grad_output is (rows, out), weight_down is (out, hidden), the pre-activations are contiguous
(rows, hidden). Everything between loads and stores is fp32. postact is what the gradient of
weight_down needs, grad_gate and grad_up are what all others need. The gradient of an operand that
is one value, or one a feature, is summed over the rows of each tile and stored so, as
(blocks of rows, hidden) in fp32: few values, whose sum is left to another kernel.

A program owns one tile of grad_hidden, as in the epilogue kernel: this is the same product with
grad_output in the place of x and weight_down^T in the place of weight_up.
"""

from __future__ import annotations

import triton.language as tl

from fusion_backend.kernels.device.tiles import (
    column_parts,
    load_saved,
    products,
    store_tile,
    tile_coordinates,
)

# Bound by specialize(): (f, df/dup) of one fp32 tensor or (f, df/dgate, df/dup) of two, of their
# place and of the operands p0 to p3, of which those that do not exist are None. It also stores the
# gradients of operands.
activation_gradient = None


def fusedmlp_hidden_gradient(
    grad_output,
    weight_down,
    preact_gate,
    preact_up,
    grad_gate,
    grad_up,
    postact,
    p0,
    p1,
    p2,
    p3,
    grad_p0,
    grad_p1,
    grad_p2,
    grad_p3,
    rows,
    grad_output_row_units,
    GRAD_OUTPUT_ROW_UNIT: tl.constexpr,
    GRAD_OUTPUT_COLUMN_STRIDE: tl.constexpr,
    DOWN_ROW_STRIDE: tl.constexpr,
    DOWN_COLUMN_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    OUT: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One tile of the results; without a gate, preact_gate and grad_gate are None."""
    row_start, column_start = tile_coordinates(
        tl.program_id(0), rows, HIDDEN, BLOCK_M, BLOCK_N, GROUP_M
    )
    _, grad_hidden = products(
        grad_output,
        None,
        weight_down,
        row_start,
        column_start,
        rows,
        grad_output_row_units * GRAD_OUTPUT_ROW_UNIT,
        OUT,
        HIDDEN,
        GRAD_OUTPUT_COLUMN_STRIDE,
        0,
        0,
        DOWN_COLUMN_STRIDE,
        DOWN_ROW_STRIDE,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        WIDE,
        PRECISION,
    )
    # The epilogue goes part by part: whole tiles of four fp32 values do not fit in the registers.
    whole: tl.constexpr = HIDDEN % BLOCK_N == 0
    part_n: tl.constexpr = BLOCK_N // PARTS
    parts = column_parts(grad_hidden, PARTS)
    for part in tl.static_range(PARTS):
        grad = parts[part]
        column = column_start + part * part_n
        up = load_saved(preact_up, row_start, rows, column, HIDDEN, BLOCK_M, part_n, whole, WIDE)
        if preact_gate is None:
            result, slope_up = activation_gradient(
                up,
                (row_start, rows, column, HIDDEN, whole, WIDE),
                (p0, p1, p2, p3),
                grad,
                (grad_p0, grad_p1, grad_p2, grad_p3),
            )
        else:
            gate = load_saved(
                preact_gate, row_start, rows, column, HIDDEN, BLOCK_M, part_n, whole, WIDE
            )
            result, slope_gate, slope_up = activation_gradient(
                gate,
                up,
                (row_start, rows, column, HIDDEN, whole, WIDE),
                (p0, p1, p2, p3),
                grad,
                (grad_p0, grad_p1, grad_p2, grad_p3),
            )
            store_tile(grad_gate, grad * slope_gate, row_start, rows, column, HIDDEN, whole, WIDE)
        store_tile(grad_up, grad * slope_up, row_start, rows, column, HIDDEN, whole, WIDE)
        store_tile(postact, result, row_start, rows, column, HIDDEN, whole, WIDE)
