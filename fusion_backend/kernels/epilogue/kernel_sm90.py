# mypy: ignore-errors
# Each branch that is chosen at compile time must end in a return of its own.
# ruff: noqa: RET505
"""The epilogue kernel for Hopper, with matrix units busy during the activation.

Mathematics in ``epilogue``. Triton waits for all products of a tile before it finishes it, and
for as long as that takes the matrix units of a program have nothing to do. Gluon, Triton's lower
level, leaves the waiting to the kernel.

A program owns every num_programs-th tile. A warp of its own loads the operands, by tensor
descriptors, into STAGES buffers. Two warpgroups take turns: each sums every other tile of the
program, and finishes and stores it while the other has the matrix units to itself.

A turn is more than an order of products. A wait for a buffer knows its odd uses from its even ones,
and no more: a warpgroup that waited for its own use while the one two before was under way would be
let through. Its turn comes when the other has seen the last of its buffers filled.

(Where they share each tile, half of its rows each, they finish at the same time. On an H200 that
took 140 us for 16384x768x3072 with GELU, where turns take 128 and cuBLAS's bare product 133.)

The two products of a gated pair are one, with columns of both weights side by side. Rows and
columns come in pieces of powers of two, as all tensors do: 192 rows are three times 64, 192 columns
128 and 64. A weight that is the transpose of a contiguous matrix, as GPT-2 has them, is read as it
is, in tiles whose columns are one piece. Of such there can be two, for the two halves of x's
columns, which may be two matrices, too: so the gradients of a gated pair's pre-activations become
that of its input.
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Bound by specialize(): the activation as a device function of one or two fp32 tensors.
activation = None

GROUPS = gl.constexpr(2)
BUFFERS = gl.constexpr(2)  # for results, of each warpgroup


@gluon.jit
def tile_coordinates(
    tile,
    blocks_m,
    blocks_n,
    BLOCK_M: gl.constexpr,
    COLUMNS: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """As in ``tiles``: bands of GROUP_M block rows, column by column within a band."""
    band = tile // (GROUP_M * blocks_n)
    within = tile % (GROUP_M * blocks_n)
    height = gl.minimum(blocks_m - band * GROUP_M, GROUP_M)
    return (band * GROUP_M + within % height) * BLOCK_M, (within // height) * COLUMNS


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The buffer after this one, and the parity of its use."""
    stage += 1
    wraps = stage == STAGES
    return gl.where(wraps, 0, stage), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def stage_after(BLOCKS: gl.constexpr, stage, phase, STAGES: gl.constexpr):
    """The buffer after BLOCKS that the other warpgroup uses, and the parity of its use."""
    stage += BLOCKS
    return stage % STAGES, phase ^ (stage // STAGES & 1)


@gluon.jit
def stage_before(stage, STAGES: gl.constexpr):
    """The buffer before this one; a variable that keeps it, Triton would take for ``stage``."""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def load_weights(
    weight_gate,
    weight_up,
    column,
    inner,
    loaded,
    tile,
    IN: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    """A piece of a tile's columns: those of the gate, if there is one, and then those of up.

    Transposed, they are beside each other along the other side, that of the sum.
    """
    if TRANSPOSED:
        if weight_gate is None:
            tma.async_copy_global_to_shared(weight_up, [inner, column], loaded, tile)
        else:
            HALF: gl.constexpr = IN // 2
            of_gate = inner < HALF
            at = [inner, column]
            tma.async_copy_global_to_shared(weight_gate, at, loaded, tile, pred=of_gate)
            at = [inner - HALF, column]
            tma.async_copy_global_to_shared(weight_up, at, loaded, tile, pred=inner >= HALF)
    else:
        BOX: gl.constexpr = weight_up.block_shape[0]
        GATE: gl.constexpr = 0 if weight_gate is None else tile.shape[0] // 2
        for start in gl.static_range(0, tile.shape[0] - GATE, BOX):
            at = [column + start, inner]
            if weight_gate is not None:
                gate = tile.slice(start, BOX)
                tma.async_copy_global_to_shared(weight_gate, at, loaded, gate)
            up = tile.slice(GATE + start, BOX)
            tma.async_copy_global_to_shared(weight_up, at, loaded, up)


@gluon.jit
def load_rows(x, x_second, row, inner, loaded, tiles, stage, IN: gl.constexpr):
    """A piece of a tile's rows; the second half of the columns from x_second, if there is one."""
    tile = tiles.index(stage)
    if x_second is None:
        tma.async_copy_global_to_shared(x, [row, inner], loaded, tile)
    else:
        HALF: gl.constexpr = IN // 2
        tma.async_copy_global_to_shared(x, [row, inner], loaded, tile, pred=inner < HALF)
        at = [row, inner - HALF]
        tma.async_copy_global_to_shared(x_second, at, loaded, tile, pred=inner >= HALF)


@gluon.jit
def load_tiles(
    arguments,
    IN: gl.constexpr,
    COLUMNS: gl.constexpr,
    PIECE: gl.constexpr,
    GROUP_M: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    """The warp that loads: all blocks of a sum, tile after tile."""
    descriptors, x_tiles, weight_tiles, barriers, blocks_m, blocks_n = arguments
    x, x_second, weight_gate, weight_up = descriptors
    full, empty, _ = barriers
    STAGES: gl.constexpr = x_tiles[0].shape[0]
    ROWS: gl.constexpr = x_tiles[0].shape[1]
    BLOCK_M: gl.constexpr = len(x_tiles) * ROWS
    BLOCK_K: gl.constexpr = x_tiles[0].shape[2]
    PRODUCTS: gl.constexpr = 1 if weight_gate is None or TRANSPOSED else 2
    ELEMENTS: gl.constexpr = (BLOCK_M + PRODUCTS * COLUMNS) * BLOCK_K
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), blocks_m * blocks_n, gl.num_programs(0)):
        row, column = tile_coordinates(tile, blocks_m, blocks_n, BLOCK_M, COLUMNS, GROUP_M)
        for inner in range(0, IN, BLOCK_K):
            loaded = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(loaded, ELEMENTS * x.dtype.primitive_bitwidth // 8)
            for piece in gl.static_range(len(x_tiles)):
                load_rows(x, x_second, row + piece * ROWS, inner, loaded, x_tiles[piece], stage, IN)
            for piece in gl.static_range(len(weight_tiles)):
                weight_tile = weight_tiles[piece].index(stage)
                start = column + piece * PIECE
                load_weights(
                    weight_gate, weight_up, start, inner, loaded, weight_tile, IN, TRANSPOSED
                )
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def accumulator(BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """What a warpgroup sums in; the first product replaces the zeros."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    return gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout)


@gluon.jit
def wait_for_products(accs, BLOCKS: gl.constexpr):
    """Wait until no more than the products of the last BLOCKS blocks are under way."""
    if len(accs) == 1:
        return (warpgroup_mma_wait(BLOCKS, deps=[accs[0]]),)
    elif len(accs) == 2:
        return warpgroup_mma_wait(2 * BLOCKS, deps=[accs[0], accs[1]])
    else:
        return warpgroup_mma_wait(3 * BLOCKS, deps=[accs[0], accs[1], accs[2]])


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
def within(column, COLUMNS: gl.constexpr, WIDTH: gl.constexpr):
    """A column from which on so many may be read: another one, where all lie beyond the last."""
    if WIDTH % COLUMNS == 0:
        return gl.minimum(column, WIDTH - COLUMNS)
    else:
        return column  # a mask says which may


@gluon.jit
def add_bias(value, bias, column, HIDDEN: gl.constexpr):
    """``value + bias[column:]``, value without a bias; anything beyond the last feature."""
    if bias is None:
        return value
    else:
        COLUMNS: gl.constexpr = value.shape[1]
        layout: gl.constexpr = gl.SliceLayout(0, value.type.layout)
        n = within(column, COLUMNS, HIDDEN) + gl.arange(0, COLUMNS, layout)
        if HIDDEN % COLUMNS == 0:
            loaded = gl.load(bias + n)
        else:
            loaded = gl.load(bias + n, mask=n < HIDDEN, other=0.0)
        return value + loaded.to(gl.float32)[None, :]


@gluon.jit
def add_residual(value, residual, row, column, rows, HIDDEN: gl.constexpr):
    """``value + residual[row:, column:]``, value without a residual; anything beyond the last."""
    if residual is None:
        return value
    else:
        COLUMNS: gl.constexpr = value.shape[1]
        layout: gl.constexpr = value.type.layout
        m = row + gl.arange(0, value.shape[0], gl.SliceLayout(1, layout))
        n = within(column, COLUMNS, HIDDEN) + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
        at = residual + (m.to(gl.int64) * HIDDEN)[:, None] + n[None, :]
        mask = (m < rows)[:, None]
        if HIDDEN % COLUMNS:
            mask = mask & (n < HIDDEN)[None, :]
        return value + gl.load(at, mask=mask, other=0.0).to(gl.float32)


@gluon.constexpr_function
def saved(gated, saves):
    """How many pre-activations are stored beside each postact."""
    return (2 if gated else 1) if saves else 0


@gluon.jit
def store_part(value, matrix, row, column, results, STORES: gl.constexpr):
    """Start to store some columns of a tile, after as many STORES of the tile."""
    buffer = results.index(STORES % BUFFERS)
    tma.store_wait(BUFFERS - 1)
    buffer.store(value.to(matrix.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(matrix, [row, column], buffer)


@gluon.jit
def store_pair(first, second, matrices, row, column, results):
    """As :func:`store_part`, for the same columns of two results: threads meet but once."""
    tma.store_wait(0)  # the last columns', which had the time in which these were computed
    for index in gl.static_range(2):
        value = first if index == 0 else second
        results.index(index).store(value.to(matrices[index].dtype))
    fence_async_shared()
    for index in gl.static_range(2):
        tma.async_copy_shared_to_global(matrices[index], [row, column], results.index(index))


@gluon.jit
def finish(
    activation: gl.constexpr,
    acc,
    added,
    written,
    results,
    row,
    column,
    rows,
    HIDDEN,
    GATED: gl.constexpr,
    STORES: gl.constexpr,
):
    """All but the products, of a piece of a tile, after as many STORES of the tile."""
    bias_gate, bias_up, residual = added
    postact, preact_gate, preact_up = written
    STORED: gl.constexpr = results.shape[2]
    SAVED: gl.constexpr = saved(GATED, preact_up is not None)
    WIDTH: gl.constexpr = acc.shape[1] // 2 if GATED else acc.shape[1]
    COUNT: gl.constexpr = WIDTH // STORED
    gates = ()
    if GATED:
        gate, up = column_parts(acc, 2)
        gates, ups = column_parts(gate, COUNT), column_parts(up, COUNT)
    else:
        ups = column_parts(acc, COUNT)
    for part in gl.static_range(COUNT):
        start = column + part * STORED
        up = add_bias(ups[part], bias_up, start, HIDDEN)
        if GATED:
            gate = add_bias(gates[part], bias_gate, start, HIDDEN)
            if preact_gate is not None:
                store_part(gate, preact_gate, row, start, results, STORES + part * (1 + SAVED))
            result = activation(gate, up)
        else:
            result = activation(up)
        result = add_residual(result, residual, row, start, rows, HIDDEN)
        if SAVED == 1:
            store_pair(up, result, (preact_up, postact), row, start, results)
        else:
            if SAVED == 2:
                store_part(up, preact_up, row, start, results, STORES + part * (1 + SAVED) + 1)
            store_part(result, postact, row, start, results, STORES + part * (1 + SAVED) + SAVED)


@gluon.jit
def sum_blocks(
    x_tiles,
    weight_tiles,
    accs,
    full,
    empty,
    stage,
    phase,
    IN: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    """The products of a tile, of which those of the last block may be under way; where it is."""
    STAGES: gl.constexpr = x_tiles[0].shape[0]
    BLOCK_K: gl.constexpr = x_tiles[0].shape[2]
    PIECES: gl.constexpr = len(weight_tiles)
    for inner in range(0, IN, BLOCK_K):
        mbarrier.wait(full.index(stage), phase)
        sums = ()
        for row_piece in gl.static_range(len(x_tiles)):
            x = x_tiles[row_piece].index(stage)
            for piece in gl.static_range(PIECES):
                weight = weight_tiles[piece].index(stage)
                if not TRANSPOSED:
                    weight = weight.permute((1, 0))
                acc = accs[row_piece * PIECES + piece]
                sums += (warpgroup_mma(x, weight, acc, is_async=True, use_acc=inner > 0),)
        accs = wait_for_products(sums, 1)
        mbarrier.arrive(empty.index(stage_before(stage, STAGES)), pred=inner > 0)
        stage, phase = next_stage(stage, phase, STAGES)
    return accs, stage, phase


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
    GATED: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    """A warpgroup that sums, finishes and stores every other tile of a program."""
    written, added, x_tiles, weight_tiles, results, barriers, counts = arguments
    rows, blocks_m, blocks_n = counts
    full, empty, turns = barriers
    STAGES: gl.constexpr = x_tiles[0].shape[0]
    ROWS: gl.constexpr = x_tiles[0].shape[1]
    BLOCK_M: gl.constexpr = len(x_tiles) * ROWS
    BLOCK_K: gl.constexpr = x_tiles[0].shape[2]
    BLOCKS: gl.constexpr = (IN + BLOCK_K - 1) // BLOCK_K  # of a sum
    PIECES: gl.constexpr = len(weight_tiles)
    ROW_PIECES: gl.constexpr = len(x_tiles)
    STORED: gl.constexpr = results.shape[2]
    RESULTS: gl.constexpr = 1 + saved(GATED, written[2] is not None)
    accs = ()
    for _ in gl.static_range(ROW_PIECES):
        for piece in gl.static_range(PIECES):
            accs += (accumulator(ROWS, weight_tiles[piece].shape[2 if TRANSPOSED else 1]),)
    stage, phase = stage_after(GROUP * BLOCKS, 0, 0, STAGES)
    turn = 1 - GROUP  # nobody has to give the first warpgroup its first turn
    first = gl.program_id(0) + GROUP * gl.num_programs(0)
    for tile in range(first, blocks_m * blocks_n, GROUPS * gl.num_programs(0)):
        row, column = tile_coordinates(tile, blocks_m, blocks_n, BLOCK_M, COLUMNS, GROUP_M)
        mbarrier.wait(turns.index(GROUP), turn)
        turn ^= 1
        accs, stage, phase = sum_blocks(
            x_tiles, weight_tiles, accs, full, empty, stage, phase, IN, TRANSPOSED
        )
        mbarrier.arrive(turns.index(1 - GROUP))
        accs = wait_for_products(accs, 0)
        mbarrier.arrive(empty.index(stage_before(stage, STAGES)))
        tma.store_wait(0)  # the last tile's, long over
        for row_piece in gl.static_range(ROW_PIECES):
            for piece in gl.static_range(PIECES):
                finish(
                    activation,
                    accs[row_piece * PIECES + piece],
                    added,
                    written,
                    results,
                    row + row_piece * ROWS,
                    column + piece * PIECE,
                    rows,
                    HIDDEN,
                    GATED,
                    (row_piece * COLUMNS + piece * PIECE) // STORED * RESULTS,
                )
        stage, phase = stage_after(BLOCKS, stage, phase, STAGES)
    tma.store_wait(0)


def fusedmlp_epilogue_hopper(
    x,
    x_second,
    weight_gate,
    bias_gate,
    weight_up,
    bias_up,
    residual,
    postact,
    preact_gate,
    preact_up,
    rows,
    IN: gl.constexpr,
    HIDDEN: gl.constexpr,
    COLUMNS: gl.constexpr,
    PIECE: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    ROW_PIECES: gl.constexpr,
):
    """Tiles of postact, and of pre-activations where there are descriptors for them, too.

    x, or its halves x and x_second, the weights, or a transposed one, and results are tensor
    descriptors, of results all alike.

    A tile has COLUMNS columns and the rows of as many boxes of x as ROW_PIECES says.
    It may start before the kernel before it has ended, if it is launched so, and lets the next one.
    """
    gdc_wait()
    gdc_launch_dependents()
    dtype: gl.constexpr = x.dtype
    ROWS: gl.constexpr = x.block_shape[0]
    GATED: gl.constexpr = weight_gate is not None and not TRANSPOSED
    PRODUCTS: gl.constexpr = 2 if GATED else 1
    x_shape: gl.constexpr = [STAGES, ROWS, BLOCK_K]
    x_tiles = ()
    for _ in gl.static_range(ROW_PIECES):
        x_tiles += (gl.allocate_shared_memory(dtype, x_shape, x.layout),)
    results = ()
    result_shape: gl.constexpr = [BUFFERS, ROWS, postact.block_shape[1]]
    for _ in gl.static_range(GROUPS):
        results += (gl.allocate_shared_memory(dtype, result_shape, postact.layout),)
    if TRANSPOSED:
        weight_shape: gl.constexpr = [STAGES, BLOCK_K, PIECE]
    else:
        weight_shape: gl.constexpr = [STAGES, PRODUCTS * PIECE, BLOCK_K]
    weight_tiles = (gl.allocate_shared_memory(dtype, weight_shape, weight_up.layout),)
    if PIECE < COLUMNS:
        rest_shape: gl.constexpr = [STAGES, PRODUCTS * (COLUMNS - PIECE), BLOCK_K]
        weight_tiles += (gl.allocate_shared_memory(dtype, rest_shape, weight_up.layout),)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    for group in gl.static_range(GROUPS):
        mbarrier.init(turns.index(group), count=1)
    fence_async_shared()
    blocks_m = gl.cdiv(rows, ROW_PIECES * ROWS)
    blocks_n: gl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    function: gl.constexpr = activation  # a function is no argument of a partition by itself
    barriers = (full, empty, turns)
    added = (bias_gate, bias_up, residual)
    counts = (rows, blocks_m, blocks_n)
    written = (postact, preact_gate, preact_up)
    even = (written, added, x_tiles, weight_tiles, results[0], barriers, counts)
    odd = (written, added, x_tiles, weight_tiles, results[1], barriers, counts)
    descriptors = (x, x_second, weight_gate, weight_up)
    loaded = (descriptors, x_tiles, weight_tiles, barriers, blocks_m, blocks_n)
    gl.warp_specialize(
        [
            (
                sum_tiles,
                (function, even, 0, IN, HIDDEN, COLUMNS, PIECE, GROUP_M, GATED, TRANSPOSED),
            ),
            (sum_tiles, (function, odd, 1, IN, HIDDEN, COLUMNS, PIECE, GROUP_M, GATED, TRANSPOSED)),
            (load_tiles, (loaded, IN, COLUMNS, PIECE, GROUP_M, TRANSPOSED)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
