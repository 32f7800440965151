"""Weights that Inductor is told to take for constants: ``rows`` reads them laid out in panels."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)
from cpu_rows_cases import WITH_COMPILER, assert_exact, double, parameters
from fusion_backend.kernels.cpu_rows import cutting, launch
from fusion_backend.kernels.cpu_rows.source import Kernel
from models import MLP, Conv1D, Gated, Packed
from repetition import slow_but, telling

ops = torch.ops.fusedmlp
PLAIN, GATED = "gelu_tanh(x)", "silu(g) * u"
ALWAYS = {"fusedmlp.policy": "always"}

pytestmark = WITH_COMPILER


@pytest.fixture
def frozen():
    """Weights are constants in what is compiled meanwhile."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(freezing=True), torch.no_grad():
        yield


@pytest.fixture
def packed(monkeypatch):
    """References to the panels that were made, in order."""
    made, panels = [], launch.panels

    def counted(weight):
        result = panels(weight)
        made.append(weakref.ref(result.untyped_storage()))
        return result

    monkeypatch.setattr(launch, "panels", counted)
    return made


def plain(dtype=torch.float32):
    return nn.Sequential(nn.Linear(64, 250), nn.GELU(), nn.Linear(250, 70)).to(dtype).eval()


def compiled(model, **options):
    return torch.compile(model, backend="fusedmlp", **options, options=ALWAYS)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


# Widths that panels divide, and that they do not; rows that take each way through the products.
@pytest.mark.parametrize("rows", [1, 3, 13, 14, 100, 700])
@pytest.mark.parametrize(
    ("activation", "dtype"),
    slow_but(
        telling(itertools.product([PLAIN, GATED], DTYPES[:2])),
        itertools.product([PLAIN, GATED], DTYPES),
    ),
    ids=str,
)
def test_panels_are_multiplied_as_exactly_as_weights(rows, dtype, activation):
    gated = activation == GATED
    for widths in ((70, 90, 33), (256, 1000, 256)):
        weights = parameters(gated, *widths, dtype)
        matrices, biases = weights.by_kind()
        layouts = (launch.IN_PANELS,) * len(matrices)
        call = launch.caller(launch.Call(Kernel(dtype, (activation,), gated), widths, layouts))
        made = [*map(launch.panels, matrices)]
        # Errors of few numbers say little: several inputs of few rows are taken together.
        inputs = [torch.randn(rows, widths[0]).to(dtype) for _ in range(-(-50 // rows))]
        residual = torch.randn(rows, widths[2]).to(dtype)
        found = [call(x, *made, *biases, residual, None, None) for x in inputs]

        def others(inputs, weights, residual, activation=activation):
            run = functools.partial(ops.mlp, operands=[], activation=activation, plan="reference")
            return torch.cat([run(x, *weights) + residual for x in inputs])

        exact = others(double(inputs), double(weights), residual.double())
        assert_exact(torch.cat(found), others(inputs, weights, residual), exact)


def test_a_weight_comes_back_from_its_panels():
    for shape in ((33, 70), (64, 5), (1, 1), (0, 3), (3, 0)):
        weight = torch.randn(shape)
        for each in (weight, weight.t().contiguous().t()):
            assert torch.equal(launch.from_panels(launch.panels(each), shape[0]), weight)


def test_panels_in_float32_are_not_packed_again_at_a_call():
    sizes = (4096, (256, 1024, 256), False, 2)
    assert cutting.cut(*sizes).packs
    assert not cutting.cut(*sizes, ready=True).packs
    assert cutting.cut(*sizes, ready=True).floats == 0


@pytest.mark.parametrize("dtype", slow_but(DTYPES[:1], DTYPES[:2]), ids=str)
def test_frozen_weights_are_packed_once_for_any_number_of_rows(frozen, packed, dtype):
    from torch._inductor.utils import run_and_get_code

    model = plain(dtype)
    exact, call = copy.deepcopy(model).double(), compiled(model, dynamic=True)
    x = torch.randn(40, 64).to(dtype)
    _, (code,) = run_and_get_code(call, x)
    assert f"({launch.IN_PANELS}, {launch.IN_PANELS})" in code
    assert "rows_panels.default(" not in code
    for rows in (40, 3, 1000):
        x = torch.randn(rows, 64).to(dtype)
        assert_exact(call(x), model(x), exact(x.double()))
    assert len(packed) == 2


def conv1ds():
    return nn.Sequential(Conv1D(16, 8), nn.GELU(), Conv1D(8, 16))


@pytest.mark.parametrize(
    ("make", "weights"),
    [
        (lambda: Gated(lambda g, u: F.silu(g) * u), 3),
        (lambda: Packed(lambda both: both.chunk(2, -1)), 3),
        (conv1ds, 2),
    ],
    ids=["gated", "packed", "transposed"],
)
def test_frozen_weights_of_every_layout_are_packed_once(frozen, packed, make, weights):
    model, x = make().eval(), torch.randn(20, 8)
    call = compiled(model)
    for _ in range(2):
        torch.testing.assert_close(call(x), model(x))
    assert len(packed) == weights


def test_an_mlp_that_is_called_twice_has_its_panels_once(frozen, packed):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = MLP(F.gelu)

        def forward(self, x):
            return self.mlp(self.mlp(x).sin())

    model, x = Twice().eval(), torch.randn(20, 8)
    torch.testing.assert_close(compiled(model)(x), model(x))
    assert len(packed) == 2


def test_what_is_written_before_a_model_is_compiled_is_frozen(frozen):
    model, x = plain(), torch.randn(20, 64)
    compiled(model)(x)
    torch._dynamo.reset()
    model[0].weight.data.mul_(2.0)
    torch.testing.assert_close(compiled(model)(x), model(x))


def test_frozen_weights_are_constants_as_freezing_says(frozen):
    model, x = plain(), torch.randn(20, 64)
    call, before = compiled(model), model(x)
    call(x)
    model[0].weight.data.zero_()
    torch.testing.assert_close(call(x), before)


def test_weights_that_are_arguments_are_never_kept(frozen, packed):
    def function(x, up, down):
        return F.linear(F.relu(F.linear(x, up)), down)

    call = compiled(function)
    x, up, down = torch.randn(20, 64), torch.randn(100, 64), torch.randn(64, 100)
    for _ in range(2):
        torch.testing.assert_close(call(x, up, down), function(x, up, down), rtol=1e-4, atol=1e-4)
        up.data.mul_(2.0)
    assert packed == []


def test_weights_are_read_anew_where_only_one_compilations_options_freeze(packed):
    model, x = plain(), torch.randn(20, 64)
    with torch.no_grad():
        call = torch.compile(model, backend="fusedmlp", options={**ALWAYS, "freezing": True})
        for _ in range(2):
            torch.testing.assert_close(call(x), model(x))
            model[0].weight.data.mul_(2.0)
    assert packed == []


def test_of_discarded_weights_their_panels_stay_alone(frozen, packed):
    model, x = plain(), torch.randn(20, 64)
    originals = [weakref.ref(model[i].weight.untyped_storage()) for i in (0, 2)]
    with torch._inductor.config.patch(freezing_discard_parameters=True):
        call = compiled(model)
        call(x)
    gc.collect()
    assert [each() for each in originals] == [None, None]
    assert None not in [each() for each in packed]


def test_panels_are_let_go_with_the_code_that_inductor_loaded(frozen, packed):
    from torch._inductor.codecache import PyCodeCache

    before = len(PyCodeCache.modules)
    call = compiled(plain())
    call(torch.randn(20, 64))
    del call
    torch._dynamo.reset()
    for module in PyCodeCache.modules[before:]:  # PyTorch itself keeps them
        sys.modules.pop(module.__name__, None)
    del PyCodeCache.modules[before:], module
    gc.collect()
    assert [each() for each in packed] == [None, None]


def test_outside_of_inductor_layers_read_panels_as_the_weights_that_they_were():
    x, weights = torch.randn(20, 64), parameters(True, 64, 90, 33)
    matrices, biases = weights.by_kind()
    made = [ops.rows_panels(matrix) for matrix in matrices]
    others = (biases, None, None, None, None, [GATED], True, "")
    features = [matrix.shape[0] for matrix in matrices]
    found = ops.rows_of_panels(x, made, features, *others)
    assert torch.equal(found, ops.rows(x, matrices, *others))
    torch.library.opcheck(ops.rows_panels.default, (matrices[0],))
    torch.library.opcheck(ops.rows_of_panels.default, (x, made, features, *others))
