# mypy: ignore-errors
"""The backward pass of a narrow plain MLP in one launch: nothing hidden is read or written.

    preact      = x @ weight_up^T + bias_up                       (rows, hidden), recomputed
    grad_preact = (grad_output @ weight_down) * f'(preact)        (rows, hidden)

    grad_x           = grad_preact @ weight_up                    (rows, in)
    grad_weight_up   = grad_preact^T @ x                          (hidden, in)
    grad_weight_down = grad_output^T @ f(preact)                  (out, hidden)
    grad_bias_up, grad_bias_down: sums over the rows of grad_preact and grad_output

Only x is saved. A program owns every num_programs-th block of rows, and keeps its sums of the
gradients of weights and biases in registers; at its end it stores them as a row of ``sums``, in
fp32 and in the order of the last two lines: weights up and down, biases up and down. These rows are
added by another kernel, always in the same order.

What is hidden is computed transposed, (hidden, rows): so products hand it on in registers.
"""

from __future__ import annotations

import triton.language as tl

# Bound by specialize(): (f, df/dx) of an fp32 tensor.
activation_gradient = None


def fusedmlp_narrow_gradient(
    x,
    grad_output,
    weight_up,
    bias_up,
    weight_down,
    grad_x,
    sums,
    rows,
    IN: tl.constexpr,
    HIDDEN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """All matrices are contiguous; blocks are powers of two, no narrower than the widths."""
    i = tl.arange(0, BLOCK_IN)
    h = tl.arange(0, BLOCK_H)
    o = tl.arange(0, BLOCK_OUT)
    in_hidden = h < HIDDEN
    up_offsets = h[:, None] * IN + i[None, :]
    up_mask = in_hidden[:, None] & (i < IN)[None, :]
    # As (hidden, out), the transpose of what is stored.
    down_offsets = o[None, :] * HIDDEN + h[:, None]
    down_mask = in_hidden[:, None] & (o < OUT)[None, :]
    up = tl.load(weight_up + up_offsets, up_mask, 0.0)
    down = tl.load(weight_down + down_offsets, down_mask, 0.0)
    of_up = tl.zeros((BLOCK_H, BLOCK_IN), tl.float32)
    of_down = tl.zeros((BLOCK_H, BLOCK_OUT), tl.float32)
    of_bias_up = tl.zeros((BLOCK_H,), tl.float32)
    of_bias_down = tl.zeros((BLOCK_OUT,), tl.float32)
    bias = tl.zeros((BLOCK_H,), tl.float32)
    if bias_up is not None:
        bias = tl.load(bias_up + h, in_hidden, 0.0).to(tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.num_programs(0)):
        m = block * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = m < rows
        wide = m.to(tl.int64)[:, None]
        x_mask = inside[:, None] & (i < IN)[None, :]
        x_tile = tl.load(x + wide * IN + i[None, :], x_mask, 0.0)
        out_mask = inside[:, None] & (o < OUT)[None, :]
        grad = tl.load(grad_output + wide * OUT + o[None, :], out_mask, 0.0)
        preact = tl.dot(up, tl.trans(x_tile)) + bias[:, None]
        grad_hidden = tl.dot(down, tl.trans(grad))
        result, slope = activation_gradient(preact)
        # Rows and features beyond the last add nothing, even where f or f' of a bias is infinite.
        exists = inside[None, :]
        if HIDDEN < BLOCK_H:
            exists &= in_hidden[:, None]
        grad_preact = tl.where(exists, grad_hidden * slope, 0.0)
        postact = tl.where(exists, result, 0.0).to(x_tile.dtype)
        rounded = grad_preact.to(x_tile.dtype)
        of_up = tl.dot(rounded, x_tile, of_up)
        of_down = tl.dot(postact, grad, of_down)
        if bias_up is not None:
            of_bias_up += tl.sum(grad_preact, 1)
        of_bias_down += tl.sum(grad.to(tl.float32), 0)
        if grad_x is not None:
            of_x = tl.dot(tl.trans(rounded), up)
            tl.store(grad_x + wide * IN + i[None, :], of_x.to(x_tile.dtype), x_mask)
    WIDTH: tl.constexpr = HIDDEN * (IN + OUT + 1) + OUT
    row = sums + tl.program_id(0).to(tl.int64) * WIDTH
    tl.store(row + up_offsets, of_up, up_mask)
    row += HIDDEN * IN
    tl.store(row + down_offsets, of_down, down_mask)
    row += HIDDEN * OUT
    tl.store(row + h, of_bias_up, in_hidden)
    tl.store(row + HIDDEN + o, of_bias_down, o < OUT)
