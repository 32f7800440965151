# mypy: ignore-errors
"""What the weights' gradients of a narrow plain MLP are products of, from x, and the input's.

    preact      = x @ weight_up^T + bias_up                       (rows, hidden), recomputed
    postact     = f(preact)                                       (rows, hidden), stored
    grad_preact = (grad_output @ weight_down) * f'(preact)        (rows, hidden), stored

    grad_x      = grad_preact @ weight_up                         (rows, in)

It is for MLPs whose input and output fit on the chip, but not the sums that are the gradients of
the weights, as ``gradient_kernel`` wants them. Only x is saved. The weights' gradients are products
of what is stored. The biases' are sums over the rows of grad_preact and of grad_output: a program
stores those of its own rows as a row of ``sums``, in fp32, and another kernel adds these rows,
always in the same order. Sums of grad_preact are products with ones: matrix units add what lies in
many threads.

A program owns BLOCK_M rows. It keeps their tiles of x and grad_output, and the fp32 tile of grad_x,
all at full width, and walks over the hidden dimension in blocks. Each block of weight_up serves two
products.
"""

from __future__ import annotations

import triton.language as tl

from fusion_backend.kernels.device.tiles import (
    load_bias,
    load_tile,
    rounded,
    store_tile,
)

# Bound by specialize(): (f, df/dx) of an fp32 tensor.
activation_gradient = None

ONES = tl.constexpr(16)  # columns: the fewest that matrix units multiply


def fusedmlp_narrow_hidden_gradient(
    x,
    grad_output,
    weight_up,
    bias_up,
    weight_down,
    grad_x,
    grad_preact,
    postact,
    sums,
    rows,
    UP_ROW_STRIDE: tl.constexpr,
    UP_COLUMN_STRIDE: tl.constexpr,
    DOWN_ROW_STRIDE: tl.constexpr,
    DOWN_COLUMN_STRIDE: tl.constexpr,
    IN: tl.constexpr,
    HIDDEN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """Matrices of rows are contiguous; what is None is not computed."""
    whole_in: tl.constexpr = IN == BLOCK_IN
    whole_h: tl.constexpr = HIDDEN % BLOCK_H == 0
    whole_out: tl.constexpr = OUT == BLOCK_OUT
    m = tl.arange(0, BLOCK_M)
    i = tl.arange(0, BLOCK_IN)
    h = tl.arange(0, BLOCK_H)
    o = tl.arange(0, BLOCK_OUT)
    up_offsets = h[:, None] * UP_ROW_STRIDE + i[None, :] * UP_COLUMN_STRIDE
    down_offsets = o[:, None] * DOWN_ROW_STRIDE + h[None, :] * DOWN_COLUMN_STRIDE
    row_start = tl.program_id(0) * BLOCK_M
    row = row_start.to(tl.int64)
    # What lies beyond the last row is zero; what becomes of it is stored nowhere.
    x_offsets = m[:, None] * IN + i[None, :]
    x_tile = load_tile(x + row * IN + x_offsets, m, rows - row_start, i, IN, False, whole_in)
    out_offsets = m[:, None] * OUT + o[None, :]
    grad = load_tile(
        grad_output + row * OUT + out_offsets, m, rows - row_start, o, OUT, False, whole_out
    )
    inside = m[:, None] < rows - row_start
    ones = tl.full((BLOCK_M, ONES), 1.0, x_tile.dtype)
    if sums is not None:
        sums += tl.program_id(0).to(tl.int64) * (HIDDEN + OUT)
        tl.store(sums + HIDDEN + o, tl.sum(grad.to(tl.float32), 0), o < OUT)
    of_x = tl.zeros((BLOCK_M, BLOCK_IN), tl.float32)
    up_start = weight_up
    down_start = weight_down
    for start in range(0, HIDDEN, BLOCK_H):
        left = HIDDEN - start
        up = load_tile(up_start + up_offsets, h, left, i, IN, whole_h, whole_in)
        down = load_tile(down_start + down_offsets, o, OUT, h, left, whole_out, whole_h)
        preact = tl.dot(x_tile, tl.trans(up))
        if bias_up is not None:
            # Of `dot + bias` Triton makes a sum that starts from the bias, and first waits for it.
            preact = -(-preact - load_bias(bias_up, start + h, HIDDEN, whole_h))
        grad_hidden = tl.dot(grad, down)
        result, slope = activation_gradient(preact)
        of_preact = grad_hidden * slope
        if postact is not None:
            store_tile(postact, result, row_start, rows, start, HIDDEN, whole_h, False)
        narrow = rounded(of_preact, start, HIDDEN, whole_h, x)
        if grad_x is not None:
            of_x = tl.dot(narrow, up, of_x)
        if grad_preact is not None:
            store_tile(grad_preact, narrow, row_start, rows, start, HIDDEN, whole_h, False)
        if sums is not None:
            # Beyond the last row, f' of a bias may be infinite.
            existing = tl.where(inside, narrow, 0.0)
            columns = tl.dot(tl.trans(existing), ones)  # all alike
            tl.store(sums + start + h, tl.max(columns, 1), h < left)
        up_start += BLOCK_H * UP_ROW_STRIDE
        down_start += BLOCK_H * DOWN_COLUMN_STRIDE
    if grad_x is not None:
        store_tile(grad_x, of_x, row_start, rows, 0, IN, whole_in, False)
