"""A training step of whole models: eager, Inductor and fusedmlp.

    python benchmarks/training_models.py benchmarks/results/h200/training_models.json
    python benchmarks/page.py

A step is forward, loss, backward and AdamW (fused), of float32 weights under bfloat16 autocast,
without dropout; weights and data are random. Each backend has a model of its own with the same
weights. Layers that are alike are compiled once (regional compilation), as are head and loss;
models without such layers are compiled whole. Backends take turns, in random order, and times are
medians between CUDA events. MB is the peak of a step above what is resident before it: activations
and gradients.

Models are compiled in processes of their own, all at once, spread over the machine's GPUs. When all
are compiled, one at a time is measured on each GPU. Results are written after every model, and the
time limit ends those that are left. On a machine without a GPU, small models run, to try the
program.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion_backend
from fusion_backend.bench.results import machine, write
from fusion_backend.cli.models import llama_config, tokens
from fusion_backend.cli.quiet import quiet_libraries
from fusion_backend.instruments.kernel_counts import count_cpu, count_gpu
from fusion_backend.instruments.profiler_trace import mark_step, record
from fusion_backend.instruments.timing import Timer, interleaved

BACKENDS = ("eager", "inductor", "fusedmlp")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Predictor(nn.Module):
    """A body of layers that are alike, a linear head on its hidden states, and the loss."""

    def __init__(self, body: nn.Module, width: int, classes: int, first_only: bool) -> None:
        super().__init__()
        self.body, self.first_only = body, first_only
        self.head = nn.Linear(width, classes, bias=False)

    def forward(self, **inputs: Tensor) -> Tensor:
        """The loss; ``labels`` are integers, of each row or (``first_only``) of each sequence."""
        labels = inputs.pop("labels")
        states = self.body(**inputs).last_hidden_state
        return self.loss(states[:, 0] if self.first_only else states, labels)

    def loss(self, states: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy in float32."""
        return F.cross_entropy(self.head(states).flatten(0, -2).float(), labels.flatten())

    def compile_parts(self, backend: str) -> None:
        """Compile a layer, which all others share, and head and loss."""
        lists = (each for each in self.body.modules() if isinstance(each, nn.ModuleList))
        for layer in max(lists, key=len):
            layer.compile(backend=backend, dynamic=False)
        self.loss = torch.compile(self.loss, backend=backend, dynamic=False)  # type: ignore[method-assign]


class Dlrm(nn.Module):
    """A recommender as MLPerf's: MLPs below and above the products of all pairs of features."""

    def __init__(self, tables: int = 26, entries: int = 10_000, width: int = 128) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(entries, width) for _ in range(tables))
        self.below = layers_of(13, 512, 256, width)
        pairs = (tables + 1) * tables // 2
        self.above = nn.Sequential(*layers_of(pairs + width, 1024, 1024, 512, 256, 1)[:-1])
        first, second = torch.tril_indices(tables + 1, tables + 1, offset=-1)
        self.register_buffer("first", first)
        self.register_buffer("second", second)

    def forward(self, dense: Tensor, sparse: Tensor, labels: Tensor) -> Tensor:
        """The loss of ``dense`` (rows, 13), ``sparse`` (rows, tables), ``labels`` (rows)."""
        x = self.below(dense)
        looked_up = [table(ids) for table, ids in zip(self.tables, sparse.unbind(1), strict=True)]
        features = torch.stack([x, *(each.to(x.dtype) for each in looked_up)], 1)
        products = (features @ features.mT)[:, self.first, self.second]
        logits = self.above(torch.cat([x, products], 1)).float().squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, labels)


def layers_of(*widths: int) -> nn.Sequential:
    """Linear layers, each with a ReLU behind."""
    return nn.Sequential(
        *(each for i, o in pairwise(widths) for each in (nn.Linear(i, o), nn.ReLU()))
    )


class ResidualMlp(nn.Module):
    """Blocks of norm, MLP and sum."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of x and y, both (rows, width)."""
        for norm, mlp in zip(self.norms, self.mlps, strict=True):
            x = x + mlp(norm(x))
        return F.mse_loss(x.float(), y)


Built = tuple[nn.Module, dict[str, Tensor]]


class Case(NamedTuple):
    """A model and a batch; ``build`` makes both in torch's default dtype and device."""

    name: str
    batch: str
    build: Callable[[], Built]


def gpt2(batch: int, length: int, **config: Any) -> Built:
    """GPT-2, by default the small one: tanh-GELU, transposed weights with biases."""
    from transformers import GPT2Config, GPT2Model

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    settings = GPT2Config(use_cache=False, **none, **config)
    model = Predictor(GPT2Model(settings), settings.n_embd, settings.vocab_size, False)
    ids = tokens(batch, length + 1, settings.vocab_size)
    return model, {"input_ids": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()}


def vit(batch: int, **config: Any) -> Built:
    """ViT, by default ViT-B/16: erf-GELU with biases; 1000 classes."""
    from transformers import ViTConfig, ViTModel

    settings = ViTConfig(**config)
    model = Predictor(ViTModel(settings, add_pooling_layer=False), settings.hidden_size, 1000, True)
    pixels = torch.randn(batch, 3, settings.image_size, settings.image_size)
    return model, {"pixel_values": pixels, "labels": torch.randint(0, 1000, (batch,))}


def llama(batch: int, length: int, **config: Any) -> Built:
    """Llama, by default of the 1 B class: SwiGLU."""
    from transformers import LlamaModel

    settings = llama_config(use_cache=False, **config)
    model = Predictor(LlamaModel(settings), settings.hidden_size, settings.vocab_size, False)
    ids = tokens(batch, length + 1, settings.vocab_size)
    return model, {"input_ids": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()}


def dlrm(rows: int, **sizes: Any) -> Built:
    """A recommender: chains of layers with ReLU."""
    model = Dlrm(**sizes)
    entries = model.tables[0].num_embeddings
    ids = torch.randint(0, entries, (rows, len(model.tables)))
    labels = torch.randint(0, 2, (rows,)).float()
    return model, {"dense": torch.randn(rows, 13), "sparse": ids, "labels": labels}


def residual_mlp(rows: int, width: int, blocks: int) -> Built:
    """Blocks of LayerNorm, GELU MLP and sum."""
    return ResidualMlp(width, blocks), {
        "x": torch.randn(rows, width),
        "y": torch.randn(rows, width),
    }


GPU_CASES = (
    Case("Llama 1B", "2 × 2048 tokens", lambda: llama(2, 2048)),
    Case("GPT-2 small", "16 × 512 tokens", lambda: gpt2(16, 512)),
    Case("ViT-B/16", "128 images", lambda: vit(128)),
    Case("DLRM", "32,768 rows", lambda: dlrm(32_768)),
    Case("residual MLP, 8 × 256", "65,536 rows", lambda: residual_mlp(65_536, 256, 8)),
)
_SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
CPU_CASES = (
    Case(
        "Llama",
        "2 × 16 tokens",
        lambda: llama(2, 16, **_SMALL, num_attention_heads=4, num_key_value_heads=2, vocab_size=99),
    ),
    Case(
        "GPT-2",
        "2 × 16 tokens",
        lambda: gpt2(2, 16, n_embd=64, n_layer=3, n_head=4, vocab_size=99),
    ),
    Case(
        "ViT",
        "2 images",
        lambda: vit(2, **_SMALL, num_attention_heads=4, image_size=32, patch_size=8),
    ),
    Case("DLRM", "64 rows", lambda: dlrm(64, tables=3, entries=9, width=16)),
    Case("residual MLP, 2 × 32", "256 rows", lambda: residual_mlp(256, 32, 2)),
)
CASES = GPU_CASES if DEVICE.type == "cuda" else CPU_CASES


class Trained:
    """A model under one backend, and its optimizer."""

    def __init__(self, case: Case, backend: str) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        with DEVICE:
            model, self.inputs = case.build()
        self.model = model.train()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        seen = len(fusion_backend.history())
        if isinstance(model, Predictor) and backend != "eager":
            model.compile_parts(backend)
        elif backend != "eager":
            model.compile(backend=backend, dynamic=False)
        self.losses = [self.step().item() for _ in range(3)]
        sites = [site for graph in fusion_backend.history()[seen:] for site in graph.sites]
        self.sites = f"{sum(site.fused for site in sites)} of {len(sites)}"
        self.reasons = sorted({site.reason for site in sites if site.reason})
        self.plans = sorted({site.plan for site in sites if site.plan})

    def step(self) -> Tensor:
        """One step; its loss."""
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss: Tensor = self.model(**self.inputs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def counted(self) -> tuple[int, float | None]:
        """Kernels of a step, without copies and fills, and microseconds that the GPU works."""

        def body() -> None:
            wait()
            with mark_step("train"):
                self.step()
                wait()

        (recorded,) = record(body)
        counts = (count_gpu if DEVICE.type == "cuda" else count_cpu)(recorded)
        return counts.kernels, counts.gpu_us

    def peak(self) -> float | None:
        """MB above what is resident."""
        if DEVICE.type != "cuda":
            return None
        wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step()
        wait()
        return (torch.cuda.max_memory_allocated() - before) / 1e6

    def timer(self) -> Timer:
        """Microseconds of a step, on a GPU between events."""

        def on_gpu() -> float:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self.step()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) * 1e3

        def on_cpu() -> float:
            start = time.perf_counter()
            self.step()
            return (time.perf_counter() - start) * 1e6

        return on_gpu if DEVICE.type == "cuda" else on_cpu


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def measured(case: Case, lock: Path, rounds: int) -> dict[str, Any]:
    """The line of one model; backends that fail leave the others."""
    line: dict[str, Any] = {"model": case.name, "batch": case.batch, "failures": {}}
    trained: dict[str, Trained] = {}
    with lock.with_name("compiling").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        for backend in BACKENDS:
            try:
                trained[backend] = Trained(case, backend)
            except Exception as error:
                line["failures"][backend] = f"{type(error).__name__}: {error}"[:500]
        fcntl.flock(file, fcntl.LOCK_EX)  # nobody else compiles any more
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
    line["losses"] = {name: each.losses for name, each in trained.items()}
    if "fusedmlp" in trained:
        ours = trained["fusedmlp"]
        line |= {"sites": ours.sites, "plans": ours.plans, "reasons": ours.reasons}
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        counts = {name: each.counted() for name, each in trained.items()}
        line["kernels"] = {name: kernels for name, (kernels, _) in counts.items()}
        line["gpu_us"] = {name: us for name, (_, us) in counts.items()}
        line["mb"] = {name: each.peak() for name, each in trained.items()}
        times = interleaved({name: each.timer() for name, each in trained.items()}, rounds)
        line["us"] = {name: round(each.median, 1) for name, each in times.items()}
        line["spread"] = {name: round(each.spread, 4) for name, each in times.items()}
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path, help="JSON file to write")
    parser.add_argument("--seconds", type=float, default=600, help="for all models (600)")
    parser.add_argument("--rounds", type=int, default=8, help="samples a backend (8)")
    text = "only models with TEXT in their name; may be repeated"
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help=text)
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        with quiet_libraries():
            line = measured(CASES[arguments.case], arguments.lock, arguments.rounds)
        write(line, arguments.results)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return measure_all(arguments, Path(folder))


def measure_all(arguments: argparse.Namespace, folder: Path) -> int:
    """Each model in a process of its own; write after each."""
    deadline = time.monotonic() + arguments.seconds
    chosen = [
        index
        for index, case in enumerate(CASES)
        if not arguments.only or any(text in case.name for text in arguments.only)
    ]
    running = {
        index: started(index, place, arguments, folder) for place, index in enumerate(chosen)
    }
    lines: dict[int, dict[str, Any]] = {}
    while running:
        time.sleep(0.1)
        late = time.monotonic() > deadline
        for index, process in list(running.items()):
            if process.poll() is None and not late:
                continue
            process.kill()
            process.wait()
            del running[index]
            part, case = folder / f"{index}.json", CASES[index]
            why = "out of time" if late else f"its process ended with {process.returncode}"
            failed = {"model": case.name, "batch": case.batch, "failures": {"all": why}}
            lines[index] = json.loads(part.read_text()) if part.is_file() else failed
            print(json.dumps(lines[index], ensure_ascii=False), flush=True)
            cases = [lines[each] for each in sorted(lines)]
            write({"machine": machine(DEVICE), "cases": cases}, arguments.results)
    return int(any(line["failures"] for line in lines.values()))


def started(
    index: int, place: int, arguments: argparse.Namespace, folder: Path
) -> subprocess.Popen[bytes]:
    """A process that measures one model, on the next GPU in turn."""
    gpu = place % max(1, torch.cuda.device_count())
    threads = max(1, min(8, (os.cpu_count() or 1) // len(CASES)))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    command = [sys.executable, __file__, str(folder / f"{index}.json"), "--case", str(index)]
    command += ["--lock", str(folder / f"lock{gpu}"), "--rounds", str(arguments.rounds)]
    return subprocess.Popen(command, env=environment)


if __name__ == "__main__":
    sys.exit(main())
