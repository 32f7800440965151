"""Launch configurations of ``chain``, and for which chains there is one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusion_backend.kernels import reference
from fusion_backend.kernels.host.configs import NARROW_SMALL, Config, padded
from fusion_backend.kernels.host.problems import MANY_ROWS, precision, row_class
from fusion_backend.kernels.host.targets import Target
from fusion_backend.mlp.steps import Steps

#: More layers make a kernel that compiles slowly, and were not tried.
MOST_LAYERS = 16
#: Of a weight that is multiplied whole, elements; more do not leave registers enough.
LARGEST_WEIGHT = 32768
# Bytes of values that are read again, for each warp: 32 registers of a thread. For tiles of more
# rows there are too few.
_MOST_KEPT = 4096
# What synchronizes copies and matrix units.
_BARRIERS = 1024
# Elements of weights that a program of few rows loads at once.
_FEW_WEIGHTS = 32768
# Upper bounds of classes of rows. On an H200, 4096 rows were still too few for tall tiles, where
# weights stream: 64 tiles leave half of the multiprocessors idle.
_FEWEST_ROWS = 1024
_ROW_CLASSES = (_FEWEST_ROWS, 4096)


class Widest(NamedTuple):
    """The widest values that are held whole, for which there must be registers.

    Attributes:
        hidden: between two layers.
        end: the input, and the output.
    """

    hidden: float = math.inf
    end: float = math.inf


# Values of fp32 take twice the registers, and products of fp32 more where they have no matrix unit.
_EVERYTHING = Widest()
_WIDEST = {"16 bits": Widest(256, 256), "tf32": Widest(256, 128), "ieee": Widest(64, 64)}


class ChainProblem(NamedTuple):
    """One chain, as the kernel sees it; as :class:`problems.Problem`, of any number of layers.

    Attributes:
        rows: upper bound of the class of rows: 1024, 4096 or ``MANY_ROWS``.
        widths: of the input, of each hidden value and of the output.
        dtype: of all operands.
        precision: how fp32 operands are multiplied: ``ieee``, or ``tf32`` of rounded operands.
        inner: the steps, where there are norms, values that are read again or layers that read the
            input beside another value; else ``None``.
    """

    rows: int
    widths: tuple[int, ...]
    dtype: torch.dtype
    precision: str = "ieee"
    inner: Steps | None = None

    @property
    def steps(self) -> Steps:
        """All steps."""
        return self.inner or Steps.of("", len(self.widths) - 1)

    @property
    def held(self) -> frozenset[int]:
        """Positions in ``widths`` of the values that are not taken in blocks, for their steps.

        A layer that reads the input, too, makes all of its value at once, so that it passes over
        the input once.
        """
        if self.inner is None:
            return frozenset()
        return self.inner.held | {layer + 1 for layer in self.joined}

    @property
    def only_activates(self) -> bool:
        """Whether there is an activation between each two layers and nothing else."""
        return self.inner is None or self.inner.only_activates

    @property
    def largest_weight(self) -> int:
        """Elements of a weight between two values that are held whole.

        Steps leave no choice of these values: twice as large a weight is multiplied in halves.
        """
        return LARGEST_WEIGHT if self.inner is None else 2 * LARGEST_WEIGHT

    @property
    def large_weight(self) -> int:
        """Elements from which on a weight had better lie beside a value that is in blocks."""
        return LARGEST_WEIGHT if self.only_activates else self.largest_weight

    @property
    def joined(self) -> frozenset[int]:
        """The layers that read the input, too."""
        return frozenset() if self.inner is None else self.inner.joined

    @property
    def kept(self) -> int:
        """Elements of the values that are kept for later steps at a time, of a row."""
        if self.inner is None:
            return 0
        groups, blocks = self.inner.group_of, self.blocks
        return max(sum(blocks[groups[value]] for value in live) for live in self.inner.live())

    @property
    def blocks(self) -> tuple[int, ...]:
        """The widths, padded."""
        return tuple(map(padded, self.widths))

    @property
    def weights(self) -> tuple[int, ...]:
        """Elements of each weight, padded: of the columns for the value before the layer."""
        return tuple(first * second for first, second in itertools.pairwise(self.blocks))

    @property
    def weights_beside(self) -> dict[int, int]:
        """The same of its columns for the input, of the layers that read that, too."""
        return {layer: self.blocks[0] * self.blocks[layer + 1] for layer in self.joined}

    @property
    def ends_exactly(self) -> bool:
        """Whether the last layer's operands are split in two, because cuBLAS rounds none there."""
        return self.precision == "tf32" and self.widths[-1] == 1

    @property
    def kind(self) -> str:
        """What limits are given by: ``16 bits``, or how fp32 is multiplied."""
        return "16 bits" if self.dtype.itemsize == 2 else self.precision


def chain_problem(
    x: Tensor, weights: Sequence[Tensor], target: Target, steps: Steps
) -> ChainProblem:
    """The problem of ``chain_launch.chain``."""
    widths = (int(weights[0].shape[1]), *(int(weight.shape[0]) for weight in weights))
    precision = product_precision(x.dtype, target)
    inner = None if steps.is_plain else steps
    return ChainProblem(chain_rows(x.shape[0]), widths, x.dtype, precision, inner)


def chain_rows(rows: Any) -> int:
    """The class of a number of rows, which may be symbolic."""
    return row_class(rows, _ROW_CLASSES)


def can_chain(
    widths: Sequence[int], dtype: torch.dtype, target: Target, inner: Steps | None = None
) -> bool:
    """Whether ``chain_launch.chain`` can run a chain.

    Args:
        widths: of the input, of each hidden value and of the output.
        dtype: of all tensors.
        target: the GPU.
        inner: as :class:`ChainProblem` has them.
    """
    if len(widths) - 1 > MOST_LAYERS:  # before the steps of a long one are looked at
        return False
    precision = product_precision(dtype, target)
    problem = ChainProblem(MANY_ROWS, tuple(widths), dtype, precision, inner)
    return any(fits(config, problem, target) for config in preferences(problem, target))


def product_precision(dtype: torch.dtype, target: Target) -> str:
    """As :func:`problems.precision`, but with one product of tf32 instead of three.

    The kernel rounds operands as cuBLAS does, which other kernels leave to their three products: a
    chain has registers to do so, since none of its operands goes from memory to the matrix unit.
    """
    how = precision(dtype, target)
    return "tf32" if how == "tf32x3" else how


def chosen(problem: ChainProblem, target: Target, config: Config | None = None) -> Config:
    """The configuration to launch with: ``config`` if there is one, else the best known.

    Raises:
        ValueError: ``config`` cannot run, or nothing can.
    """
    candidates = preferences(problem, target) if config is None else (config,)
    for candidate in candidates:
        if fits(candidate, problem, target):
            return candidate
    raise ValueError(
        f"chain has no configuration for {problem} on {target}; use plan {reference.NAME!r}"
        if config is None
        else f"{config} cannot run chain for {problem} on {target}"
    )


def fits(config: Config, problem: ChainProblem, target: Target) -> bool:
    """Whether a configuration can run: layers, widths and weights held whole, shared memory."""
    in_blocks = blocked(config, problem, target)
    alone = [n for i, n in enumerate(problem.weights) if not in_blocks & {i, i + 1}]
    largest = LARGEST_WEIGHT if config.resident else problem.largest_weight
    if len(problem.weights) > MOST_LAYERS or max(alone, default=0) > largest:
        return False
    kept = config.block_m * problem.kept * problem.dtype.itemsize
    if kept > _MOST_KEPT * config.num_warps:
        return False
    if too_wide(problem.widths, widest_held(problem, target)) - in_blocks:
        return False
    programs = max(1, config.programs) if config.resident else 1
    return programs * shared_memory(config, problem, target) <= target.shared_memory


def widest_held(problem: ChainProblem, target: Target) -> Widest:
    """The widest values that are held whole."""
    return _WIDEST["16 bits" if target.backend == "interpreter" else problem.kind]


def blocked(config: Config, problem: ChainProblem, target: Target) -> frozenset[int]:
    """Positions in ``problem.widths`` of the values that are taken in blocks of their features.

    Where weights stream they are those in the :func:`middle` of two layers; else all are whole.
    """
    if config.resident:
        return frozenset()
    most = widest_held(problem, target)
    return middle(problem.widths, most, problem.large_weight, problem.held)


def block_beside(config: Config, width: int) -> int:
    """Features of the input, padded to a width, that a layer takes at a time beside a value.

    They are no more than half of it: a loop loads ahead, and what is loaded at once takes
    registers.
    """
    return max(16, min(config.block_k, width // 2))


def too_wide(widths: Sequence[int], most: Widest) -> frozenset[int]:
    """Positions of the values that are too wide to be held whole."""
    ends = (0, len(widths) - 1)
    return frozenset(
        i for i, width in enumerate(widths) if width > (most.end if i in ends else most.hidden)
    )


class _Taken(NamedTuple):
    """Some positions, and how good they are, in the order in which that is compared."""

    too_large: int = 0
    ends: int = 0
    width: int = 0
    positions: frozenset[int] = frozenset()

    @property
    def rank(self) -> tuple[int, ...]:
        return (-self.too_large, -self.ends, self.width)


# Worse than anything there is.
_NEVER = _Taken(too_large=1000)


def middle(
    widths: Sequence[int],
    most: Widest = _EVERYTHING,
    largest: float = math.inf,
    held: Set[int] = frozenset(),
) -> frozenset[int]:
    """Positions of the values in the middle of two layers that are computed together.

    Of these no two follow one another. As few values and weights as possible are too large to be
    held beside them; then as few as possible are input or output, which are in the middle of a
    layer and of memory; then their widths are largest in sum.

    Args:
        widths: of the input, of each hidden value and of the output.
        most: the widest values that are held whole.
        largest: elements of a weight that is held whole at most.
        held: positions of the values that are held whole in any case.
    """
    last, not_held = len(widths) - 1, too_wide(widths, most)
    without, with_last = _Taken(too_large=len(not_held & {0})), _Taken(0, 1, 0, frozenset({0}))
    with_last = _NEVER if 0 in held else with_last
    for position in range(1, last + 1):
        width, is_end = widths[position], position == last
        weight = padded(widths[position - 1]) * padded(width)
        taken = without._replace(
            ends=without.ends + is_end,
            width=without.width + (0 if is_end else width),
            positions=without.positions | {position},
        )
        alone = without._replace(too_large=without.too_large + (weight > largest))
        best = max(alone, with_last, key=lambda found: found.rank)
        without = best._replace(too_large=best.too_large + (position in not_held))
        with_last = _NEVER if position in held else taken
    return max(without, with_last, key=lambda found: found.rank).positions


def shared_memory(config: Config, problem: ChainProblem, target: Target) -> int:
    """Shared memory of a program in bytes: not less than what Triton allocates."""
    in_blocks = blocked(config, problem, target)
    loops = _loops(config, problem, in_blocks)
    looped = {layer for position in loops for layer in (position - 1, position)}
    beside = _loops_beside(config, problem)
    whole = [n for layer, n in enumerate(problem.weights) if layer not in looped]
    if not config.resident and problem.inner is not None:
        whole = [n // 2 if n > LARGEST_WEIGHT else n for n in whole]
    whole += [] if beside else problem.weights_beside.values()
    # Without a loop over blocks, the loop over tiles is the one that loads ahead: all weights.
    in_loops = [*loops.values(), *beside]
    weights = max(config.num_stages * max(in_loops), *whole, 0) if in_loops else sum(whole)
    if not config.resident:
        weights += config.block_m * config.block_n
    held = max(width for i, width in enumerate(problem.blocks) if i not in in_blocks)
    elements = weights + config.block_m * held
    if problem.joined and not beside:
        elements += config.block_m * problem.blocks[0]
    if not problem.only_activates:  # sums move from the layout of products, in fp32
        elements += config.block_m * held * torch.float32.itemsize // problem.dtype.itemsize
    if problem.ends_exactly:
        elements += problem.weights[-1] + config.block_m * problem.blocks[-2]
    barriers = _BARRIERS if target.backend == "cuda" else 0
    return elements * problem.dtype.itemsize + barriers


def _loops(config: Config, problem: ChainProblem, in_blocks: frozenset[int]) -> dict[int, int]:
    """Of each value that takes more than one block, the elements that a block loads.

    A block of a hidden value needs both weights around it, one of the input itself and a weight.
    """
    widths, last = problem.blocks, len(problem.blocks) - 1
    found = {}
    for position in in_blocks:
        block = config.block_k if position == 0 else config.block_n
        if widths[position] > block:
            before = widths[position - 1] if position else config.block_m
            after = widths[position + 1] if position < last else 0
            found[position] = block * (before + after)
    return found


def _loops_beside(config: Config, problem: ChainProblem) -> list[int]:
    """The elements that a block of the input needs in each layer that reads it beside a value.

    None where all of it is one block.
    """
    block = block_beside(config, problem.blocks[0])
    if config.resident or block >= problem.blocks[0]:
        return []
    return [block * (config.block_m + problem.blocks[layer + 1]) for layer in problem.joined]


def preferences(problem: ChainProblem, target: Target) -> tuple[Config, ...]:
    """Configurations for a problem, best first; not all need fit."""
    if problem.kind == "ieee":
        return (
            Config(32, 32, block_k=32, num_warps=8, num_stages=1),
            Config(16, 16, block_k=32, num_stages=1),
        )
    if not problem.only_activates:
        return (*_with_steps(problem, target), *NARROW_SMALL)
    if too_wide(problem.widths, widest_held(problem, target)) & {0, len(problem.weights)}:
        return (*_wide_ends(problem, target), *NARROW_SMALL)
    in_tf32 = problem.kind == "tf32"
    many = tuple((_many_rows_in_tf32 if in_tf32 else _many_rows)(problem, target))
    shared = any(config.programs > 1 and fits(config, problem, target) for config in many)
    if problem.rows == MANY_ROWS or (problem.rows > _FEWEST_ROWS and shared and not in_tf32):
        return (*many, *NARROW_SMALL)
    return (*_few_rows(problem), *many, *NARROW_SMALL)


def _wide_ends(problem: ChainProblem, target: Target) -> Iterator[Config]:
    """Loops over an input or an output too wide to be held load ahead, as far as memory allows."""
    ends = too_wide(problem.widths, widest_held(problem, target)) & {0, len(problem.weights)}
    widest = max(width for i, width in enumerate(problem.blocks) if i not in ends)
    if problem.rows <= _FEWEST_ROWS:
        if problem.kind == "16 bits" or widest <= 64:
            yield Config(16, 64, block_k=128, num_warps=8 if widest > 128 else 4, num_stages=3)
        yield Config(16, 32, num_stages=2)
    elif problem.kind == "16 bits":
        yield Config(64, 64, num_warps=4 if widest <= 128 else 8, num_stages=3)
        yield Config(32, 64, num_stages=3)
    else:
        if widest <= (64 if problem.ends_exactly else 128):
            yield Config(32, 64, num_stages=3)
        yield Config(32, 32, num_warps=8, num_stages=2)


def _with_steps(problem: ChainProblem, target: Target) -> Iterator[Config]:
    """Values that are read again, and rows whose norm is taken, leave fewer registers.

    Where values are read again, 4 warps with 32 rows were faster on an H200 than 8 with 64 rows or
    with as many, although they spill.
    """
    most = widest_held(problem, target)
    in_blocks = middle(problem.widths, most, problem.largest_weight, problem.held)
    widest = max(width for i, width in enumerate(problem.blocks) if i not in in_blocks)
    few, in_16_bits = problem.rows <= _FEWEST_ROWS, problem.kind == "16 bits"
    if max(problem.blocks) <= 64:
        many = _many_rows(problem, target) if in_16_bits else _many_rows_in_tf32(problem, target)
        yield from (config for config in (_few_rows(problem) if few else many) if config.resident)
    # Where no loop over blocks is to load ahead, the loop over rows would, all weights at once.
    ahead = 2 if in_blocks else 1
    if not in_16_bits:
        tall = problem.kept and not few
        yield Config(32 if tall else 16, 32, num_warps=8, num_stages=ahead)
    elif few:
        yield Config(16, 64, num_warps=4 if widest <= 128 else 8, num_stages=ahead)
    elif problem.kept:
        yield Config(32, 64, num_warps=4, num_stages=ahead)
    elif widest > 128:
        yield Config(64, 64, block_k=32, num_warps=8, num_stages=ahead)
    else:
        yield Config(64, 64, num_warps=8, num_stages=3 if in_blocks else 1)
    yield Config(16, 32, num_warps=8, num_stages=ahead)


def _few_rows(problem: ChainProblem) -> Iterator[Config]:
    """As many programs as there can be; each waits for all weights at once, if they are few.

    In fp32 not with those of layers that read the input, too: of these registers ptxas keeps
    thousands of bytes in memory.
    """
    widest, held = max(problem.blocks), sum(problem.weights)
    beside_in_fp32 = problem.joined and problem.kind != "16 bits"
    if widest <= 64 and held <= _FEW_WEIGHTS and not beside_in_fp32:
        warps = 8 if held > _FEW_WEIGHTS // 2 else 4
        yield Config(16, 64, num_warps=warps, num_stages=1, resident=True)
    if problem.kind == "16 bits":
        if widest <= 128:
            yield Config(16, 128, num_stages=1)
        yield Config(16, 64, num_stages=2)
    yield Config(16, 32, num_stages=2)


def _many_rows(problem: ChainProblem, target: Target) -> Iterator[Config]:
    """Weights that stay in shared memory, if they fit; else as many rows as registers hold."""
    widest = max(problem.blocks)
    hopper = target.backend == "cuda" and target.capability // 10 == 9
    if target.backend == "cuda" and widest <= 128:
        for programs in (4, 3, 2):
            if programs == 2 or (widest <= 64 and (hopper or programs == 3)):
                yield Config(64, 64, num_stages=1, programs=programs, resident=True)
    if target.backend == "cuda" and (widest <= 128 or hopper):
        yield Config(128, 64, num_warps=8, num_stages=1, programs=1, resident=True)
    if hopper:
        in_blocks = middle(problem.widths, held=problem.held)
        around = [min(problem.blocks[i - 1], problem.blocks[i + 1]) for i in in_blocks]
        if max(around, default=0) > 128:
            yield Config(128, 64, num_warps=8, num_stages=2)
        yield Config(128, 32, num_warps=8, num_stages=3)
    if target.backend == "cuda":
        yield Config(64, 64, num_warps=4 if widest <= 128 else 8, num_stages=2)


def _many_rows_in_tf32(problem: ChainProblem, target: Target) -> Iterator[Config]:
    """As :func:`_many_rows`; operands take twice the registers that they take in 16 bits."""
    widest = max(problem.blocks)
    if widest <= 64:
        for programs in (3, 2):
            yield Config(64, 64, num_stages=1, programs=programs, resident=True)
        yield Config(64, 64, num_warps=8, num_stages=1, programs=1, resident=True)
    if widest <= 128 and not problem.ends_exactly:
        yield Config(64, 32, num_warps=8, num_stages=2)
    yield Config(32, 32, num_warps=8, num_stages=2)
