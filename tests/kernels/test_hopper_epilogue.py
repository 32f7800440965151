"""The Gluon kernel of wide layers without a GPU: where it runs, tiles, and machine code."""

from __future__ import annotations

import contextlib

import pytest
import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusion_backend.kernels import hopper_epilogue
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
        (WIDE._replace(gated=False), 4096, True),
        (WIDE._replace(gated=False, rows=1024), 512, True),
        (WIDE._replace(gated=False, rows=1024), 256, False),
        (WIDE._replace(gated=False, rows=1024, hidden_features=2048), 1024, False),
        (WIDE._replace(tma=False), 4096, False),
        (WIDE._replace(in_features=64), 4096, False),
        (WIDE._replace(hidden_features=5636), 4096, False),
        (WIDE._replace(in_features=2052), 4096, False),
    ],
)
def test_it_runs_what_it_was_measured_to_be_faster_for(problem, rows, runs):
    assert hopper_epilogue.runs(problem, rows, H100) == runs


@with_gluon
@pytest.mark.parametrize(
    ("rows", "in_features", "out_features", "runs"),
    [
        (4096, 3072, 768, True),
        (4095, 3072, 768, False),
        (8192, 3072, 256, False),
        (8192, 128, 768, False),
        (8192, 3076, 768, False),
        (8192, 3072, 772, False),
    ],
)
def test_it_may_run_products_alone_of_many_rows(rows, in_features, out_features, runs):
    assert hopper_epilogue.runs_linear(rows, in_features, out_features, H100) == runs


@with_gluon
@pytest.mark.parametrize(
    ("rows", "out_features", "fills"),
    [
        (8192, 768, True),
        (16384, 1024, True),
        (8192, 2048, True),
        (4096, 4096, True),
        (9000, 768, False),
        (4096, 1280, False),
        (2048, 4096, False),
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_alone_is_cublas_s_if_it_is_short_or_many_programs_would_be_idle_at_its_end(
    monkeypatch, rows, out_features, fills, transposed
):
    monkeypatch.setattr(hopper_epilogue, "target_of", lambda device: H100)
    launched, prepared = [], []
    monkeypatch.setattr(hopper_epilogue, "epilogue", lambda *of: launched.append(of) or of[0])
    monkeypatch.setattr(hopper_epilogue.compiled, "start", lambda *of: prepared.append(of))
    x, weight = torch.zeros(rows, 8).bfloat16(), torch.zeros(out_features, 8).bfloat16()
    if transposed:
        weight = weight.t().contiguous().t()
    known = (8, out_features, out_features), torch.bfloat16, (True, True, False, False, False)
    known += (False, transposed, False, False, False), 0
    hopper_epilogue.prepare(rows, "x", *known)
    call = hopper_epilogue.caller("x", *known)
    monkeypatch.setattr(Tensor, "get_device", lambda tensor: 0)
    assert call(x, weight, None, None, None).shape[0] == rows
    assert (len(launched), len(prepared)) == (fills, fills)
    hopper_epilogue.prepare(rows, "relu(x)", *known)
    assert len(prepared) == fills + 1


@with_gluon
@pytest.mark.parametrize("hint", [300, 800, 1500, 5000])
def test_symbolic_rows_are_told_apart_at_the_bounds_of_their_classes_only(hint):
    mode = FakeTensorMode(shape_env=ShapeEnv())
    rows = symbolic_size(mode, "rows", hint)
    problem = WIDE._replace(gated=False, rows=row_class(rows))
    guards = len(mode.shape_env.guards)
    assert hopper_epilogue.runs(problem, rows, H100) == (hint > 1024)
    assert hopper_epilogue.runs_linear(rows, 3072, 768, H100) == (hint > 1024)
    assert len(mode.shape_env.guards) == guards


@pytest.mark.parametrize("target", [H100._replace(capability=100), H100._replace(backend="hip")])
def test_it_runs_on_hopper_only(target):
    assert not hopper_epilogue.runs(WIDE, 4096, target)
    assert not hopper_epilogue.runs_linear(16384, 3072, 768, target)


@pytest.mark.parametrize(
    ("rows", "hidden", "gated", "columns"),
    [
        (4096, 768, False, 192),
        (2048, 4096, False, 128),
        (4096, 16384, False, 192),
        (4096, 3072, False, 128),
        (128, 14336, True, 128),
        (4096, 8192, True, 192),
    ],
)
def test_tiles_are_as_wide_as_leaves_few_programs_idle_in_the_last_turn(
    rows, hidden, gated, columns
):
    assert hopper_epilogue.columns_of_tiles(rows, hidden, gated, H100) == columns
    assert hopper_epilogue.columns_of_tiles(rows, hidden, gated, H100, widest=128) == 128


ANY_TILE = [*hopper_epilogue.STAGES]


@compiled
@with_gluon
@pytest.mark.parametrize(
    ("activation", "dtype", "tiles"),
    [
        ("silu(g) * u", torch.bfloat16, ANY_TILE),
        ("silu(g) * u", torch.float16, [128]),
        ("gelu(x)", torch.bfloat16, ANY_TILE),
        ("gelu(x)", torch.float16, [128]),
        ("where(gt(x, 0.0), x, expm1(x))", torch.bfloat16, [128]),
        ("x", torch.bfloat16, ANY_TILE),
        ("x", torch.float16, ANY_TILE),
    ],
)
@pytest.mark.parametrize("biases", [False, True])
def test_products_stay_in_flight_and_nothing_spills(monkeypatch, activation, dtype, tiles, biases):
    monkeypatch.setattr(triton.runtime.driver, "_active", HopperDriver(), raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(hopper_epilogue, "target_of", lambda device: H100)
    gated = "u" in activation.split()
    form = hopper_epilogue.Form(gated, biases, gated and biases, transposed=False)
    assert chosen_tiles(activation, dtype, form) == set(tiles)
    for columns in tiles:
        check_code(activation, dtype, form, columns)
    if not gated:
        transposed = form._replace(transposed=True)
        assert chosen_tiles(activation, dtype, transposed) == {128}
        check_code(activation, dtype, transposed, 128)


def chosen_tiles(activation: str, dtype: torch.dtype, form: hopper_epilogue.Form) -> set[int]:
    choose = hopper_epilogue._columns
    return {choose(activation, dtype, rows, 1000, form, 0) for rows in range(128, 16384, 128)}


def check_code(
    activation: str, dtype: torch.dtype, form: hopper_epilogue.Form, columns: int
) -> None:
    kernel = hopper_epilogue.compiled(activation, 520, 1000, dtype, form, columns, 0)
    assert spilled_bytes(kernel) == 0
    assert registers(kernel) == 168
    assert kernel.metadata.shared <= H100.shared_memory
    _, waits = products_and_waits(kernel)
    assert waits == 4  # in the loop and after it, of each warpgroup
