"""Fit the model of configurations to measurements, and hold it to others.

    python benchmarks/fit_config_times.py

Prints the factors fitted to all products that were timed on an H200. It also leaves out a fifth of
the layers at a time, fits the factors to the others, and takes configurations for that fifth. It
prints how much longer these take than the fastest of all that were timed, and how much longer those
of the lists do.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from fusion_backend.bench.config_fitting import (
    Choice,
    choice,
    fitted,
    held_out,
    ratio_deviation,
    samples,
)
from fusion_backend.kernels.host.config_times import FITTED
from fusion_backend.planning.gpus import gpu_named, kernel_target

MEASURED = Path(__file__).parent / "results" / "h200" / "configurations.json"


def summary(choices: Sequence[Choice]) -> str:
    """How much longer than the fastest, in the geometric mean, and the worst against the lists."""

    def longer(ratios: Iterable[float]) -> str:
        logarithms = [*map(math.log, ratios)]
        mean, most = math.expm1(statistics.fmean(logarithms)), math.exp(max(logarithms))
        return f"{mean:.1%} (at most {most:.2f} times)"

    lists = longer(each.listed / each.fastest for each in choices)
    model = longer(each.taken / each.fastest for each in choices)
    worst = max(each.taken / each.listed for each in choices)
    return f"lists {lists}, model {model}; model over lists at most {worst:.3f}"


def main() -> None:
    target = kernel_target(gpu_named("h200"))
    assert target is not None
    for kernel in FITTED:
        found = samples(kernel, MEASURED, target)
        factors = fitted(found)
        print(f"{kernel}, {len(found)} products: {factors[kernel]}")
        print(f"  fitted to all: {summary([choice(sample, factors) for sample in found])}")
        choices, deviations = [], []
        for part, of_others in held_out(found):
            choices.extend(choice(sample, of_others) for sample in part)
            deviations.append(ratio_deviation(part, of_others))
        print(f"  fitted to others: {summary(choices)}")
        print(f"  deviation of ratios, fitted to others: {statistics.fmean(deviations):.3f}")


if __name__ == "__main__":
    main()
