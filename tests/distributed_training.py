"""Training on several ranks, eager and fused: run by ``ranks.py``, one process a rank.

Each case trains a small model for some steps as eager does, and with its sites fused. Losses, and
the gradients of the last step, must be eager's on every rank, and all sites must be fused.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from fusion_backend import Options, Site, fuse
from fusion_backend.backend import backend_with_observer

WIDTH, HIDDEN, ROWS, STEPS = 16, 32, 8, 2
ON_GPUS = "FUSEDMLP_TEST_ON_GPUS"  # a variable of the environment: each rank has a GPU of its own


class Mlp(nn.Module):
    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN) if gated else None
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x)
        return self.down(F.gelu(up) if self.gate is None else F.silu(self.gate(x)) * up)


class Block(nn.Module):
    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp(gated)
        self.before, self.after = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.after(self.before(x).unflatten(-1, (-1, 8)).softmax(-1).flatten(2))
        return x + self.mlp(self.norm(x))


def model(gated: bool = False, blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(gated) for _ in range(blocks))).to(device_type())


def device_type() -> str:
    return "cuda" if ON_GPUS in os.environ else "cpu"


class Fusing:
    """Compiles modules, and keeps the sites that it saw."""

    def __init__(self, inductor: bool = False) -> None:
        self.sites: list[Site] = []
        self.inductor = inductor

    def __call__(self, module: nn.Module) -> None:
        if self.inductor:
            options = {"fusedmlp.policy": "always", "fusedmlp.strict": True}
            backend = backend_with_observer(lambda _, result: self.sites.extend(result.sites))
            module.compile(backend=backend, options=options)
        else:
            module.compile(backend=self._backend)

    def _backend(self, graph_module: Any, example_inputs: Any) -> Any:
        result = fuse(graph_module, example_inputs, Options(policy="always", strict=True))
        self.sites.extend(result.sites)
        return aot_eager(result.graph_module, example_inputs)


Compile = Callable[[nn.Module], None]


def _nothing(module: nn.Module) -> None:
    pass


def trained(
    net: nn.Module, own: Callable[[torch.Tensor], torch.Tensor], seed: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of some steps, and the whole gradients of the last."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + seed)
        x = own(torch.randn(2, ROWS, WIDTH, generator=generator)).to(device_type())
        optimizer.zero_grad()
        loss = net(x).float().sin().square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    named = net.named_parameters()
    return losses, {name: _whole(p.grad) for name, p in named if p.grad is not None}


def _whole(gradient: Any) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def check(
    wrap: Callable[[nn.Module, Compile], nn.Module],
    *,
    gated: bool = False,
    seed: int = 0,
    own: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    inductor: bool = False,
    alone: bool = False,
    exact: Callable[[nn.Module, Compile], nn.Module] | None = None,
    blocks: int = 2,
) -> None:
    """Train eager and fused, and compare.

    Args:
        wrap: given a model and what compiles a module, the model to train.
        gated: whether MLPs are.
        seed: of the data; ranks that share a batch have the same.
        own: the part of a batch that a rank has.
        inductor: whether Inductor compiles the rewritten graph.
        alone: whether one process alone gives the same gradients.
        exact: a ``wrap`` that computes more precisely: errors must be about those of eager.
        blocks: of the model.
    """
    torch._dynamo.reset()
    fusing = Fusing(inductor)

    def net() -> nn.Sequential:
        return model(gated, blocks)

    expected = trained(wrap(net(), _nothing), own, seed)
    found = trained(wrap(net(), fusing), own, seed)
    of_mlps = [(site.fused, site.reason) for site in fusing.sites if site.form != "unknown"]
    assert set(of_mlps) == {(True, None)}, of_mlps
    if exact is None:
        tolerance = 1e-5 if device_type() == "cpu" else 1e-4  # sums in other orders
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    else:
        _, gradients = trained(exact(net(), _nothing), own, seed)
        error, bound = (_error(each[1], gradients) for each in (found, expected))
        assert error <= 1.25 * bound, (error, bound)
    if alone:
        _, gradients = trained(net(), lambda x: x, seed)
        torch.testing.assert_close(found[1], gradients, rtol=1e-4, atol=1e-5)


def _error(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """The norm of all errors, over the norm of all values."""
    differences = torch.cat([(found[name] - each).flatten() for name, each in exact.items()])
    values = torch.cat([each.flatten() for each in exact.values()])
    return float(differences.norm() / values.norm())


def tensor_parallel(
    net: nn.Module, mesh: DeviceMesh, local: bool = True, sequence: bool = False
) -> nn.Module:
    """Split each MLP's hidden features; with ``sequence``, norms and sums by rows."""
    for block in net:  # type: ignore[attr-defined]
        names = ["mlp.up"] + ["mlp.gate"] * (block.mlp.gate is not None)
        plan: dict[str, Any] = {name: ColwiseParallel(use_local_output=local) for name in names}
        plan["mlp.down"] = RowwiseParallel()
        if not sequence:  # as attention is: no site
            plan |= {"before": ColwiseParallel(), "after": RowwiseParallel()}
        if sequence:
            plan["norm"] = SequenceParallel(sequence_dim=1)
            inputs = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
            plan["mlp"] = PrepareModuleInput(**inputs, use_local_output=False)  # type: ignore[arg-type]
            plan["mlp.down"] = RowwiseParallel(output_layouts=Shard(1))
        parallelize_module(block, mesh, plan)
    return net


def tensor_parallel_cases(rank: int, world: int) -> None:
    mesh = init_device_mesh(device_type(), (world,))

    def wrapped(**how: Any) -> Callable[[nn.Module, Compile], nn.Module]:
        def wrap(net: nn.Module, compiled: Compile) -> nn.Module:
            compiled(tensor_parallel(net, mesh, **how))
            return net

        return wrap

    check(wrapped(), alone=True, blocks=world // 2)
    check(wrapped(local=False), gated=True, alone=True, blocks=1)
    rows = {"own": lambda x: x.chunk(world, 1)[rank].clone()}
    check(wrapped(sequence=True), gated=True, blocks=1, **rows)
    if world == 2:
        kept_alone(mesh)


def tensor_parallel_by_inductor(rank: int, world: int) -> None:
    mesh = init_device_mesh(device_type(), (world,))

    def wrap(net: nn.Module, compiled: Compile) -> nn.Module:
        compiled(tensor_parallel(net, mesh))
        return net

    check(wrap, gated=True, alone=True, inductor=True, blocks=1)


def kept_alone(mesh: DeviceMesh) -> None:
    """A hidden value that is gathered between the layers is a reason, and eager's result."""
    torch._dynamo.reset()
    net = Mlp(gated=False).to(device_type())
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, ROWS, WIDTH, generator=generator).to(device_type())
    alone = copy.deepcopy(net)(x)
    plan = {"up": ColwiseParallel(output_layouts=Replicate()), "down": ColwiseParallel()}
    parallelize_module(net, mesh, {**plan, "down": ColwiseParallel(output_layouts=Replicate())})
    fusing = Fusing()
    fusing(net)
    torch.testing.assert_close(net(x), alone)
    assert [site.reason for site in fusing.sites] == ["sharding"], fusing.sites


def data_parallel_cases(rank: int, world: int) -> None:
    mesh = init_device_mesh(device_type(), (world,))

    def replicated(net: nn.Module, compiled: Compile) -> nn.Module:
        wrapped = DistributedDataParallel(net)
        compiled(wrapped)
        return wrapped

    def sharded(net: nn.Module, compiled: Compile, **how: Any) -> nn.Module:
        for block in net:  # type: ignore[attr-defined]
            compiled(block)
            fully_shard(block, mesh=mesh, **how)
        return fully_shard(net, mesh=mesh, **how)

    check(replicated, seed=rank, blocks=1)
    check(partial(sharded, reshard_after_forward=False), gated=True, seed=rank)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    check(partial(sharded, mp_policy=half), seed=rank, exact=sharded, blocks=1)


def both_cases(rank: int, world: int) -> None:
    """Tensor parallel within pairs of ranks, FSDP2 between them."""
    mesh = init_device_mesh(device_type(), (world // 2, 2), mesh_dim_names=("data", "tensor"))

    def wrap(net: nn.Module, compiled: Compile) -> nn.Module:
        tensor_parallel(net, mesh["tensor"])
        for block in net:  # type: ignore[attr-defined]
            compiled(block)
            fully_shard(block, mesh=mesh["data"])
        return fully_shard(net, mesh=mesh["data"])

    check(wrap, gated=True, seed=rank // 2)


CASES = {
    "tensor parallel": tensor_parallel_cases,
    "tensor parallel by Inductor": tensor_parallel_by_inductor,
    "data parallel": data_parallel_cases,
    "both": both_cases,
}


def main(name: str, rank: int, world: int, store: str) -> None:
    """Run a case as one of its ranks."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    backend = "gloo"
    if device_type() == "cuda":
        torch.cuda.set_device(rank)
        backend = "nccl"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world)
    try:
        CASES[name](rank, world)
    finally:
        dist.destroy_process_group()
