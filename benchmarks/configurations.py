"""How long a Triton kernel takes with each configuration, for MLPs drawn at random.

    python benchmarks/configurations.py configurations.json --number 60 --seed 7

Needs a GPU. Takes those of the MLPs that ``fusedmlp bench --random`` draws whose first product
Triton's kernel runs, and times its launch with the configuration that the lists have and with
each candidate that fits. They take turns, as CUDA graphs that rotate weights. The file is what
``benchmarks/fit_config_times.py`` reads.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fusion_backend.bench.cells import Cell, operands
from fusion_backend.bench.random_cells import drawn
from fusion_backend.bench.results import machine
from fusion_backend.instruments.timing import distinct_sets, interleaved, replays, rotated
from fusion_backend.kernels import launch
from fusion_backend.kernels.epilogue import config_sm90
from fusion_backend.kernels.host.candidates import candidates
from fusion_backend.kernels.host.configs import Config, fits
from fusion_backend.kernels.host.problems import epilogue_problem
from fusion_backend.kernels.host.targets import here
from fusion_backend.kernels.preferences import listed
from fusion_backend.mlp.expression import parse
from fusion_backend.mlp.weights import FirstLayer

DEVICE = torch.device("cuda")


def timed(cell: Cell) -> dict[str, Any] | None:
    """The cell and microseconds of each configuration; ``None`` where another kernel runs it."""
    target, activation = here(), parse(cell.activation)
    bytes_of_weights = 2 * (2 if cell.gated else 1) * cell.width * cell.hidden
    x, sets = operands(cell, distinct_sets(bytes_of_weights, DEVICE), DEVICE)
    firsts = [FirstLayer(*weights[:4]) for weights in sets]
    problem = epilogue_problem(x, firsts[0].weight_gate, firsts[0].weight_up, target)
    if config_sm90.runs(problem, cell.rows, target):
        return None
    configs = [listed("epilogue", problem, target), *candidates("epilogue", problem)]
    timers = {}
    for config in dict.fromkeys(configs):
        if fits("epilogue", config, problem, target):
            function = partial(run, x, activation, config)
            timers[config] = replays(function, rotated([(first,) for first in firsts]))
    names = {str(index): timer for index, timer in enumerate(timers.values())}
    times = interleaved(names)
    return {
        "kernel": "epilogue",
        "rows": cell.rows,
        "widths": [cell.width, cell.hidden, cell.out_width],
        "gated": cell.gated,
        "activation": cell.activation,
        "dtype": cell.precision,
        "us": [
            [short(config), round(min(times[str(index)].samples), 2)]
            for index, config in enumerate(timers)
        ],
    }


def run(x: torch.Tensor, activation: Any, config: Config, first: FirstLayer) -> object:
    return launch.epilogue(x, first, activation, False, config=config)


def short(config: Config) -> dict[str, Any]:
    """What of a configuration is not as by default."""
    usual = asdict(Config(config.block_m, config.block_n))
    return {name: value for name, value in asdict(config).items() if value != usual.get(name)} | {
        "block_m": config.block_m,
        "block_n": config.block_n,
    }


def measured(number: int, seed: int) -> Iterator[dict[str, Any]]:
    """So many MLPs, of those that are drawn."""
    left = number
    for cell in drawn(20 * number, seed):
        row = timed(cell) if left else None
        torch.cuda.empty_cache()
        if row is not None:
            left -= 1
            print(row["rows"], *row["widths"], min(row["us"], key=lambda each: each[1]), flush=True)
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with torch.no_grad():
        rows = [*measured(arguments.number, arguments.seed)]
    lines = ",\n  ".join(map(json.dumps, rows))
    head = json.dumps(machine(DEVICE))
    arguments.file.write_text(f'{{"machine": {head}, "rows": [\n  {lines}]}}\n')


if __name__ == "__main__":
    main()
