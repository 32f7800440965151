"""The Gluon kernel of wide layers without a GPU: where it runs, tiles, and machine code."""

from __future__ import annotations

import contextlib

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusion_backend.kernels import hopper_epilogue
from fusion_backend.kernels.hopper_epilogue import (
    SQUARE,
    TALL,
    TILES,
    WIDE,
    fastest_tile,
    tiles_for,
)
from fusion_backend.kernels.problems import MANY_ROWS, Problem, row_class
from fusion_backend.kernels.targets import H100
from kernel_cases import compiled, with_gluon
from kernel_compilation import (
    HopperDriver,
    products_and_waits,
    registers,
    spilled_bytes,
    symbolic_size,
)

MLP = Problem(MANY_ROWS, 2048, 5632, 0, True, torch.bfloat16, tma=True)


@with_gluon
@pytest.mark.parametrize(
    ("problem", "rows", "runs"),
    [
        (MLP, 4096, True),
        (MLP._replace(dtype=torch.float16), 4096, True),
        (MLP._replace(rows=1024), 128, True),
        (MLP._replace(rows=1024), 80, False),
        (MLP._replace(rows=64, hidden_features=14336), 64, False),
        (MLP._replace(gated=False), 4096, True),
        (MLP._replace(gated=False, rows=1024), 512, True),
        (MLP._replace(gated=False, rows=1024), 256, False),
        (MLP._replace(gated=False, rows=1024, hidden_features=2048), 1024, False),
        (MLP._replace(tma=False), 4096, False),
        (MLP._replace(in_features=64), 4096, False),
        (MLP._replace(hidden_features=5636), 4096, False),
        (MLP._replace(in_features=2052), 4096, False),
    ],
)
def test_it_runs_what_it_was_measured_to_be_faster_for(problem, rows, runs):
    assert hopper_epilogue.runs(problem, rows, H100) == runs


@with_gluon
@pytest.mark.parametrize("hint", [300, 800, 1500, 5000])
def test_symbolic_rows_are_told_apart_at_the_bounds_of_their_classes_only(hint):
    mode = FakeTensorMode(shape_env=ShapeEnv())
    rows = symbolic_size(mode, "rows", hint)
    problem = MLP._replace(gated=False, rows=row_class(rows))
    guards = len(mode.shape_env.guards)
    assert hopper_epilogue.runs(problem, rows, H100) == (hint > 1024)
    assert len(mode.shape_env.guards) == guards


@pytest.mark.parametrize("target", [H100._replace(capability=100), H100._replace(backend="hip")])
def test_it_runs_on_hopper_only(target):
    assert not hopper_epilogue.runs(MLP, 4096, target)


@pytest.mark.parametrize(
    ("rows", "hidden", "gated", "tile"),
    [
        (2048, 4096, False, SQUARE),
        (512, 14336, True, SQUARE),
        (4096, 16384, False, WIDE),
        (4096, 14336, True, WIDE),
        (16384, 3072, False, TALL),
        (16384, 4096, False, TALL),
    ],
)
def test_tiles_are_those_that_take_the_least_time(rows, hidden, gated, tile):
    assert fastest_tile(rows, hidden, gated, H100) == tile
    assert fastest_tile(rows, hidden, gated, H100, [SQUARE]) == SQUARE


@compiled
@with_gluon
@pytest.mark.parametrize(
    ("activation", "dtype", "tiles"),
    [
        ("silu(g) * u", torch.bfloat16, TILES),
        ("silu(g) * u", torch.float16, [SQUARE]),
        ("gelu(x)", torch.bfloat16, TILES),
        ("gelu(x)", torch.float16, [SQUARE]),
        ("where(gt(x, 0.0), x, expm1(x))", torch.bfloat16, [SQUARE]),
        ("relu(x)", torch.float16, TILES),
    ],
)
@pytest.mark.parametrize("biases", [False, True])
def test_products_stay_in_flight_and_nothing_spills(monkeypatch, activation, dtype, tiles, biases):
    monkeypatch.setattr(triton.runtime.driver, "_active", HopperDriver(), raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(hopper_epilogue, "target_of", lambda device: H100)
    gated = "u" in activation.split()
    form = hopper_epilogue.Form(gated, biases, gated and biases, transposed=False)
    assert [*tiles_for(activation, dtype, form)] == [*tiles]
    for tile in tiles:
        check_code(activation, dtype, form, tile)
    if not gated:
        transposed = form._replace(transposed=True)
        turned = [tile for tile in tiles if tile != WIDE]
        assert [*tiles_for(activation, dtype, transposed)] == turned
        for tile in turned:
            check_code(activation, dtype, transposed, tile)


def check_code(
    activation: str, dtype: torch.dtype, form: hopper_epilogue.Form, tile: hopper_epilogue.Tile
) -> None:
    for hidden in (1000, 1024) if tile == TALL else (1000,):  # masked, and not
        kernel = hopper_epilogue.compiled(activation, 520, hidden, dtype, form, tile, 0)
        assert spilled_bytes(kernel) == 0
        assert registers(kernel) == 168
        assert kernel.metadata.shared <= H100.shared_memory
        _, waits = products_and_waits(kernel)
        assert waits == 4  # in the loop and after it, of each warpgroup
