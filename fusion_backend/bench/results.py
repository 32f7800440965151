"""The results of a benchmark: one JSON file, written after every cell and continued from there.

    machine   device, versions, ceilings of memory and products
    peers     what each is, and the version of its package (null: not installed)
    cells     by name: the fields of the cell, its grid, and what `measuring` found
    summary   by grid, and "all": geometric mean and worst cell of the speed-up over Inductor

The speed-up of a cell is the time of the better of Inductor's modes over that of fusedmlp.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import fusion_backend
from fusion_backend.bench.cells import Cell
from fusion_backend.bench.grids import grid_of
from fusion_backend.bench.peer import Peer
from fusion_backend.bench.roofline import Ceilings
from fusion_backend.errors import CommandError

INDUCTOR = ("inductor", "max-autotune")
OURS = "fusedmlp"

Results = dict[str, Any]


def machine(device: torch.device) -> dict[str, str]:
    """Where and with what is measured."""
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{processor()}, {torch.get_num_threads()} threads"
    )
    return {
        "device": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "fusedmlp": fusion_backend.__version__,
        "python": platform.python_version(),
    }


def processor() -> str:
    """The model of this machine's CPU."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, name)


def started(path: Path | None, device: torch.device, peers: Sequence[Peer]) -> Results:
    """Results without cells, or those of an earlier run, to be continued.

    Raises:
        CommandError: the file is of another machine or version, or not one of these files.
    """
    here = machine(device)
    known = {peer.name: {"what": peer.what, "version": peer.version} for peer in peers}
    if path is None or not path.is_file():
        return {"machine": here, "peers": known, "cells": {}, "summary": {}}
    results = read(path)
    different = [key for key in here if here[key] != results["machine"].get(key)]
    if different:
        raise CommandError(
            f"{path} is of another machine or version ({', '.join(different)}): move it away or "
            "give another --out"
        )
    results["peers"] = known | {n: p for n, p in results["peers"].items() if n not in known}
    return results


def read(path: Path) -> Results:
    """The results in a file.

    Raises:
        CommandError: there are none.
    """
    try:
        results: Results = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} cannot be read as results: {error}") from error
    if not isinstance(results, dict) or not {"machine", "cells", "summary"} <= results.keys():
        raise CommandError(f"{path} must be a file that `fusedmlp bench --out` wrote, it is not")
    return results


def write(results: Results, path: Path) -> None:
    """Keep the results in a file, all of them or (if interrupted) those that were there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    partial.replace(path)


def ceilings_from_data(data: Mapping[str, Any]) -> Ceilings:
    """The ceilings that stand under ``machine``."""
    return Ceilings(data["bytes_per_second"], data["flops_per_second"])


def is_done(results: Results, cell: Cell, peers: Iterable[Peer]) -> bool:
    """Whether a cell has a row for each of these peers, and none was installed since."""
    rows = results["cells"].get(cell.name, {}).get("peers", {})
    return all(
        peer.name in rows
        and (peer.version is None or "not installed" not in rows[peer.name].get("absent", ""))
        for peer in peers
    )


def add(results: Results, cell: Cell, measured: Mapping[str, Any], device_type: str) -> None:
    """Put a cell among the results and bring the summary up to date."""
    grid = grid_of(cell, device_type)
    results["cells"][cell.name] = {**asdict(cell), "grid": grid, **measured}
    results["cells"][cell.name]["speedup"] = speedup(results["cells"][cell.name])
    results["summary"] = summary(results["cells"])


def reference_us(cell: Mapping[str, Any]) -> float | None:
    """Time of the better of Inductor's modes."""
    times = [cell["peers"].get(name, {}).get("us") for name in INDUCTOR]
    return min((time for time in times if time is not None), default=None)


def speedup(cell: Mapping[str, Any]) -> float | None:
    """The better of Inductor's modes over fusedmlp; ``None`` where one of them is missing."""
    theirs, ours = reference_us(cell), cell["peers"].get(OURS, {}).get("us")
    return None if theirs is None or ours is None else float(theirs / ours)


def summary(cells: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Number of cells, geometric mean and worst cell of the speed-up, by grid and of all."""
    grids: dict[str, dict[str, float]] = {"all": {}}
    for name, cell in cells.items():
        if cell["speedup"] is None:
            continue
        grids["all"][name] = cell["speedup"]
        if cell["grid"] is not None:
            grids.setdefault(cell["grid"], {})[name] = cell["speedup"]
    return {
        grid: {
            "cells": len(speedups),
            "geometric_mean": math.exp(math.fsum(map(math.log, speedups.values())) / len(speedups)),
            "worst": min(speedups.values()),
            "worst_cell": min(speedups, key=speedups.__getitem__),
        }
        for grid, speedups in grids.items()
        if speedups
    }
