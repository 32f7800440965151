"""Which layers the kernel for Hopper takes, where it is faster, and by which tiles."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from fusion_backend.compat.triton_features import has_gluon
from fusion_backend.kernels.host.called import PIECE
from fusion_backend.kernels.host.problems import MANY_ROWS, Problem
from fusion_backend.kernels.host.targets import Target
from fusion_backend.mlp.expression import parse
from fusion_backend.mlp.weights import is_transposed

# How many inputs a program sums over at a time.
BLOCK_K = 64

# How much of the tiles must be result for the input's gradient to be computed at once.
_FILLED_ENOUGH = 0.85

# Where it was measured, on an H200, to be faster: with more rows, no narrower, and with no fewer
# elements of the result, of which else too few programs would have a tile. Plain layers are
# compared with Triton's kernel.
FEW_ROWS = 64
FEW_ROWS_PLAIN = 256
NARROWEST = 256
SMALLEST = 1 << 19
SMALLEST_PLAIN = 1 << 21


class Tile(NamedTuple):
    """What a program computes at a time.

    Attributes:
        rows: of the result.
        columns: of the weights; of a gated pair, half from either.
        stages: buffers of operands.
        time: how long it takes, whatever the unit; measured on an H200 at its power limit.
    """

    rows: int
    columns: int
    stages: int
    time: int

    @property
    def box(self) -> int:
        """How many rows are loaded and stored at once: a power of two."""
        return 64 if self.rows % 128 else 128


SQUARE = Tile(128, 128, 5, 68)
WIDE = Tile(128, 192, 4, 99)
TALL = Tile(192, 128, 4, 98)
TILES = (SQUARE, WIDE, TALL)
# Where pre-activations are stored, fewer columns are at once, which leaves memory for more buffers.
_SAVING_TILES = (SQUARE._replace(stages=6), WIDE, TALL._replace(stages=5))


class Form(NamedTuple):
    """What layers a kernel is compiled for.

    Attributes:
        gated: whether there are two.
        has_bias_up: whether up has a bias.
        has_bias_gate: whether the gate has one.
        transposed: whether the weight is the transpose of a contiguous matrix; only of a plain one.
        has_residual: whether something is added to the result.
        saves: whether pre-activations are stored, too.
        joined: whether there are two weights of one layer, transposed, of which the first has the
            first half of its inputs.
        apart: whether the halves of these inputs are two matrices, too.
    """

    gated: bool
    has_bias_up: bool
    has_bias_gate: bool
    transposed: bool
    has_residual: bool = False
    saves: bool = False
    joined: bool = False
    apart: bool = False

    @classmethod
    def of(
        cls,
        weight_up: Tensor,
        weight_gate: Tensor | None,
        bias_up: Tensor | None,
        bias_gate: Tensor | None,
        residual: Tensor | None,
        saves: bool = False,
    ) -> Form:
        """What layers these are."""
        has_biases = bias_up is not None, bias_gate is not None
        how = is_transposed(weight_up), residual is not None, saves
        return cls(weight_gate is not None, *has_biases, *how)


def runs(problem: Problem, rows: Any, target: Target) -> bool:
    """Whether the kernel runs a problem, and was measured to be faster than Triton's for such."""
    hidden = problem.hidden_features
    if not problem.tma or not can(problem.in_features, hidden, target):
        return False
    if problem.gated:
        return problem.rows > FEW_ROWS and guard_or_false(rows * hidden > SMALLEST)
    if isinstance(rows, int):
        return rows > FEW_ROWS_PLAIN and rows * hidden > SMALLEST_PLAIN
    return problem.rows == MANY_ROWS  # symbolic ones: no more guards than there are


def filled(rows: int, out_features: int, target: Target) -> float:
    """How much of the tiles that there is time for is result, of a last layer with a residual.

    All programs have time for a tile in each of the turns that one of them needs.
    """
    at_once = target.multiprocessors * SQUARE.rows * SQUARE.columns
    return rows * out_features / (turns(SQUARE, rows, out_features, False, target) * at_once)


def can(in_features: int, out_features: int, target: Target) -> bool:
    """Whether layers of 16 bits are wide enough for the kernel, which runs on Hopper only."""
    return (
        target.backend == "cuda"
        and target.capability == 90
        and in_features >= NARROWEST
        and in_features % PIECE == 0
        and out_features % PIECE == 0
        and has_gluon()
    )


def can_join(hidden: int, inner: int, target: Target) -> bool:
    """Whether the gradient of a pair's input takes weights ``(hidden, inner)``.

    A block of the sum must be of one of them.
    """
    return hidden % BLOCK_K == 0 and can(2 * hidden, inner, target)


def joins(rows: Any, inner: int, target: Target) -> bool:
    """Whether the gradient of a pair's input was measured to be no slower than two products."""
    return not isinstance(rows, int) or filled(rows, inner, target) >= _FILLED_ENOUGH


def tiles_for(activation: str, dtype: torch.dtype, form: Form) -> tuple[Tile, ...]:
    """The tiles that the kernel can have; larger ones leave no registers for all that it may do."""
    square, wide, tall = _SAVING_TILES if form.saves else TILES
    adds = form.has_residual or (form.saves and (not form.gated or form.has_bias_up))
    if adds or not is_inline(activation, dtype):
        return (square,)
    return (square, tall) if form.transposed else (square, wide, tall)


def fastest_tile(
    rows: int, hidden: int, gated: bool, target: Target, tiles: Sequence[Tile] = TILES
) -> Tile:
    """The tile with which the programs, all together, take the least time."""
    return min(tiles, key=lambda tile: turns(tile, rows, hidden, gated, target) * tile.time)


def turns(tile: Tile, rows: int, hidden: int, gated: bool, target: Target) -> int:
    """How many tiles a program computes at most, one after the other."""
    return -(-_count(tile, rows, hidden, gated) // target.multiprocessors)


def _count(tile: Tile, rows: int, hidden: int, gated: bool) -> int:
    """How many tiles the result has."""
    return -(-rows // tile.rows) * -(-hidden // width_of(tile, gated))


def width_of(tile: Tile, gated: bool) -> int:
    """How many columns of the result a tile has."""
    return tile.columns // 2 if gated else tile.columns


@functools.cache
def is_inline(activation: str, dtype: torch.dtype) -> bool:
    """Whether an activation is few instructions in the kernels for Hopper."""
    from fusion_backend.kernels.codegen.activation import emit

    return emit(parse(activation), dtype, gluon=True).is_inline
