"""Deep MLPs of wide layers, in inference: Inductor's default mode and fusedmlp's.

    python benchmarks/deep_mlps.py benchmarks/results/h200/deep_mlps.json

Needs a GPU. Models are in bfloat16, with biases. CUDA graphs that rotate sets of weights take
turns, and medians count. Kernels are those of one call.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from training import kernels

import fusion_backend
from fusion_backend.bench.results import machine
from fusion_backend.instruments.timing import distinct_sets, interleaved, replays, rotated

BACKENDS = ("inductor", "fusedmlp")
FEW_ROWS = 4096


class Deep(NamedTuple):
    """Layers with an activation between each two."""

    name: str
    rows: int
    widths: tuple[int, ...]
    activation: Callable[[Tensor], Tensor]


MODELS = (
    Deep("DLRM's top tower", 2048, (479, 1024, 1024, 512, 256, 1), F.relu),
    Deep("DLRM's top tower", 16384, (479, 1024, 1024, 512, 256, 1), F.relu),
    Deep("a classifier", 1024, (784, 2048, 2048, 2048, 10), F.relu),
    Deep("six layers", 8192, (1024,) * 7, F.silu),
    Deep("a projector", 4096, (2048, 8192, 8192, 2048), F.gelu),
    Deep("four layers", 16384, (512, 2048, 1024, 2048, 512), F.mish),
)


def measured(model: Deep, device: torch.device) -> dict[str, Any]:
    """The line of one model."""
    shapes = list(zip(model.widths[1:], model.widths, strict=False))
    size = 2 * sum(out * inner for out, inner in shapes)
    sets = distinct_sets(size, device) if model.rows <= FEW_ROWS else 2
    draw = {"device": device, "dtype": torch.bfloat16}
    x = torch.randn(model.rows, model.widths[0], **draw)
    layers = [
        [
            each
            for s in shapes
            for each in (torch.randn(s, **draw) / s[1] ** 0.5, torch.randn(s[0], **draw))
        ]
        for _ in range(sets)
    ]

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        for i in range(0, len(parameters), 2):
            x = F.linear(model.activation(x) if i else x, *parameters[i : i + 2])
        return x

    line: dict[str, Any] = {"model": model.name, "rows": model.rows, "widths": model.widths}
    calls, timers = rotated([(x, *each) for each in layers], 4), {}
    for backend in BACKENDS:
        torch.compiler.reset()
        compiled = torch.compile(function, backend=backend, dynamic=False)
        timers[backend] = replays(compiled, calls)
        line[f"{backend} kernels"] = kernels(partial(compiled, *calls[0]))
    line["us"] = {name: round(each.median, 1) for name, each in interleaved(timers).items()}
    line["plans"] = [
        f"{site.form}, {site.plan if site.fused else 'Inductor'}"
        for site in fusion_backend.history()[-1].sites
    ]
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path, help="JSON file to write")
    arguments, device, lines = parser.parse_args(), torch.device("cuda"), []
    with torch.no_grad():
        for model in MODELS:
            lines.append(measured(model, device))
            print(lines[-1], flush=True)
    results = {"machine": machine(device), "models": lines}
    arguments.results.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
