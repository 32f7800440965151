"""What the host pays: time of a call without CUDA graphs, and time to compile, cold and warm.

    python benchmarks/host.py benchmarks/results/host.json

Calls: small MLPs, eagerly, by Inductor and by fusedmlp, in turns within one process; `issued` is
the time until the call has returned, `done` the time until the device has finished. Compiling: a
process for each backend with empty caches, and then others with the caches that it left.
`new_files` is what such a process added to the caches of Inductor and Triton: none, if it compiled
nothing again.
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
from fusion_backend.timing import interleaved, issue, rotated, wall

BACKENDS = ("inductor", "fusedmlp")
CALLS = 100
# (rows, width, hidden): so small that the device waits for the host.
SIZES = ((16, 64, 256), (64, 128, 512), (16, 768, 3072))


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


def compile_here(backend: str, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Seconds until a model of four layers of two kinds has been compiled and called."""
    from torch._dynamo.utils import counters

    layers = [make(256, 1024) for _ in range(4) for make in (plain, Gated)]
    model = nn.Sequential(*layers).to(device, dtype)
    x = torch.randn(4096, 256, device=device, dtype=dtype)
    started = time.perf_counter()
    call = compiled(model, backend)
    call(x).sum().item()
    seconds = time.perf_counter() - started
    hits = {f"aot_{k}": counters["aot_autograd"][f"autograd_cache_{k}"] for k in ("hit", "miss")}
    hits |= {f"fx_{k}": counters["inductor"][f"fxgraph_cache_{k}"] for k in ("hit", "miss")}
    return {"seconds": round(seconds, 2), **hits}


def compiling(device: str, repeats: int) -> dict[str, Any]:
    """Fresh processes, with empty caches and with those that the first one left."""
    found = {}
    for backend in BACKENDS:
        with tempfile.TemporaryDirectory() as directory:
            caches = {"TORCHINDUCTOR_CACHE_DIR": f"{directory}/inductor"}
            caches["TRITON_CACHE_DIR"] = f"{directory}/triton"
            runs = []
            for _ in range(1 + repeats):
                before = files_in(directory)
                runs.append(in_a_process(backend, device, caches))
                runs[-1]["new_files"] = len(files_in(directory) - before)
            found[backend] = {"cold": runs[0], "warm": runs[1:]}
            print(backend, found[backend], file=sys.stderr, flush=True)
    return found


def files_in(directory: str) -> set[Path]:
    return {path for path in Path(directory).rglob("*") if path.is_file()}


def in_a_process(backend: str, device: str, caches: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", backend, "--device", device]
    environment = {**os.environ, **caches}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", help="where the results go, as JSON")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=("calls", "compiling"), help="leave out the other")
    parser.add_argument("--repeats", type=int, default=2, help="processes with warm caches")
    parser.add_argument("--child", choices=BACKENDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.no_grad():
        if arguments.child:
            print(json.dumps(compile_here(arguments.child, device, dtype)))
            return 0
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        results: dict[str, Any] = {"machine": {"device": name, "torch": torch.__version__}}
        if arguments.only != "compiling":
            results["calls"] = calls(device, dtype)
        if arguments.only != "calls":
            results["compiling"] = compiling(arguments.device, arguments.repeats)
    text = json.dumps(results, indent=1)
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
