"""Would an MLP of wide layers gain by adding the residual in its last layer's own kernel?

    python benchmarks/sums.py benchmarks/results/h100/sums.json

Needs a Hopper GPU. Per case, in turns: the MLP alone, its last layer by cuBLAS (`mlp`); followed by
the sum, as Inductor computes it (`sum`), or added by the kernel of the last layer (`within`); and
both with a norm after the sum, which reads it and is read beside it, as between the blocks of a
transformer (`sum; norm` and `within; norm`). Where nothing else reads the sum than the norm, it is
never stored (`norm alone` and `within; norm alone`). Without a bias in the last layer, Inductor has
cuBLAS add the residual, which PyTorch copies first. `tiles` is how much of the kernel's tiles,
in whole turns of all multiprocessors, is result.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from norms import compiled, timed
from torch import Tensor

import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)
from fusion_backend.bench.results import machine
from fusion_backend.instruments.timing import distinct_sets
from fusion_backend.kernels.epilogue.config_sm90 import filled
from fusion_backend.kernels.host.targets import target_of


class Case(NamedTuple):
    """One MLP; SwiGLU without biases where it is gated, else GELU with them."""

    rows: int
    width: int
    hidden: int
    gated: bool = False
    transposed: bool = False

    @property
    def name(self) -> str:
        """For tables."""
        form = "swiglu" if self.gated else "gelu_tanh"
        stored = ", transposed weights" if self.transposed else ""
        return f"{self.rows}×{self.width}→{self.hidden}→{self.width}, {form}{stored}"


CASES = (
    Case(16384, 512, 512),
    Case(16384, 512, 2048),
    Case(4096, 768, 3072),
    Case(8192, 768, 3072),
    Case(16384, 768, 3072),
    Case(16384, 768, 3072, transposed=True),
    Case(50432, 768, 3072),
    Case(16384, 1024, 1024),
    Case(4096, 1024, 4096),
    Case(16384, 1024, 4096),
    Case(16384, 1024, 4096, transposed=True),
    Case(8192, 1600, 6400),
    Case(4096, 2048, 8192),
    Case(4096, 4096, 16384),
    Case(2048, 2048, 8192, gated=True),
    Case(8192, 2048, 5632, gated=True),
    Case(512, 4096, 14336, gated=True),
    Case(4096, 4096, 14336, gated=True),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    device = torch.device("cuda")
    results: dict[str, Any] = {"machine": machine(device), "cases": []}
    for case in CASES:
        tiles = filled(case.rows, case.width, target_of(device))
        times = timed(ways(case), operands(case))
        results["cases"].append({"mlp": case.name, "tiles": round(tiles, 2), "us": times})
        arguments.results.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        print(results["cases"][-1], flush=True)
    return 0


def operands(case: Case) -> list[tuple[Tensor, ...]]:
    """Of each layer the weight, behind x: sets enough that they come from device memory."""
    inner, hidden = (case.width, case.hidden), (case.hidden, case.width)
    sizes = ((case.rows, case.width), *[hidden] * (1 + case.gated), inner)
    elements = sum(torch.Size(size).numel() for size in sizes)

    def some(size: tuple[int, ...]) -> Tensor:
        turned = case.transposed and size[0] != case.rows
        values = torch.randn(size[::-1] if turned else size, dtype=torch.bfloat16, device="cuda")
        return (values.t() if turned else values) / 16

    count = distinct_sets(2 * elements, torch.device("cuda"))
    return [tuple(map(some, sizes)) for _ in range(count)]


def ways(case: Case) -> dict[str, Callable[..., Any]]:
    """The ways to run a case; functions of x and the weights."""
    biases = [None, None]
    if not case.gated:
        biases = [torch.randn(n, device="cuda").bfloat16() for n in (case.hidden, case.width)]
    activation = "silu(g) * u" if case.gated else "gelu_tanh(x)"

    def mlp(x: Tensor, *weights: Tensor, residual: Tensor | None = None) -> Tensor:
        gate, up, down = weights if case.gated else (None, *weights)
        layers = (gate, None, up, biases[0], down, biases[1])
        return torch.ops.fusedmlp.mlp(  # type: ignore[no-any-return]
            x, *layers, [], activation, "epilogue", residual=residual
        )

    def after(x: Tensor, *weights: Tensor) -> Tensor:
        return x + mlp(x, *weights)

    def within(x: Tensor, *weights: Tensor) -> Tensor:
        return mlp(x, *weights, residual=x)

    def normed(block: Callable[..., Tensor], alone: bool) -> Callable[..., Any]:
        def run(x: Tensor, *weights: Tensor) -> Any:
            total = block(x, *weights)
            norm = F.layer_norm(total, (case.width,))
            return norm if alone else (total, norm)

        return run

    functions: dict[str, Callable[..., Any]] = {
        "mlp": mlp,
        "sum": after,
        "within": within,
        "sum; norm": normed(after, alone=False),
        "within; norm": normed(within, alone=False),
        "norm alone": normed(after, alone=True),
        "within; norm alone": normed(within, alone=True),
    }
    return {name: compiled(each, backend="fusedmlp") for name, each in functions.items()}


if __name__ == "__main__":
    sys.exit(main())
