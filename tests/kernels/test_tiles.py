"""What kernels that compute tile by tile load, on Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl

from fusion_backend.kernels.device.tiles import rows_to_load
from kernel_cases import interpreted

pytestmark = interpreted

BLOCK = 8


@triton.jit
def loaded_rows(found, left, BLOCK: tl.constexpr):
    m = tl.arange(0, BLOCK)
    tl.store(found + m, rows_to_load(m, left))


@pytest.mark.parametrize("left", [1, 3, 7, 8, 9, 100])
def test_a_tile_loads_all_its_rows_and_rows_that_are_not_there_load_each_another(left):
    found = torch.empty(BLOCK, dtype=torch.int32)
    loaded_rows[(1,)](found, left, BLOCK)
    there = min(left, BLOCK)
    assert found[:there].tolist() == list(range(there))
    times = torch.bincount(found, minlength=there)
    assert len(times) == there
    assert times.max() - times.min() <= 1
