"""Fitting the cost model to measurements, and how far it is off on others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch

from fusion_backend.kernels.host.configs import Kernel
from fusion_backend.kernels.host.problems import inference_problem
from fusion_backend.kernels.preferences import chosen, listed
from fusion_backend.kernels.registry import EPILOGUE
from fusion_backend.planning.cases import FORMS, Case, is_half
from fusion_backend.planning.cost_model import (
    FITTED,
    Factors,
    Work,
    family_of,
    kernel_of,
    of_kernel,
    predicted,
    sure_gains,
)
from fusion_backend.planning.gpus import Gpu, kernel_target
from fusion_backend.planning.measurements import INDUCTOR, WORTHWHILE, Measurement

# Errors beyond e^0.6 count no more: a kernel that has a fault teaches nothing of the others.
_LARGEST = 0.6
_FIRST_STEP, _SHRINKING = 0.5, 0.85
# The uncertainties are no factors of a time.
_DEVIATIONS = ("deviation", "ratio")


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
        sample(_case(m), m.microseconds, gpu)
        for m in measured
        if is_half(m.kind.precision) and not (m.kind.training or m.kind.transposed)
    ]


def sample(case: Case, microseconds: Mapping[str, float], gpu: Gpu) -> Sample:
    """One MLP that was measured on a GPU."""
    return Sample(_work(case, gpu), gpu, microseconds)


def of_today(measured: Measurement, gpu: Gpu) -> Measurement:
    """What was measured on Hopper when lists chose all configurations, as far as it holds today.

    The time of ``epilogue`` is left out where that is launched with another configuration.
    """
    case, name, target = _case(measured), EPILOGUE.name, kernel_target(gpu)
    assert target is not None
    first = (case.in_features, case.hidden_features, 0)
    problem = inference_problem(case.rows, first, case.gated, case.dtype, target)
    if problem is None or case.transposed or kernel_of(name, _work(case, gpu), gpu) != name:
        return measured
    known, kernel = problem._replace(tma=True, exact_rows=case.rows), cast(Kernel, name)
    if chosen(kernel, known, target) == listed(kernel, known, target):
        return measured
    kept = {family: us for family, us in measured.microseconds.items() if family != name}
    return replace(measured, microseconds=kept)


def _case(measured: Measurement) -> Case:
    activation, kind = measured.activation or FORMS[measured.kind.form], measured.kind
    sizes = (measured.rows, *measured.widths)
    return Case(activation, *sizes, kind.precision, transposed=kind.transposed)


def _work(case: Case, gpu: Gpu) -> Work:
    return Work.of(case.setting(torch.device("cuda"), gpu))


def fitted(found: Sequence[Sample], rounds: int = 26) -> dict[str, Factors]:
    """Factors of Inductor, and of each kernel that more MLPs were run by than it has factors.

    Inductor's are fitted to its times, and a kernel's to the ratios of Inductor's time to its own:
    these are what decides.
    """
    factors = {INDUCTOR: _fit(INDUCTOR, found, FITTED, rounds)}
    for kernel in FITTED.keys() - {INDUCTOR}:
        if len(_run_by(kernel, found)) > len(_free(FITTED[kernel])):
            factors[kernel] = _fit(kernel, found, {**FITTED, **factors}, rounds)
    return factors


def errors(kernel: str, found: Sequence[Sample], factors: Mapping[str, Factors]) -> list[float]:
    """Logarithms of measured over predicted time by one kernel, of those MLPs that it ran."""
    return [_off(each, kernel, factors) for each in _run_by(kernel, found)]


def ratio_errors(
    kernel: str, found: Sequence[Sample], factors: Mapping[str, Factors]
) -> list[float]:
    """Logarithms of measured over predicted ratios of a kernel's time to Inductor's."""
    return [
        _off(each, kernel, factors) - _off(each, INDUCTOR, factors)
        for each in _run_by(kernel, found)
    ]


def planned(each: Sample, factors: Mapping[str, Factors]) -> str:
    """What the model alone would run of an MLP: a family, or Inductor."""
    families = [name for name in each.microseconds if name != INDUCTOR]
    times = predicted(families, each.work, each.gpu, factors)
    sure = sure_gains(times, each.work, each.gpu, factors)
    best = max(sure, key=lambda name: sure[name], default=INDUCTOR)
    return best if sure.get(best, 0.0) >= WORTHWHILE else INDUCTOR


def _off(each: Sample, kernel: str, factors: Mapping[str, Factors]) -> float:
    measured = each.microseconds[family_of(kernel)]
    return math.log(measured / of_kernel(kernel, each.work, each.gpu, factors))


def _run_by(kernel: str, found: Sequence[Sample]) -> list[Sample]:
    """The MLPs that a kernel ran."""
    family = family_of(kernel)
    if kernel == INDUCTOR:
        return [*found]
    return [
        each
        for each in found
        if family in each.microseconds and kernel_of(family, each.work, each.gpu) == kernel
    ]


def _free(factors: Factors) -> list[str]:
    """Names of those factors that times depend on."""
    return [n for n, value in vars(factors).items() if value and n not in _DEVIATIONS]


def _fit(
    kernel: str, found: Sequence[Sample], factors: Mapping[str, Factors], rounds: int
) -> Factors:
    first, names = factors[kernel], _free(factors[kernel])
    own = _run_by(kernel, found)
    base = [0.0 if kernel == INDUCTOR else _off(each, INDUCTOR, factors) for each in own]

    def made_of(values: Sequence[float]) -> Factors:
        return replace(first, **dict(zip(names, values, strict=True)))

    def off_by(values: Sequence[float]) -> list[float]:
        tried = {**factors, kernel: made_of(values)}
        return [_off(each, kernel, tried) - of for each, of in zip(own, base, strict=True)]

    best = made_of(descended([getattr(first, name) for name in names], off_by, rounds))
    off = errors(kernel, own, {**factors, kernel: best})
    ratios = [error - of for error, of in zip(off, base, strict=True)]
    by_ratio = 0.0 if kernel == INDUCTOR else _spread(ratios, len(names))
    return replace(best, deviation=_spread(off, len(names)), ratio=by_ratio)


def _spread(off: Sequence[float], fitted_to: int) -> float:
    """Root mean square of errors; larger of few, because what these are off by says less."""
    free = len(off) - fitted_to
    if free <= 0:
        return _LARGEST
    return math.sqrt(math.fsum(error**2 for error in off) / free)


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
