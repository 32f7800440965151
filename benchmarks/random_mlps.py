"""Inductor, every family and what ``torch.compile`` makes of it, for MLPs drawn at random.

    python benchmarks/random_mlps.py random.jsonl --number 110 --seed 7 --jobs 15

Needs a GPU. Draws as ``fusedmlp bench --random`` does. For each MLP, CUDA graphs that rotate sets
of weights take turns: Inductor's code, the operator with each family that can run it, and code of
the backend with its default options, which measures while compiling and starts with an empty table.
So a line says both what was possible and what a user gets. ``auto`` is what that code runs.

With ``--training`` it is forward and backward with all gradients, of those with at least 256 rows.
In place of the families there is the backend with policy ``always``.

Processes that compile the same beforehand (``--jobs``) fill the caches on disk; they are over
before anything is timed. What is not measured when ``--seconds`` are over is left out, and the same
command goes on with it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import fusion_backend
from fusion_backend.bench.cells import Cell, as_written, operands
from fusion_backend.bench.random_cells import drawn
from fusion_backend.bench.tuning import training_step
from fusion_backend.instruments.timing import distinct_sets, interleaved, replays, rotated
from fusion_backend.mlp.expression import parse
from fusion_backend.planning.cases import Case
from fusion_backend.planning.measurements import INDUCTOR
from fusion_backend.planning.planner import available
from fusion_backend.planning.user_table import CACHE_VARIABLE

DEVICE = torch.device("cuda")
BACKEND = "fusedmlp"
# Of a line, what does not say which MLP it is of.
MEASURED = ("us", "spread", "auto")
# With more rows, reading the weights is a small part of the work.
FEW_ROWS = 4096
FEWEST_TRAINED = 256
# Operations of the calls of one graph, so that large MLPs take no longer than needed.
OPERATIONS = 2e12


def chosen(number: int, seed: int, training: bool) -> list[Cell]:
    if not training:
        return drawn(number, seed)
    return [cell for cell in drawn(4 * number, seed) if cell.rows >= FEWEST_TRAINED][:number]


def case_of(cell: Cell, training: bool) -> Case:
    widths = (cell.width, cell.hidden, cell.out_width)
    activation = str(parse(cell.activation))
    return Case(activation, cell.rows, *widths, cell.precision, cell.has_bias, training)


def functions(cell: Cell, training: bool, **options: Any) -> dict[str, Callable[..., Any]]:
    """Inductor, the backend and every family, as functions of the input and the weights."""
    case, written = case_of(cell, training), as_written(cell)

    def by_backend(**options: Any) -> Callable[..., Any]:
        named = {f"{BACKEND}.{name}": value for name, value in options.items()}
        return torch.compile(written, dynamic=False, backend=BACKEND, options=named)

    def planned(plan: str) -> Callable[..., Any]:
        return lambda x, *w: torch.ops.fusedmlp.mlp(x, *w, [], case.activation, plan)

    found = {INDUCTOR: torch.compile(written, dynamic=False), BACKEND: by_backend(**options)}
    if training:
        found["always"] = by_backend(**options, policy="always")
        return {name: training_step(function) for name, function in found.items()}
    return found | {plan: planned(plan) for plan in available(case.setting(DEVICE))}


def compile_all(cells: Sequence[Cell], training: bool) -> None:
    for cell in cells:
        torch.compiler.reset()
        x, (weights,) = operands(cell, 1, DEVICE)
        for function in functions(cell, training, measure=False).values():
            with contextlib.suppress(Exception):  # measuring says what went wrong
                function(x, *weights)
        torch.cuda.empty_cache()


def measured(cell: Cell, training: bool) -> dict[str, Any]:
    """The line of one MLP."""
    torch.compiler.reset()
    case = case_of(cell, training)
    flops = 2 * cell.rows * case.bytes_of_weights // case.dtype.itemsize
    few = cell.rows <= FEW_ROWS and not training
    sets = distinct_sets(case.bytes_of_weights, DEVICE) if few else 2
    x, weights = operands(cell, sets, DEVICE)
    calls = rotated([(x, *each) for each in weights], max(2, min(8, int(OPERATIONS / flops))))
    timers = {}
    for name, function in functions(cell, training).items():
        timers[name] = replays(function, calls)
        if name == BACKEND:
            site = fusion_backend.history()[-1].sites[0]
    times = interleaved(timers)
    return {
        **case.row(),
        "us": {name: round(each.median, 2) for name, each in times.items()},
        "spread": {name: round(each.spread, 3) for name, each in times.items()},
        "auto": [site.plan if site.fused else INDUCTOR, site.detail],
    }


def measured_until(
    cells: Sequence[Cell], training: bool, deadline: float
) -> Iterator[dict[str, Any]]:
    """The lines of MLPs, as many as there is time for."""
    for cell in cells:
        if time.monotonic() > deadline:
            return
        try:
            yield measured(cell, training)
        except Exception as error:
            print(f"{cell.name}: {type(error).__name__}: {error}"[:300], file=sys.stderr)
        torch.cuda.empty_cache()


def wait_for(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait until all have ended; those that have not in time are stopped."""
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def unmeasured(cells: Sequence[Cell], training: bool, file: Path) -> list[Cell]:
    """Those that have no line in a file; all, if there is no file."""
    lines = file.read_text().splitlines() if file.exists() else []
    known = [
        {name: value for name, value in json.loads(line).items() if name not in MEASURED}
        for line in lines
    ]
    return [cell for cell in cells if case_of(cell, training).row() not in known]


def shards(arguments: argparse.Namespace) -> list[subprocess.Popen[bytes]]:
    """Processes that compile a part of the MLPs each."""
    command = [sys.executable, __file__, arguments.file, f"--number={arguments.number}"]
    command += [f"--seed={arguments.seed}", f"--jobs={arguments.jobs}"]
    command += ["--training"] * arguments.training
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return [
        subprocess.Popen([*command, f"--compile={shard}"], env=environment)
        for shard in range(arguments.jobs)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--number", type=int, default=110)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile beforehand")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="to take in all")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    started, training = time.monotonic(), arguments.training
    cells = chosen(arguments.number, arguments.seed, training)
    cells = unmeasured(cells, training, arguments.file)
    with tempfile.TemporaryDirectory() as empty, torch.no_grad():
        os.environ[CACHE_VARIABLE] = empty
        if arguments.compile is not None:
            compile_all(cells[arguments.compile :: arguments.jobs], training)
            return
        wait_for(shards(arguments), arguments.seconds / 2)
        with arguments.file.open("a") as file:
            for row in measured_until(cells, training, started + arguments.seconds):
                print(row["auto"], row["us"], flush=True)
                file.write(json.dumps(row) + "\n")
                file.flush()


if __name__ == "__main__":
    main()
