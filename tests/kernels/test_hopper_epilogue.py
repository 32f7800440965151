"""The Gluon kernel of gated first layers without a GPU: where it runs, tiles, and machine code."""

from __future__ import annotations

import contextlib

import pytest
import torch
import triton

from fusion_backend.kernels import hopper_epilogue
from fusion_backend.kernels.problems import MANY_ROWS, Problem
from fusion_backend.kernels.targets import H100
from kernel_cases import compiled, with_gluon
from kernel_compilation import HopperDriver, products_and_waits, registers, spilled_bytes

WIDE = Problem(MANY_ROWS, 2048, 5632, 0, True, torch.bfloat16, tma=True)


@with_gluon
@pytest.mark.parametrize(
    ("problem", "rows", "runs"),
    [
        (WIDE, 4096, True),
        (WIDE._replace(dtype=torch.float16), 4096, True),
        (WIDE._replace(rows=1024), 128, True),
        (WIDE._replace(rows=1024), 80, False),
        (WIDE._replace(rows=64, hidden_features=14336), 64, False),
        (WIDE._replace(gated=False), 4096, False),
        (WIDE._replace(tma=False), 4096, False),
        (WIDE._replace(in_features=64), 4096, False),
        (WIDE._replace(hidden_features=5636), 4096, False),
        (WIDE._replace(in_features=2052), 4096, False),
    ],
)
def test_it_runs_what_it_was_measured_to_be_faster_for(problem, rows, runs):
    assert hopper_epilogue.runs(problem, rows, H100) == runs


@pytest.mark.parametrize("target", [H100._replace(capability=100), H100._replace(backend="hip")])
def test_it_runs_on_hopper_only(target):
    assert not hopper_epilogue.runs(WIDE, 4096, target)


@pytest.mark.parametrize(
    ("rows", "hidden", "columns"),
    [(128, 5632, 64), (256, 5632, 96), (512, 5632, 64), (8192, 5632, 128), (128, 14336, 128)],
)
def test_tiles_are_narrower_where_the_last_turn_would_leave_many_programs_idle(
    rows, hidden, columns
):
    assert hopper_epilogue.columns_of_tiles(rows, hidden, H100) == columns


@compiled
@with_gluon
@pytest.mark.parametrize("columns", hopper_epilogue.STAGES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biases", [False, True])
def test_products_stay_in_flight_and_nothing_spills(monkeypatch, columns, dtype, biases):
    monkeypatch.setattr(triton.runtime.driver, "_active", HopperDriver(), raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    kernel = hopper_epilogue.compiled("silu(g) * u", 520, 1000, dtype, biases, biases, columns, 0)
    assert spilled_bytes(kernel) == 0
    assert registers(kernel) == 168
    assert kernel.metadata.shared <= H100.shared_memory
    _, waits = products_and_waits(kernel)
    assert waits == 4  # in the loop and after it, of each warpgroup
