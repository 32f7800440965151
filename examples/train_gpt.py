"""Train a GPT on Python's own sources: eager, Inductor and fusedmlp side by side.

python examples/train_gpt.py                                              # one GPU, or the CPU
torchrun --nproc-per-node 2 examples/train_gpt.py --parallel ddp          # or fsdp, or tp
torchrun --nproc-per-node 4 examples/train_gpt.py --preset llama-1b --parallel tp-fsdp --tp 2
python examples/train_gpt.py --steps 300 --curves curves.png --json curves.json

Each backend starts from the same weights and reads the same batches, on however many ranks. Printed
are tokens a second of all ranks, the largest peak of memory, kernels a step (on a CPU: operators),
how much of a step is spent in collectives (and how much of it not beside other work), and losses.

With --parallel, ddp replicates the model, fsdp shards its parameters (FSDP2), tp splits attention
heads and the hidden features of MLPs (tensor parallel), and tp-fsdp does so in groups of --tp ranks
and shards parameters among the groups. Ranks that split layers share rows, others have their own.
On a GPU the model trains in bfloat16 by autocast, or by FSDP2's policy.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import fusion_backend
from fusion_backend.instruments.collectives import collectives_in
from fusion_backend.instruments.kernel_counts import count_cpu, count_gpu
from fusion_backend.instruments.profiler_trace import mark_step, record

BACKENDS = ("eager", "inductor", "fusedmlp")
PARALLEL = ("none", "ddp", "fsdp", "tp", "tp-fsdp")
BYTES = 256
PRESETS: dict[str, dict[str, Any]] = {
    "small": {"layers": 4, "width": 256, "hidden": 0, "heads": 4, "mlp": "gelu"}
    | {"context": 128, "batch": 8, "lr": 1e-3},
    "llama-1b": {"layers": 16, "width": 2048, "hidden": 8192, "heads": 32, "mlp": "swiglu"}
    | {"context": 2048, "batch": 2, "lr": 3e-4},
}


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.head_width = width // heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=bias) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Plain with GELU, or SwiGLU."""

    def __init__(self, width: int, hidden: int, gated: bool) -> None:
        super().__init__()
        hidden = hidden or (8 * width // 3 // 16 * 16 if gated else 4 * width)
        self.gate = nn.Linear(width, hidden, bias=False) if gated else None
        self.up = nn.Linear(width, hidden, bias=not gated)
        self.down = nn.Linear(hidden, width, bias=not gated)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(F.gelu(up) if self.gate is None else F.silu(self.gate(x)) * up)


class Block(nn.Module):
    """Pre-norm: as GPT-2 has it, or with RMSNorm, SwiGLU and no biases as Llama."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        gated, norm = (True, nn.RMSNorm) if args.mlp == "swiglu" else (False, nn.LayerNorm)
        self.norm_1, self.attention = norm(args.width), Attention(args.width, args.heads, not gated)
        self.norm_2, self.mlp = norm(args.width), Mlp(args.width, args.hidden, gated)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Gpt(nn.Module):
    """Predicts each next byte; the loss of tokens ``(batch, context + 1)``."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, args.width)
        self.position = nn.Parameter(0.02 * torch.randn(args.context, args.width))
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1]) + self.position
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Result(NamedTuple):
    """What one backend did; times in seconds, memory in MB.

    Attributes:
        step: median, of the slowest rank.
        tokens_per_second: of all ranks.
        peak: the largest of all ranks.
        kernels: of one step, the most of all ranks.
        sites: on each rank, how many MLPs were fused in what was compiled. Blocks that are alike
            are compiled once.
        collectives: on each rank, which share of a step they take; none on one rank.
        exposed: of these, the share beside which the GPU does nothing else.
        losses: the mean of all ranks.
    """

    backend: str
    step: float
    tokens_per_second: float
    peak: float
    kernels: int
    sites: list[str]
    collectives: list[float]
    exposed: list[float]
    losses: list[float]


def text(limit: int) -> Tensor:
    """The beginning of the standard library's sources, in the order of their names, as bytes."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(
        bytearray(b"".join(p.read_bytes() for p in paths)[:limit]), dtype=torch.uint8
    )


def rows_in_all(args: argparse.Namespace) -> int:
    """Rows of a batch, all ranks together."""
    return int(args.batch * (world_size() if args.scaling == "weak" else 1))


def batches(args: argparse.Namespace, device: torch.device) -> Iterator[Tensor]:
    """This rank's rows of random pieces of the text, the same pieces for every backend."""
    source, generator = text(4 << 20), torch.Generator().manual_seed(1000)
    tensor = tensor_ranks(args)
    while True:
        starts = torch.randint(
            len(source) - args.context - 1, (rows_in_all(args),), generator=generator
        )
        own = starts.chunk(world_size() // tensor)[rank() // tensor].tolist()
        pieces = [source[start : start + args.context + 1] for start in own]
        yield torch.stack(pieces).long().to(device)


def tensor_ranks(args: argparse.Namespace) -> int:
    """How many ranks share the work of each layer."""
    if args.parallel not in ("tp", "tp-fsdp"):
        return 1
    return int(args.tp or (world_size() if args.parallel == "tp" else 2))


def parallelized(net: Gpt, args: argparse.Namespace, backend: str, mesh: DeviceMesh | None) -> Any:
    """The model as it is trained.

    Each block is compiled alone: all are alike, so compiling takes as long as that of one.
    """
    options = {"fusedmlp.policy": args.policy} if backend == "fusedmlp" else None
    for block in net.blocks:
        assert isinstance(block, Block)
        if mesh is not None and tensor_ranks(args) > 1:
            split_layers(block, mesh["tensor"])
        if backend != "eager":
            block.compile(backend=backend, options=options)
    if args.parallel == "ddp":
        return DistributedDataParallel(net)
    if mesh is not None and args.parallel in ("fsdp", "tp-fsdp"):
        half = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if is_half(args) else None
        how = {} if half is None else {"mp_policy": half}
        for block in net.blocks:
            fully_shard(block, mesh=mesh["data"], **how)
        fully_shard(net, mesh=mesh["data"], **how)
    return net


def split_layers(block: Block, mesh: DeviceMesh) -> None:
    """Split attention heads and the hidden features of the MLP."""
    split, joined = ["attention.q", "attention.k", "attention.v"], ("attention.out", "mlp.down")
    split += ["mlp.up"] if block.mlp.gate is None else ["mlp.up", "mlp.gate"]
    plan = {name: ColwiseParallel() for name in split}
    parallelize_module(block, mesh, plan | {name: RowwiseParallel() for name in joined})


def optimizer_of(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """One kernel for all parameters, for those of each mesh: it cannot take several together."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return torch.optim.AdamW([{"params": each} for each in groups.values()], args.lr, fused=True)


def is_half(args: argparse.Namespace) -> bool:
    """Whether products are in bfloat16."""
    return bool(args.dtype == "bfloat16")


def train(
    args: argparse.Namespace, backend: str, device: torch.device, mesh: DeviceMesh | None
) -> Result:
    """Train with one backend, time the last two thirds of the steps, profile one more."""
    forget_models(device)
    torch.manual_seed(0)
    with device:
        net = Gpt(args)
    model = parallelized(net, args, backend, mesh)
    optimizer = optimizer_of(model, args)
    seen, data, losses, times = len(fusion_backend.history()), batches(args, device), [], []
    casts = is_half(args) and "fsdp" not in args.parallel

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
    own: dict[str, Any] = {"step": statistics.median(times[args.steps // 3 :])}
    own |= {"peak": peak_memory(device), **profiled(step, device)}
    sites = [site for graph in fusion_backend.history()[seen:] for site in graph.sites]
    own["sites"] = f"{sum(site.fused for site in sites)} of {len(sites)}" if sites else "–"
    own["losses"] = [float(loss) for loss in losses[: args.steps]]
    return of_all_ranks(args, backend, gathered(own))


def of_all_ranks(args: argparse.Namespace, backend: str, found: list[dict[str, Any]]) -> Result:
    """One result of what each rank found."""
    step = max(each["step"] for each in found)
    return Result(
        backend,
        step,
        rows_in_all(args) * args.context / step,
        max(each["peak"] for each in found),
        max(each["kernels"] for each in found),
        [each["sites"] for each in found],
        [each["collectives"] for each in found if each["collectives"] is not None],
        [each["exposed"] for each in found if each["exposed"] is not None],
        [statistics.fmean(each) for each in zip(*(each["losses"] for each in found), strict=True)],
    )


def profiled(step: Callable[[], None], device: torch.device) -> dict[str, Any]:
    """Kernels of a step, without copies and fills by the driver, and the share of collectives."""

    def body() -> None:
        with mark_step("train"):
            step()

    (recorded,) = record(body)
    kernels = (count_gpu if device.type == "cuda" else count_cpu)(recorded).kernels
    if world_size() == 1:
        return {"kernels": kernels, "collectives": None, "exposed": None}
    times = collectives_in(recorded)
    exposed = None if times.exposed is None else times.exposed / times.step
    return {"kernels": kernels, "collectives": times.all / times.step, "exposed": exposed}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def forget_models(device: torch.device) -> None:
    """Give back what an earlier backend's model takes."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


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


def gathered(own: Any) -> list[Any]:
    """What each rank has, in their order."""
    if world_size() == 1:
        return [own]
    found = [None] * world_size()
    dist.all_gather_object(found, own)
    return found


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
    """What the command line takes; a preset gives the defaults of sizes."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument(
        "--parallel", choices=("none", "ddp", "fsdp", "tp", "tp-fsdp"), default="none"
    )
    made.add_argument("--tp", type=int, help="ranks that split layers (tp: all; tp-fsdp: 2)")
    made.add_argument("--backends", default=",".join(BACKENDS), help="some of these, with commas")
    made.add_argument("--policy", choices=("auto", "always", "never"), default="auto")
    made.add_argument("--preset", choices=PRESETS, default="small", help="sizes")
    made.add_argument("--mlp", choices=("gelu", "swiglu"), help="and norms: GPT-2's or Llama's")
    made.add_argument("--steps", type=int, default=30)
    for name in ("layers", "width", "heads"):
        made.add_argument(f"--{name}", type=int)
    made.add_argument("--hidden", type=int, help="of MLPs (0: four times the width; gated, 8/3)")
    made.add_argument("--context", type=int, help="tokens of a row")
    made.add_argument("--batch", type=int, help="rows, see --scaling")
    weak = "whether --batch is of each rank (weak) or of all together (strong)"
    made.add_argument("--scaling", choices=("weak", "strong"), default="weak", help=weak)
    made.add_argument("--lr", type=float)
    made.add_argument("--dtype", choices=("float32", "bfloat16"), help="of products")
    made.add_argument("--device", choices=("cpu", "cuda"))
    made.add_argument("--curves", type=Path, help="write the losses as a plot (needs matplotlib)")
    made.add_argument("--json", type=Path, help="write all that is printed, and the losses")
    return made


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    made = parser()
    chosen, _ = made.parse_known_args(arguments)
    made.set_defaults(**PRESETS[chosen.preset])
    return made.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parsed(arguments)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    args.dtype = args.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    # With blocks compiled alone, gradients are ready one block after the other anyway. Dynamo's own
    # way to that splits graphs wherever a bucket of DDP is full, which may be within an MLP.
    torch._dynamo.config.optimize_ddp = False
    warnings.filterwarnings("ignore", category=UserWarning)
    mesh = None
    if "RANK" in os.environ:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        check(args)
        tensor = tensor_ranks(args)
        sizes = (world_size() // tensor, tensor)
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("data", "tensor"))
    elif args.parallel != "none":
        raise SystemExit(f"--parallel {args.parallel} needs torchrun")
    results: list[Result] = []
    devices = gathered(name_of(device))
    for backend in args.backends.split(","):
        results.append(train(args, backend, device, mesh))
        if args.json and rank() == 0:
            write(args, devices, results)
    if rank() == 0:
        show(args, devices, results)
    if dist.is_initialized():
        dist.destroy_process_group()


def check(args: argparse.Namespace) -> None:
    """Refuse what the ranks cannot share."""
    ranks, tensor = world_size(), tensor_ranks(args)
    if ranks % tensor or (args.parallel == "tp" and tensor != ranks):
        raise SystemExit(
            f"--parallel {args.parallel} --tp {tensor} must have that many ranks (tp-fsdp: a "
            f"multiple), got {ranks}: start torchrun with --nproc-per-node {tensor}"
        )
    if rows_in_all(args) % (ranks // tensor):
        raise SystemExit(
            f"--batch must be divided by {ranks // tensor} ranks evenly, got {args.batch}"
        )


def name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def show(args: argparse.Namespace, devices: list[str], results: list[Result]) -> None:
    """Print a table, and draw what was asked for."""
    how = f"{args.parallel}, {tensor_ranks(args)} split each layer"
    ranks = f"{world_size()} ranks ({how})" if world_size() > 1 else "one process"
    tokens = f"{rows_in_all(args)}×{args.context} tokens a step"
    print(f"{args.layers} layers of {args.width}, {tokens}, {ranks}, {', '.join(set(devices))}")
    print(
        "backend    ms a step  tokens a second  peak MB  kernels  collectives  MLPs fused"
        "  loss    off eager's"
    )
    for each in results:
        figures = f"{1e3 * each.step:9.1f}  {each.tokens_per_second:15,.0f}  {each.peak:7.0f}"
        figures += f"  {each.kernels:7}  {share(each):>11}  {of_ranks(each.sites):>10}"
        print(f"{each.backend:9}  {figures}  {each.losses[-1]:.4f}  {off_eager(each, results)}")
    if args.curves:
        plot(results, args.curves)


def share(result: Result) -> str:
    """Of a step in collectives, and in parentheses that beside which nothing runs."""
    if not result.collectives:
        return "–"
    exposed = f" ({statistics.fmean(result.exposed):.0%})" if result.exposed else ""
    return f"{statistics.fmean(result.collectives):.0%}{exposed}"


def of_ranks(found: list[str]) -> str:
    """What all ranks found, or what each of them did."""
    return found[0] if len(set(found)) == 1 else "; ".join(found)


def off_eager(result: Result, results: list[Result]) -> str:
    """The largest difference of a loss from eager's."""
    eager = next((each for each in results if each.backend == "eager"), None)
    if eager is None or eager is result:
        return "–"
    return f"{max(abs(a - b) for a, b in zip(result.losses, eager.losses, strict=True)):.1e}"


def write(args: argparse.Namespace, devices: list[str], results: list[Result]) -> None:
    """All results so far, with what they are of."""
    setting = {name: value for name, value in vars(args).items() if name not in ("json", "curves")}
    ranks = {"ranks": world_size(), "tensor": tensor_ranks(args), "rows": rows_in_all(args)}
    versions = {"torch": torch.__version__, "fusedmlp": fusion_backend.__version__}
    content = {"devices": devices, **versions, **ranks, "setting": setting}
    content["results"] = [each._asdict() for each in results]
    partial = args.json.with_name(args.json.name + ".partial")
    partial.write_text(json.dumps(content, indent=1, ensure_ascii=False))
    partial.replace(args.json)  # whole even where a time limit ends this process


if __name__ == "__main__":
    main()
