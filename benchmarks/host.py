"""What the host pays: time of a call without CUDA graphs, and time to compile, cold and warm.

    python benchmarks/host.py benchmarks/results/h100/host.json

Calls: small MLPs, eagerly, by Inductor and by fusedmlp, in turns within one process; `issued` is
the time until the call has returned, `done` the time until the device has finished. Compiling: for
each model a process for each backend with empty caches, and then another with the caches that it
left, and all that again. The processes of the two backends run at the same time, so that a busy
machine slows both; `cpu_seconds` is what the process itself computed, its compiling workers apart.
`new_files` is what a process added to the caches of Inductor and Triton: none, if it compiled
nothing again.

Results are written after every part, and what is not measured again stays in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fusion_backend
from fusion_backend.bench.results import machine
from fusion_backend.cli.models import gpt2
from fusion_backend.instruments.timing import interleaved, issue, rotated, wall

BACKENDS = ("inductor", "fusedmlp")
CALLS = 100
# (rows, width, hidden): so small that the device waits for the host.
SIZES = ((16, 64, 256), (64, 128, 512), (16, 768, 3072), (512, 768, 3072))


class Gated(nn.Module):
    """SwiGLU without biases."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def plain(width: int, hidden: int) -> nn.Module:
    """Tanh-GELU with biases."""
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU("tanh"), nn.Linear(hidden, width))


def compiled(model: nn.Module, backend: str, policy: str = "auto") -> Callable[..., Any]:
    if backend == "inductor":
        return torch.compile(model)
    options = {"fusedmlp.policy": policy}
    return torch.compile(model, backend=fusion_backend.fusedmlp, options=options)


def calls(device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Microseconds a call, of every backend, for every small MLP."""
    found = []
    for rows, width, hidden in SIZES:
        for form, make in (("gelu_tanh", plain), ("swiglu", Gated)):
            model = make(width, hidden).to(device, dtype)
            x = torch.randn(rows, width, device=device, dtype=dtype)
            torch._dynamo.reset()
            candidates = {"eager": model} | {name: compiled(model, name) for name in BACKENDS}
            explanation = fusion_backend.explain(model, x)
            for call in candidates.values():
                call(x)
            operands = rotated([(x,)], CALLS)
            issued, done = (
                interleaved({n: timer(c, operands, device) for n, c in candidates.items()})
                for timer in (issue, wall)
            )
            found.append(
                {
                    "mlp": f"{form} {rows} × {width}/{hidden}",
                    "plan": explanation.sites[0].plan,
                    "issued": {name: round(times.median, 1) for name, times in issued.items()},
                    "done": {name: round(times.median, 1) for name, times in done.items()},
                }
            )
            print(found[-1], file=sys.stderr, flush=True)
    return found


def mlps(on_gpu: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Four layers of two kinds, and their input."""
    layers = [make(256, 1024) for _ in range(4) for make in (plain, Gated)]
    return nn.Sequential(*layers), {"input": torch.randn(4096 if on_gpu else 64, 256)}


def transformer(on_gpu: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """GPT-2 small, and tokens: so many that its MLPs are fused on a GPU."""
    return gpt2(8, 512) if on_gpu else gpt2(1, 16)


#: What is compiled.
MODELS = {"8 MLPs": mlps, "GPT-2 small": transformer}


def compile_here(
    model_name: str, backend: str, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Seconds until a model has been compiled and called."""
    from torch._dynamo.utils import counters

    with torch.device(device):
        model, inputs = MODELS[model_name](device.type == "cuda")
    model = model.to(dtype).eval()
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    begun, computed = time.perf_counter(), time.process_time()
    compiled(model, backend)(**inputs)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = {
        "seconds": round(time.perf_counter() - begun, 2),
        "cpu_seconds": round(time.process_time() - computed, 2),
    }
    hits = {f"aot_{k}": counters["aot_autograd"][f"autograd_cache_{k}"] for k in ("hit", "miss")}
    hits |= {f"fx_{k}": counters["inductor"][f"fxgraph_cache_{k}"] for k in ("hit", "miss")}
    return {**seconds, **hits}


def compiling(model_name: str, device: str, repeats: int) -> dict[str, Any]:
    """Fresh processes, with empty caches (cold) and with those that the one before left (warm)."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {
        backend: {"cold": [], "warm": []} for backend in BACKENDS
    }
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as directory:
            caches = {backend: Path(directory, backend) for backend in BACKENDS}
            for state in ("cold", "warm"):
                before = {backend: files_in(cache) for backend, cache in caches.items()}
                processes = {
                    backend: started(model_name, backend, device, cache)
                    for backend, cache in caches.items()
                }
                for backend, process in processes.items():
                    run = answer(process)
                    run["new_files"] = len(files_in(caches[backend]) - before[backend])
                    found[backend][state].append(run)
                last = {backend: runs[state][-1] for backend, runs in found.items()}
                print(model_name, state, last, file=sys.stderr)
    return found


def files_in(directory: Path) -> set[Path]:
    return {path for path in directory.rglob("*") if path.is_file()}


def started(model_name: str, backend: str, device: str, cache: Path) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--child", backend, "--device", device]
    command += ["--model", model_name]
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
    }
    return subprocess.Popen(
        command,
        env={**os.environ, **caches},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate(timeout=600)
    if process.returncode != 0:
        raise RuntimeError(errors[-2000:])
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def main() -> int:
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    models = arguments.model or list(MODELS)
    with torch.no_grad():
        if arguments.child:
            print(json.dumps(compile_here(models[0], arguments.child, device, dtype)))
            return 0
        results = earlier(arguments.out, machine(device))
        if arguments.only != "compiling":
            results["calls"] = calls(device, dtype)
            write(results, arguments.out)
        if arguments.only != "calls":
            for name in models:
                found = compiling(name, arguments.device, arguments.repeats)
                results["compiling"] = results.get("compiling", {}) | {name: found}
                write(results, arguments.out)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, nargs="?", help="where the results go, as JSON")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=("calls", "compiling"), help="leave out the other")
    parser.add_argument("--model", action="append", choices=MODELS, help="compile only this one")
    parser.add_argument(
        "--repeats", type=int, default=2, help="processes with cold, and with warm caches (2)"
    )
    parser.add_argument("--child", choices=BACKENDS, help=argparse.SUPPRESS)
    return parser.parse_args()


def earlier(path: Path | None, here: dict[str, str]) -> dict[str, Any]:
    """What an earlier run on the same machine left, or nothing yet."""
    if path is None or not path.is_file():
        return {"machine": here}
    results: dict[str, Any] = json.loads(path.read_text())
    different = [key for key in ("device", "torch") if here[key] != results["machine"].get(key)]
    if different:
        sys.exit(f"{path} is of another machine or version ({', '.join(different)}): move it away")
    return results


def write(results: dict[str, Any], path: Path | None) -> None:
    text = json.dumps(results, indent=1, ensure_ascii=False)
    if path is None:
        print(text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
