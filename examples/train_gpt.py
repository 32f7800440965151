"""Train a small GPT on Python's own sources: eager, Inductor and fusedmlp side by side.

python examples/train_gpt.py                                              # one GPU, or the CPU
torchrun --nproc-per-node 2 examples/train_gpt.py --parallel ddp          # or fsdp, or tp
python examples/train_gpt.py --steps 300 --curves curves.png --json curves.json

Each backend starts from the same weights and reads the same batches. Printed are tokens a second,
the peak of memory, kernels a step (on a CPU: operators) and the loss at the end. With --parallel,
ddp replicates the model, fsdp shards its parameters (FSDP2), and tp splits attention heads and the
hidden features of MLPs (tensor parallel). Batches are a rank's own, but for tp, whose ranks share
one. On a GPU the model trains in bfloat16 by autocast, or by FSDP2's policy.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import fusion_backend
from fusion_backend.instruments.kernel_counts import count_cpu, count_gpu
from fusion_backend.instruments.profiler_trace import mark_step, record

BACKENDS = ("eager", "inductor", "fusedmlp")
BYTES = 256


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Plain with GELU, or SwiGLU."""

    def __init__(self, width: int, gated: bool) -> None:
        super().__init__()
        hidden = 8 * width // 3 // 16 * 16 if gated else 4 * width
        self.gate = nn.Linear(width, hidden, bias=False) if gated else None
        self.up = nn.Linear(width, hidden, bias=not gated)
        self.down = nn.Linear(hidden, width, bias=not gated)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(F.gelu(up) if self.gate is None else F.silu(self.gate(x)) * up)


class Block(nn.Module):
    """Pre-norm."""

    def __init__(self, width: int, heads: int, gated: bool) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm_2, self.mlp = nn.LayerNorm(width), Mlp(width, gated)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Gpt(nn.Module):
    """Predicts each next byte; the loss of tokens ``(batch, context + 1)``."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, args.width)
        self.position = nn.Parameter(0.02 * torch.randn(args.context, args.width))
        gated = args.mlp == "swiglu"
        self.blocks = nn.ModuleList(
            Block(args.width, args.heads, gated) for _ in range(args.layers)
        )
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1]) + self.position
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Result(NamedTuple):
    """What one backend did; times in seconds, memory in MB."""

    backend: str
    step: float
    tokens_per_second: float
    peak: float
    kernels: int
    sites: str
    losses: list[float]


def text(limit: int) -> Tensor:
    """The beginning of the standard library's sources, in the order of their names, as bytes."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(
        bytearray(b"".join(p.read_bytes() for p in paths)[:limit]), dtype=torch.uint8
    )


def batches(args: argparse.Namespace, device: torch.device, shard: int) -> Iterator[Tensor]:
    """Random pieces of the text, the same for every backend."""
    source, generator = text(4 << 20), torch.Generator().manual_seed(1000 + shard)
    while True:
        starts = torch.randint(len(source) - args.context - 1, (args.batch,), generator=generator)
        pieces = [source[start : start + args.context + 1] for start in starts.tolist()]
        yield torch.stack(pieces).long().to(device)


def parallelized(net: Gpt, args: argparse.Namespace, backend: str, device: torch.device) -> Any:
    """The model as it is trained, compiled."""
    options = {"fusedmlp.policy": args.policy} if backend == "fusedmlp" else None

    def compile_in_place(module: nn.Module) -> None:
        if backend != "eager":
            module.compile(backend=backend, options=options)

    if args.parallel == "fsdp":
        half = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if is_half(args) else None
        how = {} if half is None else {"mp_policy": half}
        for block in net.blocks:
            compile_in_place(block)
            fully_shard(block, **how)
        return fully_shard(net, **how)
    if args.parallel == "tp":
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        split, joined = ("attention.q", "attention.k", "attention.v"), ("attention.out", "mlp.down")
        for block in net.blocks:
            assert isinstance(block, Block)
            first = (*split, "mlp.up") if block.mlp.gate is None else (*split, "mlp.up", "mlp.gate")
            plan = {name: ColwiseParallel() for name in first}
            parallelize_module(block, mesh, plan | {name: RowwiseParallel() for name in joined})
    model = DistributedDataParallel(net) if args.parallel == "ddp" else net
    compile_in_place(model)
    return model


def is_half(args: argparse.Namespace) -> bool:
    """Whether products are in bfloat16."""
    return bool(args.dtype == "bfloat16")


def train(args: argparse.Namespace, backend: str, device: torch.device) -> Result:
    """Train with one backend, time the last two thirds of the steps, count kernels of one more."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    shard = 0 if args.parallel == "tp" else rank()
    model = parallelized(Gpt(args).to(device), args, backend, device)
    # One kernel cannot take sharded and whole parameters together.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, foreach=args.parallel != "tp")
    seen, data, losses, times = len(fusion_backend.history()), batches(args, device, shard), [], []
    casts = is_half(args) and args.parallel != "fsdp"

    def step() -> None:
        context: AbstractContextManager[Any] = nullcontext()
        if casts:
            context = torch.autocast(device.type, torch.bfloat16)
        with context:
            loss = model(next(data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        wait(device)

    for number in range(args.steps):
        if number == args.steps // 3:
            forget_peak(device)
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    seconds, peak = statistics.median(times[args.steps // 3 :]), peak_memory(device)
    kernels = count_kernels(step, device)
    tokens = args.batch * args.context * (1 if args.parallel == "tp" else world_size())
    sites = [site for graph in fusion_backend.history()[seen:] for site in graph.sites]
    fused = f"{sum(site.fused for site in sites)} of {len(sites)}" if sites else "–"
    curve = [float(loss) for loss in losses[: args.steps]]
    return Result(backend, seconds, tokens / seconds, peak, kernels, fused, curve)


def count_kernels(step: Callable[[], None], device: torch.device) -> int:
    """Kernels of a step, without copies and fills by the driver; on a CPU operators."""

    def body() -> None:
        with mark_step("train"):
            step()

    (recorded,) = record(body)
    return (count_gpu if device.type == "cuda" else count_cpu)(recorded).kernels


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of what is resident


def peak_memory(device: torch.device) -> float:
    """In MB: what the GPU's allocator gave out; on a CPU, what was resident of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (each for each in status.read_text().splitlines() if each.startswith("VmHWM"))
        return float(line.split()[1]) / 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def plot(results: list[Result], path: Path) -> None:
    """The losses of each backend, and how far each is from eager's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(7, 6))
    for result in results:
        above.plot(result.losses, label=result.backend, linewidth=1)
        differences = [a - b for a, b in zip(result.losses, results[0].losses, strict=True)]
        below.plot(differences, label=result.backend, linewidth=1)
    above.set_ylabel("loss, nats a byte")
    below.set_ylabel(f"less that of {results[0].backend}")
    below.set_xlabel("step")
    above.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def parser() -> argparse.ArgumentParser:
    """What the command line takes."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--parallel", choices=("none", "ddp", "fsdp", "tp"), default="none")
    made.add_argument("--backends", default=",".join(BACKENDS), help="some of these, with commas")
    made.add_argument("--policy", choices=("auto", "always", "never"), default="auto")
    made.add_argument("--mlp", choices=("gelu", "swiglu"), default="gelu")
    for name, value in {"steps": 30, "layers": 4, "width": 256, "heads": 4}.items():
        made.add_argument(f"--{name}", type=int, default=value)
    made.add_argument("--context", type=int, default=128, help="tokens of a row")
    made.add_argument("--batch", type=int, default=8, help="rows of a rank")
    made.add_argument("--lr", type=float, default=1e-3)
    made.add_argument("--dtype", choices=("float32", "bfloat16"), help="of products")
    made.add_argument("--device", choices=("cpu", "cuda"))
    made.add_argument("--curves", type=Path, help="write the losses as a plot (needs matplotlib)")
    made.add_argument("--json", type=Path, help="write all that is printed, and the losses")
    return made


def main(arguments: list[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    args.dtype = args.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    if "RANK" in os.environ:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    elif args.parallel != "none":
        raise SystemExit(f"--parallel {args.parallel} needs torchrun")
    warnings.filterwarnings("ignore", category=UserWarning)
    results = [train(args, backend, device) for backend in args.backends.split(",")]
    if rank() == 0:
        show(args, results)
    if dist.is_initialized():
        dist.destroy_process_group()


def show(args: argparse.Namespace, results: list[Result]) -> None:
    """Print a table, and write what was asked for."""
    ranks = f"{world_size()} ranks ({args.parallel})" if world_size() > 1 else "one process"
    print(f"{args.layers} layers of {args.width}, {args.batch}×{args.context} tokens, {ranks}")
    print("backend    ms a step  tokens a second  peak MB  kernels  MLPs fused  loss")
    for each in results:
        figures = f"{1e3 * each.step:9.1f}  {each.tokens_per_second:15,.0f}  {each.peak:7.0f}"
        figures += f"  {each.kernels:7}  {each.sites:>10}  {each.losses[-1]:.4f}"
        print(f"{each.backend:9}  {figures}")
    if args.curves:
        plot(results, args.curves)
    if args.json:
        args.json.write_text(json.dumps([each._asdict() for each in results], indent=1))


if __name__ == "__main__":
    main()
