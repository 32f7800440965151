# mypy: ignore-errors
# Each branch that is chosen at compile time must end in a return of its own.
"""The hidden-gradient kernel for Hopper, with matrix units busy during f'.

    grad_hidden = grad_output @ weight_down                     (rows, hidden), never stored
    postact     = f(preact_gate, preact_up)  or  f(preact_up)
    grad_gate   = grad_hidden * df/dgate                        only with a gate
    grad_up     = grad_hidden * df/dup
    sums        = of grad_gate, of grad_up and of grad_output, over the rows of each warp, in fp32

Mathematics in ``hidden_gradient``, the order of work in ``epilogue_hopper``: a warp loads operands,
and two warpgroups sum every other tile of a program each. For each of them there is also a warp
that loads pre-activations, by parts of a tile: the first parts of a tile come in while it is
summed, the others as buffers become free.

The sums are what the biases' gradients are summed of, by another kernel, always in the same order.
Those of grad_output are shared out among the tiles of the same rows: the first tiles sum a few
columns each, which the second kind of warp loads once more, as if they were pre-activations.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fusion_backend.kernels.epilogue.kernel_sm90 import (
    BUFFERS,
    GROUPS,
    accumulator,
    column_parts,
    load_tiles,
    next_stage,
    stage_after,
    stage_before,
    store_pair,
    store_part,
    sum_blocks,
    tile_coordinates,
    wait_for_products,
)

# Bound by specialize(): (f, df/dup) of one fp32 tensor or (f, df/dgate, df/dup) of two.
activation_gradient = None

WARPS = gl.constexpr(4)  # of a warpgroup, 16 of each 64 rows each

# Triton 3.6 and 3.8 differ in its name.
wait_for_all_threads = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.constexpr_function
def output_parts(out, columns, part, slots):
    """How many parts of grad_output a tile sums, if any: whole rounds of the buffers.

    Args:
        out: columns of grad_output.
        columns: how many tiles there are of the same rows.
        part: columns of a part.
        slots: buffers.
    """
    of_tile = -(-out // (part * columns))
    return -(-of_tile // slots) * slots


@gluon.jit
def load_part(preact, row, column, parts, barriers, slot, phase):
    """Start to load a part of a tile, once its buffer is free; where the next one goes."""
    full, empty = barriers
    mbarrier.wait(empty.index(slot), phase)
    mbarrier.expect(full.index(slot), preact.block_type.nbytes)
    tma.async_copy_global_to_shared(preact, [row, column], full.index(slot), parts.index(slot))
    return next_stage(slot, phase, parts.shape[0])


@gluon.jit
def load_preacts(
    arguments,
    GROUP: gl.constexpr,
    OUT: gl.constexpr,
    COLUMNS: gl.constexpr,
    GROUP_M: gl.constexpr,
    OUTPUT_PARTS: gl.constexpr,
):
    """A warp that loads the pre-activations of a warpgroup's tiles: of a pair by turns.

    Then the parts of grad_output that a tile sums.
    """
    parted, parts, barriers, blocks_m, blocks_n = arguments
    grad_output, preact_gate, preact_up = parted
    BLOCK_M: gl.constexpr = parts.shape[1]
    PART: gl.constexpr = parts.shape[2]
    slot = 0
    phase = 1
    first = gl.program_id(0) + GROUP * gl.num_programs(0)
    for tile in range(first, blocks_m * blocks_n, GROUPS * gl.num_programs(0)):
        row, column = tile_coordinates(tile, blocks_m, blocks_n, BLOCK_M, COLUMNS, GROUP_M)
        for start in range(0, COLUMNS, PART):
            at = column + start
            if preact_gate is not None:
                slot, phase = load_part(preact_gate, row, at, parts, barriers, slot, phase)
            slot, phase = load_part(preact_up, row, at, parts, barriers, slot, phase)
        if OUTPUT_PARTS:
            start = column // COLUMNS * (OUTPUT_PARTS * PART)
            if start < OUT:
                for part in gl.static_range(OUTPUT_PARTS):
                    at = start + part * PART
                    slot, phase = load_part(grad_output, row, at, parts, barriers, slot, phase)


@gluon.jit
def take_part(parts, barriers, PART: gl.constexpr, phase, layout: gl.constexpr):
    """A part of a tile of pre-activations, once it is there; its buffer is free again."""
    full, empty = barriers
    SLOTS: gl.constexpr = parts.shape[0]
    slot: gl.constexpr = PART % SLOTS
    mbarrier.wait(full.index(slot), phase ^ (PART // SLOTS & 1))
    part = parts.index(slot).load(layout)
    # A load from shared memory may be under way when its thread has passed a barrier. The copy that
    # fills the buffer next goes another way to it, and would overtake the load.
    fence_async_shared()
    wait_for_all_threads()
    mbarrier.arrive(empty.index(slot))
    return part.to(gl.float32)


@gluon.jit
def store_sums(value, sums, row, column, rows, COUNT: gl.constexpr, WIDTH: gl.constexpr):
    """Store the sums over each warp's rows, those beyond the last left out, as rows of ``sums``.

    There are COUNT columns, of WIDTH. What warps add up without each other, they need not meet for.
    """
    if sums is not None:
        BLOCK_M: gl.constexpr = value.shape[0]
        COLUMNS: gl.constexpr = value.shape[1]
        m = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, value.type.layout))
        inside = gl.where((m < rows)[:, None], value, 0.0)
        by_warp = inside.reshape(BLOCK_M // 64, WARPS, 16, COLUMNS)
        total = gl.sum(gl.sum(by_warp, 0), 1)
        layout: gl.constexpr = total.type.layout
        warp = gl.arange(0, WARPS, gl.SliceLayout(1, layout))
        n = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
        start = sums + (row // BLOCK_M * WARPS).to(gl.int64) * WIDTH
        gl.store(start + ((warp * WIDTH)[:, None] + n[None, :]), total, mask=(n < COUNT)[None, :])


@gluon.jit
def sum_output(
    preacts,
    sums,
    at,
    phase,
    OUT: gl.constexpr,
    COLUMNS: gl.constexpr,
    OUTPUT_PARTS: gl.constexpr,
    WIDTH: gl.constexpr,
    layout: gl.constexpr,
):
    """Sum the parts of grad_output that are a tile's; the parity of what comes after them."""
    parts, barriers = preacts
    row, column, rows = at
    PART: gl.constexpr = parts.shape[2]
    start = column // COLUMNS * (OUTPUT_PARTS * PART)
    if start < OUT:
        for part in gl.static_range(OUTPUT_PARTS):
            value = take_part(parts, barriers, part, phase, layout)
            store_sums(value, sums, row, start + part * PART, rows, OUT, WIDTH)
        phase ^= OUTPUT_PARTS // parts.shape[0] & 1
    return phase


@gluon.jit
def finish_gradient(
    F: gl.constexpr,
    grad_hidden,
    preacts,
    written,
    sums,
    results,
    at,
    phase,
    HIDDEN: gl.constexpr,
    WIDTH: gl.constexpr,
    GATED: gl.constexpr,
):
    """All but the product, of a tile."""
    parts, barriers = preacts
    row, column, rows = at
    grad_gate, grad_up, postact = written
    PART: gl.constexpr = parts.shape[2]
    COUNT: gl.constexpr = grad_hidden.shape[1] // PART
    grads = column_parts(grad_hidden, COUNT)
    up_sums = sums
    if sums is not None:
        up_sums = sums + (HIDDEN if GATED else 0)
    layout: gl.constexpr = grads[0].type.layout
    for part in gl.static_range(COUNT):
        start = column + part * PART
        if GATED:
            gate = take_part(parts, barriers, 2 * part, phase, layout)
            up = take_part(parts, barriers, 2 * part + 1, phase, layout)
            result, slope_gate, slope_up = F(gate, up)
            store_part(result, postact, row, start, results, 3 * part)
            of_gate = grads[part] * slope_gate
            store_part(of_gate, grad_gate, row, start, results, 3 * part + 1)
            of_up = grads[part] * slope_up
            store_part(of_up, grad_up, row, start, results, 3 * part + 2)
            store_sums(of_gate, sums, row, start, rows, HIDDEN, WIDTH)
            store_sums(of_up, up_sums, row, start, rows, HIDDEN, WIDTH)
        else:
            up = take_part(parts, barriers, part, phase, layout)
            result, slope_up = F(up)
            of_up = grads[part] * slope_up
            store_pair(result, of_up, (postact, grad_up), row, start, results)
            store_sums(of_up, up_sums, row, start, rows, HIDDEN, WIDTH)


@gluon.jit
def sum_gradient_tiles(
    F: gl.constexpr,
    arguments,
    GROUP: gl.constexpr,
    OUT: gl.constexpr,
    HIDDEN: gl.constexpr,
    GROUP_M: gl.constexpr,
    GATED: gl.constexpr,
    SUMS_PREACTS: gl.constexpr,
    OUTPUT_PARTS: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    """A warpgroup that sums, finishes and stores every other tile of a program."""
    written, sums, tiles, preacts, results, barriers, counts = arguments
    grad_tiles, weight_tiles = tiles
    PRODUCTS: gl.constexpr = 2 if GATED else 1
    SUMMED: gl.constexpr = PRODUCTS * HIDDEN if SUMS_PREACTS else 0
    WIDTH: gl.constexpr = SUMMED + OUT if OUTPUT_PARTS else SUMMED
    preact_sums = None
    if SUMS_PREACTS:
        preact_sums = sums
    rows, blocks_m, blocks_n = counts
    full, empty, turns = barriers
    STAGES: gl.constexpr = grad_tiles.shape[0]
    BLOCK_M: gl.constexpr = grad_tiles.shape[1]
    BLOCK_K: gl.constexpr = grad_tiles.shape[2]
    COLUMNS: gl.constexpr = weight_tiles.shape[2 if TRANSPOSED else 1]
    BLOCKS: gl.constexpr = (OUT + BLOCK_K - 1) // BLOCK_K  # of a sum
    PART: gl.constexpr = preacts[0].shape[2]
    SLOTS: gl.constexpr = preacts[0].shape[0]
    PARTS: gl.constexpr = PRODUCTS * COLUMNS // PART
    accs = (accumulator(BLOCK_M, COLUMNS),)
    stage, phase = stage_after(GROUP * BLOCKS, 0, 0, STAGES)
    part_phase = 0
    turn = 1 - GROUP  # nobody has to give the first warpgroup its first turn
    first = gl.program_id(0) + GROUP * gl.num_programs(0)
    for tile in range(first, blocks_m * blocks_n, GROUPS * gl.num_programs(0)):
        row, column = tile_coordinates(tile, blocks_m, blocks_n, BLOCK_M, COLUMNS, GROUP_M)
        mbarrier.wait(turns.index(GROUP), turn)
        turn ^= 1
        accs, stage, phase = sum_blocks(
            (grad_tiles,), (weight_tiles,), accs, full, empty, stage, phase, OUT, TRANSPOSED
        )
        mbarrier.arrive(turns.index(1 - GROUP))
        accs = wait_for_products(accs, 0)
        mbarrier.arrive(empty.index(stage_before(stage, STAGES)))
        tma.store_wait(0)  # the last tile's, long over
        at = (row, column, rows)
        finish_gradient(
            F, accs[0], preacts, written, preact_sums, results, at, part_phase, HIDDEN, WIDTH, GATED
        )
        part_phase ^= PARTS // SLOTS & 1
        if OUTPUT_PARTS:
            layout: gl.constexpr = column_parts(accs[0], COLUMNS // PART)[0].type.layout
            part_phase = sum_output(
                preacts, sums + SUMMED, at, part_phase, OUT, COLUMNS, OUTPUT_PARTS, WIDTH, layout
            )
        stage, phase = stage_after(BLOCKS, stage, phase, STAGES)
    tma.store_wait(0)


@gluon.jit
def barriers(COUNT: gl.constexpr):
    """As many memory barriers, each passed after an arrival."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(made.index(index), count=1)
    return made


def fusedmlp_hidden_gradient_hopper(
    grad_output,
    output_part,
    weight_down,
    preact_gate,
    preact_up,
    grad_gate,
    grad_up,
    postact,
    sums,
    rows,
    OUT: gl.constexpr,
    HIDDEN: gl.constexpr,
    COLUMNS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    REGISTERS: gl.constexpr,
    SUMS_PREACTS: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    """Tiles of the gradients and of postact.

    All but ``sums``, a pointer or None, are tensor descriptors; those of preact_gate and grad_gate
    are None without a gate. ``output_part`` is of grad_output, in parts as of the pre-activations,
    and None where it is not summed. SUMS_PREACTS says that the pre-activations' gradients are.
    TRANSPOSED says that weight_down lies as (out, hidden).
    """
    gdc_wait()
    gdc_launch_dependents()
    dtype: gl.constexpr = grad_output.dtype
    BLOCK_M: gl.constexpr = grad_output.block_shape[0]
    PART: gl.constexpr = postact.block_shape[1]
    GATED: gl.constexpr = preact_gate is not None
    grad_shape: gl.constexpr = [STAGES, BLOCK_M, BLOCK_K]
    grad_tiles = gl.allocate_shared_memory(dtype, grad_shape, grad_output.layout)
    weight_block: gl.constexpr = [BLOCK_K, COLUMNS] if TRANSPOSED else [COLUMNS, BLOCK_K]
    weight_shape: gl.constexpr = [STAGES, weight_block[0], weight_block[1]]
    weight_tiles = gl.allocate_shared_memory(dtype, weight_shape, weight_down.layout)
    part_shape: gl.constexpr = [SLOTS, BLOCK_M, PART]
    result_shape: gl.constexpr = [BUFFERS, BLOCK_M, PART]
    full = barriers(STAGES)
    empty = barriers(STAGES)
    turns = barriers(GROUPS)
    preacts = ()
    results = ()
    for _ in gl.static_range(GROUPS):
        parts = gl.allocate_shared_memory(dtype, part_shape, preact_up.layout)
        preacts += ((parts, (barriers(SLOTS), barriers(SLOTS))),)
        results += (gl.allocate_shared_memory(dtype, result_shape, postact.layout),)
    fence_async_shared()
    blocks_m = gl.cdiv(rows, BLOCK_M)
    blocks_n: gl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    SUMS_OUTPUT: gl.constexpr = output_part is not None
    OUTPUT_PARTS: gl.constexpr = output_parts(OUT, blocks_n, PART, SLOTS) if SUMS_OUTPUT else 0
    F: gl.constexpr = activation_gradient  # a function is no argument of a partition by itself
    written = (grad_gate, grad_up, postact)
    tiles = (grad_tiles, weight_tiles)
    signals = (full, empty, turns)
    counts = (rows, blocks_m, blocks_n)
    even = (written, sums, tiles, preacts[0], results[0], signals, counts)
    odd = (written, sums, tiles, preacts[1], results[1], signals, counts)
    operands = (grad_output, None, None, weight_down)
    loaded = (operands, (grad_tiles,), (weight_tiles,), signals, blocks_m, blocks_n)
    parted = (output_part, preact_gate, preact_up)
    of_even = (parted, preacts[0][0], preacts[0][1], blocks_m, blocks_n)
    of_odd = (parted, preacts[1][0], preacts[1][1], blocks_m, blocks_n)
    gl.warp_specialize(
        [
            (
                sum_gradient_tiles,
                (F, even, 0, OUT, HIDDEN, GROUP_M, GATED, SUMS_PREACTS, OUTPUT_PARTS, TRANSPOSED),
            ),
            (
                sum_gradient_tiles,
                (F, odd, 1, OUT, HIDDEN, GROUP_M, GATED, SUMS_PREACTS, OUTPUT_PARTS, TRANSPOSED),
            ),
            (load_tiles, (loaded, OUT, COLUMNS, COLUMNS, GROUP_M, TRANSPOSED)),
            (load_preacts, (of_even, 0, OUT, COLUMNS, GROUP_M, OUTPUT_PARTS)),
            (load_preacts, (of_odd, 1, OUT, COLUMNS, GROUP_M, OUTPUT_PARTS)),
        ],
        [4, 1, 1, 1],
        [REGISTERS, 24, 24, 24],
    )
