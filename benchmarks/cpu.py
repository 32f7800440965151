"""MLPs on a CPU: eager, Inductor and fusedmlp in turns, with equal threads.

    python benchmarks/cpu.py                       # the grid, with torch's number of threads
    python benchmarks/cpu.py --threads 1
    python benchmarks/cpu.py --random 100 --seed 0
    python benchmarks/cpu.py --dtype bfloat16 --json results.json
    python benchmarks/cpu.py --training            # forward and backward, and a step's memory

Where others compute on the machine, `--threads 1 --processor-time` measures what one thread itself
takes, without the time in which others have its core.

Each way runs once a turn, and turns repeat until a cell has had its seconds; a cell's time is the
least of a way, because other programs can only lengthen it. What counts is the ratio to the better
of eager and Inductor's default. Errors are relative, against float64.

A training step has gradients of the input and of all parameters. Its peak memory is that of
tensors, as PyTorch's profiler counts them, above what there was before it.

A line says so where the machine was not idle: where other processes computed during a cell, as the
system counts it, or the load average before is above a tenth of the cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read when torch is imported

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion_backend import explain
from fusion_backend.bench.results import machine as measured_by
from fusion_backend.bench.results import processor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "tanh": torch.tanh,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "sine": lambda x: torch.sin(30.0 * x),
}


class Cell(NamedTuple):
    """One MLP, or a chain of plain layers where there are more than three widths."""

    form: str  # plain, gated or packed
    activation: str
    rows: int
    widths: tuple[int, ...]
    bias: bool = True

    def __str__(self) -> str:
        widths = "→".join(map(str, self.widths))
        return f"{self.form} {self.activation} {self.rows}×{widths}" + " bias" * self.bias


GRID = (
    *(Cell("plain", "gelu_tanh", rows, (768, 3072, 768)) for rows in (1, 16, 128, 512, 2048)),
    *(Cell("gated", "silu", rows, (768, 3072, 768), False) for rows in (1, 16, 128)),
    Cell("gated", "silu", 1, (2048, 5632, 2048), False),
    *(Cell("plain", "gelu_tanh", rows, (256, 1024, 256)) for rows in (512, 4096)),
    *(Cell("gated", "silu", rows, (256, 1024, 256), False) for rows in (512, 4096)),
    *(Cell("plain", "gelu_tanh", rows, (64, 256, 64)) for rows in (4096, 32768)),
    *(Cell("gated", "silu", rows, (64, 256, 64), False) for rows in (4096, 32768)),
    Cell("plain", "gelu_tanh", 262144, (32, 128, 32)),
    *(Cell("plain", "relu", rows, (13, 512, 256, 64)) for rows in (1, 64, 4096)),
    *(Cell("plain", "tanh", rows, (348, 64, 64, 17)) for rows in (1, 64, 4096)),
)


TRAINING_GRID = (
    *(Cell("plain", "gelu_tanh", rows, (64, 256, 64)) for rows in (128, 4096, 32768)),
    *(Cell("gated", "silu", rows, (64, 256, 64), False) for rows in (128, 4096, 32768)),
    Cell("plain", "relu", 4096, (64, 256, 64)),
    *(Cell("plain", "gelu_tanh", rows, (256, 1024, 256)) for rows in (16, 512, 4096)),
    *(Cell("gated", "silu", rows, (256, 1024, 256), False) for rows in (512, 4096)),
    Cell("packed", "silu", 4096, (128, 384, 128)),
    *(Cell("plain", "gelu_tanh", rows, (768, 3072, 768)) for rows in (16, 512)),
    Cell("plain", "gelu_tanh", 262144, (32, 128, 32)),
    Cell("gated", "silu", 262144, (32, 128, 32), False),
)


def random_cells(count: int, seed: int) -> Iterator[Cell]:
    """Cells drawn at random: half of them wide, rows 1 to 65536, ten activations, three forms."""
    draw = random.Random(seed)
    while count:
        form = draw.choices(("plain", "gated", "packed"), (6, 3, 2))[0]
        names = [*ACTIVATIONS] if form == "plain" else ["silu", "gelu", "gelu_tanh"]
        wide = draw.random() < 0.5
        choices = (384, 512, 640, 768, 1024, 1536) if wide else (8, 24, 32, 50, 64, 100, 128, 256)
        width = draw.choice(choices)
        hidden = max(16, int(width * draw.choice((0.5, 1, 2, 2.6875, 3.5, 4, 4))) // 16 * 16)
        out = width if draw.random() < 0.8 else draw.choice((1, 10, 64, 512))
        rows = int(2 ** draw.uniform(0, 10 if wide else 16))
        operations = 2 * rows * hidden * (width * (1 if form == "plain" else 2) + out)
        if operations > 3e10:
            continue
        count -= 1
        bias = draw.random() < 0.6
        yield Cell(form, draw.choice(names), rows, (width, hidden, out), bias)


class MLP(nn.Module):
    """The model of a cell."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.form, self.function = cell.form, ACTIVATIONS[cell.activation]
        width, hidden, *others = cell.widths
        first = hidden * (2 if cell.form == "packed" else 1)
        sizes = [(width, first), *zip((hidden, *others), others, strict=False)]
        self.layers = nn.ModuleList(nn.Linear(k, n, bias=cell.bias) for k, n in sizes)
        if cell.form == "gated":
            self.gate = nn.Linear(width, hidden, bias=cell.bias)

    def forward(self, x: Tensor) -> Tensor:
        first, *between, last = self.layers
        if self.form == "gated":
            return last(self.function(self.gate(x)) * first(x))
        if self.form == "packed":
            gate, up = first(x).chunk(2, -1)
            return last(self.function(gate) * up)
        x = self.function(first(x))
        for layer in between:
            x = self.function(layer(x))
        return last(x)


def measured(
    cell: Cell,
    dtype: torch.dtype,
    clock: tuple[float, Callable[[], float]],
    policies: tuple[str, ...],
    training: bool,
) -> dict:
    """Milliseconds of each way, the plan and the errors of a cell; in training, its memory, too.

    ``clock`` is for how many seconds a cell is measured, and what measures.
    """
    model = MLP(cell).train(training).to(dtype)
    x = torch.randn(cell.rows, cell.widths[0]).to(dtype).requires_grad_(training)
    dy = torch.randn(cell.rows, cell.widths[-1]).to(dtype)
    with torch.set_grad_enabled(training):
        exact = results(copy_in_double(cell, model), x, dy)
        options = {policy: {"fusedmlp.policy": policy} for policy in policies}
        sites = explain(model, x, options=options[policies[0]]).sites
        torch._dynamo.reset()
        ways = {"eager": model, "inductor": torch.compile(model)}
        for policy, chosen in options.items():
            ways[policy] = torch.compile(model, backend="fusedmlp", options=chosen)
        errors = {name: distance(results(way, x, dy, model), exact) for name, way in ways.items()}
        runs = {name: (lambda way=way: results(way, x, dy, model)) for name, way in ways.items()}
        busy = Busy()
        times = in_turns(runs, *clock)
        peaks = {name: peak_bytes(run) for name, run in runs.items()} if training else {}
    best = min(times["eager"], times["inductor"])
    return {
        "cell": str(cell),
        "ms": {name: round(each * 1e3, 4) for name, each in times.items()},
        "ratio": {policy: round(best / times[policy], 3) for policy in policies},
        "errors": errors,
        "peak_mb": {name: round(peak / 2**20, 2) for name, peak in peaks.items()},
        "plan": ", ".join(site.plan or f"({site.reason})" for site in sites),
        "idle": busy.idle(),
    }


def results(
    way: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor, model: nn.Module | None = None
) -> list[Tensor]:
    """The result of an MLP, and in training its gradients."""
    dtype = x.dtype
    if model is None:  # ``way`` is itself a model, in float64
        model = way
        dtype = torch.float64
        x = x.detach().to(dtype).requires_grad_(x.requires_grad)
    y = way(x)
    if not torch.is_grad_enabled():
        return [y]
    return [y, *torch.autograd.grad(y, [x, *model.parameters()], dy.to(dtype))]


def distance(found: list[Tensor], exact: list[Tensor]) -> float:
    """The largest relative distance of a tensor from what it should be."""
    pairs = zip(found, exact, strict=True)
    return max(float((each.double() - right).norm() / right.norm()) for each, right in pairs)


def peak_bytes(run: Callable[[], object]) -> int:
    """Bytes of tensors that a step has at most beside those there were before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    events = profile.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    sizes = itertools.accumulate(change for _, change in sorted(changes, key=lambda each: each[0]))
    return max(sizes, default=0)


def copy_in_double(cell: Cell, model: nn.Module) -> nn.Module:
    """The model in float64."""
    wide = MLP(cell).train(model.training).double()
    wide.load_state_dict(model.state_dict())
    return wide


def in_turns(
    ways: dict[str, Callable[[], object]], seconds: float, clock: Callable[[], float]
) -> dict[str, float]:
    """The least seconds of each way."""
    for run in ways.values():
        run()
        run()
    least = dict.fromkeys(ways, math.inf)
    names = [*ways]
    end, turns = time.perf_counter() + seconds, 0
    while turns < 5 or time.perf_counter() < end:
        random.shuffle(names)  # no way always runs after the same other
        for name in names:
            start = clock()
            ways[name]()
            least[name] = min(least[name], clock() - start)
        turns += 1
    return least


class Busy:
    """How much other processes compute from now on."""

    def __init__(self) -> None:
        self._load = os.getloadavg()[0] / (os.cpu_count() or 1)
        self._start = self._others()

    @staticmethod
    def _others() -> float | None:
        """Seconds of processors that other processes have used, or None where nobody says."""
        try:
            fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        except OSError:
            return None
        ticks = [int(field) for field in fields]
        used = sum(ticks) - ticks[3] - ticks[4]  # idle, and waiting for a disk
        return used / os.sysconf("SC_CLK_TCK") - sum(os.times()[:2])

    def idle(self) -> bool:
        """Whether they computed for less than a twentieth of a core's time."""
        now, start = self._others(), self._start
        if now is None or start is None:
            return self._load < 0.1
        return now - start < 0.05 * max(1.0, self._load) + 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N random cells")
    parser.add_argument("--training", action="store_true", help="forward and backward")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each cell")
    parser.add_argument("--processor-time", action="store_true", help="with one thread only")
    parser.add_argument("--always", action="store_true", help="the policy always, too")
    parser.add_argument("--only", default="", help="cells whose name has this in it")
    parser.add_argument("--json", type=Path, help="write the results there")
    arguments = parser.parse_args()
    if arguments.processor_time and arguments.threads != 1:
        parser.error(f"--processor-time needs --threads 1, got {arguments.threads}")
    clock = (
        arguments.seconds,
        time.process_time if arguments.processor_time else time.perf_counter,
    )
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    cells = [*(TRAINING_GRID if arguments.training else GRID)]
    if arguments.random:
        cells = [*random_cells(arguments.random, arguments.seed)]
    cells = [cell for cell in cells if arguments.only in str(cell)]
    policies = ("auto", "always") if arguments.always else ("auto",)
    machine = {
        **measured_by(torch.device("cpu")),
        "device": f"{processor()}, {os.cpu_count()} cores",
        "threads": arguments.threads,
        **({"seed": arguments.seed} if arguments.random else {}),
    }
    print(*(f"{name} {value}" for name, value in machine.items()), arguments.dtype, sep=", ")
    dtype, cells_found = getattr(torch, arguments.dtype), []
    for cell in cells:
        found = measured(cell, dtype, clock, policies, arguments.training)
        cells_found.append(found)
        times = "  ".join(f"{name} {each:.3f}" for name, each in found["ms"].items())
        ratios = "  ".join(f"{each:.2f}" for each in found["ratio"].values())
        error = found["errors"]["auto"] / max(found["errors"]["eager"], 1e-300)
        note = "" if found["idle"] else "  NOT IDLE"
        if arguments.training:
            peaks = found["peak_mb"]
            note = f"  peak MB {peaks['inductor']:.1f} → {peaks['auto']:.1f}{note}"
        print(
            f"{cell!s:<48}  {times} ms  ratio {ratios}  error {error:.2f}× eager's  "
            f"{found['plan']}{note}",
            flush=True,
        )
        torch._dynamo.reset()
    summarise(cells_found, policies)
    if arguments.json:
        content = {"machine": machine, "dtype": arguments.dtype, "cells": cells_found}
        arguments.json.write_text(json.dumps(content, indent=1, ensure_ascii=False))


def summarise(results: list[dict], policies: tuple[str, ...]) -> None:
    for policy in policies:
        ratios = [found["ratio"][policy] for found in results]
        mean = statistics.geometric_mean(ratios)
        slowest = min(results, key=lambda found: found["ratio"][policy])
        busy = sum(not found["idle"] for found in results)
        print(
            f"{policy}: {len(ratios)} cells, geometric mean {mean:.3f}, "
            f"worst {min(ratios):.3f} ({slowest['cell']}); the machine was not idle in {busy}"
        )


if __name__ == "__main__":
    main()
