# mypy: ignore-errors
# Each branch that is chosen at compile time must end in a return of its own.
# ruff: noqa: RET505
"""The epilogue kernel of gated MLPs for Hopper, with matrix units busy during the activation.

Mathematics in ``epilogue``. Triton waits for all products of a tile before it finishes it, and
for as long as that takes the matrix units of a program have nothing to do. Gluon, Triton's lower
level, leaves the waiting to the kernel.

A program owns every num_programs-th tile of 128 rows. A warp of its own loads the operands, by
tensor descriptors, into STAGES buffers. Two warpgroups each sum, finish and store half the rows.
They share the tiles of the weights, but do not wait for each other: while one finishes its half of
a tile, the other has the matrix units to itself, as far ahead or behind as there are buffers.

The two products of a gated pair are one, with columns of both weights side by side. Its columns
come in pieces of powers of two, as all tensors do: the 96 columns of a tile are 64 and 32.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Bound by specialize(): the activation as a device function of two fp32 tensors.
activation = None

GROUPS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # of a warpgroup
BUFFERS = gl.constexpr(2)  # for results, of each warpgroup


@gluon.jit
def tile_coordinates(tile, blocks_m, blocks_n, COLUMNS: gl.constexpr, GROUP_M: gl.constexpr):
    """As in ``tiles``: bands of GROUP_M block rows, column by column within a band."""
    band = tile // (GROUP_M * blocks_n)
    within = tile % (GROUP_M * blocks_n)
    height = gl.minimum(blocks_m - band * GROUP_M, GROUP_M)
    return (band * GROUP_M + within % height) * (GROUPS * ROWS), (within // height) * COLUMNS


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The buffer after this one, and the parity of its use."""
    stage += 1
    wraps = stage == STAGES
    return gl.where(wraps, 0, stage), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def stage_before(stage, STAGES: gl.constexpr):
    """The buffer before this one; a variable that keeps it, Triton would take for ``stage``."""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def load_weights(weight_gate, weight_up, column, inner, loaded, tile):
    """A piece of a tile's columns: those of the gate, and after them those of up."""
    BOX: gl.constexpr = weight_up.block_shape[0]
    WIDTH: gl.constexpr = tile.shape[0] // 2
    for start in gl.static_range(0, WIDTH, BOX):
        at = [column + start, inner]
        gate, up = tile.slice(start, BOX), tile.slice(WIDTH + start, BOX)
        tma.async_copy_global_to_shared(weight_gate, at, loaded, gate)
        tma.async_copy_global_to_shared(weight_up, at, loaded, up)


@gluon.jit
def load_tiles(
    arguments, IN: gl.constexpr, COLUMNS: gl.constexpr, PIECE: gl.constexpr, GROUP_M: gl.constexpr
):
    """The warp that loads: all blocks of a sum, tile after tile."""
    descriptors, x_tiles, weight_tiles, barriers, blocks_m, blocks_n = arguments
    x, weight_gate, weight_up = descriptors
    full, empty = barriers
    STAGES: gl.constexpr = x_tiles[0].shape[0]
    BLOCK_K: gl.constexpr = x_tiles[0].shape[2]
    ELEMENTS: gl.constexpr = (GROUPS * ROWS + 2 * COLUMNS) * BLOCK_K
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), blocks_m * blocks_n, gl.num_programs(0)):
        row, column = tile_coordinates(tile, blocks_m, blocks_n, COLUMNS, GROUP_M)
        for inner in range(0, IN, BLOCK_K):
            loaded = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(loaded, ELEMENTS * x.dtype.primitive_bitwidth // 8)
            for group in gl.static_range(GROUPS):
                x_tile = x_tiles[group].index(stage)
                tma.async_copy_global_to_shared(x, [row + group * ROWS, inner], loaded, x_tile)
            for piece in gl.static_range(len(weight_tiles)):
                weight_tile = weight_tiles[piece].index(stage)
                start = column + piece * PIECE
                load_weights(weight_gate, weight_up, start, inner, loaded, weight_tile)
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def accumulator(BLOCK_N: gl.constexpr):
    """What a warpgroup sums in; the first product replaces the zeros."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    return gl.zeros((ROWS, BLOCK_N), gl.float32, layout)


@gluon.jit
def wait_for_products(accs, BLOCKS: gl.constexpr):
    """Wait until no more than the products of the last BLOCKS blocks are under way."""
    if len(accs) == 1:
        return (warpgroup_mma_wait(BLOCKS, deps=[accs[0]]),)
    else:
        return warpgroup_mma_wait(2 * BLOCKS, deps=[accs[0], accs[1]])


@gluon.jit
def column_parts(value, COUNT: gl.constexpr):
    """A tensor's columns in parts side by side."""
    parts = (value,)
    for _ in gl.static_range(COUNT.bit_length() - 1):
        halves = ()
        for index in gl.static_range(len(parts)):
            part = parts[index]
            pair = part.reshape(part.shape[0], 2, part.shape[1] // 2)
            halves += pair.permute(0, 2, 1).split()
        parts = halves
    return parts


@gluon.jit
def add_bias(value, bias, column, HIDDEN: gl.constexpr):
    """``value + bias[column:]``, with zeros beyond the last; value without a bias."""
    if bias is None:
        return value
    else:
        COLUMNS: gl.constexpr = value.shape[1]
        layout: gl.constexpr = gl.SliceLayout(0, value.type.layout)
        n = column + gl.arange(0, COLUMNS, layout)
        if HIDDEN % COLUMNS == 0:
            loaded = gl.load(bias + n)
        else:
            loaded = gl.load(bias + n, mask=n < HIDDEN, other=0.0)
        return value + loaded.to(gl.float32)[None, :]


@gluon.jit
def finish(activation: gl.constexpr, acc, biases, postact, results, row, column, HIDDEN):
    """Biases, activation and stores of a piece of a tile's columns."""
    bias_gate, bias_up = biases
    STORED: gl.constexpr = results.shape[2]
    COUNT: gl.constexpr = acc.shape[1] // 2 // STORED
    gate, up = column_parts(acc, 2)
    gates, ups = column_parts(gate, COUNT), column_parts(up, COUNT)
    for part in gl.static_range(COUNT):
        start = column + part * STORED
        gate = add_bias(gates[part], bias_gate, start, HIDDEN)
        up = add_bias(ups[part], bias_up, start, HIDDEN)
        buffer = results.index(part % BUFFERS)
        result = activation(gate, up).to(postact.dtype)
        tma.store_wait(BUFFERS - 1)
        buffer.store(result)
        fence_async_shared()
        tma.async_copy_shared_to_global(postact, [row, start], buffer)


@gluon.jit
def sum_tiles(
    activation: gl.constexpr,
    arguments,
    GROUP: gl.constexpr,
    IN: gl.constexpr,
    HIDDEN: gl.constexpr,
    COLUMNS: gl.constexpr,
    PIECE: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """A warpgroup that sums, finishes and stores 64 rows of tiles."""
    postact, biases, x_tiles, weight_tiles, results, barriers, blocks_m, blocks_n = arguments
    full, empty = barriers
    STAGES: gl.constexpr = x_tiles.shape[0]
    BLOCK_K: gl.constexpr = x_tiles.shape[2]
    PIECES: gl.constexpr = len(weight_tiles)
    accs = ()
    for piece in gl.static_range(PIECES):
        accs += (accumulator(weight_tiles[piece].shape[1]),)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), blocks_m * blocks_n, gl.num_programs(0)):
        row, column = tile_coordinates(tile, blocks_m, blocks_n, COLUMNS, GROUP_M)
        row += GROUP * ROWS
        for inner in range(0, IN, BLOCK_K):
            mbarrier.wait(full.index(stage), phase)
            x = x_tiles.index(stage)
            sums = ()
            for piece in gl.static_range(PIECES):
                weight = weight_tiles[piece].index(stage).permute((1, 0))
                acc = accs[piece]
                sums += (warpgroup_mma(x, weight, acc, is_async=True, use_acc=inner > 0),)
            accs = wait_for_products(sums, 1)
            mbarrier.arrive(empty.index(stage_before(stage, STAGES)), pred=inner > 0)
            stage, phase = next_stage(stage, phase, STAGES)
        accs = wait_for_products(accs, 0)
        mbarrier.arrive(empty.index(stage_before(stage, STAGES)))
        for piece in gl.static_range(PIECES):
            start = column + piece * PIECE
            finish(activation, accs[piece], biases, postact, results, row, start, HIDDEN)
    tma.store_wait(0)


def fusedmlp_epilogue_hopper(
    x,
    weight_gate,
    bias_gate,
    weight_up,
    bias_up,
    postact,
    rows,
    IN: gl.constexpr,
    HIDDEN: gl.constexpr,
    COLUMNS: gl.constexpr,
    PIECE: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Tiles of postact. x, the weights and postact are tensor descriptors."""
    dtype: gl.constexpr = x.dtype
    x_tiles = ()
    results = ()
    x_shape: gl.constexpr = [STAGES, ROWS, BLOCK_K]
    result_shape: gl.constexpr = [BUFFERS, ROWS, postact.block_shape[1]]
    for _ in gl.static_range(GROUPS):
        x_tiles += (gl.allocate_shared_memory(dtype, x_shape, x.layout),)
        results += (gl.allocate_shared_memory(dtype, result_shape, postact.layout),)
    weight_shape: gl.constexpr = [STAGES, 2 * PIECE, BLOCK_K]
    weight_tiles = (gl.allocate_shared_memory(dtype, weight_shape, weight_up.layout),)
    if PIECE < COLUMNS:
        rest_shape: gl.constexpr = [STAGES, 2 * (COLUMNS - PIECE), BLOCK_K]
        weight_tiles += (gl.allocate_shared_memory(dtype, rest_shape, weight_up.layout),)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    fence_async_shared()
    blocks_m = gl.cdiv(rows, GROUPS * ROWS)
    blocks_n: gl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    function: gl.constexpr = activation  # a function is no argument of a partition by itself
    barriers = (full, empty)
    biases = (bias_gate, bias_up)
    upper = (postact, biases, x_tiles[0], weight_tiles, results[0], barriers, blocks_m, blocks_n)
    lower = (postact, biases, x_tiles[1], weight_tiles, results[1], barriers, blocks_m, blocks_n)
    descriptors = (x, weight_gate, weight_up)
    loaded = (descriptors, x_tiles, weight_tiles, barriers, blocks_m, blocks_n)
    gl.warp_specialize(
        [
            (sum_tiles, (function, upper, 0, IN, HIDDEN, COLUMNS, PIECE, GROUP_M)),
            (sum_tiles, (function, lower, 1, IN, HIDDEN, COLUMNS, PIECE, GROUP_M)),
            (load_tiles, (loaded, IN, COLUMNS, PIECE, GROUP_M)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
