"""`fusedmlp bench`: single MLPs under every installed way to run them, side by side."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

import torch

from fusion_backend.bench import results as results_file
from fusion_backend.bench.cells import Cell, check
from fusion_backend.bench.grids import GRIDS, grids_for
from fusion_backend.bench.measuring import measure
from fusion_backend.bench.model_cells import cells_of
from fusion_backend.bench.peer import Peer
from fusion_backend.bench.peers import chosen
from fusion_backend.bench.plots import check_matplotlib, write_plots
from fusion_backend.bench.random_cells import drawn
from fusion_backend.bench.results import Results
from fusion_backend.bench.roofline import Ceilings, ceilings_of
from fusion_backend.bench.tables import cell_text, overview
from fusion_backend.bench.warm_up import Pending, warming
from fusion_backend.cli import one_line
from fusion_backend.cli.loading import choose_device, load
from fusion_backend.cli.progress import step
from fusion_backend.errors import CommandError


def run(arguments: argparse.Namespace) -> int:
    """Measure what the results do not have yet, and print all; 1 if a cell failed."""
    deadline = time.monotonic() + arguments.seconds
    device = choose_device(arguments.device)
    left_out = chosen(arguments.without.split(",") if arguments.without else [])
    named = chosen(arguments.peers.split(",") if arguments.peers else None)
    peers = [peer for peer in named if peer.name not in {each.name for each in left_out}]
    cells = wanted(arguments, device)
    if arguments.plots:
        check_matplotlib()
    results = results_file.started(arguments.out, device, peers)
    failed = measure_missing(arguments, results, cells, peers, device, deadline)
    print(
        json.dumps(results, indent=1, ensure_ascii=False) if arguments.json else overview(results)
    )
    if arguments.plots:
        for path in write_plots(results, arguments.plots):
            print(f"wrote {path}", file=sys.stderr)
    return int(failed)


def wanted(arguments: argparse.Namespace, device: torch.device) -> list[Cell]:
    """The cells that a command line names.

    Raises:
        CommandError: it names none, or one that cannot be built.
    """
    cells = dict.fromkeys(_named(arguments, device))
    if arguments.dtype:
        cells = dict.fromkeys(
            replace(cell, precision=precision) for cell in cells for precision in arguments.dtype
        )
    for cell in cells:
        check(cell)
    found = [cell for cell in cells if (arguments.only or "") in cell.name]
    if not found:
        names = "\n".join(cell.name for cell in cells)
        raise CommandError(f"--only must be part of a cell's name, such as {names.splitlines()[0]}")
    return found


def _named(arguments: argparse.Namespace, device: torch.device) -> Iterable[Cell]:
    if arguments.model:
        loaded = load(arguments.model).to(device, None)
        return cells_of(loaded.model.eval(), *loaded.args, **loaded.kwargs)
    if arguments.random is not None:
        if arguments.random < 1:
            raise CommandError(f"--random must be at least 1, got {arguments.random}")
        cells = drawn(arguments.random, arguments.seed)
        if device.type == "cuda":
            return cells
        return [replace(cell, precision="float32") for cell in cells]
    shape = (arguments.rows, arguments.width, arguments.hidden, arguments.form)
    if any(given is not None for given in shape):
        if arguments.rows is None or arguments.width is None:
            raise CommandError(
                "a shape must have --rows and --width (--hidden: four times as wide)"
            )
        return [
            Cell(
                form,
                rows,
                arguments.width,
                4 * arguments.width if arguments.hidden is None else arguments.hidden,
                "bfloat16" if device.type == "cuda" else "float32",
                arguments.bias,
                arguments.out_width,
            )
            for form, rows in product(arguments.form or ["gelu_tanh"], arguments.rows)
        ]
    names = arguments.grid or grids_for(device.type)
    return [cell for name in names for cell in GRIDS[name]]


def measure_missing(
    arguments: argparse.Namespace,
    results: Results,
    cells: Sequence[Cell],
    peers: Sequence[Peer],
    device: torch.device,
    deadline: float,
) -> bool:
    """Measure the cells that are not there yet until the deadline; whether one failed."""
    left = [cell for cell in cells if not results_file.is_done(results, cell, peers)]
    if not left:
        return False
    failed = False
    with warming(left, peers, device, arguments.jobs) as pending:
        ceilings = known_ceilings(results, device, left)
        # What compiles runs what it compiled, too, and would disturb what is timed.
        if arguments.jobs:
            with step(f"compiling {len(left)} cells in {arguments.jobs} processes"):
                pending.wait(left, deadline)
        while left and (cell := next_cell(pending, left, deadline)) is not None:
            left.remove(cell)
            place = f"[{len(cells) - len(left)}/{len(cells)}] {cell.name}"
            try:
                with step(place):
                    measured = measure(cell, peers, device, ceilings, arguments.rounds)
            except CommandError:
                raise
            except Exception as error:
                if arguments.traceback:
                    raise
                print(f"fusedmlp: error: {cell.name}: {one_line(error)}", file=sys.stderr)
                failed = True
                continue
            results_file.add(results, cell, measured, device.type)
            if arguments.out:
                results_file.write(results, arguments.out)
            if not arguments.json:
                print(f"\n{cell_text(cell.name, results['cells'][cell.name])}\n", flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if left and time.monotonic() > deadline:
        print(f"out of time before {len(left)} cells: repeat the command", file=sys.stderr)
    return failed


def next_cell(pending: Pending, left: Sequence[Cell], deadline: float) -> Cell | None:
    """The next cell to measure, ``None`` when time is up."""
    return None if time.monotonic() > deadline else pending.next_ready(left, deadline)


def known_ceilings(results: Results, device: torch.device, cells: Sequence[Cell]) -> Ceilings:
    """The ceilings in the results, measured now as far as they are not there yet."""
    known = results["machine"].get("ceilings", {"bytes_per_second": 0.0, "flops_per_second": {}})
    missing = {cell.precision for cell in cells} - known["flops_per_second"].keys()
    if missing:
        with step("measuring the ceilings of memory and products"):
            here = ceilings_of(device, missing)
        known = {
            "bytes_per_second": max(known["bytes_per_second"], here.bytes_per_second),
            "flops_per_second": {**known["flops_per_second"], **here.flops_per_second},
        }
        results["machine"]["ceilings"] = known
    return results_file.ceilings_from_data(known)
