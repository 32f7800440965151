"""The Gluon kernel of wide layers without a GPU: where it runs, tiles, and machine code."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusion_backend.kernels.epilogue import config_sm90
from fusion_backend.kernels.epilogue import launch_sm90 as hopper_epilogue
from fusion_backend.kernels.epilogue.config_sm90 import (
    SQUARE,
    TALL,
    TILES,
    WIDE,
    Form,
    Tile,
    fastest_tile,
    tiles_for,
)
from fusion_backend.kernels.epilogue.family import can_add_residual
from fusion_backend.kernels.host.problems import MANY_ROWS, Problem, row_class
from fusion_backend.kernels.host.targets import H100, Target
from fusion_backend.planning.gains import gains_by_residual
from kernel_cases import compiled, with_gluon
from kernel_compilation import (
    HopperDriver,
    products_and_waits,
    registers,
    spilled_bytes,
    symbolic_size,
)
from repetition import slow_but

A100 = Target("cuda", 80, 166912, 108)
# With biases a kernel needs more registers, so that it is the one that would spill.
WITHOUT = pytest.param(False, marks=pytest.mark.slow)
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
    assert config_sm90.runs(problem, rows, H100) == runs


@with_gluon
@pytest.mark.parametrize("hint", [300, 800, 1500, 5000])
def test_symbolic_rows_are_told_apart_at_the_bounds_of_their_classes_only(hint):
    mode = FakeTensorMode(shape_env=ShapeEnv())
    rows = symbolic_size(mode, "rows", hint)
    problem = MLP._replace(gated=False, rows=row_class(rows))
    guards = len(mode.shape_env.guards)
    assert config_sm90.runs(problem, rows, H100) == (hint > 1024)
    assert len(mode.shape_env.guards) == guards


@pytest.mark.parametrize("target", [H100._replace(capability=100), H100._replace(backend="hip")])
def test_it_runs_on_hopper_only(target):
    assert not config_sm90.runs(MLP, 4096, target)


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


@pytest.mark.parametrize(
    ("rows", "width", "gains"),
    [
        (16384, 768, True),
        (50432, 768, True),
        (4096, 1024, True),
        (2048, 4096, True),
        (4096, 768, False),  # 192 tiles for two turns of 132 programs
        (8192, 1600, False),  # of 13 columns of tiles the last is half full
        (512, 4096, False),
    ],
)
def test_last_layers_add_a_residual_where_tiles_fill_the_card(rows, width, gains):
    assert gains_by_residual(rows, width, H100) == gains


@with_gluon
def test_last_layers_add_a_residual_of_16_bits_on_hopper():
    assert can_add_residual(3072, 768, torch.float16, H100)
    assert not can_add_residual(3072, 768, torch.float32, H100)
    assert not can_add_residual(3072, 768, torch.float16, A100)
    assert not can_add_residual(3072, 772, torch.float16, H100)


def test_last_layers_add_no_residual_of_rows_that_are_not_known():
    rows = symbolic_size(FakeTensorMode(shape_env=ShapeEnv()), "rows", 16384)
    assert not gains_by_residual(rows, 768, H100)


@compiled
@with_gluon
@pytest.mark.parametrize(
    ("dtype", "transposed"),
    slow_but(
        [(torch.bfloat16, True)], itertools.product([torch.bfloat16, torch.float16], [False, True])
    ),
)
@pytest.mark.parametrize("bias", [WITHOUT, True])
def test_last_layers_that_add_a_residual_spill_nothing(monkeypatch, dtype, transposed, bias):
    compile_for_hopper(monkeypatch)
    form = Form(False, bias, False, transposed, has_residual=True)
    (tile,) = tiles_for(hopper_epilogue.IDENTITY, dtype, form)
    check_code(hopper_epilogue.IDENTITY, dtype, form, tile, (1000, 1024))


ACTIVATIONS = {
    ("silu(g) * u", torch.bfloat16): TILES,
    ("silu(g) * u", torch.float16): TILES,
    ("gelu(x)", torch.bfloat16): TILES,
    ("gelu(x)", torch.float16): TILES,
    ("relu(x)", torch.float16): TILES,
    ("where(gt(x, 0.0), x, expm1(x))", torch.bfloat16): (SQUARE,),
}


def form_of(activation: str, biases: bool, transposed: bool) -> Form:
    gated = "u" in activation.split()
    return Form(gated, biases, gated and biases, transposed)


@with_gluon
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(("activation", "dtype"), ACTIVATIONS)
def test_an_activation_that_calls_functions_leaves_registers_for_small_tiles_only(
    activation, dtype, biases
):
    tiles = ACTIVATIONS[activation, dtype]
    assert tiles_for(activation, dtype, form_of(activation, biases, False)) == tiles
    turned = tiles_for(activation, dtype, form_of(activation, biases, True))
    assert turned == tuple(tile for tile in tiles if tile != WIDE)


def kernels_of_all_tiles():
    """Activation and dtype, whether weights are transposed, and a tile."""
    for (activation, dtype), tiles in ACTIVATIONS.items():
        gated = form_of(activation, False, False).gated
        for transposed, tile in itertools.product((False,) if gated else (False, True), tiles):
            if not (transposed and tile == WIDE):
                yield activation, dtype, transposed, tile


@compiled
@with_gluon
@pytest.mark.parametrize(
    ("activation", "dtype", "transposed", "tile"),
    slow_but([("silu(g) * u", torch.bfloat16, False, WIDE)], kernels_of_all_tiles()),
)
@pytest.mark.parametrize("biases", [WITHOUT, True])
def test_products_stay_in_flight_and_nothing_spills(
    monkeypatch, activation, dtype, transposed, tile, biases
):
    compile_for_hopper(monkeypatch)
    form = form_of(activation, biases, transposed)
    check_code(activation, dtype, form, tile, masked_and_not(tile))


def compile_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", HopperDriver(), raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(hopper_epilogue, "target_of", lambda device: H100)


def masked_and_not(tile: Tile) -> tuple[int, ...]:
    """Widths to compile for; of tiles that are stored in other parts if they need a mask, two."""
    return (1000, 1024) if tile == TALL else (1000,)


def check_code(
    activation: str, dtype: torch.dtype, form: Form, tile: Tile, widths: tuple[int, ...]
) -> None:
    for hidden in widths:
        kernel = hopper_epilogue.compiled(activation, 520, hidden, dtype, form, tile, 0)
        assert spilled_bytes(kernel) == 0
        assert registers(kernel) == 168
        assert kernel.metadata.shared <= H100.shared_memory
        _, waits = products_and_waits(kernel)
        assert waits == 4  # in the loop and after it, of each warpgroup
