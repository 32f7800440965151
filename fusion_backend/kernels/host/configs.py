"""Launch configurations: what they are, and which can run where.

``preferences`` chooses one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fusion_backend.kernels.host.problems import MANY_ROWS, Problem
from fusion_backend.kernels.host.targets import Target

# Rows of 16-bit results that tensor descriptors store divide by this many elements.
_DESCRIBED_UNIT = 8

#: The kernels that are configured here, each by a name of its own.
Kernel = Literal["epilogue", "hidden_gradient", "back_to_back", "stream_hidden", "stream_out"]

# back_to_back holds whole rows of x and y in one program. Products of fp32 need more registers: all
# operands stand there without matrix units, and their halves do where they are split for tf32.
_WIDEST_BACK_TO_BACK = 256
_WIDEST_BACK_TO_BACK_IN_FP32 = 64

# Of x and y of the kernel of a narrow MLP's hidden gradient.
WIDEST_HIDDEN_GRADIENT = 128

# The gradients of a narrow MLP's weights that one program sums in the registers of 8 warps.
MOST_SUMS = 1 << 15
_ROWS_OF_GRADIENTS = 64
# Sums and hidden values of a program of 4 warps: of the 255 registers of a thread, 192.
_MOST_OF_FOUR_WARPS = 192 * 4 * 32


@dataclass(frozen=True)
class Config:
    """How a kernel is launched.

    Attributes:
        block_m: rows of a tile.
        block_n: columns of a tile; in back_to_back, hidden features computed at a time; in stream,
            the most features that a program owns.
        block_k: features summed over at a time; back_to_back sums over all of them at once.
        group_m: block rows taken together for the L2 cache, see ``tiles.tile_coordinates``.
        parts: in how many parts, side by side, the epilogue is done: 1, 2 or 4.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline.
        programs: 0 for a program per tile, else programs per multiprocessor among which the work
            is divided.
        resident: keep all weights in shared memory (back_to_back; persistent).
        late_bias: add the bias of a first layer after its product, so that it is loaded ahead with
            the weights (back_to_back, not resident).
        tma: load operands by tensor descriptors (epilogue), see ``epilogue_tma``.
        flatten: with tma, load for the next tile while the last is finished, and store by tensor
            descriptors as well (without a gate; persistent).
    """

    block_m: int
    block_n: int
    block_k: int = 64
    group_m: int = 8
    parts: int = 1
    num_warps: int = 4
    num_stages: int = 3
    programs: int = 0
    resident: bool = False
    late_bias: bool = False
    tma: bool = False
    flatten: bool = False


def fits(kernel: Kernel, config: Config, problem: Problem, target: Target) -> bool:
    """Whether a configuration can run: widths, memory, operands that TMA can load."""
    if config.tma and not (kernel == "epilogue" and problem.tma and target.has_tma):
        return False
    if config.flatten and (problem.gated or problem.hidden_features % _DESCRIBED_UNIT):
        return False
    if kernel == "back_to_back":
        widest = max(problem.in_features, problem.out_features)
        if widest > _widest_back_to_back(problem, target):
            return False
    return shared_memory(kernel, config, problem, target) <= target.shared_memory


def _widest_back_to_back(problem: Problem, target: Target) -> int:
    if problem.dtype.itemsize == 2 or target.backend == "interpreter":
        return _WIDEST_BACK_TO_BACK
    return _WIDEST_BACK_TO_BACK_IN_FP32


def shared_memory(kernel: Kernel, config: Config, problem: Problem, target: Target) -> int:
    """Shared memory of a program in bytes: not less than what Triton allocates."""
    if kernel == "back_to_back":
        return _back_to_back_memory(config, problem, target)
    itemsize = problem.dtype.itemsize
    weights = 2 if kernel in ("epilogue", "stream_hidden") and problem.gated else 1
    stage = (config.block_m + weights * config.block_n) * config.block_k * itemsize
    operands = _buffers(config, target) * stage
    if problem.splits_operands:
        operands = (config.num_stages + 1) * stage + config.block_n * config.block_k * itemsize
    part = config.block_m * config.block_n // config.parts
    if config.flatten:  # operands of the next tile are there while this one is stored
        return operands + part * itemsize + part * problem.exchanged // 2 + _barriers(target)
    return max(operands, part * itemsize) + _barriers(target)


def padded(width: int) -> int:
    """The power of two that back_to_back pads a width to; matrix units want 16 at least."""
    return max(16, 1 << (width - 1).bit_length())


def narrow_gradient_config(
    in_features: int, hidden_features: int, out_features: int, exact: bool = False
) -> Config:
    """How the backward pass of a narrow MLP is launched.

    Sums of gradients stay in registers, beside the hidden values of a tile and what they become.
    Where both leave room, two programs of four warps share a multiprocessor: one multiplies while
    the other waits. Where sums leave little, there are fewer rows, which are loaded further ahead.

    Args:
        in_features: of x.
        hidden_features: of the hidden values.
        out_features: of the result.
        exact: whether the activation has functions that are computed exactly, which need registers.
    """
    hidden = padded(hidden_features)
    sums = hidden * (padded(in_features) + padded(out_features))
    if sums > MOST_SUMS // 2:
        return Config(block_m=32, block_n=hidden, num_warps=8, num_stages=3)
    if not exact and sums + hidden * 2 * _ROWS_OF_GRADIENTS <= _MOST_OF_FOUR_WARPS:
        return Config(_ROWS_OF_GRADIENTS, hidden, num_warps=4, num_stages=2, programs=2)
    return Config(_ROWS_OF_GRADIENTS, hidden, num_warps=8, num_stages=2, programs=1)


def narrow_hidden_gradient_config(problem: Problem, target: Target, sums: bool) -> Config:
    """How ``narrow_hidden_gradient`` is launched: see that kernel.

    Args:
        problem: as of ``back_to_back``.
        target: the GPU.
        sums: whether gradients of biases are wanted. Hopper's matrix units sum 64 columns or more.
    """
    if problem.rows != MANY_ROWS:
        return Config(16, 32, num_warps=4, num_stages=2)
    hopper = target.backend == "cuda" and target.capability // 10 == 9
    if hopper and sums:
        return Config(64, 64, num_warps=4, num_stages=2)
    return Config(64, 32, num_warps=4, num_stages=3 if hopper else 2)


def _back_to_back_memory(config: Config, problem: Problem, target: Target) -> int:
    block_in, block_out = padded(problem.in_features), padded(problem.out_features)
    weights = ((2 if problem.gated else 1) * block_in + block_out) * config.block_n
    x_tile, y_tile = config.block_m * block_in, config.block_m * block_out
    hidden_tile = config.block_m * config.block_n
    if config.resident:
        blocks = -(-problem.hidden_features // config.block_n)
        elements = blocks * weights + max(x_tile, hidden_tile, y_tile)
    else:
        elements = max(_buffers(config, target) * weights + x_tile + hidden_tile, y_tile)
    if problem.splits_operands:
        elements *= 2
    exchanged = hidden_tile * problem.exchanged
    return elements * problem.dtype.itemsize + exchanged + _barriers(target)


def _buffers(config: Config, target: Target) -> int:
    """Tiles of an operand that the software pipeline holds at a time.

    Matrix units that read shared memory (wgmma, from 64 rows on, and tcgen05) keep the tile in use
    there; others hold it in registers.
    """
    reads_shared_memory = target.multiplies_shared_memory and config.block_m >= 64
    return max(1, config.num_stages - (0 if reads_shared_memory else 1))


def _barriers(target: Target) -> int:
    """Bytes for what synchronizes copies and matrix units."""
    return 1024 if target.backend == "cuda" else 0


#: The last resort of kernels that hold all features of a row, from ever fewer rows.
NARROW_SMALL = (
    Config(64, 32, num_warps=8, num_stages=2),
    Config(32, 32, num_stages=2),
    Config(16, 32, num_stages=1),
    Config(16, 16, num_stages=1),
)
