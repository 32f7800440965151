"""Launch configurations of ``chain``, and for which chains there is one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusion_backend.kernels import reference
from fusion_backend.kernels.host.configs import NARROW_SMALL, Config, padded
from fusion_backend.kernels.host.problems import MANY_ROWS, precision, row_class
from fusion_backend.kernels.host.targets import Target

#: More layers make a kernel that compiles slowly, and were not tried.
MOST_LAYERS = 16
# Values that are held whole stand in registers: of fp32 fewer, as its products have no matrix unit.
_WIDEST = 256
_WIDEST_IN_FP32 = 64
# Of a weight that is multiplied whole, elements; more do not leave registers enough.
_LARGEST_WEIGHT = 32768
# What synchronizes copies and matrix units.
_BARRIERS = 1024
# Elements of weights that a program of few rows loads at once.
_FEW_WEIGHTS = 32768


class ChainProblem(NamedTuple):
    """One chain, as the kernel sees it; as :class:`problems.Problem`, of any number of layers.

    Attributes:
        rows: upper bound of the class of rows, as in :class:`problems.Problem`.
        widths: of the input, of each hidden value and of the output.
        dtype: of all operands.
        precision: how fp32 operands are multiplied: ``ieee`` or ``tf32x3``.
    """

    rows: int
    widths: tuple[int, ...]
    dtype: torch.dtype
    precision: str = "ieee"

    @property
    def blocks(self) -> tuple[int, ...]:
        """The widths, padded."""
        return tuple(map(padded, self.widths))

    @property
    def weights(self) -> tuple[int, ...]:
        """Elements of each weight, padded."""
        return tuple(first * second for first, second in itertools.pairwise(self.blocks))


def chain_problem(x: Tensor, weights: Sequence[Tensor], target: Target) -> ChainProblem:
    """The problem of ``chain_launch.chain``."""
    widths = (int(weights[0].shape[1]), *(int(weight.shape[0]) for weight in weights))
    return ChainProblem(row_class(x.shape[0]), widths, x.dtype, precision(x.dtype, target))


def can_chain(widths: Sequence[int], dtype: torch.dtype, target: Target) -> bool:
    """Whether ``chain_launch.chain`` can run a chain.

    Args:
        widths: of the input, of each hidden value and of the output.
        dtype: of all tensors.
        target: the GPU.
    """
    problem = ChainProblem(MANY_ROWS, tuple(widths), dtype, precision(dtype, target))
    return any(fits(config, problem, target) for config in preferences(problem, target))


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
    in_blocks = blocked(config, problem.widths)
    held = [width for i, width in enumerate(problem.widths) if i not in in_blocks]
    alone = [n for i, n in enumerate(problem.weights) if not in_blocks & {i, i + 1}]
    half = problem.dtype.itemsize == 2 or target.backend == "interpreter"
    if len(problem.weights) > MOST_LAYERS or max(held) > (_WIDEST if half else _WIDEST_IN_FP32):
        return False
    if max(alone, default=0) > _LARGEST_WEIGHT:
        return False
    programs = max(1, config.programs) if config.resident else 1
    return programs * shared_memory(config, problem, target) <= target.shared_memory


def blocked(config: Config, widths: tuple[int, ...]) -> frozenset[int]:
    """Positions in ``widths`` of the hidden values that are computed in blocks."""
    return frozenset() if config.resident else middle(widths)


def middle(widths: Sequence[int]) -> frozenset[int]:
    """Positions of the hidden values in the middle of two layers that are computed together.

    Those of which no two follow one another, and whose widths are largest in sum.
    """
    without, with_last = (0, frozenset[int]()), (0, frozenset[int]())
    for position, width in list(enumerate(widths))[1:-1]:
        taken = (without[0] + width, without[1] | {position})
        without, with_last = max(without, with_last, key=lambda found: found[0]), taken
    return max(without, with_last, key=lambda found: found[0])[1]


def shared_memory(config: Config, problem: ChainProblem, target: Target) -> int:
    """Shared memory of a program in bytes: not less than what Triton allocates."""
    weights = sum(problem.weights) if config.resident else _streamed(config, problem)
    elements = weights + config.block_m * max(problem.blocks)
    splits = 2 if problem.precision == "tf32x3" else 1
    barriers = _BARRIERS if target.backend == "cuda" else 0
    return splits * elements * problem.dtype.itemsize + barriers


def _streamed(config: Config, problem: ChainProblem) -> int:
    """Elements of weights in shared memory at a time, where they stream, and a block of a value.

    Without a loop over blocks, the loop over tiles is the one that loads ahead: all weights.
    """
    widths = problem.blocks
    in_loops = [p for p in blocked(config, problem.widths) if widths[p] > config.block_n]
    hidden = config.block_m * config.block_n
    if not in_loops:
        return sum(problem.weights) + hidden
    around = max(config.block_n * (widths[p - 1] + widths[p + 1]) for p in in_loops)
    looped = {layer for p in in_loops for layer in (p - 1, p)}
    whole = [n for layer, n in enumerate(problem.weights) if layer not in looped]
    return max(config.num_stages * around, *whole, 0) + hidden


def preferences(problem: ChainProblem, target: Target) -> tuple[Config, ...]:
    """Configurations for a problem, best first; not all need fit."""
    if problem.precision == "tf32x3":
        return (Config(32, 32, num_stages=1), Config(16, 16, num_stages=1))
    if problem.dtype.itemsize != 2:
        return (Config(32, 32, num_warps=8, num_stages=1), Config(16, 16, num_stages=1))
    few = () if problem.rows == MANY_ROWS else tuple(_few_rows(problem))
    return (*few, *_many_rows(problem, target), *NARROW_SMALL)


def _few_rows(problem: ChainProblem) -> Iterator[Config]:
    """As many programs as there can be; each waits for all weights at once, if they are few."""
    widest, held = max(problem.blocks), sum(problem.weights)
    if widest <= 64 and held <= _FEW_WEIGHTS:
        warps = 8 if held > _FEW_WEIGHTS // 2 else 4
        yield Config(16, 64, num_warps=warps, num_stages=1, resident=True)
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
        around = [min(problem.blocks[i - 1], problem.blocks[i + 1]) for i in middle(problem.widths)]
        if max(around) > 128:
            yield Config(128, 64, num_warps=8, num_stages=2)
        yield Config(128, 32, num_warps=8, num_stages=3)
    if target.backend == "cuda":
        yield Config(64, 64, num_warps=4 if widest <= 128 else 8, num_stages=2)
