"""Models and measurements that pages are written of in tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion_backend import Comparison, Explanation, KernelCounts, explain
from fusion_backend.instruments.timelines import Launch

ALWAYS = {"fusedmlp.policy": "always"}


class MLP(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Escaping(MLP):
    """An MLP that is left alone."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(F.gelu(hidden)) + hidden.sum()


class Block(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm(x).cumsum(0)
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """Blocks that repeat, one that does not, and again some that do."""

    def __init__(self, first: int = 3, last: int = 2) -> None:
        super().__init__()
        blocks = [Block(MLP()) for _ in range(first)]
        blocks += [Block(Escaping()), *(Block(MLP()) for _ in range(last))]
        self.blocks, self.head = nn.ModuleList(blocks), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def explained(model: nn.Module, rows: int = 8) -> Explanation:
    with torch.no_grad():
        return explain(model, torch.randn(rows, 16), options=ALWAYS)


#: One call of a model whose second site is an MLP; :func:`compared` makes a comparison of it.
TIMES = {
    "inductor": (
        Launch("aten::addmm", 0.0, 10.0),
        Launch("aten::addmm", 10.0, 20.0, site=1),
        Launch("cpp_fused_gelu_0", 30.0, 10.0, site=1),
        Launch("aten::addmm", 40.0, 20.0, site=1),
        Launch("cpp_fused_add_1", 60.0, 40.0),
    ),
    "fusedmlp": (Launch("aten::addmm", 0.0, 10.0), Launch("fusedmlp::rows", 10.0, 25.0, site=1)),
}


def counts(backend: str, launches: tuple[Launch, ...], wall_us: float) -> KernelCounts:
    names = dict.fromkeys((launch.name for launch in launches), 1)
    return KernelCounts(backend, len(launches), None, None, None, wall_us, 1e-7, None, names)


def compared(**timelines: tuple[Launch, ...]) -> Comparison:
    times = {"eager": 300.0, "inductor": 200.0, "fusedmlp": 100.0}
    rows = tuple(counts(name, found, times[name]) for name, found in timelines.items())
    note = ("a note",)
    return Comparison(rows, "cpu", "CPU operators", 3, False, note, timelines=timelines)
