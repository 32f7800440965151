"""How long a kernel takes with a configuration: a model of what a GPU does, to compare them.

A program of ``epilogue`` computes one tile, in steps of ``block_k``. A step takes

    ‖ bytes / cache,  products / rate,  latency / stages in flight ‖

with a norm between the sum and the maximum (``_POWER``), because loads and products overlap, but
not fully. Programs that run on a multiprocessor at one time divide cache and matrix units among
them; each waits its own latency. How many run is what registers and shared memory allow. Programs
beyond these start in a further turn. To all turns comes what the memory needs to read each operand
and to write the result once, by the same norm.

So the model knows what lists by rows cannot: whether tiles are enough for the card, what the last
turn leaves idle, whether a tile has rows that are not there, and what a sum waits for.

Its factors are fitted to an H200, in 16 bits, by ``benchmarks/fit_config_times.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fusion_backend.kernels.host.configs import Config, Kernel, shared_memory
from fusion_backend.kernels.host.problems import Problem
from fusion_backend.kernels.host.targets import Target

_POWER = 3.0
# Of a multiprocessor; a program takes a KiB of shared memory more than it asks for.
_REGISTERS, _WARPS = 65536, 64
_RESERVED = 1024
# Of a thread, beside its part of the sums; and the most.
_OTHER_REGISTERS, _MOST_REGISTERS = 56, 255
# Rows from which Hopper multiplies with wgmma.
_WGMMA_ROWS = 64
# A gain must exceed so many standard deviations of the ratio of two predicted times. With fewer,
# some MLPs that the factors were not fitted to took up to 7 % longer than by the lists.
_SURE = 1.65


@dataclass(frozen=True)
class Factors:
    """What a kernel reaches on one GPU.

    Attributes:
        start: microseconds to start and end the kernel.
        latency: microseconds from asking for a block of operands to having used it, with wgmma.
        latency_few: the same in tiles of fewer than 64 rows, with mma.
        tile: microseconds to start and end a tile.
        described: how many times as long that takes with tensor descriptors.
        cache: what the L2 cache gives all multiprocessors, in TB/s.
        products: with wgmma, in TFLOP/s.
        products_few: with mma.
        element: nanoseconds that a thread takes to finish an element of a sum.
        exact: nanoseconds more, for each function of the activation that is computed exactly.
        memory: in TB/s.
        deviation: of the logarithm of measured over predicted ratios of two configurations' times,
            for MLPs that the factors were not fitted to.
    """

    start: float
    latency: float
    latency_few: float
    tile: float
    described: float
    cache: float
    products: float
    products_few: float
    element: float
    exact: float
    memory: float
    deviation: float = 0.0


#: By kernel. Fitted to an H200 by ``benchmarks/fit_config_times.py``.
FITTED: dict[Kernel, Factors] = {
    "epilogue": Factors(
        start=1.0,
        latency=0.716,
        latency_few=1.024,
        tile=1.13,
        described=2.38,
        cache=13.3,
        products=1077.0,
        products_few=229.0,
        element=12.4,
        exact=38.1,
        memory=3.82,
        deviation=0.144,
    ),
}


def speaks_of(kernel: Kernel, problem: Problem, target: Target) -> bool:
    """Whether the model knows a kernel, and was fitted to such problems on such a GPU."""
    return (
        kernel in FITTED
        and problem.exact_rows > 0
        and problem.dtype.itemsize == 2
        and target.backend == "cuda"
        and target.capability == 90
    )


def predicted(
    kernel: Kernel,
    config: Config,
    problem: Problem,
    target: Target,
    fitted: Mapping[Kernel, Factors] = FITTED,
) -> float:
    """Microseconds of a problem of which the model :func:`speaks_of`.

    Args:
        kernel: one that is fitted.
        config: one that fits.
        problem: of which the number of rows is known.
        target: the GPU.
        fitted: what kernels reach.
    """
    reached, processors = fitted[kernel], target.multiprocessors
    rows, depth, columns = problem.exact_rows, problem.in_features, problem.hidden_features
    weights = 2 if problem.gated else 1
    sums = weights * config.block_m * config.block_n
    loaded = 2 * (config.block_m + weights * config.block_n) * config.block_k
    wgmma = config.block_m >= _WGMMA_ROWS
    latency = reached.latency if wgmma else reached.latency_few
    products = reached.products if wgmma else reached.products_few
    loading = loaded / (reached.cache * 1e6 / processors)
    multiplying = 2 * sums * config.block_k / (products * 1e6 / processors)
    waiting = latency / max(1, config.num_stages - 1)
    steps = math.ceil(depth / config.block_k)
    finishing = reached.tile * (reached.described if config.tma else 1.0)
    by_element = reached.element * weights + reached.exact * problem.exact_functions
    finishing += by_element * 1e-3 * sums / weights / (32 * config.num_warps)

    def turn(programs: int) -> float:
        return steps * _overlapped(programs * loading, programs * multiplying, waiting) + finishing

    tiles = math.ceil(rows / config.block_m) * math.ceil(columns / config.block_n)
    most = math.ceil(tiles / processors)
    at_once = min(most, programs_at_once(kernel, config, problem, target))
    turns, left = divmod(most, at_once)
    computing = turns * turn(at_once) + (turn(left) if left else 0.0)
    elements = weights * depth * columns + rows * (depth + columns)
    return reached.start + _overlapped(computing, 2 * elements / (reached.memory * 1e6))


def is_sure(kernel: Kernel, ratio: float, fitted: Mapping[Kernel, Factors] = FITTED) -> bool:
    """Whether one configuration is faster than another, if its predicted time is so much shorter.

    Args:
        kernel: one that is fitted.
        ratio: of the predicted times, the longer over the shorter.
        fitted: what kernels reach.
    """
    return math.log(ratio) > _SURE * fitted[kernel].deviation


def programs_at_once(kernel: Kernel, config: Config, problem: Problem, target: Target) -> int:
    """How many programs run on a multiprocessor at one time: registers and memory allow so many."""
    threads = 32 * config.num_warps
    sums = config.block_m * config.block_n * (2 if problem.gated else 1) / threads
    registers = min(_MOST_REGISTERS, _OTHER_REGISTERS + sums)
    memory = shared_memory(kernel, config, problem, target) + _RESERVED
    allowed = min(
        (target.shared_memory + _RESERVED) // memory,
        int(_REGISTERS / (registers * threads)),
        _WARPS // config.num_warps,
    )
    if config.programs:
        allowed = min(allowed, config.programs)
    return max(1, allowed)


def _overlapped(*parts: float) -> float:
    return float(math.fsum(part**_POWER for part in parts) ** (1 / _POWER))
