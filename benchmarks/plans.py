"""Every plan against Inductor, over a grid of MLPs, on the GPU of this machine.

    python benchmarks/plans.py --out plans.json [--seconds 500]

For each MLP: Inductor's default mode, and each plan that can run it, as GPU time of CUDA-graph
replays. Weights rotate through enough sets that they come from device memory, not from the cache.
Candidates are timed in turns, so that a change of the card's clock meets all of them. The table of
`fusion_backend/profit.py` rests on these numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import fusion_backend.operators  # noqa: F401  (defines torch.ops.fusedmlp)
from fusion_backend.kernels.launch import can_back_to_back, can_stream
from fusion_backend.library import library_supports

L2_BYTES = 50 << 20
Weights = tuple[torch.Tensor | None, ...]


class Case(NamedTuple):
    """One MLP: ``rows`` × ``width`` → ``hidden`` → ``width``."""

    form: str
    rows: int
    width: int
    hidden: int
    precision: str = "bfloat16"
    training: bool = False

    @property
    def dtype(self) -> torch.dtype:
        halves = {"bfloat16": torch.bfloat16, "float16": torch.float16}
        return halves.get(self.precision, torch.float32)

    @property
    def gated(self) -> bool:
        return self.form == "swiglu"

    @property
    def activation(self) -> str:
        return {"swiglu": "silu(g) * u", "gelu_tanh": "gelu_tanh(x)", "gelu": "gelu(x)"}[self.form]

    @property
    def products(self) -> int:
        return 3 if self.gated else 2


def cases() -> Iterator[Case]:
    """The grid: narrow to wide, one row to many, plain and gated; then other dtypes, training."""
    for width, hidden in [(64, 256), (128, 512), (256, 1024)]:
        for rows in (64, 1024, 16384, 65536):
            yield Case("gelu_tanh", rows, width, hidden)
            yield Case("swiglu", rows, width, hidden)
    for width, hidden in [(768, 3072), (2048, 8192), (4096, 16384)]:
        for rows in (1, 16, 64, 128, 512, 1024, 4096, 16384):
            if rows * width <= 1 << 24:
                yield Case("gelu_tanh", rows, width, hidden)
    for width, hidden in [(768, 2048), (2048, 8192), (4096, 14336)]:
        for rows in (1, 16, 64, 128, 256, 512, 1024, 4096, 16384):
            if rows * width <= 1 << 24:
                yield Case("swiglu", rows, width, hidden)
    for width, hidden in [(768, 3072), (1024, 4096)]:
        for rows in (1, 16, 64, 128, 256, 512, 1024, 4096, 16384):
            yield Case("gelu", rows, width, hidden)
    for rows in (1024, 65536):
        yield Case("gelu", rows, 64, 256)
        yield Case("gelu", rows, 128, 512)
    for precision in ("float16", "tf32", "ieee"):
        for rows, width, hidden in [(65536, 64, 256), (16, 768, 3072)]:
            yield Case("gelu_tanh", rows, width, hidden, precision)
    yield from training_cases()


def training_cases() -> Iterator[Case]:
    """Forward and backward, with gradients of everything."""
    for rows in (512, 2048, 16384):
        yield Case("gelu_tanh", rows, 768, 3072, training=True)
        yield Case("swiglu", rows, 768, 2048, training=True)
    for rows in (512, 4096):
        yield Case("swiglu", rows, 2048, 8192, training=True)
    yield Case("gelu_tanh", 65536, 64, 256, training=True)


def weights_of(case: Case) -> Weights:
    """(gate weight, gate bias, up weight, up bias, down weight, down bias)."""

    def weight(out_features: int, in_features: int) -> torch.Tensor:
        return torch.randn(out_features, in_features, dtype=case.dtype) / in_features**0.5

    if case.gated:
        gate, up = weight(case.hidden, case.width), weight(case.hidden, case.width)
        return gate, None, up, None, weight(case.width, case.hidden), None
    biases = torch.randn(case.hidden, dtype=case.dtype), torch.randn(case.width, dtype=case.dtype)
    up, down = weight(case.hidden, case.width), weight(case.width, case.hidden)
    return None, None, up, biases[0], down, biases[1]


def reference(case: Case) -> Callable[..., torch.Tensor]:
    """The MLP as a person writes it."""

    def gated(x: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
        return F.linear(F.silu(F.linear(x, w[0], w[1])) * F.linear(x, w[2], w[3]), w[4], w[5])

    def plain(x: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
        form = "tanh" if case.form == "gelu_tanh" else "none"
        return F.linear(F.gelu(F.linear(x, w[2], w[3]), approximate=form), w[4], w[5])

    return gated if case.gated else plain


def plans_of(case: Case) -> list[str]:
    """The plans that can run an MLP."""
    plans = ["epilogue"]
    if case.training:
        return plans
    if can_back_to_back(case.width, case.hidden, case.width, case.gated, case.dtype):
        plans.append("back_to_back")
    if can_stream(case.rows, case.dtype):
        plans.append("stream")
    if library_supports(
        case.activation,
        case.dtype,
        device_type="cuda",
        has_bias_up=not case.gated,
        rows=case.rows,
        in_features=case.width,
        hidden_features=case.hidden,
    ):
        plans.append("library")
    return plans


def planned(case: Case, plan: str) -> Callable[..., Any]:
    """The MLP as one call of the operator: launched at once, or compiled where it is trained."""

    def call(x: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
        return torch.ops.fusedmlp.mlp(x, *w, case.activation, plan)

    return torch.compile(call, dynamic=False) if case.training else call


def training_step(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Forward and backward of a function, with the gradients of all of its inputs."""

    def step(x: torch.Tensor, *weights: torch.Tensor) -> Any:
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in (x, *weights) if t is not None]
            given = iter(inputs[1:])
            y = function(inputs[0], *(w if w is None else next(given) for w in weights))
            return torch.autograd.grad(y, inputs, torch.ones_like(y))

    return step


def captured(function: Callable[..., Any], x: torch.Tensor, sets: list[Weights]) -> Any:
    """A CUDA graph that calls the function on one weight set after the other."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for weights in sets[:3]:
            function(x, *weights)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weights in sets:
            function(x, *weights)
    return graph


def microseconds(graph: Any, calls: int) -> float:
    """GPU time of one call, from one replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / calls


def measure(case: Case) -> dict[str, Any]:
    """Median GPU time and error of Inductor and of every plan for one MLP."""
    itemsize = case.dtype.itemsize
    bytes_of_weights = case.products * case.width * case.hidden * itemsize
    distinct = min(4 * L2_BYTES // bytes_of_weights + 2, 64) if case.rows <= 4096 else 2
    sets = [weights_of(case) for _ in range(distinct)]
    calls = [sets[i % distinct] for i in range(max(distinct, 8))]
    x = torch.randn(case.rows, case.width, dtype=case.dtype)
    torch.backends.cuda.matmul.allow_tf32 = case.precision != "ieee"
    torch._dynamo.reset()
    candidates = {"inductor": torch.compile(reference(case), dynamic=False)}
    candidates.update((plan, planned(case, plan)) for plan in plans_of(case))
    exact = reference(case)(x[:512].double(), *(w if w is None else w.double() for w in sets[0]))
    errors, graphs = {}, {}
    for name, function in candidates.items():
        result = function(x, *sets[0])[:512].double()
        errors[name] = ((result - exact).norm() / exact.norm()).item()
        step = training_step(function) if case.training else function
        graphs[name] = captured(step, x, calls)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(12):
        for name, graph in graphs.items():
            times[name].append(microseconds(graph, len(calls)))
    medians = {name: round(statistics.median(values[2:]), 2) for name, values in times.items()}
    return {
        **case._asdict(),
        "precision": "half" if case.dtype != torch.float32 else case.precision,
        "control": case.precision == "float16",
        "us": medians,
        "error": errors,
    }


def main() -> None:
    """Measure the grid within the given time and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=500)
    arguments = parser.parse_args()
    torch.set_default_device("cuda")
    started, rows = time.monotonic(), []
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    for case in cases():
        if time.monotonic() - started > arguments.seconds:
            print("out of time", flush=True)
            break
        try:
            with torch.no_grad():
                rows.append(measure(case))
            print(json.dumps(rows[-1]), flush=True)
        except Exception as error:
            print(f"{case}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        torch.cuda.empty_cache()
        arguments.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
