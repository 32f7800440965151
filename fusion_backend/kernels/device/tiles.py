# mypy: ignore-errors
# Each branch that is chosen at compile time must end in a return of its own.
# ruff: noqa: RET505
"""Tiles of a matrix product: what the two-launch kernels share.

A program owns one tile of the result, BLOCK_M rows by BLOCK_N columns, and accumulates it in fp32
over blocks of BLOCK_K:

    gate = x @ weight_gate^T      (when there is a gate: it shares every tile of x with `up`)
    up   = x @ weight_up^T

Addresses have a 64-bit scalar part (where the tile starts) and a 32-bit tensor part (where an
element lies within the tile), because 64-bit tensors would double the registers addresses take. The
tensor part is 64 bits wide only where a stride is so large that 32 bits could overflow (WIDE).

Rows beyond the last are not masked: they load others of their tile, and the store drops them.
Columns are masked only where a width is no multiple of its block. Widths are compile-time
constants, so a symbolic number of rows costs nothing here.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_coordinates(
    tile,
    rows,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """First row and first column of a tile.

    Tiles are taken in bands of GROUP_M block rows, column by column within a band, so that the
    programs that run at one time cover a roughly square part of the result: they read few distinct
    tiles of x and of the weights, which therefore stay in the L2 cache.
    """
    blocks_m = tl.cdiv(rows, BLOCK_M)
    blocks_n = tl.cdiv(COLUMNS, BLOCK_N)
    band = tile // (GROUP_M * blocks_n)
    within = tile % (GROUP_M * blocks_n)
    height = tl.minimum(blocks_m - band * GROUP_M, GROUP_M)
    return (band * GROUP_M + within % height) * BLOCK_M, (within // height) * BLOCK_N


@triton.jit
def tile_offsets(first, first_stride, second, second_stride, WIDE: tl.constexpr):
    """Offsets of the elements of a tile from its start, in elements."""
    if WIDE:
        first = first.to(tl.int64)
        second = second.to(tl.int64)
    return first[:, None] * first_stride + second[None, :] * second_stride


@triton.jit
def rows_to_load(m, left):
    """Which rows of a matrix a tile of rows ``m`` loads, if so many are left from its first on.

    Those that are not there load others that are, each another: where all load the last one, all
    programs wait for each other at one place of the L2 cache, at every step of a sum.
    """
    return m % tl.minimum(left, m.shape[0])


@triton.jit
def load_tile(
    pointers,
    first,
    FIRST_END,
    second,
    SECOND_END,
    FIRST_WHOLE: tl.constexpr,
    SECOND_WHOLE: tl.constexpr,
):
    """Load a tile, with zeros where an index reaches its end; a WHOLE dimension never does."""
    if FIRST_WHOLE and SECOND_WHOLE:
        return tl.load(pointers)
    elif FIRST_WHOLE:
        return tl.load(pointers, mask=second[None, :] < SECOND_END, other=0.0)
    elif SECOND_WHOLE:
        return tl.load(pointers, mask=first[:, None] < FIRST_END, other=0.0)
    else:
        valid = (first[:, None] < FIRST_END) & (second[None, :] < SECOND_END)
        return tl.load(pointers, mask=valid, other=0.0)


@triton.jit
def load_bias(bias, columns, COLUMNS: tl.constexpr, WHOLE: tl.constexpr):
    """bias[columns] in fp32, as a row."""
    if WHOLE:
        values = tl.load(bias + columns)
    else:
        values = tl.load(bias + columns, mask=columns < COLUMNS, other=0.0)
    return values.to(tl.float32)[None, :]


@triton.jit
def add_bias(tile, bias, columns, COLUMNS: tl.constexpr, WHOLE: tl.constexpr):
    """Add bias[columns] to every row of an fp32 tile; no bias is None."""
    if bias is not None:
        tile += load_bias(bias, columns, COLUMNS, WHOLE)
    return tile


@triton.jit
def saved_pointers(
    matrix, row_start, column_start, COLUMNS: tl.constexpr, m, n, WIDE: tl.constexpr
):
    """Addresses of a tile of a contiguous matrix of COLUMNS columns."""
    matrix += row_start.to(tl.int64) * COLUMNS + column_start
    return matrix + tile_offsets(m, COLUMNS, n, 1, WIDE)


@triton.jit
def load_saved(
    matrix,
    row_start,
    rows,
    column_start,
    COLUMNS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The (M, N) tile of a contiguous (rows, COLUMNS) matrix in fp32, zero outside of it."""
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    pointers = saved_pointers(matrix, row_start, column_start, COLUMNS, m, n, WIDE)
    tile = load_tile(pointers, m, rows - row_start, n, COLUMNS - column_start, False, WHOLE)
    return tile.to(tl.float32)


@triton.jit
def store_tile(
    matrix,
    tile,
    row_start,
    rows,
    column_start,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Round a tile to the dtype of a contiguous (rows, COLUMNS) matrix; store what lies inside."""
    m = tl.arange(0, tile.shape[0])
    n = tl.arange(0, tile.shape[1])
    valid = m[:, None] < rows - row_start
    if not WHOLE:
        valid = valid & (n[None, :] < COLUMNS - column_start)
    pointers = saved_pointers(matrix, row_start, column_start, COLUMNS, m, n, WIDE)
    tl.store(pointers, tile.to(matrix.dtype.element_ty), mask=valid)


@triton.jit
def multiply_biased(
    value,
    tile,
    bias,
    columns,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    LATE_BIAS: tl.constexpr,
):
    """The fp32 sum value @ tile + bias[columns].

    Of `dot + bias` Triton makes a sum that starts from the bias, and first waits for it. With
    LATE_BIAS the two signs prevent that, and a pipelined loop loads it ahead.
    """
    value = as_operand(value, PRECISION)
    tile = as_operand(tile, PRECISION)
    product = tl.dot(value, tile, input_precision=PRECISION)
    if bias is None:
        return product
    else:
        values = load_bias(bias, columns, COLUMNS, WHOLE)
        return -(-product - values) if LATE_BIAS else product + values


@triton.jit
def rounded(postact, start, OUT: tl.constexpr, WHOLE: tl.constexpr, like):
    """A hidden value as the next layer's operand: what pads it is zero, whatever f(0) is."""
    if not WHOLE:
        columns = start + tl.arange(0, postact.shape[1])
        postact = tl.where(columns[None, :] < OUT, postact, 0.0)
    return postact.to(like.dtype.element_ty)


@triton.jit
def multiply_add(total, a, b, PRECISION: tl.constexpr):
    """The sum total + a @ b, one step of a sum over blocks.

    Tensor cores accumulate in their own way. IEEE fp32 products are chains of multiply-adds, whose
    error grows with their length: each block is summed by itself, as cuBLAS splits its sums. Triton
    would make one chain of `total + dot`, hence the two signs.
    """
    if PRECISION == "ieee" and a.dtype == tl.float32:
        return -(-total - tl.dot(a, b, input_precision=PRECISION))
    else:
        a = as_operand(a, PRECISION)
        b = as_operand(b, PRECISION)
        return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def as_operand(tile, PRECISION: tl.constexpr):
    """A tile as the matrix unit takes it: in tf32 rounded, where the unit itself would truncate.

    cuBLAS rounds. Truncation doubles the error and gives it a sign, so that it adds up in sums.
    """
    if PRECISION == "tf32" and tile.dtype == tl.float32:
        bits = tl.inline_asm_elementwise(
            "cvt.rna.tf32.f32 $0, $1;", "=r,f", [tile], dtype=tl.int32, is_pure=True, pack=1
        )
        return bits.to(tl.float32, bitcast=True)
    else:
        return tile


@triton.jit
def halves(tile):
    """The left and the right half of a tile's columns."""
    pairs = tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2))
    return tl.split(tl.permute(pairs, (0, 2, 1)))


@triton.jit
def column_parts(tile, PARTS: tl.constexpr):
    """A tile cut into 1, 2 or 4 tiles side by side, without moving data between threads."""
    if PARTS == 1:
        return (tile,)
    else:
        left, right = halves(tile)
        if PARTS == 2:
            return left, right
        else:
            tl.static_assert(PARTS == 4, "a tile is cut into 1, 2 or 4 parts")
            first, second = halves(left)
            third, fourth = halves(right)
            return first, second, third, fourth


@triton.jit
def products(
    x,
    weight_gate,
    weight_up,
    row_start,
    column_start,
    rows,
    x_row_stride,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    X_COLUMN_STRIDE: tl.constexpr,
    GATE_ROW_STRIDE: tl.constexpr,
    GATE_COLUMN_STRIDE: tl.constexpr,
    UP_ROW_STRIDE: tl.constexpr,
    UP_COLUMN_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The fp32 tiles (gate, up) that start at row_start, column_start; without a gate, (up, up)."""
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    WHOLE_K: tl.constexpr = INNER % BLOCK_K == 0
    WHOLE_N: tl.constexpr = COLUMNS % BLOCK_N == 0
    n_end = COLUMNS - column_start
    x += row_start.to(tl.int64) * x_row_stride
    loaded = rows_to_load(m, rows - row_start)
    x_offsets = tile_offsets(loaded, x_row_stride, k, X_COLUMN_STRIDE, WIDE)
    weight_up += column_start.to(tl.int64) * UP_ROW_STRIDE
    up_offsets = tile_offsets(k, UP_COLUMN_STRIDE, n, UP_ROW_STRIDE, WIDE)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if weight_gate is not None:
        weight_gate += column_start.to(tl.int64) * GATE_ROW_STRIDE
        gate_offsets = tile_offsets(k, GATE_COLUMN_STRIDE, n, GATE_ROW_STRIDE, WIDE)
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, INNER, BLOCK_K):
        k_end = INNER - start
        x_tile = load_tile(x + x_offsets, m, BLOCK_M, k, k_end, True, WHOLE_K)
        if weight_gate is not None:
            gate_tile = load_tile(weight_gate + gate_offsets, k, k_end, n, n_end, WHOLE_K, WHOLE_N)
            gate = multiply_add(gate, x_tile, gate_tile, PRECISION)
            weight_gate += BLOCK_K * GATE_COLUMN_STRIDE
        up_tile = load_tile(weight_up + up_offsets, k, k_end, n, n_end, WHOLE_K, WHOLE_N)
        up = multiply_add(up, x_tile, up_tile, PRECISION)
        x += BLOCK_K * X_COLUMN_STRIDE
        weight_up += BLOCK_K * UP_COLUMN_STRIDE
    if weight_gate is None:
        return up, up
    else:
        return gate, up
