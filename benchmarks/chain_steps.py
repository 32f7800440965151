"""How fast one kernel for a network with norms, residuals and skips is, beside Inductor and pairs.

    python benchmarks/chain_steps.py [--rows 1024 65536] [--networks policy]

Times are medians of CUDA-graph replays in turns, in bfloat16, over inputs that come from device
memory. A line has microseconds by peer, and errors against float64 relative to the exact result:
``chain`` is the kernel whatever the planner thinks of it, ``pairs`` what fusedmlp fuses without
chains, by its tables alone.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion_backend.instruments import timing

ROWS = (1, 64, 1024, 4096, 65536)
MOST_SETS = 16
_PAIRS = {"fusedmlp.disable_forms": "chain", "fusedmlp.measure": False}
_CHAIN = {"fusedmlp.policy": "always"}


class Policy(nn.Module):
    """Layers with a LayerNorm before each activation."""

    def __init__(self, widths: tuple[int, ...], f: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(inner, out) for inner, out in pairs)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in widths[1:-1])
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=False):
            x = self.f(norm(layer(x)))
        result: Tensor = self.layers[-1](x)
        return result


class Block(nn.Module):
    """``x + w_2(gelu(w_1(norm(x))))``."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


class Skip(nn.Module):
    """``tanh(w(x)) + x``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) + x


class Nerf(nn.Module):
    """Eight layers, of which the fifth also reads the input, and a last one."""

    def __init__(self, inner: int, width: int, out: int, skip: int = 4) -> None:
        super().__init__()
        widths = [inner, *[width] * 7]
        widths[skip] += inner
        self.layers = nn.ModuleList(nn.Linear(each, width) for each in widths)
        self.last, self.skip = nn.Linear(width, out), skip

    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        for i, layer in enumerate(self.layers):
            read = torch.cat([x, hidden], -1) if i == self.skip else hidden
            hidden = F.relu(layer(read))
        result: Tensor = self.last(hidden)
        return result


def critic(inner: int, width: int, blocks: int, out: int) -> nn.Sequential:
    """An embedding, blocks, a norm and a head."""
    between = (Block(width, width) for _ in range(blocks))
    return nn.Sequential(
        nn.Linear(inner, width), *between, nn.LayerNorm(width), nn.Linear(width, out)
    )


#: By name: the width of the input, and the network.
NETWORKS: Mapping[str, tuple[int, Callable[[], nn.Module]]] = {
    "policy 348-256-256-17": (348, lambda: Policy((348, 256, 256, 17))),
    "policy 348-64-64-17": (348, lambda: Policy((348, 64, 64, 17))),
    "policy 64-128-128-1": (64, lambda: Policy((64, 128, 128, 1), torch.relu)),
    "blocks of 64": (64, lambda: nn.Sequential(*(Block(64, 64) for _ in range(4)))),
    "blocks of 128": (128, lambda: nn.Sequential(*(Block(128, 128) for _ in range(4)))),
    "blocks of 256": (256, lambda: nn.Sequential(*(Block(256, 256) for _ in range(4)))),
    "blocks of 64-256": (64, lambda: nn.Sequential(*(Block(64, 256) for _ in range(2)))),
    "critic 23-128-6": (23, lambda: critic(23, 128, 3, 6)),
    "critic 39-256-1": (39, lambda: critic(39, 256, 2, 1)),
    "nerf 60-256-4": (60, lambda: Nerf(60, 256, 4)),
    "nerf 63-256-4": (63, lambda: Nerf(63, 256, 4)),
    "skips 32-64-3": (
        32,
        lambda: nn.Sequential(
            nn.Linear(32, 64), nn.Tanh(), *(Skip(64) for _ in range(4)), nn.Linear(64, 3)
        ),
    ),
}


def measured(name: str, rows: int) -> str:
    """A line of times and errors."""
    torch.manual_seed(0)
    width, make = NETWORKS[name]
    model = make().cuda().bfloat16()
    exact = make().cuda().double()
    exact.load_state_dict({key: value.double() for key, value in model.state_dict().items()})
    bytes_each = 4 * rows * width
    count = min(timing.distinct_sets(bytes_each, torch.device("cuda", 0)), MOST_SETS)
    calls = [(torch.randn(rows, width, device="cuda").bfloat16(),) for _ in range(count)]
    torch._dynamo.reset()
    runs: dict[str, Callable[..., Tensor]] = {
        "eager": model,
        "inductor": torch.compile(model),
        "pairs": torch.compile(model, backend="fusedmlp", options=_PAIRS),
        "chain": torch.compile(model, backend="fusedmlp", options=_CHAIN),
    }
    truth = exact(calls[0][0].double())
    errors = {
        peer: float((run(calls[0][0]).double() - truth).norm() / truth.norm())
        for peer, run in runs.items()
    }
    timers = {peer: timing.replays(run, timing.rotated(calls)) for peer, run in runs.items()}
    times = timing.interleaved(timers)
    each = "  ".join(f"{peer} {times[peer].median:.1f} µs ({errors[peer]:.1e})" for peer in runs)
    return f"{rows}×{name}: {each}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--networks", default="", help="measure those whose names contain this")
    options = parser.parse_args()
    with torch.no_grad():
        for name in (name for name in NETWORKS if options.networks in name):
            for rows in options.rows:
                print(measured(name, rows), flush=True)


if __name__ == "__main__":
    main()
