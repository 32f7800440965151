"""Would an MLP gain by fusing the norm between its layers, or the one before its first?

    python benchmarks/norms.py benchmarks/results/h100/norms.json

Needs a GPU. Per case of a norm between the layers, in turns: Inductor, which computes activation
and norm in one kernel between two products (`inductor`); the activation in the epilogue of the
first product, then the norm as a kernel (`epilogue`); the same, but of the norm only its
statistics, and the rest folded into the second product's weight and result (`folded`: the least
that any fused kernel must do, less exact, RMSNorm only); and the two products alone (`products`:
the bound that no fusing can pass).

Per case of a norm before the first layer: Inductor (`inductor`); what the backend makes of it
(`fused`); the fused MLP without the norm (`mlp`: the bound that no fusing of the norm can pass);
and `x + mlp(norm(x))` by both (`block, inductor` and `block, fused`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend.bench.results import machine
from fusion_backend.instruments.timing import distinct_sets, interleaved, replays, rotated
from fusion_backend.kernels import launch
from fusion_backend.mlp.expression import parse
from fusion_backend.mlp.weights import FirstLayer

# (rows, in, hidden, out, norm)
BETWEEN = (
    (4096, 768, 3072, 768, "layer"),
    (4096, 768, 768, 30522, "layer"),
    (8192, 2048, 8192, 2048, "rms"),
    (128, 768, 3072, 768, "layer"),
)
# (rows, width, hidden, norm, gated)
BEFORE = (
    (262144, 64, 256, "layer", False),
    (65536, 128, 512, "layer", False),
    (65536, 256, 1024, "layer", False),
    (4096, 768, 3072, "layer", False),
    (16384, 768, 3072, "layer", False),
    (16, 768, 3072, "layer", False),
    (1, 4096, 14336, "rms", True),
    (64, 4096, 14336, "rms", True),
)
GELU = parse("gelu(x)")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "machine": machine(torch.device("cuda")),
        "between": [],
        "before": [],
    }
    measurements = [("before", before, BEFORE), ("between", between, BETWEEN)]
    for place, measured, cases in measurements:
        for case in cases:
            results[place].append(measured(*case))
            arguments.results.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
            print(results[place][-1], flush=True)
    return 0


def before(rows: int, width: int, hidden: int, norm: str, gated: bool) -> dict[str, Any]:
    """Microseconds of each way to run a norm and the MLP that follows."""
    first = [(hidden, width)] * 2 if gated else [(hidden, width), (hidden,)]
    sizes = ((rows, width), *first, (width, hidden), (width,))
    sets = weight_sets(sizes)

    def mlp(x: Tensor, a: Tensor, b: Tensor, down: Tensor, bias_down: Tensor) -> Tensor:
        if gated:
            return F.linear(F.silu(F.linear(x, a)) * F.linear(x, b), down)
        return F.linear(F.gelu(F.linear(x, a, b), approximate="tanh"), down, bias_down)

    def whole(x: Tensor, *weights: Tensor) -> Tensor:
        return mlp(normalized(x, norm), *weights)

    def block(x: Tensor, *weights: Tensor) -> Tensor:
        return x + whole(x, *weights)

    ways = {
        "inductor": compiled(whole),
        "fused": compiled(whole, backend="fusedmlp"),
        "mlp": compiled(mlp, backend="fusedmlp"),
        "block, inductor": compiled(block),
        "block, fused": compiled(block, backend="fusedmlp"),
    }
    function = "swiglu" if gated else "gelu_tanh"
    return {
        "mlp": f"{norm} norm, {rows}×{width}→{hidden}→{width}, {function}",
        "us": timed(ways, sets),
    }


def compiled(function: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False, **options)  # type: ignore[no-any-return]


def between(rows: int, width: int, hidden: int, out: int, norm: str) -> dict[str, Any]:
    """Microseconds of each way to run one case."""
    sets = weight_sets(((rows, width), (hidden, width), (hidden,), (out, hidden), (out,)))
    ways = {"inductor": whole(norm), "epilogue": by_epilogue(norm), "products": products}
    if norm == "rms":
        ways["folded"] = folded
    return {
        "mlp": f"{rows}×{width}→{hidden}→{out}, gelu, {norm} norm",
        "us": timed(ways, sets),
    }


def weight_sets(sizes: Sequence[tuple[int, ...]]) -> list[tuple[Tensor, ...]]:
    """Operands enough that they come from device memory."""
    count = distinct_sets(2 * sum(torch.Size(size).numel() for size in sizes), torch.device("cuda"))
    return [
        tuple(torch.randn(size, device="cuda", dtype=torch.bfloat16) / 16 for size in sizes)
        for _ in range(count)
    ]


def timed(
    ways: dict[str, Callable[..., Tensor]], sets: list[tuple[Tensor, ...]]
) -> dict[str, float]:
    with torch.no_grad():
        times = interleaved({name: replays(way, rotated(sets)) for name, way in ways.items()})
    return {name: round(each.median, 2) for name, each in times.items()}


def normalized(hidden: Tensor, norm: str) -> Tensor:
    shape = hidden.shape[-1:]
    return F.layer_norm(hidden, shape) if norm == "layer" else F.rms_norm(hidden, shape)


def whole(norm: str) -> Callable[..., Tensor]:
    @torch.compile(dynamic=False)
    def mlp(x: Tensor, up: Tensor, bias_up: Tensor, down: Tensor, bias_down: Tensor) -> Tensor:
        return F.linear(normalized(F.gelu(F.linear(x, up, bias_up)), norm), down, bias_down)

    return mlp


def by_epilogue(norm: str) -> Callable[..., Tensor]:
    @torch.compile(dynamic=False)
    def rest(hidden: Tensor, down: Tensor, bias_down: Tensor) -> Tensor:
        return F.linear(normalized(hidden, norm), down, bias_down)

    def mlp(x: Tensor, up: Tensor, bias_up: Tensor, down: Tensor, bias_down: Tensor) -> Tensor:
        hidden, _, _ = launch.epilogue(
            x, FirstLayer(None, None, up, bias_up), GELU, save_preact=False
        )
        return rest(hidden, down, bias_down)

    return mlp


def folded(x: Tensor, up: Tensor, bias_up: Tensor, down: Tensor, bias_down: Tensor) -> Tensor:
    hidden, _, _ = launch.epilogue(x, FirstLayer(None, None, up, bias_up), GELU, save_preact=False)
    return scaled(hidden, down, bias_down)


@torch.compile(dynamic=False)
def scaled(hidden: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    """The product with hidden values as they are, scaled by what their squares say."""
    scale = torch.rsqrt(hidden.float().square().mean(-1, keepdim=True) + 1e-6)
    return (torch.mm(hidden, down.t()) * scale + bias).to(hidden.dtype)


@torch.compile(dynamic=False)
def products(x: Tensor, up: Tensor, bias_up: Tensor, down: Tensor, bias_down: Tensor) -> Tensor:
    return torch.mm(torch.mm(x, up.t()), down.t())


if __name__ == "__main__":
    sys.exit(main())
