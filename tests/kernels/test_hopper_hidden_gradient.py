"""The Gluon kernels of training without a GPU: where they run, and their machine code."""

from __future__ import annotations

import contextlib
import operator
import re

import pytest
import sympy
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusion_backend.kernels.epilogue import gradient_launch_sm90 as hopper_hidden_gradient
from fusion_backend.kernels.epilogue import launch_sm90 as hopper_epilogue
from fusion_backend.kernels.epilogue.calls import CALLS
from fusion_backend.kernels.epilogue.config_sm90 import can_join, joins, tiles_for
from fusion_backend.kernels.epilogue.gradient_launch_sm90 import Form, blocks, differentiates, runs
from fusion_backend.kernels.epilogue.launch_sm90 import IDENTITY
from fusion_backend.kernels.host.problems import MANY_ROWS, Problem, row_class
from fusion_backend.kernels.host.targets import H100, Target
from kernel_cases import compiled, with_gluon
from kernel_compilation import (
    HopperDriver,
    products_and_waits,
    registers,
    spilled_bytes,
    symbolic_size,
)

A100 = Target("cuda", 80, 166912, 108)
BF16, FP16 = torch.bfloat16, torch.float16
MLP = Problem(MANY_ROWS, 0, 3072, 768, False, BF16)
SLOW = pytest.mark.slow


@with_gluon
@pytest.mark.parametrize(
    ("problem", "rows", "target", "expected"),
    [
        (MLP, 4096, H100, True),
        (MLP._replace(gated=True, dtype=FP16), 4096, H100, True),
        (MLP._replace(out_features=128), 65536, H100, True),
        (MLP._replace(out_features=64), 65536, H100, False),
        (MLP._replace(out_features=772), 4096, H100, False),
        (MLP._replace(hidden_features=3076), 4096, H100, False),
        (MLP._replace(rows=1024), 256, H100, False),
        (MLP._replace(dtype=torch.float32), 4096, H100, False),
        (MLP, 4096, A100, False),
    ],
)
def test_gradients_of_preactivations_take_it_where_it_was_measured(problem, rows, target, expected):
    assert runs(problem, rows, target) == expected


@with_gluon
@pytest.mark.parametrize("hint", [300, 5000])
def test_symbolic_rows_are_told_apart_at_the_bounds_of_their_classes_only(hint):
    mode = FakeTensorMode(shape_env=ShapeEnv())
    rows = symbolic_size(mode, "rows", hint)
    problem = MLP._replace(rows=row_class(rows))
    guards = len(mode.shape_env.guards)
    assert runs(problem, rows, H100) == (hint > 1024)
    assert len(mode.shape_env.guards) == guards


@with_gluon
def test_a_gated_input_gradient_is_one_product_where_blocks_are_of_one_weight():
    assert can_join(5632, 2048, H100)
    assert not can_join(5640, 2048, H100)
    assert not can_join(5632, 2048, A100)
    assert joins(8192, 2048, H100)
    assert not joins(512, 2048, H100)  # 64 tiles for 132 programs


@compiled
@pytest.mark.parametrize(
    ("activation", "dtype", "few"),
    [
        ("gelu(x)", BF16, True),
        ("silu(g) * u", BF16, True),
        ("gelu_tanh(x)", FP16, True),
        ("mish(x)", FP16, False),
        ("square(relu(x))", FP16, True),
        ("tanh(x)", torch.bfloat16, True),
        ("x * tanh(log1p(exp(x)))", BF16, False),
        ("sin(30.0 * x)", BF16, True),
        ("sin(30.0 * x)", FP16, True),
    ],
)
def test_an_activation_is_taken_if_it_calls_nothing(activation, dtype, few):
    assert differentiates(activation, dtype) == few


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("has_sums", [False, True])
@pytest.mark.parametrize("has_output_sums", [False, True])
def test_widths_of_results_may_be_symbolic(gated, has_sums, has_output_sums):
    (call,) = (call for call in CALLS if call.name == "hidden_gradient")
    rows, out, hidden = sympy.symbols("rows out hidden", integer=True)
    sizes = [(rows, out), (out, hidden), (rows, hidden) if gated else None, (rows, hidden)]
    how = ["relu(x)", False, has_sums, has_output_sums]
    *grads, postact, (size, dtype) = call.results(sizes, torch.bfloat16, how, operator.floordiv)
    first = ((rows, hidden), torch.bfloat16)
    assert [*grads, postact] == [first] * (3 if gated else 2)
    assert dtype == torch.float32
    if has_sums or has_output_sums:
        of_preacts = (2 * hidden if gated else hidden) if has_sums else 0
        assert size[1] == of_preacts + (out if has_output_sums else 0)
    else:
        assert size == (0, hidden)


def test_each_warp_of_a_tile_has_a_row_of_sums():
    assert [blocks(rows) for rows in (1, 128, 129)] == [4, 4, 8]


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(triton.runtime.driver, "_active", HopperDriver(), raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(hopper_epilogue, "target_of", lambda device: H100)


def check_code(kernel, spilled: int = 0):
    assert spilled_bytes(kernel) <= spilled
    assert registers(kernel) == 168
    assert kernel.metadata.shared <= H100.shared_memory
    _, waits = products_and_waits(kernel)
    assert waits == 4  # in the loop and after it, of each warpgroup


@compiled
@with_gluon
@pytest.mark.parametrize(
    ("activation", "dtype", "sums", "transposed"),
    [
        ("gelu_tanh(x)", BF16, (True, True), False),
        pytest.param("silu(g) * u", BF16, (False, False), False, marks=SLOW),
        pytest.param("gelu_tanh(x)", BF16, (False, False), True, marks=SLOW),
        pytest.param("gelu_tanh(x)", BF16, (False, True), False, marks=SLOW),
        pytest.param("gelu(x)", BF16, (True, False), False, marks=SLOW),
        pytest.param("sin(30.0 * x)", BF16, (True, True), False, marks=SLOW),
        pytest.param("silu(g) * u", BF16, (True, True), True, marks=SLOW),
        pytest.param("gelu(g) * u", BF16, (True, True), False, marks=SLOW),
        pytest.param("square(relu(x))", FP16, (True, True), False, marks=SLOW),
    ],
)
def test_gradients_of_preactivations_spill_nothing(activation, dtype, sums, transposed):
    form = Form("u" in activation.split(), *sums, transposed)
    spilled = 24 if all(sums) else 0  # addresses, by Triton 3.6, where widths are no whole tiles
    check_code(hopper_hidden_gradient.compiled(activation, 520, 1000, dtype, form, 0), spilled)


@compiled
@with_gluon
def test_a_buffer_is_given_back_when_what_was_loaded_from_it_is_there():
    """Else the copy that fills it next may overtake loads that are under way."""
    form = Form(True, True, True, False)
    kernel = hopper_hidden_gradient.compiled("silu(g) * u", 520, 1000, BF16, form, 0)
    found = re.findall(r"ldmatrix|fence\.proxy|mbarrier\.arrive\.s", kernel.asm["ptx"])
    loads = [i for i, name in enumerate(found) if name == "ldmatrix"]
    last = [i for i in loads if found[i + 1] != "ldmatrix"]
    assert len(last) > 8
    for i in last:
        assert found[i + 1 : i + 3] == ["fence.proxy", "mbarrier.arrive.s"]


@compiled
@with_gluon
@pytest.mark.parametrize(
    ("activation", "dtype"),
    [
        ("gelu_tanh(x)", BF16),
        pytest.param("silu(g) * u", BF16, marks=SLOW),
        pytest.param("gelu(x)", BF16, marks=SLOW),
        pytest.param("square(relu(x))", FP16, marks=SLOW),
    ],
)
def test_first_layers_that_save_spill_nothing(activation, dtype):
    gated = "u" in activation.split()
    for hidden, bias in ((1000, True), (1024, True)):
        form = hopper_epilogue.Form(gated, bias, gated and bias, False, saves=True)
        for tile in tiles_for(activation, dtype, form):
            check_code(hopper_epilogue.compiled(activation, 520, hidden, dtype, form, tile, 0))


@compiled
@with_gluon
@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=SLOW)])
def test_an_input_gradient_spills_nothing(apart):
    form = hopper_epilogue.Form(False, False, False, True, joined=True, apart=apart)
    for tile in tiles_for(IDENTITY, BF16, form):
        check_code(hopper_epilogue.compiled(IDENTITY, 2048, 1000, BF16, form, tile, 0))
