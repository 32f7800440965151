"""Fit the cost model to measurements on one GPU, and hold it to others.

    python benchmarks/fit_cost_model.py

Prints the factors fitted to the H200's table and its random MLPs, and how far they are off on
these, on each half of the random ones when fitted without it, and on the H100's table.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from fusion_backend.bench.fitting import Sample, errors, fitted, samples
from fusion_backend.planning.cases import Case
from fusion_backend.planning.cost_model import Work
from fusion_backend.planning.gpus import gpu_named
from fusion_backend.planning.measurements import shipped

RANDOM = Path(__file__).parent / "results" / "h200" / "random.json"


def table(name: str) -> list[Sample]:
    """What was measured on a GPU itself, not what other tables say for it."""
    gpu = gpu_named(name)
    return samples([m for m in shipped(gpu) if name.upper() in m.source], gpu)


def random_mlps() -> list[Sample]:
    found = []
    for row in json.loads(RANDOM.read_text())["rows"]:
        case = Case(**row["case"])
        work = Work(case.rows, case.measurement.widths, case.gated)
        found.append(Sample(work, gpu_named("h200"), row["us"]))
    return found


def main() -> None:
    drawn, h200, h100 = random_mlps(), table("h200"), table("h100")
    for fit_to, held_to in (
        ("h200 and all random", {"h200": h200, "random": drawn, "h100": h100}),
        ("h200 and even random", {"odd random": drawn[1::2]}),
        ("h200 and odd random", {"even random": drawn[::2]}),
    ):
        part = {"all": drawn, "even": drawn[::2], "odd": drawn[1::2]}[fit_to.split()[2]]
        factors = fitted([*h200, *part])
        print(f"fitted to {fit_to}")
        for name, found in factors.items():
            print(f"  {name}: {found}")
            for where, held in held_to.items():
                off = errors(name, held, factors)
                if off:
                    print(
                        f"    {where}: {len(off)} MLPs, mean {statistics.fmean(off):+.3f}, "
                        f"median of sizes {statistics.median(map(abs, off)):.3f}"
                    )


if __name__ == "__main__":
    main()
