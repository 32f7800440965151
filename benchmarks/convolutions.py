"""How fast are two 1×1 convolutions with an activation between them, on channels-last data?

    python benchmarks/convolutions.py benchmarks/results/h100/convolutions.json

Needs a GPU. Per case, in turns: eager, where cuDNN computes the convolutions (`eager`); Inductor
(`inductor`); and what the backend makes of them by its measurements of linear layers (`fused`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fusion_backend
from fusion_backend.bench.results import machine
from fusion_backend.instruments.timing import distinct_sets, interleaved, replays, rotated

# (images, positions a side, channels, hidden channels): the stages of a PoolFormer, the first of a
# larger image, and squeeze-and-excitation
CASES = (
    (32, 56, 64, 256),
    (32, 28, 128, 512),
    (32, 14, 320, 1280),
    (32, 7, 512, 2048),
    (8, 128, 96, 384),
    (4, 64, 256, 1024),
    (64, 1, 768, 192),
    (1, 14, 320, 1280),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "machine": machine(torch.device("cuda")),
        "cases": [],
    }
    for case in CASES:
        results["cases"].append(measured(*case))
        arguments.results.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        print(results["cases"][-1], flush=True)
    return 0


def measured(images: int, side: int, channels: int, hidden: int) -> dict[str, Any]:
    """Microseconds of each way to run one case."""
    torch._dynamo.reset()
    block = nn.Sequential(nn.Conv2d(channels, hidden, 1), nn.GELU(), nn.Conv2d(hidden, channels, 1))
    block = block.eval().to("cuda", torch.bfloat16, memory_format=torch.channels_last)
    shape = (images, channels, side, side)
    count = distinct_sets(2 * torch.Size(shape).numel(), torch.device("cuda"))
    inputs = [(channels_last(shape),) for _ in range(count)]
    ways = {
        "eager": block,
        "inductor": torch.compile(block, dynamic=False),
        "fused": torch.compile(block, backend="fusedmlp", dynamic=False),
    }
    with torch.no_grad():
        times = interleaved({name: replays(way, rotated(inputs)) for name, way in ways.items()})
        (site,) = fusion_backend.explain(block, *inputs[0]).sites
    return {
        "block": f"{images}×{side}×{side} positions, {channels}→{hidden}→{channels}, gelu",
        "plan": site.plan or site.reason,
        "us": {name: round(each.median, 2) for name, each in times.items()},
    }


def channels_last(shape: tuple[int, ...]) -> Tensor:
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    return x.contiguous(memory_format=torch.channels_last)


if __name__ == "__main__":
    sys.exit(main())
