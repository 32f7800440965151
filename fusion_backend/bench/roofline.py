"""What the hardware allows: the least time in which an MLP can be computed.

    floor = max(bytes / memory bandwidth, FLOPs / peak of the products)

Bytes are those of the input, weights, biases and output, each moved once; FLOPs are those of the
products, two for each multiplication with its addition. The hidden activation moves no byte: that
is what fusion is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from time import perf_counter_ns

import torch

from fusion_backend.bench.cells import PRECISIONS, Cell
from fusion_backend.bench.precision import products_in


@dataclass(frozen=True)
class Work:
    """What one forward must do at least: ``flops`` of its products, ``bytes`` to move."""

    flops: int
    bytes: int

    @classmethod
    def of(cls, cell: Cell) -> Work:
        """The work of a cell."""
        first_layers = 2 if cell.gated else 1
        weights = cell.hidden * (first_layers * cell.width + cell.out_width)
        biases = (first_layers * cell.hidden + cell.out_width) if cell.has_bias else 0
        activations = cell.rows * (cell.width + cell.out_width)
        return cls(
            flops=2 * cell.rows * weights,
            bytes=(weights + biases + activations) * cell.dtype.itemsize,
        )

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes


@dataclass(frozen=True)
class Ceilings:
    """What a device reaches: bytes a second, and FLOPs a second of products by precision."""

    bytes_per_second: float
    flops_per_second: Mapping[str, float]

    def floor_us(self, work: Work, precision: str) -> float:
        """The least time for some work, in microseconds."""
        return 1e6 * max(
            work.bytes / self.bytes_per_second, work.flops / self.flops_per_second[precision]
        )

    def bound(self, work: Work, precision: str) -> str:
        """``"memory"`` or ``"arithmetic"``: which of the two makes the floor."""
        in_memory = work.bytes / self.bytes_per_second
        return (
            "memory" if in_memory >= work.flops / self.flops_per_second[precision] else "arithmetic"
        )


# The best that was measured on such cards, as a card under load clocks down: a copy of 1 GiB, and
# products of 8192 × 8192 matrices.
KNOWN = {
    "NVIDIA H100 80GB HBM3": Ceilings(3.01e12, {"bfloat16": 790e12, "float16": 790e12}),
}


def ceilings_of(device: torch.device, precisions: Iterable[str]) -> Ceilings:
    """The ceilings of a device: the best of what is known of its kind and what it shows now."""
    known = Ceilings(0.0, {})
    if device.type == "cuda":
        known = KNOWN.get(torch.cuda.get_device_name(device), known)
    flops = {
        precision: max(known.flops_per_second.get(precision, 0.0), _flops(device, precision))
        for precision in sorted(set(precisions))
    }
    return Ceilings(max(known.bytes_per_second, _bandwidth(device)), flops)


def _bandwidth(device: torch.device) -> float:
    """Bytes read and written a second by a copy far larger than any cache."""
    size = 1 << (30 if device.type == "cuda" else 28)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best_seconds(lambda: target.copy_(source), device)


def _flops(device: torch.device, precision: str) -> float:
    """FLOPs a second of a large square product of random matrices."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, dtype=PRECISIONS[precision], device=device) for _ in range(2))
    with products_in(precision):
        return 2 * n**3 / _best_seconds(lambda: torch.mm(a, b), device)


def _best_seconds(function: Callable[[], object], device: torch.device, calls: int = 5) -> float:
    seconds = []
    for _ in range(calls + 1):
        start = perf_counter_ns()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append((perf_counter_ns() - start) / 1e9)
    return min(seconds[1:])
