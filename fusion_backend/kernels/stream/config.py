"""How the two kernels of ``stream_hopper`` are launched, and for which MLPs they are."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fusion_backend.kernels.host.called import PIECE
from fusion_backend.kernels.host.targets import Target

# Upper bounds of the classes of rows, each with kernels of its own; more rows it does not run.
ROW_CLASSES = (1, 16, 32, 64, 128)
MOST_ROWS = ROW_CLASSES[-1]

# How many tiles of y may be summed by several programs, and how wide y may be for that: the
# narrowest of those tiles have 32 columns of up to 64 rows.
COUNTERS = 1024
_WIDEST_OUT = 32 * COUNTERS

# Parts of a sum over hidden features start at multiples of whole lines of the cache.
_HIDDEN_UNIT = 256

# Bytes of weights for which the pair was measured to be faster on an H200: of one row, of more, and
# the least. Larger weights take so long to read that it does not matter when the second kernel
# begins, and those of both layers disturb each other if they are read at once.
_MOST_BYTES_OF_A_ROW = 48 << 20
_MOST_BYTES = 20 << 20
_LEAST_BYTES = 1 << 20
# And if one is transposed, of any number of rows.
_MOST_BYTES_TRANSPOSED = 18 << 20
# Beyond, tiles of 64 rows are faster even for one, for which Hopper's matrix units are used.
_MOST_HIDDEN_OF_SMALL_TILES = 3072


class Half(NamedTuple):
    """How one of the kernels is launched.

    Attributes:
        share: how many features a program owns.
        block_m: rows of a tile.
        block_n: the power of two that a share is padded to.
        block_k: features summed over at a time.
        warps: of a program.
        stages: depth of the software pipeline; a single row has none, all is loaded at once.
        lanes: among how many groups of warps the features to sum over are divided.
        splits: among how many programs.
    """

    share: int
    block_m: int
    block_n: int
    block_k: int
    warps: int = 4
    stages: int = 1
    lanes: int = 1
    splits: int = 1


class Pair(NamedTuple):
    """How both are launched."""

    hidden: Half
    out: Half


def row_class(rows: int) -> int:
    """The class of a number of rows, at most ``MOST_ROWS``."""
    return ROW_CLASSES[bisect_left(ROW_CLASSES, rows)]


def is_faster(
    rows: Any, widths: Sequence[int], gated: bool, dtype: torch.dtype, transposed: bool
) -> bool:
    """Whether the pair runs MLPs of these widths, and was measured to be faster for such.

    Args:
        rows: how many there are, at most ``MOST_ROWS``; may be symbolic.
        widths: of x, between the layers, and of y.
        gated: whether there are two first layers.
        dtype: of all tensors.
        transposed: whether weights are the transposes of contiguous ones.
    """
    in_features, hidden_features, out_features = widths
    elements = ((2 if gated else 1) * in_features + out_features) * hidden_features
    single = isinstance(rows, int) and rows == 1
    most = _MOST_BYTES_OF_A_ROW if single else _MOST_BYTES
    if transposed:
        most = _MOST_BYTES_TRANSPOSED
    return (
        dtype.itemsize == 2
        and all(width % PIECE == 0 for width in widths)
        and hidden_features % _HIDDEN_UNIT == 0
        and out_features <= _WIDEST_OUT
        and _LEAST_BYTES <= elements * dtype.itemsize <= most
    )


def preferred(
    rows: int,
    in_features: int,
    hidden_features: int,
    out_features: int,
    gated: bool,
    transposed: tuple[bool, bool],
    target: Target,
) -> Pair:
    """The pair for a class of rows, measured on an H200 in bfloat16.

    Args:
        rows: one of ``ROW_CLASSES``.
        in_features: width of x.
        hidden_features: width between the layers.
        out_features: width of y.
        gated: whether there are two first layers.
        transposed: whether the weights before and after hidden are transposes.
        target: the GPU.
    """
    sms = target.multiprocessors
    return Pair(
        _transposed_hidden(rows, hidden_features, gated)
        if transposed[0]
        else _hidden(rows, in_features, hidden_features, gated, sms),
        _transposed_out(rows, hidden_features)
        if transposed[1]
        else _out(rows, hidden_features, out_features, sms),
    )


def _hidden(rows: int, in_features: int, hidden_features: int, gated: bool, sms: int) -> Half:
    if rows == 1:
        return _row(hidden_features, in_features, 2 if gated else 1, 8, 4 * sms)
    if rows <= 32:
        return Half(32, rows, 32, 256, stages=3 if gated else 4, lanes=4 if rows == 32 else 1)
    if rows == 64:
        share = max(24, min(32, -(-hidden_features // sms)))  # of programs that run all at one time
        return Half(share, 64, 32, 128, stages=3 if gated else 5)
    width, stages = (32, 3) if gated else (64, 5)
    return Half(width, 64, width, 128, stages=stages)


def _out(rows: int, hidden_features: int, out_features: int, sms: int) -> Half:
    if rows == 1:
        return _row(out_features, hidden_features, 1, 4, 2 * sms)
    if rows <= 32:
        return Half(8, rows, 8, 256, stages=6, lanes=4)
    if rows == 64:
        return Half(32, 64, 32, 128, stages=5, splits=4)
    return Half(64, 64, 64, 128, stages=4, splits=4)


def _transposed_hidden(rows: int, hidden_features: int, gated: bool) -> Half:
    """Features lie side by side: a share has enough of them to read whole lines of the cache."""
    small = rows <= 16 and hidden_features <= _MOST_HIDDEN_OF_SMALL_TILES
    if small and not gated:  # of two weights, registers would spill
        return Half(32, 16, 32, 256, stages=3)
    if rows <= 64:
        return Half(32, 64, 32, 128, stages=3 if gated else 5)
    return Half(64, 64, 64, 64, stages=5)


def _transposed_out(rows: int, hidden_features: int) -> Half:
    if rows <= 16 and hidden_features <= _MOST_HIDDEN_OF_SMALL_TILES:
        return Half(64, 16, 64, 128, stages=4, splits=8)
    if rows <= 64:
        return Half(32, 64, 32, 128, stages=5, splits=4)
    return Half(64, 64, 64, 128, stages=4, splits=4)


def _row(features: int, depth: int, weights: int, widest: int, programs: int) -> Half:
    """For a single row: a share of the features for each of so many programs, all in registers."""
    block_k = min(1024, 1 << (depth - 1).bit_length())
    deep = -(-depth // block_k) * block_k
    while widest > 1 and widest * deep * weights > 128 * 128:
        widest //= 2
    share = min(widest, -(-features // programs))
    return Half(share, 1, 1 << (share - 1).bit_length(), block_k)
