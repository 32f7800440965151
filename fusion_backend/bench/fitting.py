"""Fitting the cost model to measurements, and how far it is off on others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import NamedTuple

from fusion_backend.planning.cost_model import FITTED, Factors, Work, predicted
from fusion_backend.planning.gpus import Gpu
from fusion_backend.planning.measurements import INDUCTOR, Measurement

# Errors beyond e^0.6 count no more: a kernel that has a fault teaches nothing of the others.
_LARGEST = 0.6
_FIRST_STEP, _SHRINKING = 0.5, 0.85


class Sample(NamedTuple):
    """One measured MLP.

    Attributes:
        work: the MLP.
        gpu: where it ran.
        microseconds: by family, and of Inductor.
    """

    work: Work
    gpu: Gpu
    microseconds: Mapping[str, float]


def samples(measured: Sequence[Measurement], gpu: Gpu) -> list[Sample]:
    """What the model speaks of: inference in 16 bits, weights as ``nn.Linear`` stores them."""
    return [
        Sample(Work(m.rows, m.widths, m.kind.form == "swiglu"), gpu, m.microseconds)
        for m in measured
        if m.kind.precision in ("bfloat16", "float16")
        if not (m.kind.training or m.kind.transposed)
    ]


def fitted(found: Sequence[Sample], rounds: int = 26) -> dict[str, Factors]:
    """Factors of every family that was measured, Inductor's first: other families need them."""
    factors = {INDUCTOR: _fit(INDUCTOR, found, {INDUCTOR: FITTED[INDUCTOR]}, rounds)}
    for name in FITTED.keys() - {INDUCTOR}:
        if any(name in sample.microseconds for sample in found):
            factors[name] = _fit(name, found, {**factors, name: FITTED[name]}, rounds)
    return factors


def errors(name: str, found: Sequence[Sample], factors: Mapping[str, Factors]) -> list[float]:
    """Logarithms of measured over predicted time of one family, where it was measured."""

    def expected(sample: Sample) -> float:
        return predicted([name], sample.work, sample.gpu, factors)[name]

    measured = [sample for sample in found if name in sample.microseconds]
    return [math.log(sample.microseconds[name] / expected(sample)) for sample in measured]


def _fit(
    name: str, found: Sequence[Sample], factors: Mapping[str, Factors], rounds: int
) -> Factors:

    def off_by(values: Sequence[float]) -> list[float]:
        return errors(name, found, {**factors, name: _factors(values)})

    best = descended(astuple(factors[name])[:-1], off_by, rounds)
    off = off_by(best)
    free = len(off) - len(best)  # what few samples are off by says less of others
    spread = statistics.pstdev(off) * math.sqrt(len(off) / free) if free > 0 else _LARGEST
    return replace(_factors(best), deviation=spread)


def descended(
    values: Sequence[float], off_by: Callable[[Sequence[float]], Iterable[float]], rounds: int
) -> list[float]:
    """One value after the other, longer or shorter by ever smaller steps, where errors shrink.

    Args:
        values: positive, to begin with.
        off_by: the errors that values make, of which large ones count less.
        rounds: how often each value is tried.
    """

    def loss(tried: Sequence[float]) -> float:
        return statistics.fmean(min(abs(error), _LARGEST) ** 1.5 for error in off_by(tried))

    best = [*values]
    least, step = loss(best), _FIRST_STEP
    for _ in range(rounds):
        for place in range(len(best)):
            for by in (math.exp(step), math.exp(-step)):
                tried = [*best[:place], best[place] * by, *best[place + 1 :]]
                if (reached := loss(tried)) < least:
                    best, least = tried, reached
        step *= _SHRINKING
    return best


def _factors(values: Sequence[float]) -> Factors:
    start, latency, memory, products, special = values
    return Factors(start, latency, memory, products, special, deviation=0.0)
