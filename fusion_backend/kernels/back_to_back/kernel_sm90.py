# mypy: ignore-errors
"""The narrow MLP of ``back_to_back`` for Hopper, written in Gluon, Triton's lower level.

    hidden = f(x @ weight_up^T + bias_up)
    y      = hidden @ weight_down^T + bias_down (+ residual)

Triton waits for each product of matrix units right after starting it, so that within a program
products and activation take turns. Gluon leaves the waiting to the kernel: here the second product
of a block of hidden features is under way while the activation of the next block is computed.

A program is persistent. Its warpgroups each own 64 rows at a time, and only share weights: these
come by tensor descriptors in blocks of BLOCK_H hidden features. Where STAGES holds all blocks, they
are loaded once and stay in shared memory; else a warp of its own loads them again for each tile of
rows. Rows of x, which are as wide as those of y, are copied a tile ahead; their norm is taken in
registers. A residual is what the second products are summed onto: so it comes while the first
product is computed, and takes no registers of its own. If it is x (ADDS_X), it is there already.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

# Bound by specialize(): the activation as a device function of an fp32 tensor.
activation = None

# Triton 3.6 and 3.8 differ in its name.
wait_for_all_threads = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

# A warpgroup: its warps, and the rows of its products.
WARPS = gl.constexpr(4)
ROWS = gl.constexpr(64)


@gluon.constexpr_function
def coalesced(columns):
    """Layout of a tile whose rows are moved in pieces of 8 elements."""
    lanes = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.constexpr_function
def power_of_two(count):
    """The next power of two: the length of a range."""
    return 1 << (count - 1).bit_length()


@gluon.jit
def copy_rows(x, x_tile, row_start, rows, x_row_stride, IN: gl.constexpr):
    """Start to copy the rows of x from row_start on; rows beyond the last are the last again."""
    layout: gl.constexpr = coalesced(IN)
    row_start = gl.minimum(row_start, rows - 1)
    m = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    k = gl.arange(0, IN, gl.SliceLayout(0, layout))
    offsets = (gl.minimum(m, rows - row_start - 1) * x_row_stride)[:, None] + k[None, :]
    start = x + row_start.to(gl.int64) * x_row_stride
    async_copy.async_copy_global_to_shared(x_tile, start + offsets)
    async_copy.commit_group()


@gluon.constexpr_function
def moved(layout, columns):
    """How results are loaded and stored: as they are where no memory is left to exchange them."""
    return layout if columns > 128 else coalesced(columns)


@gluon.jit
def load_rows(matrix, row_start, rows, layout: gl.constexpr, OUT: gl.constexpr):
    """A tile of a matrix like the result, with zeros beyond the last row."""
    loaded: gl.constexpr = moved(layout, OUT)
    m = gl.arange(0, ROWS, gl.SliceLayout(1, loaded))
    n = gl.arange(0, OUT, gl.SliceLayout(0, loaded))
    start = matrix + row_start.to(gl.int64) * OUT
    inside = (m < rows - row_start)[:, None]
    return gl.load(start + ((m * OUT)[:, None] + n[None, :]), inside, 0.0)


@gluon.jit
def store_rows(y, tile, row_start, rows, layout: gl.constexpr, OUT: gl.constexpr):
    """Store a tile of results."""
    stored: gl.constexpr = moved(layout, OUT)
    m = gl.arange(0, ROWS, gl.SliceLayout(1, stored))
    n = gl.arange(0, OUT, gl.SliceLayout(0, stored))
    start = y + row_start.to(gl.int64) * OUT
    inside = (m < rows - row_start)[:, None]
    gl.store(start + ((m * OUT)[:, None] + n[None, :]), gl.convert_layout(tile, stored), inside)


@gluon.jit
def load_block(weight, start, tiles, ready, stage):
    """Start to load one block of a weight into a buffer."""
    mbarrier.expect(ready.index(stage), weight.block_type.nbytes)
    tma.async_copy_global_to_shared(weight, start, ready.index(stage), tiles.index(stage))


@gluon.jit
def load_blocks(
    weights,
    tiles,
    ready,
    free,
    rows,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    TILE: gl.constexpr,
):
    """The warp that loads weights: all their blocks, for each tile of rows."""
    weight_up, weight_down = weights
    up_tiles, down_tiles = tiles
    up_ready, down_ready = ready
    up_free, down_free = free
    BLOCK_H: gl.constexpr = weight_up.block_shape[0]
    step = 0
    for _ in range(gl.program_id(0), gl.cdiv(rows, TILE), gl.num_programs(0)):
        for block in range(BLOCKS):
            stage = step % STAGES
            phase = (step // STAGES + 1) & 1
            mbarrier.wait(up_free.index(stage), phase)
            load_block(weight_up, [block * BLOCK_H, 0], up_tiles, up_ready, stage)
            mbarrier.wait(down_free.index(stage), phase)
            load_block(weight_down, [0, block * BLOCK_H], down_tiles, down_ready, stage)
            step += 1


@gluon.jit
def multiply(a, tiles, ready, step, sum, use_sum, STAGES: gl.constexpr, RESIDENT: gl.constexpr):
    """Start sum + a @ tile^T with the tile of that step, once it is there."""
    stage = step % STAGES
    if not RESIDENT:
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
    tile = tiles.index(stage).permute((1, 0))
    return warpgroup_mma(a, tile, sum, use_acc=use_sum, is_async=True)


@gluon.jit
def release(free, step, STAGES: gl.constexpr, RESIDENT: gl.constexpr):
    """Give the buffer of that step back to the warp that loads."""
    if not RESIDENT:
        mbarrier.arrive(free.index(step % STAGES), count=1)


@gluon.jit
def biased(tile, bias, layout: gl.constexpr):
    """A tile plus a bias in shared memory."""
    return tile + bias.load(gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def normalized(tile, weight, bias, NORM: gl.constexpr):
    """As ``normalization.normalized``; weight and bias are in shared memory."""
    EPS: gl.constexpr = NORM[1]
    layout: gl.constexpr = tile.type.layout
    WIDTH: gl.constexpr = tile.shape[1]
    values = tile.to(gl.float32)
    if NORM[0] == "layer_norm":
        values -= gl.expand_dims(gl.sum(values, 1), 1) / WIDTH
    scale = gl.rsqrt(gl.sum(values * values, 1) / WIDTH + EPS)
    values *= gl.expand_dims(scale, 1)
    values *= weight.load(gl.SliceLayout(0, layout))[None, :]
    if NORM[0] == "layer_norm":
        values += bias.load(gl.SliceLayout(0, layout))[None, :]
    return values.to(tile.dtype)


@gluon.jit
def own_rows(
    matrices,
    tiles,
    vectors,
    signals,
    x_tiles,
    GROUP: gl.constexpr,
    GROUPS: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    NORM: gl.constexpr,
    ADDS_X: gl.constexpr,
    F: gl.constexpr,
):
    """A warpgroup: its share of the rows, 64 at a time."""
    x, residual, y, rows, x_row_stride = matrices
    up_tiles, down_tiles = tiles
    up_bias, down_bias, norm_weight, norm_bias = vectors
    ready, free = signals
    up_ready, down_ready = ready
    up_free, down_free = free
    RESIDENT: gl.constexpr = STAGES == BLOCKS
    BLOCK_H: gl.constexpr = up_tiles.shape[1]
    IN: gl.constexpr = up_tiles.shape[2]
    OUT: gl.constexpr = down_tiles.shape[1]
    X_STAGES: gl.constexpr = x_tiles.shape[0]
    ADDS: gl.constexpr = ADDS_X or residual is not None
    BARE: gl.constexpr = 0 if ADDS else 1  # the block whose second product is added to nothing
    # In registers, x leaves the bandwidth of shared memory to the weights; wide rows do not fit.
    X_IN_REGISTERS: gl.constexpr = IN <= 128
    dtype: gl.constexpr = y.dtype.element_ty
    hidden_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_H, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, OUT, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    x_in_registers: gl.constexpr = gl.DotOperandLayout(0, hidden_layout, 2)
    nothing = gl.zeros((ROWS, BLOCK_H), gl.float32, hidden_layout)
    first = (gl.program_id(0) * GROUPS + GROUP) * ROWS
    stride = gl.num_programs(0) * GROUPS * ROWS
    # All groups of a program go through the weights equally often: they are loaded for all.
    end = gl.cdiv(rows, GROUPS * ROWS) * (GROUPS * ROWS)
    for ahead in gl.static_range(X_STAGES):
        copy_rows(x, x_tiles.index(ahead), first + ahead * stride, rows, x_row_stride, IN)
    step = 0
    x_stage = 0
    for row_start in range(first, end, stride):
        async_copy.wait_group(X_STAGES - 1)
        x_tile = x_tiles.index(x_stage)
        next_start = row_start + X_STAGES * stride
        if ADDS_X:
            added = x_tile.load(layout)
        if NORM is not None:
            x_normed = normalized(x_tile.load(layout), norm_weight, norm_bias, NORM)
        if X_IN_REGISTERS:
            if NORM is not None:
                x_operand = gl.convert_layout(x_normed, x_in_registers)
            else:
                x_operand = x_tile.load(x_in_registers)
            copy_rows(x, x_tile, next_start, rows, x_row_stride, IN)
        else:
            if NORM is not None:
                x_tile.store(x_normed)
            fence_async_shared()
            x_operand = x_tile
        current = multiply(x_operand, up_tiles, up_ready, step, nothing, False, STAGES, RESIDENT)
        if residual is not None:
            added = load_rows(residual, row_start, rows, layout, OUT)
        preact = warpgroup_mma_wait(0, deps=[current])
        release(up_free, step, STAGES, RESIDENT)
        hidden = F(biased(preact, up_bias.index(0), hidden_layout)).to(dtype)
        hidden = gl.convert_layout(hidden, operand)
        if ADDS:
            sum = gl.convert_layout(added, layout).to(gl.float32)
        else:
            sum = gl.zeros((ROWS, OUT), gl.float32, layout)
        result = warpgroup_mma_init(sum)
        for block in range(1, BLOCKS):
            now = step + block
            current = multiply(x_operand, up_tiles, up_ready, now, nothing, False, STAGES, RESIDENT)
            result = multiply(
                hidden, down_tiles, down_ready, now - 1, result, block > BARE, STAGES, RESIDENT
            )
            preact = warpgroup_mma_wait(1, deps=[current])
            release(up_free, now, STAGES, RESIDENT)
            postact = F(biased(preact, up_bias.index(block), hidden_layout)).to(dtype)
            result = warpgroup_mma_init(warpgroup_mma_wait(0, deps=[result]))
            release(down_free, now - 1, STAGES, RESIDENT)
            hidden = gl.convert_layout(postact, operand)
        if not X_IN_REGISTERS:
            copy_rows(x, x_tile, next_start, rows, x_row_stride, IN)
        last = step + BLOCKS - 1
        result = multiply(hidden, down_tiles, down_ready, last, result, True, STAGES, RESIDENT)
        total = biased(warpgroup_mma_wait(0, deps=[result]), down_bias, layout)
        release(down_free, last, STAGES, RESIDENT)
        store_rows(y, total.to(dtype), row_start, rows, layout, OUT)
        if not RESIDENT:
            step += BLOCKS
        x_stage = (x_stage + 1) % X_STAGES
    async_copy.wait_group(0)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """As many memory barriers, each passed after so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(made.index(index), count=ARRIVALS)
    return made


@gluon.jit
def keep(vector, BLOCKS: gl.constexpr, BLOCK: gl.constexpr, MISSING: gl.constexpr = 0.0):
    """A vector in shared memory as (blocks, block) fp32; where there is none, of MISSING."""
    spread: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    whole: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PADDED: gl.constexpr = power_of_two(BLOCKS)
    block = gl.arange(0, PADDED, gl.SliceLayout(1, spread))
    feature = gl.arange(0, BLOCK, gl.SliceLayout(0, spread))
    kept = gl.allocate_shared_memory(gl.float32, [PADDED, BLOCK], whole)
    if vector is None:
        kept.store(gl.full((PADDED, BLOCK), MISSING, gl.float32, spread))
    else:
        features = block[:, None] * BLOCK + feature[None, :]
        values = gl.load(vector + features, features < BLOCKS * BLOCK, 0.0)
        kept.store(values.to(gl.float32))
    return kept._reinterpret(gl.float32, [PADDED, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))


def fusedmlp_back_to_back_hopper(
    x,
    weight_up,
    weight_down,
    bias_up,
    bias_down,
    residual,
    norm_weight,
    norm_bias,
    y,
    rows,
    x_row_units,
    X_ROW_UNIT: gl.constexpr,
    HIDDEN: gl.constexpr,
    NORM: gl.constexpr,
    ADDS_X: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
):
    """See the module."""
    BLOCK_H: gl.constexpr = weight_up.block_shape[0]
    IN: gl.constexpr = weight_up.block_shape[1]
    OUT: gl.constexpr = weight_down.block_shape[0]
    BLOCKS: gl.constexpr = HIDDEN // BLOCK_H
    F: gl.constexpr = activation
    dtype: gl.constexpr = y.dtype.element_ty
    x_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, IN], dtype)
    up_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_H, IN], weight_up.layout)
    down_tiles = gl.allocate_shared_memory(dtype, [STAGES, OUT, BLOCK_H], weight_down.layout)
    up_ready = barriers(STAGES, 1)
    down_ready = barriers(STAGES, 1)
    up_free = barriers(STAGES, GROUPS)
    down_free = barriers(STAGES, GROUPS)
    fence_async_shared()
    if STAGES == BLOCKS:
        for block in gl.static_range(BLOCKS):
            load_block(weight_up, [block * BLOCK_H, 0], up_tiles, up_ready, block)
            load_block(weight_down, [0, block * BLOCK_H], down_tiles, down_ready, block)
    up_bias = keep(bias_up, BLOCKS, BLOCK_H)
    down_bias = keep(bias_down, 1, OUT).index(0)
    if NORM is None:
        vectors = (up_bias, down_bias, None, None)
    else:
        kept_weight = keep(norm_weight, 1, IN, 1.0).index(0)
        vectors = (up_bias, down_bias, kept_weight, keep(norm_bias, 1, IN).index(0))
    if STAGES == BLOCKS:
        for block in gl.static_range(BLOCKS):
            mbarrier.wait(up_ready.index(block), 0)
            mbarrier.wait(down_ready.index(block), 0)
    wait_for_all_threads()
    matrices = (x, residual, y, rows, x_row_units * X_ROW_UNIT)
    weights = (weight_up, weight_down)
    tiles = (up_tiles, down_tiles)
    ready = (up_ready, down_ready)
    free = (up_free, down_free)
    signals = (ready, free)
    x0 = gl.allocate_shared_memory(dtype, [X_STAGES, ROWS, IN], x_layout)
    x1 = gl.allocate_shared_memory(dtype, [X_STAGES, ROWS, IN], x_layout)
    # A multiprocessor's registers are 168 for each thread of three warpgroups.
    if GROUPS == 3:
        x2 = gl.allocate_shared_memory(dtype, [X_STAGES, ROWS, IN], x_layout)
        gl.warp_specialize(
            [
                (
                    own_rows,
                    (matrices, tiles, vectors, signals, x0, 0, 3, BLOCKS, STAGES, NORM, ADDS_X, F),
                ),
                (
                    own_rows,
                    (matrices, tiles, vectors, signals, x1, 1, 3, BLOCKS, STAGES, NORM, ADDS_X, F),
                ),
                (
                    own_rows,
                    (matrices, tiles, vectors, signals, x2, 2, 3, BLOCKS, STAGES, NORM, ADDS_X, F),
                ),
            ],
            [WARPS, WARPS],
            [168, 168],
        )
    else:
        gl.warp_specialize(
            [
                (
                    own_rows,
                    (matrices, tiles, vectors, signals, x0, 0, 2, BLOCKS, STAGES, NORM, ADDS_X, F),
                ),
                (
                    own_rows,
                    (matrices, tiles, vectors, signals, x1, 1, 2, BLOCKS, STAGES, NORM, ADDS_X, F),
                ),
                (load_blocks, (weights, tiles, ready, free, rows, BLOCKS, STAGES, 2 * ROWS)),
            ],
            [WARPS, 1],
            [240, 24],
        )
