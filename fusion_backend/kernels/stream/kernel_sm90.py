# mypy: ignore-errors
# Each branch that is chosen at compile time must end in a return of its own.
# ruff: noqa: RET505
"""A whole MLP of few rows and small weights, as two kernels that overlap.

The mathematics is that of ``stream``. There the second kernel begins when the first has ended: to
launch it, and to fetch its first weights, takes about as long as to read all weights of a small
MLP. Here programmatic dependent launch starts each before what precedes it has ended:

    first kernel    waits for all that was launched before, lets the second start, computes hidden
    second kernel   loads its weights, of one row into registers, else into the L2 cache;
                    waits for the first kernel to have ended; computes y

Nothing is read or written too early. A wait (``griddepcontrol.wait``) ends when the kernel before
has ended and all that it wrote is visible. The first kernel waits before it touches any memory, so
it may take the place of memory that earlier kernels still read. The second kernel starts when every
program of the first has waited: all that was launched before has ended then, and the first writes
nothing but hidden and scratch, so weights may be read. It touches those two, and y, after its own
wait. And because it waits, its end implies the end of the first: what comes later need not know.

All loads of a tile are in flight at one time, because with so little to read the latency of each
counts. Where a program has few rows, its warps divide the features to sum over among them (LANES),
as there are too few results to divide. Where there are more rows, several programs divide them
(SPLITS): each stores its sums, and the one that is done last adds them up in the order of the
programs. Sums have a fixed order in any case: results are the same bit for bit from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fusion_backend.kernels.device.tiles import add_bias
from fusion_backend.kernels.stream import config as stream_configs
from fusion_backend.kernels.stream.kernel import store_share

# Bound by specialize(): the activation as a device function.
activation = None

# At the head of the scratch: for each tile of y, how many programs have stored their sums.
COUNTERS = tl.constexpr(stream_configs.COUNTERS)


def fusedmlp_stream_hopper_hidden(
    x,
    weight_gate,
    bias_gate,
    weight_up,
    bias_up,
    hidden,
    scratch,
    rows,
    x_row_units,
    X_ROW_UNIT: tl.constexpr,
    IN: tl.constexpr,
    HIDDEN: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """A share of hidden, in fp32 until it is stored; one program resets the counters in scratch."""
    gdc_wait()
    gdc_launch_dependents()
    if scratch is not None:
        reset_counters(scratch)
    shares: tl.constexpr = (HIDDEN + SHARE - 1) // SHARE
    first = tl.program_id(0) % shares * SHARE
    row_start = tl.program_id(0) // shares * BLOCK_M
    x_row_stride = x_row_units * X_ROW_UNIT
    if BLOCK_M == 1:
        up_tiles = share_tiles(weight_up, first, SHARE, HIDDEN, IN, BLOCK_N, BLOCK_K)
        gate_tiles = up_tiles
        if weight_gate is not None:
            gate_tiles = share_tiles(weight_gate, first, SHARE, HIDDEN, IN, BLOCK_N, BLOCK_K)
        row_tiles = tiles_of_row(x, IN, BLOCK_K)
        up = row_product(row_tiles, up_tiles, IN, BLOCK_N, BLOCK_K)
        gate = up
        if weight_gate is not None:
            gate = row_product(row_tiles, gate_tiles, IN, BLOCK_N, BLOCK_K)
    else:
        gate, up = products(
            x,
            x_row_stride,
            row_start,
            rows,
            weight_gate,
            weight_up,
            IN,
            first,
            SHARE,
            HIDDEN,
            0,
            IN,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            LANES,
            STAGES,
            TRANSPOSED,
        )
    n = first + tl.arange(0, BLOCK_N)
    up = add_bias(up, bias_up, n, HIDDEN, False)
    place = (row_start, rows, first, HIDDEN, False, False)
    if weight_gate is None:
        result = activation(up, place, (None, None, None, None))
    else:
        gate = add_bias(gate, bias_gate, n, HIDDEN, False)
        result = activation(gate, up, place, (None, None, None, None))
    store_share(hidden, result, row_start, rows, first, SHARE, HIDDEN, False)


def fusedmlp_stream_hopper_out(
    hidden,
    weight_down,
    bias_down,
    y,
    scratch,
    rows,
    HIDDEN: tl.constexpr,
    OUT: tl.constexpr,
    SHARE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    THREADS: tl.constexpr,
):
    """A share of y; or the sum over a part of hidden, and of a share what the last one adds up."""
    shares: tl.constexpr = (OUT + SHARE - 1) // SHARE
    DEPTH: tl.constexpr = HIDDEN // SPLITS
    first = tl.program_id(0) % shares * SHARE
    split = tl.program_id(0) // shares % SPLITS
    row_start = tl.program_id(0) // shares // SPLITS * BLOCK_M
    n = first + tl.arange(0, BLOCK_N)
    if BLOCK_M == 1:
        tiles = share_tiles(weight_down, first, SHARE, OUT, HIDDEN, BLOCK_N, BLOCK_K)
        gdc_wait()
        row_tiles = tiles_of_row(hidden, HIDDEN, BLOCK_K)
        result = row_product(row_tiles, tiles, HIDDEN, BLOCK_N, BLOCK_K)
    else:
        prefetch_share(
            weight_down, first, SHARE, OUT, HIDDEN, split * DEPTH, DEPTH, TRANSPOSED, THREADS
        )
        gdc_wait()
        _, result = products(
            hidden,
            HIDDEN,
            row_start,
            rows,
            None,
            weight_down,
            HIDDEN,
            first,
            SHARE,
            OUT,
            split * DEPTH,
            DEPTH,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            LANES,
            STAGES,
            TRANSPOSED,
        )
    if SPLITS == 1:
        result = add_bias(result, bias_down, n, OUT, False)
        store_share(y, result, row_start, rows, first, SHARE, OUT, False)
    else:
        partial = scratch + COUNTERS
        size = rows * OUT
        store_share(partial + split * size, result, row_start, rows, first, SHARE, OUT, False)
        tl.debug_barrier()  # all of it is stored when one thread says so
        tile = tl.program_id(0) // shares // SPLITS * shares + tl.program_id(0) % shares
        if tl.atomic_add(counters(scratch) + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            m = row_start + tl.arange(0, BLOCK_M)
            offsets = m[:, None] * OUT + n[None, :]
            valid = (m[:, None] < rows) & (n[None, :] < OUT)
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for part in tl.static_range(SPLITS):
                total += tl.load(partial + part * size + offsets, mask=valid, other=0.0)
            total = add_bias(total, bias_down, n, OUT, False)
            store_share(y, total, row_start, rows, first, SHARE, OUT, False)


@triton.jit
def reset_counters(scratch):
    """Let one program say that nothing is stored yet."""
    if tl.program_id(0) == 0:
        tl.store(counters(scratch) + tl.arange(0, COUNTERS), tl.zeros((COUNTERS,), tl.int32))


@triton.jit
def counters(scratch):
    """The head of an fp32 scratch as integers: for each tile of y, how many parts are stored."""
    return scratch.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def share_tiles(
    weight,
    first,
    SHARE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """All tiles (BLOCK_N, BLOCK_K) of a share of a weight, in registers."""
    tiles = ()
    for start in tl.static_range(0, DEPTH, BLOCK_K):
        tile = weight_tile(
            weight,
            DEPTH,
            first,
            SHARE,
            COLUMNS,
            start,
            DEPTH - start,
            BLOCK_N,
            BLOCK_K,
            1,
            start + BLOCK_K <= DEPTH,
            False,
        )
        tiles = tiles + (tile,)  # noqa: RUF005
    return tiles


@triton.jit
def tiles_of_row(x, DEPTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """All tiles (1, BLOCK_K) of a single row."""
    tiles = ()
    for start in tl.static_range(0, DEPTH, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)[None, :]
        if start + BLOCK_K <= DEPTH:
            tile = tl.load(x + k)
        else:
            tile = tl.load(x + k, mask=k < DEPTH, other=0.0)
        tiles = tiles + (tile,)  # noqa: RUF005
    return tiles


@triton.jit
def row_product(
    row_tiles, tiles, DEPTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """The (1, BLOCK_N) products of a row with a share: a row is no matrix for matrix units."""
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for i in tl.static_range((DEPTH + BLOCK_K - 1) // BLOCK_K):
        total += row_tiles[i].to(tl.float32) * tiles[i].to(tl.float32)
    return tl.sum(total, 1)[None, :]


@triton.jit
def products(
    x,
    x_row_stride,
    row_start,
    rows,
    weight_gate,
    weight_up,
    ROW_STRIDE: tl.constexpr,
    first,
    SHARE: tl.constexpr,
    COLUMNS: tl.constexpr,
    depth_start,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """The fp32 tiles (gate, up) of some rows and a share of features; without a gate, (0, up)."""
    m, k = row_indices(BLOCK_M, BLOCK_K, LANES)
    m += row_start
    shape: tl.constexpr = (BLOCK_M, BLOCK_N) if LANES == 1 else (LANES, BLOCK_M, BLOCK_N)
    up = tl.zeros(shape, tl.float32)
    gate = up
    x += depth_start
    beginning = depth_start * COLUMNS if TRANSPOSED else depth_start
    weight_up += beginning
    if weight_gate is not None:
        weight_gate += beginning
    for start in tl.range(0, DEPTH, BLOCK_K, num_stages=STAGES):
        end = DEPTH - start
        # Rows that are not there are not loaded: those of all programs at one place of the L2 cache
        # would have to wait for each other.
        valid = m < rows
        if DEPTH % BLOCK_K != 0:
            valid = valid & (k < end)
        x_tile = tl.load(x + start + m * x_row_stride + k, mask=valid, other=0.0)
        if weight_gate is not None:
            tile = weight_tile(
                weight_gate,
                ROW_STRIDE,
                first,
                SHARE,
                COLUMNS,
                start,
                end,
                BLOCK_N,
                BLOCK_K,
                LANES,
                DEPTH % BLOCK_K == 0,
                TRANSPOSED,
            )
            gate = multiply_add(gate, x_tile, tile, LANES)
        tile = weight_tile(
            weight_up,
            ROW_STRIDE,
            first,
            SHARE,
            COLUMNS,
            start,
            end,
            BLOCK_N,
            BLOCK_K,
            LANES,
            DEPTH % BLOCK_K == 0,
            TRANSPOSED,
        )
        up = multiply_add(up, x_tile, tile, LANES)
    if LANES == 1:
        return gate, up
    else:
        return tl.sum(gate, 0), tl.sum(up, 0)


@triton.jit
def weight_tile(
    weight,
    ROW_STRIDE: tl.constexpr,
    first,
    SHARE: tl.constexpr,
    COLUMNS: tl.constexpr,
    start,
    end,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    WHOLE_K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """A tile of a weight, which is read once: (BLOCK_N, BLOCK_K), cut into lanes along BLOCK_K."""
    n, k = tile_indices(BLOCK_N, BLOCK_K, LANES)
    WHOLE_N: tl.constexpr = SHARE == BLOCK_N and COLUMNS % SHARE == 0
    if TRANSPOSED:
        pointers = weight + tl.cast(start, tl.int64) * COLUMNS + first + k * COLUMNS + n
    else:
        pointers = weight + tl.cast(first, tl.int64) * ROW_STRIDE + start + n * ROW_STRIDE + k
    owned = (n < SHARE) & (first + n < COLUMNS)
    if WHOLE_N and WHOLE_K:
        return tl.load(pointers, eviction_policy="evict_first")
    elif WHOLE_N:
        return tl.load(pointers, mask=k < end, other=0.0, eviction_policy="evict_first")
    elif WHOLE_K:
        return tl.load(pointers, mask=owned, other=0.0, eviction_policy="evict_first")
    else:
        valid = owned & (k < end)
        return tl.load(pointers, mask=valid, other=0.0, eviction_policy="evict_first")


@triton.jit
def tile_indices(ROWS: tl.constexpr, BLOCK_K: tl.constexpr, LANES: tl.constexpr):
    """Indices along both sides of a tile that broadcast to its shape."""
    row = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K // LANES)
    if LANES == 1:
        return row[:, None], k[None, :]
    else:
        lane = tl.arange(0, LANES) * (BLOCK_K // LANES)
        return row[None, :, None], lane[:, None, None] + k[None, None, :]


@triton.jit
def row_indices(BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, LANES: tl.constexpr):
    """Those of a tile of x; with lanes its sides are exchanged.

    With its rows first, Triton 3.8 keeps it in shared memory so that all rows of a lane begin in
    the same bank: at 16x768x3072 an MLP took 10.5 us on an H200, with Triton 3.6 7.7.
    """
    m, k = tile_indices(BLOCK_M, BLOCK_K, LANES)
    if LANES == 1:
        return m, k
    else:
        return tl.permute(m, (0, 2, 1)), tl.permute(k, (0, 2, 1))


@triton.jit
def multiply_add(total, x_tile, tile, LANES: tl.constexpr):
    """One step of a sum over blocks; lanes are summed apart, each by a warp."""
    if LANES == 1:
        return tl.dot(x_tile, tl.trans(tile), total)
    else:
        return tl.dot(tl.permute(x_tile, (0, 2, 1)), tl.permute(tile, (0, 2, 1)), total)


@triton.jit
def prefetch_share(
    weight,
    first,
    SHARE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    depth_start,
    DEPTH: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Ask for a share of a 16-bit weight to be brought into the L2 cache, by lines of 128 bytes."""
    LINE: tl.constexpr = 64
    if TRANSPOSED:  # a line, or a part of one, of each feature that is summed over
        lines: tl.constexpr = (SHARE + LINE - 1) // LINE
        weight += tl.cast(depth_start, tl.int64) * COLUMNS + first
    else:
        lines: tl.constexpr = (DEPTH + LINE - 1) // LINE
        weight += tl.cast(first, tl.int64) * ROW_STRIDE + depth_start
    count: tl.constexpr = DEPTH * lines if TRANSPOSED else SHARE * lines
    for start in tl.static_range(0, count, THREADS):
        i = start + tl.arange(0, THREADS)
        if TRANSPOSED:
            offset = tl.minimum(i // lines, DEPTH - 1) * COLUMNS
        else:
            n = tl.minimum(i // lines, tl.minimum(SHARE, COLUMNS - first) - 1)
            offset = n * ROW_STRIDE
        address = (weight + offset + i % lines * LINE).to(tl.uint64, bitcast=True)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [address],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
