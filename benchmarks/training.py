"""A training step of one MLP: its bare products, Inductor's default mode, and fusedmlp's `auto`.

    python benchmarks/training.py benchmarks/results/h200/training.json

A step is forward and backward with the gradients of x and of all parameters, in bfloat16, as one
CUDA graph; the gradient of the result is random. In turns, in random order, medians. `bare` is the
cuBLAS products alone: two forward and four backward, of a gated MLP with its pair's weights as one.
Kernels are those of one step, without copies and fills by the driver; MB is the peak of a step
above what is resident; the error is the largest of the gradients', relative to float64, where that
fits.

Cells are compiled by processes of their own, all at once; one at a time is timed.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
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
    """One MLP, as wide out as in."""

    form: str
    rows: int
    width: int
    hidden: int
    biases: bool = False

    @property
    def name(self) -> str:
        """For tables."""
        biases = ", biases" if self.biases else ""
        return f"{self.form} {self.rows}×{self.width}→{self.hidden}{biases}"


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


def bare(cell: Cell, x: Tensor, grad: Tensor) -> Callable[[], Any]:
    """The products of a step."""
    first = cell.hidden * (2 if "swiglu" in cell.form else 1)
    options: dict[str, Any] = {"dtype": x.dtype, "device": x.device}
    up, down = (
        torch.randn(first, cell.width, **options),
        torch.randn(cell.width, cell.hidden, **options),
    )
    hidden, preacts = (torch.randn(cell.rows, n, **options) for n in (cell.hidden, first))

    def step() -> Any:
        x @ up.t(), hidden @ down.t()
        return grad @ down, grad.t() @ hidden, preacts @ up, preacts.t() @ x

    return step


def measured(cell: Cell, lock: Path) -> dict[str, Any]:
    """The line of one cell."""
    torch.manual_seed(0)
    model = Mlp(cell).to("cuda", torch.bfloat16)
    x = torch.randn(cell.rows, cell.width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    leaves = [x, *model.parameters()]

    def step_of(function: Callable[..., Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(function(x), leaves, grad)

    steps = {"bare": bare(cell, x.detach(), grad)}
    for name, backend in (("inductor", "inductor"), ("fusedmlp", "fusedmlp")):
        torch._dynamo.reset()
        steps[name] = step_of(torch.compile(model, backend=backend, dynamic=False))
        steps[name]()
    line: dict[str, Any] = {"mlp": cell.name, "kernels": {}, "mb": {}, "error": {}}
    exact = _exact(cell, model, x, grad)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for name in ("inductor", "fusedmlp"):
            line["kernels"][name] = _kernels(steps[name])
            line["mb"][name] = _peak(steps[name])
        for name, step in {**steps, "eager": step_of(model)}.items():
            if exact is not None and name != "bare":
                line["error"][name] = float(f"{_error(step(), exact):.3g}")
        timers = {name: replays(step, [()]) for name, step in steps.items()}
        line["us"] = {name: round(each.median, 1) for name, each in interleaved(timers).items()}
    return line


def _kernels(step: Callable[[], Any]) -> int:
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    names = [event.name for event in recorded.events() if event.device_type == cuda]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in names)


def _peak(step: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)


def _exact(cell: Cell, model: Mlp, x: Tensor, grad: Tensor) -> list[Tensor] | None:
    if cell.rows * cell.hidden > _LARGEST_IN_FLOAT64:
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
        line = measured(CELLS[arguments.cell], arguments.lock)
        arguments.results.write_text(json.dumps(line))
        print(line, flush=True)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        parts = [Path(folder, f"{index}.json") for index in range(len(CELLS))]
        command = [sys.executable, __file__, "--lock", f"{folder}/lock", "--cell"]
        processes = [
            subprocess.Popen([*command, str(index), str(part)]) for index, part in enumerate(parts)
        ]
        failed = [process.wait() for process in processes]
        lines = [json.loads(part.read_text()) for part in parts if part.exists()]
    results = {"machine": machine(torch.device("cuda")), "cases": lines}
    arguments.results.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    return int(any(failed))


if __name__ == "__main__":
    sys.exit(main())
