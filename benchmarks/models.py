"""Whole models: kernels, times and errors of eager, Inductor and fusedmlp.

    python benchmarks/models.py benchmarks/results/models.json
    python benchmarks/page.py

The first command measures, the second publishes. Published sizes, random weights, bfloat16,
inference, on one GPU. Backends take turns within one process, so that a card which clocks down
slows all of them: compare ratios within a model. Results are written after every model, and models
already in the file are not measured again, so a run that was cut short is continued by the same
command. On a machine without a GPU the small models of `fusedmlp demo` are measured in float32.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import fusion_backend
from fusion_backend.cli.models import ModelCase, bert, cpu_cases, gpt2, llama, vit
from fusion_backend.cli.progress import step
from fusion_backend.cli.quiet import quiet_libraries

GPU_CASES = (
    ModelCase("GPT-2 small", "1 × 128 tokens", lambda: gpt2(1, 128)),
    ModelCase("Llama 1B", "1 × 1 token", lambda: llama(1, 1)),
    ModelCase("BERT base", "1 × 128 tokens", lambda: bert(1, 128)),
    ModelCase("ViT-B/16", "1 image", lambda: vit(1)),
    ModelCase("Llama 1B", "16 × 1 token", lambda: llama(16, 1)),
    ModelCase("GPT-2 small", "32 × 512 tokens", lambda: gpt2(32, 512)),
    ModelCase("Llama 1B", "1 × 2048 tokens", lambda: llama(1, 2048)),
    ModelCase("BERT base", "32 × 128 tokens", lambda: bert(32, 128)),
    ModelCase("ViT-B/16", "256 images", lambda: vit(256)),
)


def main() -> int:
    arguments = parse_arguments()
    on_gpu = torch.cuda.is_available()
    cases = GPU_CASES if on_gpu else tuple(case for case in cpu_cases() if not case.training)
    if arguments.only:
        cases = tuple(case for case in cases if arguments.only.lower() in label(case).lower())
    results = earlier_results(arguments.results) or {"machine": machine(), "cases": {}}
    deadline = time.monotonic() + arguments.seconds
    with quiet_libraries():
        measure_all(cases, results, arguments, deadline)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path, help="JSON file, written and continued")
    parser.add_argument("--only", metavar="TEXT", help="only models with TEXT in name or batch")
    parser.add_argument(
        "--seconds", type=float, default=400.0, help="start no model after this long (400)"
    )
    parser.add_argument("--steps", type=int, default=20, help="calls measured a backend (20)")
    return parser.parse_args()


def earlier_results(path: Path) -> dict[str, Any] | None:
    """What an earlier run on the same card and version of PyTorch left, to be continued."""
    if not path.is_file():
        return None
    results: dict[str, Any] = json.loads(path.read_text())
    here, there = machine(), results["machine"]
    different = [key for key in here if here[key] != there.get(key)]
    if different:
        sys.exit(f"{path} is of another machine or version ({', '.join(different)}): move it away")
    return results


def machine() -> dict[str, str]:
    """Where and with what the numbers were measured."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {
        "device": device,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "fusedmlp": fusion_backend.__version__,
        "python": platform.python_version(),
    }


def measure_all(
    cases: tuple[ModelCase, ...],
    results: dict[str, Any],
    arguments: argparse.Namespace,
    deadline: float,
) -> None:
    """Measure the cases that are not there yet, until the deadline; write after each."""
    for case in cases:
        if label(case) in results["cases"]:
            continue
        if time.monotonic() > deadline:
            print(f"out of time before {label(case)}: repeat the command", file=sys.stderr)
            return
        try:
            measured = measure(case, arguments.steps)
        except Exception as error:
            measured = {"failure": f"{type(error).__name__}: {error}"[:1000]}
            print(f"{label(case)}: {measured['failure']}", file=sys.stderr)
        results["cases"][label(case)] = measured
        arguments.results.parent.mkdir(parents=True, exist_ok=True)
        arguments.results.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        gc.collect()
        torch.cuda.empty_cache()


def measure(case: ModelCase, steps: int) -> dict[str, Any]:
    """Sites, kernels, times and errors of one model; on a GPU with CUDA graphs as well."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", None)
    torch.manual_seed(0)
    torch._dynamo.reset()
    with torch.device(device):
        model, inputs = case.build()
    model = model.to(dtype).eval()
    if dtype is not None:
        inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    measured: dict[str, Any] = {}
    with torch.no_grad():
        with step(f"{label(case)}: explaining"):
            sites = fusion_backend.explain(model, **inputs).sites
        measured["sites"] = len(sites)
        measured["plans"] = dict(Counter(site.plan or f"not: {site.reason}" for site in sites))
        with step(f"{label(case)}: profiling"):
            measured["default"] = rows(fusion_backend.profile(model, steps=steps, **inputs))
        if device == "cuda":
            torch._dynamo.reset()
            with step(f"{label(case)}: profiling with CUDA graphs"):
                comparison = fusion_backend.profile(
                    model,
                    steps=steps,
                    backends=("inductor", "fusedmlp"),
                    mode="reduce-overhead",
                    **inputs,
                )
            measured["cuda_graphs"] = rows(comparison)
    return measured


def rows(comparison: fusion_backend.Comparison) -> dict[str, dict[str, Any]]:
    """The rows of a comparison as JSON-compatible data, by backend."""
    data = json.loads(comparison.to_json())
    return {row["backend"]: row for row in data["rows"]}


def label(case: ModelCase) -> str:
    """Name and batch."""
    return f"{case.name}, {case.batch}"


if __name__ == "__main__":
    sys.exit(main())
