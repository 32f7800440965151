"""Fitting the model of configurations to measurements, and what it would take of others."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fusion_backend.bench.fitting import descended
from fusion_backend.kernels.codegen.activation import exact_functions
from fusion_backend.kernels.host.called import PIECE
from fusion_backend.kernels.host.candidates import candidates, surely_fastest
from fusion_backend.kernels.host.config_times import FITTED, Factors, predicted
from fusion_backend.kernels.host.configs import Config, Kernel, fits
from fusion_backend.kernels.host.problems import Problem, row_class
from fusion_backend.kernels.host.targets import Target
from fusion_backend.kernels.preferences import listed
from fusion_backend.mlp.expression import parse

# Where fitting starts: no measurement is in it.
_START = Factors(1.0, 1.0, 1.0, 1.0, 1.0, 8.0, 800.0, 200.0, 10.0, 20.0, 4.0)
_PARTS = 5


class Sample(NamedTuple):
    """A kernel of one MLP, timed with several configurations.

    Attributes:
        kernel: which.
        problem: of a known number of rows.
        target: the GPU.
        microseconds: by configuration.
    """

    kernel: Kernel
    problem: Problem
    target: Target
    microseconds: Mapping[Config, float]


class Choice(NamedTuple):
    """Microseconds of the listed configuration, of the one that is taken, and of the fastest."""

    listed: float
    taken: float
    fastest: float


def samples(kernel: Kernel, file: Path, target: Target) -> list[Sample]:
    """What ``benchmarks/configurations.py`` timed of a kernel on a GPU."""
    rows = json.loads(file.read_text())["rows"]
    return [_sample(row, target) for row in rows if row["kernel"] == kernel]


def _sample(row: dict[str, Any], target: Target) -> Sample:
    dtype = getattr(torch, row["dtype"])
    # Float16's were timed with functions as exact as float32's.
    accuracy = torch.float32 if dtype == torch.float16 else dtype
    rows, (inner, hidden, _) = row["rows"], row["widths"]
    problem = Problem(
        row_class(rows),
        inner,
        hidden,
        0,
        row["gated"],
        dtype,
        tma=inner % PIECE == 0,
        exact_rows=rows,
        exact_functions=exact_functions(parse(row["activation"]), accuracy, differentiated=False),
    )
    times = {Config(**config): microseconds for config, microseconds in row["us"]}
    return Sample(row["kernel"], problem, target, times)


def fitted(found: Sequence[Sample], rounds: int = 26) -> dict[Kernel, Factors]:
    """Factors of the kernel of some samples, with the deviation that ships."""
    kernel = found[0].kernel

    def off_by(values: Sequence[float]) -> list[float]:
        factors = {kernel: Factors(*values)}
        return [each for sample in found for each in errors(sample, factors, sample.microseconds)]

    start = [value for name, value in vars(_START).items() if name != "deviation"]
    best = Factors(*descended(start, off_by, rounds))
    return {kernel: replace(best, deviation=FITTED[kernel].deviation)}


def errors(
    sample: Sample, factors: Mapping[Kernel, Factors], configs: Iterable[Config]
) -> list[float]:
    """Logarithms of measured over predicted times."""
    kernel, problem, target, times = sample
    return [
        math.log(times[config] / predicted(kernel, config, problem, target, factors))
        for config in configs
    ]


def choice(sample: Sample, factors: Mapping[Kernel, Factors] = FITTED) -> Choice:
    """What is taken, of the configurations that were timed."""
    kernel, problem, target, times = sample
    first = listed(kernel, problem, target)
    others = [each for each in _compared(sample) if fits(kernel, each, problem, target)]
    taken = surely_fastest(kernel, problem, target, first, others, factors)
    return Choice(times[first], times[taken], min(times.values()))


def ratio_deviation(found: Sequence[Sample], factors: Mapping[Kernel, Factors]) -> float:
    """Standard deviation of what ratios of candidates' times to the listed one's are off by."""
    off: list[float] = []
    for sample in found:
        first = listed(sample.kernel, sample.problem, sample.target)
        others = [each for each in _compared(sample) if each != first]
        base, *rest = errors(sample, factors, [first, *others])
        off.extend(error - base for error in rest)
    return statistics.pstdev(off)


def held_out(found: Sequence[Sample]) -> Iterator[tuple[list[Sample], dict[Kernel, Factors]]]:
    """A fifth of the samples after the other, with factors fitted to the rest.

    All numbers of rows of a layer are in one fifth.
    """

    def layer(sample: Sample) -> Problem:
        return sample.problem._replace(rows=0, exact_rows=0)

    part_of = {each: place % _PARTS for place, each in enumerate(dict.fromkeys(map(layer, found)))}
    for part in range(_PARTS):
        inside = [sample for sample in found if part_of[layer(sample)] == part]
        yield inside, fitted([sample for sample in found if part_of[layer(sample)] != part])


def _compared(sample: Sample) -> list[Config]:
    """Candidates that were timed."""
    known = candidates(sample.kernel, sample.problem)
    return [each for each in known if each in sample.microseconds]
