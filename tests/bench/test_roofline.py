"""Bytes, FLOPs and floors, against figures worked out by hand."""

from __future__ import annotations

import pytest
import torch

from fusion_backend.bench.cells import Cell
from fusion_backend.bench.roofline import KNOWN, Ceilings, Work, ceilings_of

H100 = KNOWN["NVIDIA H100 80GB HBM3"]


def test_work_of_a_plain_mlp_with_biases() -> None:
    work = Work.of(Cell("gelu", 10, 4, 8, out=2))
    assert work.flops == 2 * 10 * (4 * 8 + 8 * 2)
    assert work.bytes == 2 * (10 * (4 + 2) + 4 * 8 + 8 + 8 * 2 + 2)


def test_work_of_a_gated_mlp_in_float32() -> None:
    work = Work.of(Cell("swiglu", 10, 4, 8, "tf32"))
    assert work.flops == 2 * 10 * 3 * 4 * 8
    assert work.bytes == 4 * (10 * 8 + 3 * 4 * 8)


@pytest.mark.parametrize(
    ("cell", "floor", "bound"),
    [
        (Cell("gelu_tanh", 262144, 64, 256), 22.3, "memory"),
        (Cell("gelu_tanh", 65536, 256, 1024), 87.0, "arithmetic"),
        (Cell("gelu_tanh", 4096, 4096, 16384), 1392, "arithmetic"),
        (Cell("swiglu", 1, 4096, 14336), 117, "memory"),
    ],
)
def test_the_floor_is_the_larger_of_the_two_bounds(cell: Cell, floor: float, bound: str) -> None:
    work = Work.of(cell)
    assert H100.floor_us(work, "bfloat16") == pytest.approx(floor, rel=0.01)
    assert H100.bound(work, "bfloat16") == bound


def test_the_bounds_meet_where_the_roof_bends() -> None:
    ceilings = Ceilings(1e12, {"float32": 8e12})
    work = Work(flops=8000, bytes=1000)
    assert work.intensity == 8
    assert ceilings.floor_us(work, "float32") == pytest.approx(1e-3)


def test_ceilings_of_an_unknown_device_are_measured() -> None:
    ceilings = ceilings_of(torch.device("cpu"), ["float32"])
    assert ceilings.bytes_per_second > 1e8
    assert ceilings.flops_per_second["float32"] > 1e8
