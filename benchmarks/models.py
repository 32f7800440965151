"""Whole models: kernels, times and errors of eager, Inductor and fusedmlp.

    python benchmarks/models.py benchmarks/results/h100/models.json --jobs 9
    python benchmarks/page.py

The first command measures, the second publishes. Published sizes, random weights, bfloat16,
inference, on one GPU. Backends take turns within one process, so that a card which clocks down
slows all of them: compare ratios within a model. With `--jobs` several models are compiled at the
same time, each in a process of its own; they are measured one after the other once all of them are
compiled. Results are written after every model, and models already in the file are not measured
again, so a run that was cut short is continued by the same command. On a machine without a GPU the
small models of `fusedmlp demo` are measured in float32.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import fusion_backend
from fusion_backend.bench.whole_model import BACKENDS, Compiled, compile_all, measure, nothing
from fusion_backend.cli.models import (
    LLAMA_8B,
    Decoder,
    ModelCase,
    bert,
    cpu_cases,
    gpt2,
    llama,
    llama_decoding,
    vit,
)
from fusion_backend.cli.progress import step
from fusion_backend.cli.quiet import quiet_libraries
from fusion_backend.instruments.workload import floating

#: In batches that fit on a card of 80 GB when each model has a process of its own.
GPU_CASES = (
    ModelCase("GPT-2 small", "1 × 128 tokens", lambda: gpt2(1, 128)),
    ModelCase("GPT-2 small", "64 × 512 tokens", lambda: gpt2(64, 512)),
    ModelCase("BERT base", "1 × 128 tokens", lambda: bert(1, 128)),
    ModelCase("BERT base", "64 × 128 tokens", lambda: bert(64, 128)),
    ModelCase("ViT-B/16", "1 image", lambda: vit(1)),
    ModelCase("ViT-B/16", "256 images", lambda: vit(256)),
    ModelCase("Llama 1B", "decoding 1 × 1 token", lambda: llama_decoding(1, 1024)),
    ModelCase("Llama 1B", "decoding 16 × 1 token", lambda: llama_decoding(16, 1024)),
    ModelCase("Llama 1B", "1 × 2048 tokens", lambda: llama(1, 2048)),
    ModelCase("Llama 8B", "decoding 1 × 1 token", lambda: llama_decoding(1, 1024, **LLAMA_8B)),
    ModelCase("Llama 8B", "decoding 16 × 1 token", lambda: llama_decoding(16, 1024, **LLAMA_8B)),
    ModelCase("Llama 8B", "1 × 2048 tokens", lambda: llama(1, 2048, **LLAMA_8B)),
)
#: How the call was turned into a CUDA graph; ``mode="reduce-overhead"`` would copy its inputs, too.
CUDA_GRAPHS = "the call captured as one graph and replayed"
#: A model with more parameters has no copy in float64 beside it on a card of 80 GB.
MOST_PARAMETERS_IN_FLOAT64 = 2e9


def main() -> int:
    arguments = parse_arguments()
    results = earlier_results(arguments.results) or {
        "machine": machine(),
        "cuda_graphs": CUDA_GRAPHS,
        "cases": {},
    }
    deadline = time.monotonic() + arguments.seconds
    with quiet_libraries():
        measure_all(wanted(arguments.only), results, arguments, deadline)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path, help="JSON file, written and continued")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="only models with TEXT in name or batch; may be repeated",
    )
    parser.add_argument(
        "--seconds", type=float, default=400.0, help="start no model after this long (400)"
    )
    parser.add_argument("--rounds", type=int, default=10, help="samples a backend (10)")
    parser.add_argument(
        "--jobs", type=int, default=1, help="models compiled at the same time, if they fit (1)"
    )
    parser.add_argument(
        "--max-autotune",
        action="append",
        default=[],
        metavar="TEXT",
        help="measure Inductor and fusedmlp under max-autotune, too, on models with TEXT in name "
        "or batch (takes minutes to compile); may be repeated",
    )
    return parser.parse_args()


def wanted(texts: Sequence[str]) -> list[ModelCase]:
    """The models with one of the texts in their names, by default all of this machine's."""
    on_gpu = torch.cuda.is_available()
    cases = GPU_CASES if on_gpu else tuple(case for case in cpu_cases() if not case.training)
    return [case for case in cases if not texts or is_named(case, texts)]


def is_named(case: ModelCase, texts: Sequence[str]) -> bool:
    """Whether one of the texts is in the name or batch of a model."""
    return any(text.lower() in label(case).lower() for text in texts)


def earlier_results(path: Path) -> dict[str, Any] | None:
    """What an earlier run on the same card and version of PyTorch left, to be continued."""
    if not path.is_file():
        return None
    results: dict[str, Any] = json.loads(path.read_text())
    here, there = machine(), results["machine"]
    different = [key for key in here if here[key] != there.get(key)]
    if results.get("cuda_graphs") != CUDA_GRAPHS:
        different.append("how CUDA graphs were made")
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
    cases: Sequence[ModelCase],
    results: dict[str, Any],
    arguments: argparse.Namespace,
    deadline: float,
) -> None:
    """Measure the cases that are not there yet, until the deadline; write after each."""
    left = [case for case in cases if not is_done(case, results, arguments)]
    while left:
        if time.monotonic() > deadline:
            print(f"out of time before {label(left[0])}: repeat the command", file=sys.stderr)
            return
        batch = next_batch(left, arguments.jobs)
        left = left[len(batch) :]
        measured = in_processes(batch, arguments) if arguments.jobs > 1 else here(batch, arguments)
        for case, result in measured:
            if "failure" in result:
                print(f"{label(case)}: {result['failure']}", file=sys.stderr)
            results["cases"][label(case)] = result
            arguments.results.parent.mkdir(parents=True, exist_ok=True)
            arguments.results.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def is_done(case: ModelCase, results: dict[str, Any], arguments: argparse.Namespace) -> bool:
    """Whether a case was measured (or failed) under each backend that is wanted."""
    result = results["cases"].get(label(case))
    return result is not None and (
        "failure" in result or all(name in result["default"] for name in backends(case, arguments))
    )


def backends(case: ModelCase, arguments: argparse.Namespace) -> tuple[str, ...]:
    """The backends of a case."""
    if is_named(case, arguments.max_autotune):
        return BACKENDS
    return tuple(name for name in BACKENDS if "max-autotune" not in name)


def next_batch(left: Sequence[ModelCase], jobs: int) -> list[ModelCase]:
    """The cases that share the machine next: as many as asked for, the 8 B models by themselves."""
    large = [case.name == "Llama 8B" for case in left]
    alike = next((i for i, each in enumerate(large) if each != large[0]), len(left))
    return list(left[: min(jobs, alike)])


def here(
    cases: Sequence[ModelCase], arguments: argparse.Namespace
) -> Iterator[tuple[ModelCase, dict[str, Any]]]:
    """Measure cases in this process."""
    for case in cases:
        try:
            with step(f"{label(case)}: compiling"):
                prepared = Prepared(case, backends(case, arguments))
            with step(f"{label(case)}: measuring"):
                result = prepared.measured(arguments.rounds)
        except Exception as error:
            result = failed(error)
        yield case, result
        prepared = None  # type: ignore[assignment]  # gives its memory back
        gc.collect()
        torch.cuda.empty_cache()


def in_processes(
    cases: Sequence[ModelCase], arguments: argparse.Namespace
) -> Iterator[tuple[ModelCase, dict[str, Any]]]:
    """Compile cases in a process each, then let one after the other measure."""
    threads = max(1, (os.cpu_count() or 1) // len(cases))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    context = multiprocessing.get_context("spawn")
    links: list[Connection] = []
    processes = []
    for case in cases:
        link, end = context.Pipe()
        process = context.Process(target=serve, args=(end, label(case), arguments), daemon=True)
        process.start()
        end.close()
        links.append(link)
        processes.append(process)
    try:
        with step(f"compiling {len(cases)} models in {len(cases)} processes"):
            said = [answer(link) for link in links]
        for case, link, process, failure in zip(cases, links, processes, said, strict=True):
            if failure:
                yield case, failure
                continue
            with step(f"{label(case)}: measuring"):
                link.send("measure")
                result = answer(link)
                process.join(timeout=30)  # its memory is free again
            yield case, result
    finally:
        for process in processes:
            process.kill()


def answer(link: Connection) -> dict[str, Any]:
    """What a process says, or that it ended without a word."""
    try:
        said: dict[str, Any] = link.recv()
    except EOFError:
        return {"failure": "its process ended: out of memory, or a crash"}
    return said


def serve(link: Connection, name: str, arguments: argparse.Namespace) -> None:
    """One process: compile a case, say so, wait for the word, measure, and answer."""
    (case,) = (case for case in wanted(()) if label(case) == name)
    with quiet_libraries():
        try:
            prepared = Prepared(case, backends(case, arguments))
            link.send({})
            link.recv()
            link.send(prepared.measured(arguments.rounds))
        except Exception as error:
            link.send(failed(error))


class Prepared:
    """A case, built and compiled."""

    def __init__(self, case: ModelCase, names: Sequence[str]) -> None:
        on_gpu = torch.cuda.is_available()
        torch._dynamo.reset()
        self.case, self.device = case, torch.device("cuda" if on_gpu else "cpu")
        self.model, self.inputs = self.built(torch.bfloat16 if on_gpu else torch.float32)
        rewind = self.model.rewind if isinstance(self.model, Decoder) else nothing
        with torch.no_grad():
            self.compiled: Compiled = compile_all(self.model, self.inputs, names, rewind)

    def built(self, dtype: torch.dtype) -> tuple[torch.nn.Module, dict[str, Any]]:
        """The model and its inputs, made in a dtype on the device."""
        torch.manual_seed(0)
        with torch.device(self.device), default_dtype(dtype):
            model, inputs = self.case.build()
        return model.eval(), inputs

    def measured(self, rounds: int) -> dict[str, Any]:
        """Sites, kernels, times and errors."""
        with torch.no_grad():
            return asdict(measure(self.compiled, self.reference(), rounds))

    def reference(self) -> list[torch.Tensor] | None:
        """The outputs in float64, of the same weights and inputs."""
        if sum(each.numel() for each in self.model.parameters()) > MOST_PARAMETERS_IN_FLOAT64:
            return None
        exact, _ = self.built(torch.float64)
        exact.load_state_dict(self.model.state_dict())
        inputs = {
            name: value.double() if value.is_floating_point() else value
            for name, value in self.inputs.items()
        }
        return floating(exact(**inputs))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make floating-point tensors in a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def failed(error: Exception) -> dict[str, Any]:
    """What stands for a case that could not be measured."""
    return {"failure": f"{type(error).__name__}: {error}"[:1000]}


def label(case: ModelCase) -> str:
    """Name and batch."""
    return f"{case.name}, {case.batch}"


if __name__ == "__main__":
    sys.exit(main())
