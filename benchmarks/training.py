"""A training step of one MLP: its bare products, Inductor's default mode, and fusedmlp's `auto`.

    python benchmarks/training.py benchmarks/results/h200/training.json

A step is forward and backward with the gradients of x and of all parameters, as one CUDA graph;
the gradient of the result is random. In turns, in random order, medians. Cells are in bfloat16, and
some in float16 or under autocast to bfloat16, where x and the parameters are float32. `bare` is the
cuBLAS products alone: two forward and four backward, of a gated MLP with its pair's weights as one,
in 16 bits. `recompute` is fusedmlp with `options={"fusedmlp.recompute": True}`. Kernels are those
of one step, without copies and fills by the driver; MB is the peak of a step above what is
resident, with the gradients that it returns, which `gradients` are alone; the error is the largest
of the gradients', relative to float64, where that fits.

Cells are compiled by processes of their own, all at once; one at a time is timed.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from fusion_backend.bench.results import machine
from fusion_backend.instruments.timing import interleaved, replays

_LARGEST_IN_FLOAT64 = 1 << 26  # hidden values


class Cell(NamedTuple):
    """One MLP, as wide out as in, or some with a residual, one after the other.

    ``precision`` is "bfloat16", "float16" or "autocast".
    """

    form: str
    rows: int
    width: int
    hidden: int
    biases: bool = False
    precision: str = "bfloat16"
    layers: int = 1

    @property
    def name(self) -> str:
        """For tables."""
        biases = ", biases" if self.biases else ""
        precision = f", {self.precision}" if self.precision != "bfloat16" else ""
        layers = f", {self.layers} with residuals" if self.layers > 1 else ""
        return f"{self.form} {self.rows}×{self.width}→{self.hidden}{biases}{precision}{layers}"

    @property
    def dtype(self) -> torch.dtype:
        """Of products."""
        return torch.float16 if self.precision == "float16" else torch.bfloat16

    @property
    def kept(self) -> torch.dtype:
        """Of x and the parameters."""
        return torch.float32 if self.precision == "autocast" else self.dtype


CELLS = (
    Cell("gelu_tanh", 16384, 768, 3072, biases=True),
    Cell("gelu_tanh", 16384, 768, 3072),
    Cell("gelu_tanh", 262144, 64, 256, biases=True),
    Cell("gelu_tanh", 65536, 128, 512, biases=True),
    Cell("relu", 262144, 32, 128, biases=True),
    Cell("swiglu", 8192, 2048, 5632),
    Cell("swiglu", 4096, 4096, 14336),
    Cell("gelu", 4096, 768, 3072, biases=True),
    Cell("gelu", 8192, 1024, 4096, biases=True),
    Cell("packed swiglu", 8192, 3072, 8192),
)
OTHERS = (
    *(
        cell._replace(precision=precision)
        for precision in ("float16", "autocast")
        for cell in (CELLS[0], CELLS[2], CELLS[5], CELLS[7])
    ),
    CELLS[0]._replace(layers=8),
    CELLS[5]._replace(layers=8),
)
_WAYS = {"inductor": {}, "fusedmlp": {}, "recompute": {"fusedmlp.recompute": True}}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
}


class Mlp(nn.Module):
    """The MLP of a cell."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.form = cell.form
        firsts = {"swiglu": (cell.hidden,) * 2, "packed swiglu": (2 * cell.hidden,)}
        widths = firsts.get(cell.form, (cell.hidden,))
        self.first = nn.ModuleList(nn.Linear(cell.width, n, bias=cell.biases) for n in widths)
        self.down = nn.Linear(cell.hidden, cell.width, bias=cell.biases)

    def forward(self, x: Tensor) -> Tensor:
        preacts = [layer(x) for layer in self.first]
        if self.form == "packed swiglu":
            preacts = [*preacts[0].chunk(2, -1)]
        if len(preacts) == 2:
            return self.down(F.silu(preacts[0]) * preacts[1])  # type: ignore[no-any-return]
        return self.down(_ACTIVATIONS[self.form](preacts[0]))  # type: ignore[no-any-return]


class Residuals(nn.Module):
    """The MLPs of a cell that has several."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(Mlp(cell) for _ in range(cell.layers))

    def forward(self, x: Tensor) -> Tensor:
        for mlp in self.mlps:
            x = x + mlp(x)
        return x


def bare(cell: Cell) -> Callable[[], Any]:
    """The products of a step."""
    first = cell.hidden * (2 if "swiglu" in cell.form else 1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=cell.dtype, device="cuda")

    up, down = random(first, cell.width), random(cell.width, cell.hidden)
    x, hidden, preacts = (random(cell.rows, n) for n in (cell.width, cell.hidden, first))
    grad = random(cell.rows, cell.width)

    def step() -> Any:
        for _ in range(cell.layers):
            x @ up.t(), hidden @ down.t()
            grad @ down, grad.t() @ hidden, preacts @ up, preacts.t() @ x

    return step


def measured(cell: Cell, lock: Path) -> dict[str, Any]:
    """The line of one cell."""
    torch.manual_seed(0)
    model = (Residuals if cell.layers > 1 else Mlp)(cell).to("cuda", cell.kept)
    x = torch.randn(cell.rows, cell.width, device="cuda", dtype=cell.kept, requires_grad=True)
    grad = torch.randn(cell.rows, cell.width, device="cuda", dtype=cell.dtype)
    leaves = [x, *model.parameters()]

    def step_of(function: Callable[..., Tensor]) -> Callable[[], Any]:
        def step() -> Any:
            with torch.autocast("cuda", torch.bfloat16, enabled=cell.precision == "autocast"):
                result = function(x)
            return torch.autograd.grad(result, leaves, grad)

        return step

    steps = {"bare": bare(cell)}
    for name, options in _WAYS.items():
        torch._dynamo.reset()
        backend = "inductor" if name == "inductor" else "fusedmlp"
        compiled = torch.compile(model, backend=backend, options=options, dynamic=False)
        steps[name] = step_of(compiled)
        steps[name]()
    line: dict[str, Any] = {"mlp": cell.name, "kernels": {}, "mb": {}, "error": {}}
    line["mb"]["gradients"] = round(sum(leaf.nbytes for leaf in leaves) / 1e6, 1)
    exact = _exact(cell, model, x, grad)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for name in _WAYS:
            line["kernels"][name] = kernels(steps[name])
            line["mb"][name] = _peak(steps[name])
        for name, step in {**steps, "eager": step_of(model)}.items():
            if exact is not None and name != "bare":
                line["error"][name] = float(f"{_error(step(), exact):.3g}")
        timers = {name: replays(step, [()]) for name, step in steps.items()}
        line["us"] = {name: round(each.median, 1) for name, each in interleaved(timers).items()}
    return line


def kernels(step: Callable[[], Any]) -> int:
    """How many kernels a step is, without copies and fills by the driver."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    names = [event.name for event in recorded.events() if event.device_type == cuda]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in names)


def _peak(step: Callable[[], Any]) -> float:
    gc.collect()  # what the step before has left would be free memory for this one
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)


def _exact(cell: Cell, model: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor] | None:
    if cell.layers * cell.rows * cell.hidden > _LARGEST_IN_FLOAT64:
        return None
    wide, x = copy.deepcopy(model).double(), x.detach().double().requires_grad_()
    return list(torch.autograd.grad(wide(x), [x, *wide.parameters()], grad.double()))


def _error(found: list[Tensor], exact: list[Tensor]) -> float:
    """The largest of the gradients' relative errors (Frobenius norm)."""
    return max(float((f - e).norm() / e.norm()) for f, e in zip(found, exact, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path, help="JSON file to write")
    parser.add_argument("--cell", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell is not None:
        line = measured((*CELLS, *OTHERS)[arguments.cell], arguments.lock)
        arguments.results.write_text(json.dumps(line))
        print(line, flush=True)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        parts = [Path(folder, f"{index}.json") for index in range(len(CELLS) + len(OTHERS))]
        command = [sys.executable, __file__, "--lock", f"{folder}/lock", "--cell"]
        processes = [
            subprocess.Popen([*command, str(index), str(part)]) for index, part in enumerate(parts)
        ]
        failed = [process.wait() for process in processes]
        cases, others = (
            [json.loads(part.read_text()) for part in some if part.exists()]
            for some in (parts[: len(CELLS)], parts[len(CELLS) :])
        )
    results = {"machine": machine(torch.device("cuda")), "cases": cases, "others": others}
    arguments.results.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    return int(any(failed))


if __name__ == "__main__":
    sys.exit(main())
