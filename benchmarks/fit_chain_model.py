"""Fit the model of chains to the shipped tables, and hold it to chains that it was not fitted to.

    python benchmarks/fit_chain_model.py

Prints, for 16 bits and for TF32, the factors fitted to all tables, and how far predicted gains are
off for each chain when all but that chain are fitted to: the standard deviation is the model's
uncertainty. Then how many chains it would form, and how many of these at a loss.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import NamedTuple

from fusion_backend.bench.fitting import descended
from fusion_backend.kernels.registry import CHAIN
from fusion_backend.planning import chain_model
from fusion_backend.planning.chain_model import FITTED, PAIRS, UNFUSED, ChainWork, Factors
from fusion_backend.planning.chain_profit import ChainMeasurement, shipped
from fusion_backend.planning.gpus import Gpu, gpu_named

GPUS = ("h100", "h200")
# The chain kernel multiplies a single row in TF32 nowhere.
FEWEST_ROWS = {"bfloat16": 1, "tf32": 2}

Fitted = dict[str, Factors]


class Sample(NamedTuple):
    """One measured chain: the work, where it ran, and the times by way."""

    work: ChainWork
    gpu: Gpu
    microseconds: Mapping[str, float]


def samples(precision: str) -> list[Sample]:
    """What was measured on each GPU itself."""
    found = [(m, gpu) for gpu in map(gpu_named, GPUS) for m in shipped(gpu)]
    return [
        Sample(work_of(m), gpu, m.microseconds)
        for m, gpu in found
        if m.precision == precision and m.rows >= FEWEST_ROWS[precision]
    ]


def work_of(measured: ChainMeasurement) -> ChainWork:
    functions = chain_model.functions_of(f"{measured.form}(x)")
    return ChainWork(measured.rows, measured.widths, functions, measured.precision)


def errors(name: str, found: Sequence[Sample], fitted: Fitted) -> list[float]:
    """Logarithms of measured over predicted time of one way."""
    times = [(s, chain_model.time_of(name, s.work, s.gpu, fitted)) for s in found]
    return [math.log(s.microseconds[name] / us) for s, us in times]


def fit(found: Sequence[Sample], start: Mapping[str, Factors], rounds: int) -> Fitted:
    """Factors of both ways, one after the other."""
    fitted = dict(start)
    for name in (UNFUSED, CHAIN.name):

        def off_by(values: Sequence[float], name: str = name) -> list[float]:
            return errors(name, found, {**fitted, name: Factors(*values)})

        fitted[name] = Factors(*descended(astuple(fitted[name]), off_by, rounds))
    return fitted


def gain(times: Mapping[str, float]) -> float:
    """Logarithm of the faster rival's time over the kernel's."""
    rivals = [times[name] for name in (UNFUSED, PAIRS) if name in times]
    return math.log(min(rivals) / times[CHAIN.name])


def left_out(found: Sequence[Sample], fitted: Fitted) -> list[tuple[Sample, float, float]]:
    """Each sample with its gain as predicted from the other chains, and as measured."""
    compared = []
    for widths in sorted({s.work.widths for s in found}):
        others = fit([s for s in found if s.work.widths != widths], fitted, rounds=5)
        for sample in (s for s in found if s.work.widths == widths):
            times = {
                way: chain_model.time_of(way, sample.work, sample.gpu, others)
                for way in (CHAIN.name, UNFUSED, PAIRS)
            }
            compared.append((sample, gain(times), gain(sample.microseconds)))
        off = [measured - expected for s, expected, measured in compared if s.work.widths == widths]
        chain = "→".join(map(str, widths))
        print(f"    {chain}: mean {statistics.fmean(off):+.3f}, {len(off)} of them", flush=True)
    return compared


def root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(value * value for value in values))


def main() -> None:
    for precision in FITTED:
        found = samples(precision)
        fitted = fit(found, FITTED[precision], rounds=8)
        print(f"{precision}: {len(found)} chains")
        for name, factors in fitted.items():
            rounded = ", ".join(f"{value:.3f}" for value in astuple(factors))
            off = root_mean_square(errors(name, found, fitted))
            print(f"  {name}: Factors({rounded}), off by {off:.3f}", flush=True)
        print("  gains of chains left out, measured over predicted:")
        compared = left_out(found, fitted)
        deviation = root_mean_square([measured - expected for _, expected, measured in compared])
        formed = [measured for _, expected, measured in compared if expected > deviation]
        slower = sum(measured < 0.0 for measured in formed)
        print(f"  deviation {deviation:.3f}; {len(formed)} of {len(compared)} formed, ", end="")
        print(f"{slower} slower, the worst {math.exp(min(formed, default=0.0)):.2f}")


if __name__ == "__main__":
    main()
