"""How the work of a call is cut: into blocks of rows, chunks and shares of hidden features.

What a block's products read and write at a time is to stay in a core's second cache, or little
beyond. Every block reads all weights, so of wide layers more rows are worth more than that. Two
threads do not share a block, unless there are fewer blocks than threads: then each computes a share
of the hidden features.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

# Features of the widest panel of weights that any instruction set has, as common.h demands. Chunks
# and shares consist of panels.
PANEL = 64
_NARROW_PANEL = 16  # of AVX2

_CHUNK = 256
_GRADIENT_CHUNK = 256
_GRADIENT_ROWS = 192
# Blocks of which a group consists, as in gradients.h, where there are groups.
_GROUP = 16
# Input features that a product takes at once, as in products.h.
_SUM = 256
# With fewer rows weights are read as they are, and best in long pieces.
_WORTH_PACKING = 14
# Rows of whole tiles on every instruction set.
_TILE = 12
_MOST_ROWS = 264
# Second caches that a block may take: half of it is read and written in long pieces.
_CACHES = 2
# With fewer rows to a thread, reading weights once and not once a thread is worth the sum.
_FEWEST_ROWS = 128
_FEWEST_GRADIENT_ROWS = 48
# With fewer blocks, panels that each makes for itself take less than those made beforehand.
_BLOCKS_WORTH_PACKING = 3
# Operations of a thread below which starting it takes longer than it saves, some microseconds.
_LEAST_WORK = 300_000
# Bytes of panels that are made beforehand. Memory of more is mapped anew at every call by glibc.
_MOST_PACKED = 2**25


class Cut(NamedTuple):
    """The cut of one call.

    Attributes:
        block_rows: of a block.
        chunk: hidden features that are computed at once, a multiple of a panel.
        shares: of the hidden features, computed by themselves and added.
        threads: that work at most.
        packs: whether panels are made of all weights beforehand.
        floats: of memory for panels and sums.
    """

    block_rows: int
    chunk: int
    shares: int
    threads: int
    packs: bool
    floats: int


def cut(rows: int, widths: Sequence[int], gated: bool, threads: int, ready: bool = False) -> Cut:
    """The cut of a call.

    Args:
        rows: how many there are, at least one.
        widths: of the input, after each layer.
        gated: whether there are two first layers.
        threads: that there are.
        ready: whether weights are panels already, in float32.
    """
    pairs = [*itertools.pairwise(widths)]
    pairs += pairs[: int(gated)]
    weights = sum(k * n for k, n in pairs)
    threads = max(1, min(threads, rows * weights * 2 // _LEAST_WORK))
    chunk = min(_CHUNK, max(_rounded_up(widths[-2], PANEL), PANEL))
    block_rows = _block_rows(rows, widths, gated, chunk, threads)
    blocks = -(-rows // block_rows)
    shares = 1
    if blocks < threads and len(widths) == 3:
        shares = _shares(blocks, widths[1], threads)
    if rows < _WORTH_PACKING:
        chunk = max(chunk, _rounded_up(-(-widths[-2] // shares), PANEL))
    panels = sum(_rounded_up(n, PANEL) * (k + 1) for k, n in pairs)
    packs = not ready and blocks >= _BLOCKS_WORTH_PACKING and 4 * panels <= _MOST_PACKED
    sums = shares * rows * _rounded_up(widths[-1], PANEL) if shares > 1 else 0
    return Cut(block_rows, chunk, shares, threads, packs, sums + packs * panels)


class GradientCut(NamedTuple):
    """The cut of a call for gradients.

    Attributes:
        part_rows: of a part of the rows, which has sums of its own of the weights' gradients.
        block_rows: of a block; a part consists of blocks.
        chunk: hidden features that are computed at once, a multiple of a panel.
        parts: of the rows.
        shares: of the hidden features, each of which has sums of its own of dx.
        packs: whether panels are made of all weights beforehand.
        groups: whether sums are taken of groups of blocks first, which loses less to rounding.
    """

    part_rows: int
    block_rows: int
    chunk: int
    parts: int
    shares: int
    packs: bool
    groups: bool


def cut_gradients(
    rows: int, widths: tuple[int, int, int], gated: bool, threads: int
) -> GradientCut:
    """The cut of a call for gradients; arguments are those of :func:`cut`."""
    inner, hidden, out = widths
    weights = hidden * (inner * (1 + gated) + out)
    threads = max(1, min(threads, rows * weights * 4 // _LEAST_WORK))
    parts, shares = _parts_and_shares(rows, widths, weights, threads)
    chunk = min(_GRADIENT_CHUNK, max(_rounded_up(-(-hidden // shares), PANEL), PANEL))
    part_rows = _rounded_up(-(-rows // parts), _TILE)
    parts = -(-rows // part_rows)
    block_rows = _rounded_up(-(-part_rows // -(-part_rows // _GRADIENT_ROWS)), _TILE)
    # Panels of weights for both directions take little beside what an unfused step would keep.
    packs = 2 * weights <= min(_MOST_PACKED // 4, rows * hidden // 4)
    groups = part_rows > 2 * _GROUP * block_rows
    return GradientCut(part_rows, min(block_rows, rows), chunk, parts, shares, packs, groups)


def _parts_and_shares(
    rows: int, widths: tuple[int, int, int], weights: int, threads: int
) -> tuple[int, int]:
    """Of those that keep most threads at work, the pair with the least memory for sums."""
    inner, hidden, _ = widths
    most_parts, most_shares = max(1, rows // _FEWEST_GRADIENT_ROWS), max(1, hidden // PANEL)

    def worth(parts: int) -> tuple[int, int]:
        shares = min(threads // parts, most_shares)
        memory = weights * (parts if parts > 1 else 0) + rows * inner * (
            shares if shares > 1 else 0
        )
        return parts * shares, -memory

    parts = max(range(1, min(threads, most_parts) + 1), key=worth)
    return parts, min(threads // parts, most_shares)


def floats_of_sums(how: GradientCut, rows: int, widths: tuple[int, int, int], gated: bool) -> int:
    """Floats that the sums of a call for all gradients take at most, beside the gradients."""
    inner, hidden, out = widths
    wide = _rounded_up(inner, PANEL)
    of_part = hidden * wide * (1 + gated) + out * _rounded_up(hidden, PANEL)
    return of_part * how.parts * (1 + how.groups) + (
        rows * wide * how.shares if how.shares > 1 else 0
    )


def _block_rows(rows: int, widths: Sequence[int], gated: bool, chunk: int, threads: int) -> int:
    """Rows of a block that stays in a core's cache, and of which no thread has one more to do."""
    ends = min(widths[0], _SUM) + min(widths[-1], _SUM)  # of wider ones a part is used at a time
    floats = ends + chunk * (1 + gated) + 2 * max(widths[1:-2], default=0)
    most = _CACHES * _second_cache_bytes() // (4 * floats)
    most = min(max(most // _TILE * _TILE, 4 * _TILE), _MOST_ROWS)
    blocks = -(-rows // most)
    enough = len(widths) == 3 and widths[1] // PANEL >= threads  # hidden features for a share each
    shared = enough and rows < threads * _FEWEST_ROWS
    if blocks < 4 * threads and not shared:
        blocks = _rounded_up(blocks, threads)
    return min(rows, _rounded_up(math.ceil(rows / blocks), _TILE))


def _shares(blocks: int, hidden: int, threads: int) -> int:
    """Shares of the hidden features of each block that keep all threads at work to the end.

    Of equally good numbers the largest: a thread that begins later has less to do.
    """
    most = min(-(-2 * threads // blocks), max(1, hidden // PANEL))

    def longest(shares: int) -> int:
        """Hidden features of the thread that has most of them."""
        of_share = _rounded_up(-(-hidden // shares), _NARROW_PANEL)
        return of_share * -(-blocks * shares // threads)

    return min(range(1, most + 1), key=lambda shares: (longest(shares), -shares))


@functools.cache
def _second_cache_bytes() -> int:
    """Size of a core's second cache; a usual one where it is not known."""
    return int(torch.cpu.get_capabilities().get("l2_cache_size", 0)) or 2**20


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
