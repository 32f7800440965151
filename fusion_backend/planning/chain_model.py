"""How long a chain of narrow layers takes on a GPU, in one kernel and in others: a model.

It is like :mod:`cost_model`, of any number of layers. Three ways to run a chain are modelled:

    chain     one kernel. A program takes a tile of rows through all layers: each layer has a
              latency, and weights that do not stay in shared memory are read for each tile
    unfused   a product a layer, and a pointwise kernel between two: Inductor's code
    pairs     the fastest families for pairs of layers, by the cost model, the others unfused

The kernel and unfused layers have a handful of factors each, in 16 bits and in TF32. They are
fitted to measurements by ``benchmarks/fit_chain_model.py``, which also says how far the gain is off
that is predicted for a chain without its own measurements: :data:`DEVIATIONS`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from fusion_backend.kernels.registry import BACK_TO_BACK, CHAIN, STREAM
from fusion_backend.mlp.steps import Step, Steps
from fusion_backend.planning import cost_model
from fusion_backend.planning.cost_model import of_functions, of_moving, of_multiplying, overlapped
from fusion_backend.planning.gains import MOST_OF_FEW_ROWS
from fusion_backend.planning.gpus import Gpu, kernel_target
from fusion_backend.planning.measurements import INDUCTOR

if TYPE_CHECKING:
    from fusion_backend.kernels.chain.config import ChainProblem
    from fusion_backend.kernels.host.configs import Config

#: The names of the ways to run a chain without its kernel.
UNFUSED, PAIRS = "unfused", "pairs"
# Beyond so many waves, programs no longer end at the same time.
_COUNTED_WAVES = 4
# Norms and sums of two values, in special functions an element, and what each takes a tile of rows
# in microseconds: reductions wait, and values move between layouts. Chosen by 50 times on an H200.
_NORM, _SUM = 2.0, 0.5
_WAITING = {"norm": 0.5, "sum": 0.3}
# Programs that a multiprocessor has registers for, whatever shared memory says.
_MOST_PROGRAMS = 4
# 16-bit elements that are loaded at a time, from multiples of as many.
_UNIT = 8


@dataclass(frozen=True)
class ChainWork:
    """One chain, as the model sees it.

    Attributes:
        rows: at least one.
        widths: of the input, of each hidden value and of the output.
        functions: what an activation costs for each element, in special functions.
        precision: ``bfloat16``, which speaks for float16, too, or ``tf32``.
        inner: the steps, where they are more than layers and an activation between each two.
    """

    rows: int
    widths: tuple[int, ...]
    functions: float = 1.0
    precision: str = "bfloat16"
    inner: Steps | None = None

    @property
    def held(self) -> frozenset[int]:
        """Positions in ``widths`` of values with a norm or a sum."""
        return frozenset() if self.inner is None else self.inner.held

    @property
    def joined(self) -> frozenset[int]:
        """The layers that read the input beside the value before them."""
        return frozenset() if self.inner is None else self.inner.joined

    @property
    def depths(self) -> tuple[int, ...]:
        """The features that each layer sums over."""
        return self.widths[:-1] if self.inner is None else self.inner.depths(self.widths)

    @property
    def waiting(self) -> float:
        """Microseconds that its norms and sums add to the latency of a tile of rows."""
        if self.inner is None:
            return 0.0
        sums = sum(bool(step.reads) for step in self.inner.all)
        return _WAITING["norm"] * len(self.inner.norms) + _WAITING["sum"] * sums

    def functions_at(self, position: int) -> float:
        """What the steps of a value cost for each element, in special functions."""
        if self.inner is None:
            return self.functions if 0 < position < len(self.widths) - 1 else 0.0
        steps = (self.inner.all[index] for index in self.inner.groups[position])
        return sum(self._functions_of(step) for step in steps)

    def _functions_of(self, step: Step) -> float:
        if step.is_norm:
            return _NORM
        return _SUM if step.reads else self.functions

    @property
    def size(self) -> int:
        """Bytes of an element, in those of 16 bits; and how much longer its products take."""
        return 2 if self.precision == "tf32" else 1


@dataclass(frozen=True)
class Factors:
    """What the kernels of one way reach; dimensionless, but for times in microseconds.

    Attributes:
        start: microseconds to start and end a kernel.
        latency: microseconds for each layer of a tile of rows; of unfused layers, for 1024 elements
            that they sum over.
        weights: microseconds to pass over 65,536 elements of weights, for each tile of rows; like
            ``cache``, of no account for unfused layers.
        memory: of the peak bandwidth.
        products: of the peak rate of products.
        special: of the rate of special functions.
        cache: bandwidth of weights that are read again, of the peak of device memory.
        odd: how much longer a layer takes whose rows of weights start at any element; less where
            they start at multiples of a few.
    """

    start: float
    latency: float
    weights: float
    memory: float
    products: float
    special: float
    cache: float
    odd: float

    @property
    def shared(self) -> cost_model.Factors:
        """Those that the cost model of MLPs has, too."""
        return cost_model.Factors(
            self.start, self.latency, self.memory, self.products, self.special
        )

    def longer(self, depth: int) -> float:
        """How much longer a layer takes that sums over so many features."""
        return float(self.odd ** (math.log2(_UNIT / math.gcd(depth, _UNIT)) / math.log2(_UNIT)))


#: By precision and way. Fitted to the H100's and the H200's tables of chains.
FITTED: Mapping[str, Mapping[str, Factors]] = {
    "bfloat16": {
        CHAIN.name: Factors(2.096, 0.031, 2.082, 0.556, 0.507, 0.959, 9.252, 2.967),
        UNFUSED: Factors(1.949, 0.894, 1.0, 0.854, 0.441, 0.308, 1.0, 3.408),
    },
    "tf32": {
        CHAIN.name: Factors(1.78, 0.019, 4.832, 0.306, 0.265, 0.15, 286.1, 2.156),
        UNFUSED: Factors(3.16, 0.57, 1.0, 0.871, 30.176, 14.072, 1.0, 3.646),
    },
}
#: Standard deviations of the logarithm of a gain, measured over predicted, of chains left out.
DEVIATIONS: Mapping[str, float] = {"bfloat16": 0.22, "tf32": 0.35}
#: The same of chains with norms and sums, twice as large: it was 0.40 for the 28 that were timed on
#: an H200 beside their pairs. Only what these steps add was chosen by them.
DEVIATIONS_OF_STEPS: Mapping[str, float] = {"bfloat16": 0.44, "tf32": 0.7}


def functions_of(activation: str) -> float:
    """What an activation costs for each element, in special functions; given as canonical text."""
    if "gelu(" in activation or "erf(" in activation:
        return 1.6
    return 2.0 if "sin(" in activation or "cos(" in activation else 1.0


def predicted(work: ChainWork, gpu: Gpu) -> dict[str, float]:
    """Microseconds of the kernel, which must be able to run the chain, and of its rivals."""
    fitted = FITTED[work.precision]
    return {way: time_of(way, work, gpu, fitted) for way in (CHAIN.name, UNFUSED, PAIRS)}


def time_of(way: str, work: ChainWork, gpu: Gpu, fitted: Mapping[str, Factors]) -> float:
    """Microseconds of one way to run a chain, by other factors than those that ship."""
    if way == CHAIN.name:
        return _chain(work, gpu, fitted[way])
    return (_unfused if way == UNFUSED else _pairs)(work, gpu, fitted[UNFUSED])


def of_towers(works: Sequence[ChainWork], gpu: Gpu) -> float | None:
    """Microseconds of one launch of several chains of one input.

    ``None`` where it would launch one of them in another way than alone, or cannot run them.
    """
    works = tuple(works)
    tiles = _tiles_together(works, gpu)
    fitted = FITTED[works[0].precision][CHAIN.name]
    return None if tiles is None else _launch(works, tiles, gpu, fitted)


def _chain(work: ChainWork, gpu: Gpu, reached: Factors) -> float:
    return _launch((work,), (_tiles(work, gpu),), gpu, reached)


class _Tiles(NamedTuple):
    """How a chain is divided.

    Attributes:
        height: rows of a tile.
        together: programs on a multiprocessor.
        resident: whether weights stay there.
    """

    height: int
    together: int
    resident: bool


class _Tower(NamedTuple):
    """One chain of a launch: what one of its tiles takes, and what all of them do.

    Attributes:
        tiles: how many.
        latency: microseconds of a round.
        passed: microseconds in which a program passes over its weights.
        products: multiply-adds of a tile.
        functions: special functions of a tile.
        read: elements that come from memory, or go there.
        again: elements of weights that are read again, and of inputs.
    """

    tiles: int
    latency: float
    passed: float
    products: int
    functions: float
    read: int
    again: float


def _tower(work: ChainWork, tiles: _Tiles, reached: Factors) -> _Tower:
    from fusion_backend.kernels.host.configs import padded

    blocks = [padded(width) for width in work.widths]
    depths = work.depths
    weights = (a * b for a, b in itertools.pairwise(blocks))
    layers = [*zip(weights, depths, strict=True)]
    layers += [(blocks[0] * blocks[i + 1], depths[i]) for i in work.joined]
    loaded = sum(n * reached.longer(depth) for n, depth in layers)
    count = math.ceil(work.rows / tiles.height)
    again = 0.0 if tiles.resident else count * loaded
    again += len(work.joined) * work.rows * work.widths[0]
    read = work.rows * (work.widths[0] + work.widths[-1])
    read += sum(a * b for a, b in zip(depths, work.widths[1:], strict=True))
    functions = sum(width * work.functions_at(i) for i, width in enumerate(blocks))
    return _Tower(
        tiles=count,
        latency=reached.latency * len(layers) + work.waiting,
        passed=reached.weights * loaded / 65536,
        products=tiles.height * sum(n for n, _ in layers),
        functions=tiles.height * functions,
        read=read,
        again=again / reached.cache,
    )


def _launch(
    works: Sequence[ChainWork], tiles: Sequence[_Tiles], gpu: Gpu, reached: Factors
) -> float:
    """Microseconds of one launch of one chain or of several, of which the largest counts.

    Each multiprocessor has as many tiles of each as there are, and never less than a whole one.
    """
    towers = [_tower(work, each, reached) for work, each in zip(works, tiles, strict=True)]
    total = sum(tower.tiles for tower in towers)
    together = min(each.together for each in tiles)
    waves = _whole(total / gpu.multiprocessors)
    rounds = _whole(total / gpu.multiprocessors / together)

    def spread(times: float, values: Sequence[float]) -> float:
        mean = sum(t.tiles * v for t, v in zip(towers, values, strict=True)) / total
        return max(times * mean, *values)

    of, size = reached.shared, works[0].size
    busy = gpu.multiprocessors * spread(waves, [tower.products for tower in towers])
    called = gpu.multiprocessors * spread(waves, [tower.functions for tower in towers])
    memory = size * of_moving(sum(tower.read for tower in towers), of, gpu)
    compute = size * of_multiplying(busy, of, gpu) + of_functions(called, of, gpu)
    again = sum(tower.again for tower in towers)
    cached = size * of_moving(again * reached.memory, of, gpu)
    latency = spread(rounds, [tower.latency for tower in towers])
    resident = all(each.resident for each in tiles)
    passed = spread(1 if resident else rounds, [tower.passed for tower in towers])
    return reached.start + latency + passed + overlapped(memory, compute, cached)


def _whole(waves: float) -> float:
    return max(1, math.ceil(waves)) if waves < _COUNTED_WAVES else waves


@functools.cache
def _tiles(work: ChainWork, gpu: Gpu) -> _Tiles:
    """How a chain is divided by itself."""
    from fusion_backend.kernels.chain import config as chain_config

    target = kernel_target(gpu)
    assert target is not None
    problem = _problem(work)
    return _divided(chain_config.chosen(problem, target), problem, gpu)


@functools.cache
def _tiles_together(works: tuple[ChainWork, ...], gpu: Gpu) -> tuple[_Tiles, ...] | None:
    """How chains are divided in one launch; ``None`` where one is not as it is by itself."""
    from fusion_backend.kernels.chain import towers_config

    target = kernel_target(gpu)
    assert target is not None
    problems = [_problem(work) for work in works]
    configs = towers_config.chosen(problems, target)
    if configs is None or not towers_config.are_best_alone(configs, problems, target):
        return None
    return tuple(_divided(*each, gpu) for each in zip(configs, problems, strict=True))


def _problem(work: ChainWork) -> ChainProblem:
    from fusion_backend.kernels.chain import config as chain_config

    how = (torch.float32, "tf32") if work.precision == "tf32" else (torch.bfloat16, "ieee")
    return chain_config.ChainProblem(
        chain_config.chain_rows(work.rows), work.widths, *how, work.inner
    )


def _divided(config: Config, problem: ChainProblem, gpu: Gpu) -> _Tiles:
    from fusion_backend.kernels.chain import config as chain_config

    target = kernel_target(gpu)
    assert target is not None
    memory = chain_config.shared_memory(config, problem, target)
    programs = config.programs or max(1, min(_MOST_PROGRAMS, gpu.shared_memory // memory))
    return _Tiles(config.block_m, programs, config.resident)


def _unfused(work: ChainWork, gpu: Gpu, reached: Factors) -> float:
    layers = zip(work.depths, work.widths[1:], strict=True)
    products = sum(_product(work, depth, columns, gpu, reached) for depth, columns in layers)
    return products + sum(_between(work, at, gpu, reached) for at in range(len(work.widths)))


def _product(work: ChainWork, depth: int, columns: int, gpu: Gpu, reached: Factors) -> float:
    of = reached.shared
    busy = cost_model.of_product(work.rows, depth, columns, of, gpu) - of.start
    return of.start + work.size * reached.longer(depth) * busy


def _between(work: ChainWork, at: int, gpu: Gpu, reached: Factors) -> float:
    """The kernel of all steps of a value, which also writes the input beside it where it must."""
    of, functions = reached.shared, work.functions_at(at)
    if not functions and at not in work.joined:
        return 0.0
    width = work.depths[at] if at in work.joined else work.widths[at]
    elements = work.rows * width
    again = 0
    if work.inner is not None:
        again = sum(len(work.inner.all[index].reads) for index in work.inner.groups[at])
    moved = work.size * of_moving((2 + again) * elements, of, gpu)
    return of.start + overlapped(moved, of_functions(elements * functions, of, gpu))


def _pairs(work: ChainWork, gpu: Gpu, reached: Factors) -> float:
    """Those pairs with the largest hidden values; in float32 layers are taken to be unfused.

    ``back_to_back`` computes the norm before a pair, and adds what follows, as if for nothing. No
    pair has a concatenation in its middle.
    """
    from fusion_backend.kernels.chain.config import middle

    if work.precision == "tf32":
        return _unfused(work, gpu, reached)
    hidden, time, at = middle(work.widths, held=work.held | work.joined), 0.0, 0
    computed = set(hidden)
    while at + 1 < len(work.widths):
        if at + 1 in hidden:
            widths = (work.depths[at], *work.widths[at + 1 : at + 3])
            family, microseconds = _pair(work, widths, gpu, reached)
            if family == BACK_TO_BACK.name:
                computed |= work.held & {at, at + 2}
            time += microseconds
            at += 2
        else:
            time += _product(work, work.depths[at], work.widths[at + 1], gpu, reached)
            at += 1
    left = set(range(len(work.widths))) - computed
    return time + sum(_between(work, position, gpu, reached) for position in left)


def _pair(
    work: ChainWork, widths: tuple[int, ...], gpu: Gpu, reached: Factors
) -> tuple[str, float]:
    """The fastest family for two layers, or Inductor, and its microseconds."""
    from fusion_backend.kernels.back_to_back.family import can_back_to_back

    inner, hidden, out = widths
    families = [STREAM.name] if work.rows <= MOST_OF_FEW_ROWS else []
    if can_back_to_back(inner, hidden, out, False, torch.bfloat16, kernel_target(gpu)):
        families.append(BACK_TO_BACK.name)
    times = cost_model.predicted(families, cost_model.Work(work.rows, (inner, hidden, out)), gpu)
    times[INDUCTOR] = _unfused(ChainWork(work.rows, widths, work.functions), gpu, reached)
    return min(times.items(), key=lambda item: item[1])
