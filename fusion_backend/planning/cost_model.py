"""How long an MLP takes, by family and in Inductor's code: a model of what the GPU does.

A kernel takes

    start + latency · depth + ‖ traffic / bandwidth, products / rate ‖ + activation / rate

with a norm between the sum and the maximum (``_POWER``), because loads and products overlap, but
not fully. ``depth`` is what one program sums over, one step after the other: where tiles are few it
is all that counts. ``traffic`` is what is read and written, each operand once. ``products`` are
those of whole tiles in whole waves. An MLP is

    Inductor      products of the first layers, a pointwise pass over their results, last product
    library       first product with its activation, last product
    epilogue      first product(s) with the activation, last product
    stream        both, for few rows: reading the weights is the work
    back_to_back  one kernel, which computes each hidden value once and stores none

A family may have several kernels, and :func:`kernel_of` says which one runs an MLP. Each has a
handful of factors: what it reaches of the data sheet's bandwidth and rate, its start and its
latency. Of kernels for Hopper the tiles are known, too. Of Triton's they are not: a variant that
took the first product of ``epilogue`` from ``config_times``, with the configuration that it would
have, was as far off for MLPs that it was not fitted to, and chose no better.

Factors are fitted to measurements, and so are the uncertainties: the standard deviations of the
logarithms of measured over predicted times, and of ratios of Inductor's time to a family's. The
latter are smaller, because the last product is the same in both. Those that ship are an H200's.
``fusedmlp tune --quick`` fits a GPU's own, which the user's table keeps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fusion_backend.kernels.registry import BACK_TO_BACK, EPILOGUE, LIBRARY, STREAM, named
from fusion_backend.planning import discounts
from fusion_backend.planning.gpus import Gpu, kernel_target
from fusion_backend.planning.measurements import INDUCTOR
from fusion_backend.planning.setting import Setting

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
# 16-bit elements of a line of the cache, and of what libraries load at a time.
_LINE, _PIECE = 64, 8
# Of stream's kernels for any GPU.
_ROWS_OF_A_TILE_OF_STREAM = 64
#: Of GPUs that decisions were checked on.
ARCHITECTURE = "sm_90"
# With three quarters of one, a random MLP that it was not fitted to ran at 0.925 of Inductor's.
_DEVIATIONS = 1.0
_EPILOGUE_OF_A_ROW = f"{EPILOGUE.name} of one row"
#: Kernels of families that have one for any GPU beside: that has the family's name.
EPILOGUE_ON_HOPPER = f"{EPILOGUE.name} on Hopper"
STREAM_ON_HOPPER = f"{STREAM.name} on Hopper"


@dataclass(frozen=True)
class Work:
    """One MLP in 16 bits, as the model sees it.

    Attributes:
        rows: at least one.
        widths: input, hidden and output width.
        gated: there are two first layers.
        packed: their weights are halves of one, so libraries compute one product.
        exact: how many functions of the activation kernels compute exactly.
        transposed: weights are stored ``(in_features, out_features)``.
        any_gpu: only kernels for any GPU take it, on whatever GPU it is.
        by_class: only the class of the number of rows will be known, so kernels inlined by Inductor
            have the configuration of that class.
    """

    rows: int
    widths: tuple[int, int, int]
    gated: bool = False
    packed: bool = False
    exact: int = 0
    transposed: bool = False
    any_gpu: bool = False
    by_class: bool = False

    @classmethod
    def of(cls, setting: Setting) -> Work:
        """The MLP of a site of known widths, with as many rows as are likely."""
        assert setting.widths is not None
        return cls(
            max(setting.likely_rows, 1),
            setting.widths,
            setting.gated,
            setting.packed,
            discounts.exact_functions(setting),
            setting.transposed,
            setting.strided or bool(setting.operands),
            setting.known_rows is None,
        )


@dataclass(frozen=True)
class Factors:
    """What one kernel reaches; dimensionless, but for times in microseconds.

    Attributes:
        start: microseconds to start and end a kernel.
        latency: microseconds for 1024 elements that one program sums over; in ``stream`` on Hopper,
            for each 16 rows of a tile.
        memory: of the peak bandwidth.
        products: of the peak rate of products.
        special: of the rate of special functions, taken as one for each hidden element.
        deviation: of the logarithm of measured over predicted time.
        ratio: of the logarithm of measured over predicted ratios of Inductor's time to it.
        exact: of the rate of special functions, for those that are computed exactly.
        pitched: how many times as long products take where rows of an operand are no whole lines
            of the cache.

    A factor is 0 where no time of the kernel depends on it.
    """

    start: float
    latency: float
    memory: float
    products: float
    special: float = 1.0
    deviation: float = 0.0
    ratio: float = 0.0
    exact: float = 0.0
    pitched: float = 0.0


#: By kernel. ``benchmarks/fit_cost_model.py`` fits them to an H200's table and random MLPs.
FITTED: Mapping[str, Factors] = {
    INDUCTOR: Factors(2.2, 1.86, 0.889, 0.736, 0.0, deviation=0.12, pitched=1.49),
    LIBRARY.name: Factors(2.96, 1.47, 0.898, 0.784, 2.05, deviation=0.11, ratio=0.05),
    EPILOGUE.name: Factors(2.66, 1.05, 0.937, 0.535, 1.46, 0.131, 0.092, exact=0.25),
    EPILOGUE_ON_HOPPER: Factors(5.63, 0.0, 0.818, 0.806, 0.0, 0.088, 0.07, exact=0.101),
    STREAM.name: Factors(4.05, 2.71, 0.774, 0.0, 0.0, 0.168, 0.165),
    STREAM_ON_HOPPER: Factors(2.71, 1.18, 0.877, 0.0, 0.0, 0.151, 0.139),
    BACK_TO_BACK.name: Factors(2.27, 2.05, 0.441, 1.13, 0.764, 0.232, 0.204, exact=0.286),
}


def speaks_for(setting: Setting) -> bool:
    """Whether it decides of a site, where nobody has measured that very MLP.

    It was checked on such, in inference in 16 bits, on GPUs like the one that it was fitted to. Of
    weights stored the other way round, tables know more.
    """
    return (
        setting.gpu.architecture == ARCHITECTURE
        and setting.widths is not None
        and setting.dtype.itemsize == 2
        and setting.known_rows != 0
        and not (setting.training or setting.activated or setting.is_chain or setting.convolution)
        and not (setting.operands or setting.strided or setting.transposed)
    )


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
    times = {INDUCTOR: of_kernel(INDUCTOR, work, gpu, fitted)}
    for name in families:
        kernel = kernel_of(name, work, gpu)
        if kernel in fitted:
            times[name] = of_kernel(kernel, work, gpu, fitted)
    return times


def of_kernel(kernel: str, work: Work, gpu: Gpu, fitted: Mapping[str, Factors] = FITTED) -> float:
    """Microseconds of an MLP by one of the kernels that have factors, or Inductor's code."""
    return _KERNELS[kernel](work, gpu, fitted[kernel], fitted[INDUCTOR])


@functools.cache
def kernel_of(family: str, work: Work, gpu: Gpu) -> str:
    """The kernel by which a family runs an MLP: its factors have that name, if it has any.

    Of one row of ``epilogue`` there are none: its tiles have 16, and took up to 1.6 times as long
    as the model says.
    """
    if family == EPILOGUE.name and work.rows == 1:
        return _EPILOGUE_OF_A_ROW
    target = kernel_target(gpu)
    how = (work.rows, work.widths, work.gated, torch.bfloat16, work.transposed, target)
    on_hopper = _ON_HOPPER.get(family)
    if on_hopper and not work.any_gpu and named(family).runs_made_for_hopper(*how):
        return on_hopper
    return family


def family_of(kernel: str) -> str:
    """The family that a kernel is of; of Inductor its own name."""
    return _OF_FAMILY.get(kernel, kernel)


def deviation(
    name: str, other: str, work: Work, gpu: Gpu, fitted: Mapping[str, Factors] = FITTED
) -> float:
    """Standard deviation of the logarithm of a ratio of times of one MLP, by family or Inductor."""
    kernels = {kernel_of(each, work, gpu) for each in (name, other)} - {INDUCTOR}
    less_known = _LESS_KNOWN if work.rows > _FEW_ROWS else {}
    return math.hypot(*(less_known.get(each, 1.0) * fitted[each].ratio for each in kernels))


def sure_gains(
    times: Mapping[str, float], work: Work, gpu: Gpu, fitted: Mapping[str, Factors] = FITTED
) -> dict[str, float]:
    """How many times as fast as Inductor families are, less ``_DEVIATIONS`` of what it is off by.

    A family of which this is worthwhile may be taken without a measurement.

    Args:
        times: what is :func:`predicted`.
        work: the MLP.
        gpu: where it would run.
        fitted: what kernels reach.
    """
    return {
        name: times[INDUCTOR]
        / us
        / math.exp(_DEVIATIONS * deviation(name, INDUCTOR, work, gpu, fitted))
        for name, us in times.items()
        if name != INDUCTOR
    }


def careful(
    families: Sequence[str], work: Work, gpu: Gpu, fitted: Mapping[str, Factors] = FITTED
) -> dict[str, float]:
    """:func:`predicted`, with families as much longer as makes their gains those that are sure."""
    times = predicted(families, work, gpu, fitted)
    sure = sure_gains(times, work, gpu, fitted)
    return times | {name: times[INDUCTOR] / gain for name, gain in sure.items()}


def _inductor(work: Work, gpu: Gpu, reached: Factors, library: Factors) -> float:
    inner, hidden, out = work.widths
    first = 2 if work.gated else 1
    pairs, columns = (1, 2 * hidden) if work.packed else (first, hidden)
    up = _of_library(work.rows, inner, columns, reached, gpu)
    pointwise = reached.start + of_moving(work.rows * hidden * (first + 1), reached, gpu)
    return pairs * up + pointwise + _of_library(work.rows, hidden, out, reached, gpu)


def _library(work: Work, gpu: Gpu, reached: Factors, library: Factors) -> float:
    inner, hidden, _ = work.widths
    up = of_product(work.rows, inner, hidden, reached, gpu)
    activation = of_functions(work.rows * hidden, reached, gpu)
    return up + activation + _last(work, gpu, library)


def _epilogue(work: Work, gpu: Gpu, reached: Factors, library: Factors) -> float:
    inner, hidden, _ = work.widths
    first = 2 if work.gated else 1
    sizes = (work.rows, inner, first * hidden)
    unwritten = (1 - first) * work.rows * hidden  # of a pair one result is written
    up = of_product(*sizes, reached, gpu, further=unwritten, may_split=not work.gated)
    functions = of_functions(work.rows * hidden, reached, gpu)
    functions += _of_exact_functions(work, reached, gpu)
    lost = _lost_to_its_class(work, gpu) if work.by_class else 0.0
    return up + functions + lost + _last(work, gpu, library)


def _lost_to_its_class(work: Work, gpu: Gpu) -> float:
    """Microseconds by which the first product takes longer with the configuration of its class."""
    from fusion_backend.kernels.host.problems import Problem, row_class
    from fusion_backend.kernels.preferences import lost_to_class

    target = kernel_target(gpu)
    if target is None:
        return 0.0
    inner, hidden, _ = work.widths
    sizes = (row_class(work.rows), inner, hidden, 0)
    aligned = inner % _PIECE == 0 and hidden % _PIECE == 0
    problem = Problem(*sizes, work.gated, torch.bfloat16, tma=aligned, exact_rows=work.rows)
    return lost_to_class(problem._replace(exact_functions=work.exact), target)


def _of_exact_functions(work: Work, reached: Factors, gpu: Gpu) -> float:
    return of_exact_functions(work.rows * work.widths[1] * work.exact, reached, gpu)


def _epilogue_on_hopper(work: Work, gpu: Gpu, reached: Factors, library: Factors) -> float:
    """By the tiles of its kernel: there are turns enough for one tile of each multiprocessor."""
    from fusion_backend.kernels.epilogue import config_sm90

    target = kernel_target(gpu)
    assert target is not None
    inner, hidden, _ = work.widths
    sizes = (work.rows, hidden, work.gated, target)
    whole = config_sm90.SQUARE
    tile = config_sm90.fastest_tile(*sizes, [whole] if work.exact else config_sm90.TILES)
    turns = config_sm90.turns(tile, *sizes) * tile.time / whole.time
    steps = math.ceil(inner / config_sm90.BLOCK_K)
    at_once = gpu.multiprocessors * whole.rows * whole.columns * config_sm90.BLOCK_K
    weights = (2 if work.gated else 1) * inner * hidden
    memory = of_moving(work.rows * (inner + hidden) + weights, reached, gpu)
    up = overlapped(memory, of_multiplying(turns * steps * at_once, reached, gpu))
    return reached.start + up + _of_exact_functions(work, reached, gpu) + _last(work, gpu, library)


@functools.lru_cache(4096)  # fitting asks for it again and again
def _last(work: Work, gpu: Gpu, library: Factors) -> float:
    """Microseconds of the last product, by a library."""
    _, hidden, out = work.widths
    return _of_library(work.rows, hidden, out, library, gpu)


def _stream(work: Work, gpu: Gpu, reached: Factors, library: Factors) -> float:
    inner, hidden, _ = work.widths
    tiles = math.ceil(work.rows / _ROWS_OF_A_TILE_OF_STREAM)
    return _streamed(work, tiles * (inner + hidden), reached, gpu)


def _stream_on_hopper(work: Work, gpu: Gpu, reached: Factors, library: Factors) -> float:
    """A step takes the longer the more rows a tile has; programs may share a sum over hidden."""
    from fusion_backend.kernels.stream.config import preferred, row_class

    target = kernel_target(gpu)
    assert target is not None
    inner, hidden, _ = work.widths
    stored = (work.transposed, work.transposed)
    pair = preferred(row_class(work.rows), *work.widths, work.gated, stored, target)
    depth = inner * (1.5 if work.gated else 1.0) + hidden / pair.out.splits
    return _streamed(work, pair.hidden.block_m / _FEWEST_ROWS * depth, reached, gpu)


def _streamed(work: Work, depth: float, reached: Factors, gpu: Gpu) -> float:
    """Microseconds in which weights are read, and multiplied.

    A single row needs no matrix units, and its sums are done when the weights are there.
    """
    memory = of_moving(_elements_of_weights(work), reached, gpu)
    latency = 0.0 if work.rows == 1 else reached.latency * depth / 1024
    return reached.start + overlapped(memory, latency)


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
    functions = of_functions(rows * hidden, reached, gpu)
    functions += of_exact_functions(rows * hidden * work.exact, reached, gpu)
    busy = of_multiplying(rows * weights, reached, gpu) + functions
    return reached.start + reached.latency * weights / 65536 + overlapped(memory, busy)


# How many times as far off it is with many rows: Triton's large tiles run narrow layers there.
_LESS_KNOWN = {EPILOGUE.name: 2.5}
_ON_HOPPER = {EPILOGUE.name: EPILOGUE_ON_HOPPER, STREAM.name: STREAM_ON_HOPPER}
_OF_FAMILY = {kernel: family for family, kernel in _ON_HOPPER.items()}
_KERNELS: Mapping[str, Callable[[Work, Gpu, Factors, Factors], float]] = {
    INDUCTOR: _inductor,
    LIBRARY.name: _library,
    EPILOGUE.name: _epilogue,
    EPILOGUE_ON_HOPPER: _epilogue_on_hopper,
    STREAM.name: _stream,
    STREAM_ON_HOPPER: _stream_on_hopper,
    BACK_TO_BACK.name: _back_to_back,
}


def _of_library(rows: int, depth: int, columns: int, reached: Factors, gpu: Gpu) -> float:
    """Microseconds of a product by a library's kernel.

    It takes longer where rows of an operand or the result are no whole lines of the cache. Where
    they are not whole pieces either, programs do not share a sum.
    """
    if depth % _LINE or columns % _LINE:
        slower = {name: getattr(reached, name) / reached.pitched for name in ("memory", "products")}
        reached = replace(reached, **slower)
    in_pieces = depth % _PIECE == 0 and (columns % _PIECE == 0 or columns == 1)
    return of_product(rows, depth, columns, reached, gpu, may_split=in_pieces or rows == 1)


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


def of_exact_functions(count: float, reached: Factors, gpu: Gpu) -> float:
    """Microseconds of so many functions that are computed exactly; none where the rate is 0."""
    if not reached.exact:
        return 0.0
    return count / (reached.exact * gpu.multiprocessors * _SPECIAL_FUNCTIONS)
