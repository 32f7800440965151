"""Fit the cost model to measurements on one GPU, and hold it to others.

    python benchmarks/fit_cost_model.py

Prints the factors fitted to the H200's table and its random MLPs. It also fits them to the table
and half of the random MLPs, and holds them to the other half: how far times and their ratios to
Inductor's are off there, what would be planned by the model alone, and how much longer that takes
than the fastest of all. It does the same with the H100's table, which was measured before most of
Hopper's kernels: those for any GPU are held to it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fusion_backend.bench.fitting import (
    Factors,
    Sample,
    errors,
    fitted,
    of_today,
    planned,
    ratio_errors,
    sample,
    samples,
)
from fusion_backend.planning.cases import Case
from fusion_backend.planning.gpus import gpu_named
from fusion_backend.planning.measurements import INDUCTOR, shipped

RANDOM = Path(__file__).parent / "results" / "h200" / "random.json"


def h200s_table() -> list[Sample]:
    """What the H200's table has that would run today as it was measured."""
    gpu = gpu_named("h200")
    own = [m for m in shipped(gpu) if gpu.name in m.source]
    return samples([of_today(m, gpu) for m in own], gpu)


def h100s_table() -> list[Sample]:
    """The H100's, as work for the kernels that it was measured with."""
    gpu = gpu_named("h100")
    found = samples([m for m in shipped(gpu) if gpu.name in m.source], gpu)
    return [each._replace(work=replace(each.work, any_gpu=True)) for each in found]


def random_mlps() -> list[Sample]:
    """Those that were drawn for the H200."""
    rows = json.loads(RANDOM.read_text())["rows"]
    return [sample(Case(**row["case"]), row["us"], gpu_named("h200")) for row in rows]


def report(where: str, held: Sequence[Sample], factors: dict[str, Factors]) -> None:
    """How far the model is off on some MLPs, and what would be planned by it."""
    print(f"  held to {where}")
    for kernel in factors:
        off, ratios = (each(kernel, held, factors) for each in (errors, ratio_errors))
        if off:
            print(f"    {kernel}: {len(off)} MLPs, times {size(off)}, ratios {size(ratios)}")
    chosen = [planned(each, factors) for each in held]
    pairs = [(each.microseconds, name) for each, name in zip(held, chosen, strict=True)]
    gains = [math.log(times[INDUCTOR] / times[name]) for times, name in pairs]
    possible = [math.log(times[INDUCTOR] / min(times.values())) for times, _ in pairs]
    regret = math.expm1(statistics.fmean(possible) - statistics.fmean(gains))
    print(
        f"    {sum(name != INDUCTOR for name in chosen)} of {len(held)} fused, "
        f"{math.exp(statistics.fmean(gains)):.3f} times as fast as Inductor, worst "
        f"{math.exp(min(gains)):.3f}, {sum(gains) / sum(possible):.1%} of the possible gain, "
        f"{regret:.1%} longer than the fastest"
    )


def size(off: Sequence[float]) -> str:
    """The mean and the root mean square of errors."""
    return f"{statistics.fmean(off):+.3f} ± {math.sqrt(statistics.fmean(e**2 for e in off)):.3f}"


def main() -> None:
    drawn, h200, h100 = random_mlps(), h200s_table(), h100s_table()
    even, odd = drawn[::2], drawn[1::2]
    for fit_to, part, held_to in (
        ("all random MLPs", drawn, {"the table": h200, "all random MLPs": drawn}),
        ("every other random MLP", even, {"the other random MLPs": odd, "the H100's table": h100}),
        ("the other random MLPs", odd, {"every other random MLP": even, "the H100's table": h100}),
    ):
        factors = fitted([*h200, *part])
        print(f"fitted to the H200's table and {fit_to}")
        for kernel, found in factors.items():
            values = ", ".join(f"{n}={v:.3g}" for n, v in vars(found).items() if v)
            print(f"  {kernel}: {values}")
        for where, held in held_to.items():
            report(where, held, factors)


if __name__ == "__main__":
    main()
