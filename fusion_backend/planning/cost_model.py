"""How long an MLP takes, by family and in Inductor's code: a model of what the GPU does.

A kernel takes

    start + latency · depth + ‖ traffic / bandwidth, products / rate, activation / rate ‖

with a norm between the sum and the maximum (``_POWER``), because loads and products overlap, but
not fully. ``depth`` is what one program sums over, one step after the other: where tiles are few it
is all that counts. ``traffic`` is what is read and written, each operand once. ``products`` are
those of whole tiles in whole waves, the best of a few tiles. An MLP is

    Inductor      products of the first layers, a pointwise pass over their results, last product
    library       first product with its activation, last product
    epilogue      first product(s) with the activation, last product
    stream        both, for few rows: reading the weights is the work
    back_to_back  one kernel, which computes each hidden value once and stores none

Each has a handful of factors: what it reaches of the data sheet's bandwidth and rate, its start and
its latency. They are fitted to measurements, and so are the uncertainties: the standard deviation
of the logarithm of measured over predicted time. Those that ship are an H200's. ``fusedmlp tune
--quick`` fits a GPU's own, which the user's table keeps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusion_backend.kernels.registry import BACK_TO_BACK, EPILOGUE, LIBRARY, STREAM
from fusion_backend.planning.gpus import Gpu
from fusion_backend.planning.measurements import INDUCTOR

_POWER = 3.0
_TILES = ((256, 128), (128, 128), (128, 64), (64, 64), (64, 32), (16, 32))
_SPLITS = (1, 2, 4, 8)
# A tile whose operands serve so many products each reaches the full rate.
_SERVED = 64
_ITEMSIZE = 2
# Special functions a microsecond and multiprocessor: 16 a clock at 1.5 GHz.
_SPECIAL_FUNCTIONS = 24e3
# Matrix units want so many rows; with more than the second, back_to_back takes as many as the last.
_FEWEST_ROWS, _FEW_ROWS, _ROWS_OF_A_PROGRAM = 16, 1024, 64
# Beyond so many waves, programs no longer end at the same time.
_COUNTED_WAVES = 4


@dataclass(frozen=True)
class Work:
    """One MLP in 16 bits, as the model sees it.

    Attributes:
        rows: at least one.
        widths: input, hidden and output width.
        gated: there are two first layers.
    """

    rows: int
    widths: tuple[int, int, int]
    gated: bool = False


@dataclass(frozen=True)
class Factors:
    """What the kernels of one family reach; dimensionless, but for times in microseconds.

    Attributes:
        start: microseconds to start and end a kernel.
        latency: microseconds for 1024 elements that one program sums over.
        memory: of the peak bandwidth.
        products: of the peak rate of products.
        special: of the rate of special functions, taken as one for each hidden element.
        deviation: of the logarithm of measured over predicted time: the uncertainty.
    """

    start: float
    latency: float
    memory: float
    products: float
    special: float = 1.0
    deviation: float = 0.0


#: Fitted to the H200's table and to 44 random MLPs there, by ``benchmarks/fit_cost_model.py``.
FITTED = {
    INDUCTOR: Factors(2.205, 1.536, 0.822, 0.718, 1.0, 0.12),
    EPILOGUE.name: Factors(3.0, 1.712, 0.867, 0.875, 0.382, 0.18),
    LIBRARY.name: Factors(3.329, 2.421, 1.034, 0.831, 0.532, 0.09),
    STREAM.name: Factors(3.691, 0.087, 0.869, 1.885, 15.18, 0.21),
    BACK_TO_BACK.name: Factors(1.939, 1.702, 0.361, 1.187, 0.293, 0.22),
}


def predicted(
    families: Sequence[str], work: Work, gpu: Gpu, fitted: Mapping[str, Factors] = FITTED
) -> dict[str, float]:
    """Microseconds of Inductor's code, and of those families that the model knows.

    Args:
        families: their names.
        work: the MLP.
        gpu: where it would run, by its data sheet.
        fitted: what kernels reach.
    """
    times = {INDUCTOR: _inductor(work, gpu, fitted[INDUCTOR])}
    for name in families:
        if name in _PREDICTIONS and name in fitted:
            times[name] = _PREDICTIONS[name](work, gpu, fitted[name], fitted[INDUCTOR])
    return times


def deviation(*names: str, fitted: Mapping[str, Factors] = FITTED) -> float:
    """Standard deviation of the logarithm of a ratio of times, from those of both."""
    return math.hypot(*(fitted[name].deviation for name in names))


def _inductor(work: Work, gpu: Gpu, reached: Factors) -> float:
    inner, hidden, out = work.widths
    first = 2 if work.gated else 1
    up = of_product(work.rows, inner, hidden, reached, gpu)
    pointwise = reached.start + of_moving(work.rows * hidden * (first + 1), reached, gpu)
    return first * up + pointwise + of_product(work.rows, hidden, out, reached, gpu)


def _epilogue(work: Work, gpu: Gpu, reached: Factors, library: Factors) -> float:
    inner, hidden, out = work.widths
    first = 2 if work.gated else 1
    sizes = (work.rows, inner, first * hidden)
    unwritten = (1 - first) * work.rows * hidden  # of a pair one result is written
    up = of_product(*sizes, reached, gpu, further=unwritten, may_split=not work.gated)
    activation = of_functions(work.rows * hidden, reached, gpu)
    return up + activation + of_product(work.rows, hidden, out, library, gpu)


def _stream(work: Work, gpu: Gpu, reached: Factors, library: Factors) -> float:
    """Each program reads all rows; ``special`` is the rate of that, in TB/s, not of functions."""
    inner, hidden, out = work.widths
    weights = _elements_of_weights(work)
    memory = of_moving(weights + (inner + out + 2 * hidden) * work.rows, reached, gpu)
    products = of_multiplying(max(work.rows, _FEWEST_ROWS) * weights, reached, gpu)
    depth = reached.latency * (inner + hidden) / 1024
    rows = work.rows * (inner + hidden) * _ITEMSIZE * gpu.multiprocessors
    return reached.start + depth + overlapped(memory, products) + rows / (reached.special * 1e6)


def _back_to_back(work: Work, gpu: Gpu, reached: Factors, library: Factors) -> float:
    return of_back_to_back(work, gpu, reached)


def of_back_to_back(work: Work, gpu: Gpu, reached: Factors) -> float:
    """Microseconds of a narrow MLP by one kernel.

    The latency is that of passing over 65,536 elements of weights, one block after the other.
    """
    from fusion_backend.kernels.host.configs import padded

    inner, hidden, out = work.widths
    memory = of_moving(work.rows * (inner + out) + _elements_of_weights(work), reached, gpu)
    height = _ROWS_OF_A_PROGRAM if work.rows > _FEW_ROWS else _FEWEST_ROWS
    waves = work.rows / height / gpu.multiprocessors
    rows = (math.ceil(waves) if waves < _COUNTED_WAVES else waves) * height * gpu.multiprocessors
    weights = ((2 if work.gated else 1) * padded(inner) + padded(out)) * hidden
    busy = of_multiplying(rows * weights, reached, gpu) + of_functions(rows * hidden, reached, gpu)
    return reached.start + reached.latency * weights / 65536 + overlapped(memory, busy)


_PREDICTIONS = {
    EPILOGUE.name: _epilogue,
    LIBRARY.name: _epilogue,  # its first product with the library's factors
    STREAM.name: _stream,
    BACK_TO_BACK.name: _back_to_back,
}


def of_product(
    rows: int,
    depth: int,
    columns: int,
    reached: Factors,
    gpu: Gpu,
    further: float = 0.0,
    tiles: Sequence[tuple[int, int]] = _TILES,
    may_split: bool = True,
) -> float:
    """Microseconds of ``(rows, depth) @ (depth, columns)`` by one kernel.

    Args:
        rows: of the result.
        depth: that is summed over.
        columns: of the result.
        reached: what the kernel reaches.
        gpu: where it runs.
        further: elements that it reads and writes beside operands and result.
        tiles: rows and columns that one program may compute at a time; the best of them counts.
        may_split: whether programs may share a sum.
    """
    elements = rows * depth + depth * columns + rows * columns + further
    memory = of_moving(elements, reached, gpu)
    best = math.inf
    for tall, wide in tiles:
        count = math.ceil(rows / tall) * math.ceil(columns / wide)
        serves = max(0.1, min(1.0, tall * wide / (tall + wide) / _SERVED))
        for splits in _SPLITS if may_split else (1,):
            waves = math.ceil(count * splits / gpu.multiprocessors)
            share = math.ceil(depth / splits)
            busy = waves * gpu.multiprocessors * tall * wide * share / serves
            added = 0.5 * reached.start if splits > 1 else 0.0
            time = overlapped(memory, of_multiplying(busy, reached, gpu)) + added
            best = min(best, time + reached.latency * share / 1024)
    return reached.start + best


def _elements_of_weights(work: Work) -> int:
    inner, hidden, out = work.widths
    return ((2 if work.gated else 1) * inner + out) * hidden


def overlapped(*parts: float) -> float:
    """Microseconds of parts that overlap."""
    return float(math.fsum(part**_POWER for part in parts) ** (1 / _POWER))


def of_moving(elements: float, reached: Factors, gpu: Gpu) -> float:
    """Microseconds of reading or writing so many."""
    return elements * _ITEMSIZE / (reached.memory * gpu.gigabytes_per_second * 1e3)


def of_multiplying(multiplications: float, reached: Factors, gpu: Gpu) -> float:
    """Microseconds of so many products with their sums."""
    return 2 * multiplications / (reached.products * gpu.teraflops * 1e6)


def of_functions(count: float, reached: Factors, gpu: Gpu) -> float:
    """Microseconds of so many special functions."""
    return count / (reached.special * gpu.multiprocessors * _SPECIAL_FUNCTIONS)
