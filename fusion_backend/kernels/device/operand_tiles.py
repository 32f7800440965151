# mypy: ignore-errors
"""What activations have besides the projections: operands, their gradients, and bits of dropouts.

A kernel tells the device function of an activation where its tile lies, as the tuple
(first row, rows, first column, COLUMNS, WHOLE, WIDE), see ``tiles``. The tuple is written where the
function is called: what is constant in it would no longer be after an assignment.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusion_backend.kernels.device.tiles import load_bias, load_saved, store_tile


@triton.jit
def load_scalar(operand):
    """The only value of an operand in fp32."""
    return tl.load(operand).to(tl.float32)


@triton.jit
def load_vector(operand, place, N: tl.constexpr):
    """A value for each of N columns in fp32, as a row."""
    return load_bias(operand, place[2] + tl.arange(0, N), place[3], place[4])


@triton.jit
def load_elements(operand, place, M: tl.constexpr, N: tl.constexpr):
    """A value for each element of an (M, N) tile in fp32."""
    return load_saved(operand, place[0], place[1], place[2], place[3], M, N, place[4], place[5])


@triton.jit
def store_elements(gradient, tile, place):
    """Round a tile of an operand's gradient to its dtype, and store what lies inside."""
    store_tile(gradient, tile, place[0], place[1], place[2], place[3], place[4], place[5])


@triton.jit
def store_sums(gradient, tile, place):
    """Sum a tile over its rows, into a row of an fp32 matrix (blocks of rows, COLUMNS)."""
    m = tl.arange(0, tile.shape[0])
    n = tl.arange(0, tile.shape[1])
    sums = tl.sum(tl.where(m[:, None] < place[1] - place[0], tile, 0.0), 0)
    block = (place[0] // tile.shape[0]).to(tl.int64)
    pointers = gradient + block * place[3] + place[2] + n
    if place[4]:
        tl.store(pointers, sums)
    else:
        tl.store(pointers, sums, mask=n < place[3] - place[2])


@triton.jit
def random_bits(seed, place, M: tl.constexpr, N: tl.constexpr):
    """32 bits for each element of an (M, N) tile, of which the first column is a multiple of 4.

    They are word column % 4 of Philox's four for (column // 4, row).
    """
    row = (place[0] + tl.arange(0, M)).to(tl.uint32)[:, None]
    group = (place[2] // 4 + tl.arange(0, N // 4)).to(tl.uint32)[None, :]
    zero = tl.zeros((M, N // 4), tl.uint32)
    first, second, third, fourth = tl.philox(tl.load(seed), group + zero, row + zero, zero, zero)
    even, odd = tl.join(first, third), tl.join(second, fourth)
    return tl.reshape(tl.join(even, odd), (M, N))
