"""Write the measured figures into docs/performance/, a page for each machine.

    python benchmarks/page.py

`benchmarks/results/` has a folder for each machine: h100, h200, cpu. In it are the JSON files that
`fusedmlp bench --out` (mlps.json, precisions.json) and the programs in benchmarks/ wrote there. The
tables that `fusedmlp tune` (plans) and benchmarks/chains.py (chains) wrote ship with the package,
and the planner chooses by them. A page has a section for each of these. What a person says of a
table stands beside it: mlps.md beside mlps.json, and about.md for all of a machine; goals.json has
times that fusedmlp is meant to reach, by the names of cells. The plots of `fusedmlp bench` are
drawn anew from its results on a GPU. What benchmarks/many_gpus.py wrote into
`benchmarks/results/many-gpus/`, a file for each machine, has a page of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sections import (
    chains_section,
    convolutions_section,
    counters_section,
    cpu_section,
    deep_mlps_section,
    host_section,
    many_gpus_section,
    models_section,
    norms_section,
    peers_section,
    plans_section,
    random_mlps_section,
    sums_section,
    training_models_section,
    training_section,
)

from fusion_backend.bench.plots import write_plots

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "performance"
PLOTS = PAGES / "plots"
RESULTS = ROOT / "benchmarks" / "results"
TABLES = ROOT / "fusion_backend" / "tables"
MANY_GPUS = "many-gpus"

#: By the name of a file: the heading of its section, in the order of the page, and who writes it.
SUBJECTS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "mlps": ("Single MLPs beside their peers", peers_section),
    "precisions": ("Single MLPs in other precisions, and without biases", peers_section),
    "random_mlps": ("MLPs drawn at random", random_mlps_section),
    "deep_mlps": ("Deep MLPs", deep_mlps_section),
    "models": ("Whole models", models_section),
    "host": ("What the host pays", host_section),
    "chains": ("Chains", chains_section),
    "norms": ("Norms", norms_section),
    "sums": ("Sums", sums_section),
    "training": ("Training steps", training_section),
    "cpu": ("Single MLPs and chains", cpu_section),
    "cpu-one-thread": ("Single MLPs and chains, one thread", cpu_section),
    "cpu-random": ("MLPs drawn at random", cpu_section),
    "cpu-training": ("Training steps", cpu_section),
    "training_models": ("Training steps of whole models", training_models_section),
    "convolutions": ("1×1 convolutions", convolutions_section),
    "counters": ("What bounds the kernels", counters_section),
    "plans": ("The fastest family", plans_section),
}


def main() -> int:
    for folder in machines():
        path = PAGES / f"{folder.name}.md"
        path.write_text(machine_page(folder))
        print(f"wrote {path}", file=sys.stderr)
        results = measured_in(folder)
        if "mlps" in results and on_gpu(results["mlps"]):
            for path in write_plots(results["mlps"], PLOTS / folder.name):
                print(f"wrote {path}", file=sys.stderr)
    path = PAGES / "many-gpus.md"
    path.write_text(many_gpus_page())
    print(f"wrote {path}", file=sys.stderr)
    return 0


def machines() -> list[Path]:
    """The folders of the machines that something was measured on; CPUs last."""
    folders = [path for path in RESULTS.iterdir() if path.is_dir() and measured_in(path)]
    return sorted(folders, key=lambda folder: (folder.name == "cpu", folder.name))


def measured_in(folder: Path) -> dict[str, dict[str, Any]]:
    """What was measured on a machine, by subject: its own files, and the tables of its GPU."""
    paths = {name: folder / f"{name}.json" for name in SUBJECTS}
    paths["plans"] = TABLES / f"mlps_{folder.name}.json"
    paths["chains"] = TABLES / f"chains_{folder.name}.json"
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.is_file()}


def machine_page(folder: Path) -> str:
    """All that was measured on one machine."""
    results = measured_in(folder)
    parts = ["<!-- Written by benchmarks/page.py: change what it reads, not this file. -->"]
    parts += [f"# {device(folder, results)}", remark(folder, "about")]
    for name, (heading, section) in SUBJECTS.items():
        if name in results:
            parts += [f"## {heading}", remark(folder, name)]
            parts.append(section(results[name], **goals(folder) if name == "mlps" else {}))
        if name == "mlps" and name in results and on_gpu(results[name]):
            parts.append(plots(folder))
    return "\n\n".join(filter(None, parts)) + "\n"


def many_gpus_page() -> str:
    """Training on several GPUs: a section for each machine, those with most GPUs first."""
    folder = RESULTS / MANY_GPUS
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    parts = ["<!-- Written by benchmarks/page.py: change what it reads, not this file. -->"]
    parts += ["# Many GPUs", remark(folder, "about")]
    for results in sorted(found, key=lambda results: -results["gpus"]):
        parts.append(f"## {results['gpus']} × {results['machine']['device']}")
        parts.append(many_gpus_section(results))
    if not found:
        parts.append("Nothing was measured yet.")
    return "\n\n".join(filter(None, parts)) + "\n"


def device(folder: Path, results: dict[str, dict[str, Any]]) -> str:
    """The machine that all results in a folder are of."""
    wheres = [each["machine"] for each in results.values()]
    names = {where.get("device") or where["gpu"] for where in wheres}
    if len(names) > 1:
        sys.exit(f"{folder} must be of one machine, got {', '.join(sorted(names))}: move one away")
    return str(names.pop())


def remark(folder: Path, name: str) -> str:
    """What a person says of a table, if anything."""
    path = folder / f"{name}.md"
    return path.read_text().strip() if path.is_file() else ""


def goals(folder: Path) -> dict[str, dict[str, float]]:
    """The goals of a machine, as an argument of the section that shows them."""
    path = folder / "goals.json"
    return {"goals": json.loads(path.read_text())} if path.is_file() else {}


def plots(folder: Path) -> str:
    """The plots of single MLPs."""
    return (
        f"![Speed-up over Inductor by MLP and number of rows](plots/{folder.name}/speedup.png)\n\n"
        f"![TFLOP/s under the roofline](plots/{folder.name}/roofline.png)"
    )


def on_gpu(results: dict[str, Any]) -> bool:
    """Whether kernels were counted."""
    rows = (row for cell in results["cells"].values() for row in cell["peers"].values())
    return any(row.get("kernels") is not None for row in rows)


if __name__ == "__main__":
    sys.exit(main())
