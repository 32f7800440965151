"""fuse(): the rewrite as a pure function, on every kind of graph module."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from capture import ALWAYS, fused_calls, record
from fusion_backend import fuse
from fusion_backend.errors import FusionError
from models import MLP, Gated, X


def test_a_symbolically_traced_module_is_fused_and_left_unchanged():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    traced = torch.fx.symbolic_trace(model)
    code = traced.code
    result = fuse(traced, [X], ALWAYS)
    assert fused_calls(result.graph_module) == 1
    assert traced.code == code
    torch.testing.assert_close(result.graph_module(X), model(X))


def test_parameters_are_shared_not_copied():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    fused = fuse(torch.fx.symbolic_trace(model), [X], ALWAYS).graph_module
    assert {id(p) for p in fused.parameters()} == {id(p) for p in model.parameters()}
    fused(X).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_exported_program_is_fused(dynamic):
    model = Gated(lambda g, u: F.silu(g) * u, bias=True)
    shapes = ({0: torch.export.Dim("batch")},) if dynamic else None
    program = torch.export.export(model, (X,), dynamic_shapes=shapes)
    result = fuse(program.module(), [X], ALWAYS)
    (site,) = result.sites
    assert (site.rewritten, site.form, site.activation) == (True, "gated", "silu(g) * u")
    assert isinstance(site.shape.rows, str) == dynamic
    torch.testing.assert_close(result.graph_module(X), model(X))
    if dynamic:
        larger = torch.randn(7, 5, 8)
        torch.testing.assert_close(result.graph_module(larger), model(larger))


def test_a_decomposed_exported_program_is_fused():
    model = MLP(F.gelu)
    program = torch.export.export(model, (X,)).run_decompositions()
    result = fuse(program.module(), [X], ALWAYS)
    assert [site.rewritten for site in result.sites] == [True]
    torch.testing.assert_close(result.graph_module(X), model(X))


def test_the_rewritten_graph_holds_one_call_and_none_of_the_old_ones():
    recorder, _ = record(MLP(F.gelu), X)
    (graph,) = recorder.after
    calls = [node for node in graph.graph.nodes if node.op.startswith("call")]
    (call,) = calls
    assert call.target is torch.ops.fusedmlp.mlp.default
    assert call.args[-2:] == ("gelu(x)", "rows")
    assert call.meta["example_value"].shape == X.shape


def test_two_sites_in_a_row_are_both_rewritten():
    model = nn.Sequential(MLP(F.gelu), nn.LayerNorm(8), MLP(F.silu))
    recorder, result = record(model, X)
    assert [site.activation for site in recorder.sites] == ["gelu(x)", "silu(x)"]
    assert fused_calls(recorder.after[0]) == 2
    torch.testing.assert_close(result, model(X))


def test_mlps_across_a_graph_break_are_found_in_their_graphs():
    first, second = MLP(F.gelu), MLP(F.silu)

    def model(x):
        x = first(x)
        torch._dynamo.graph_break()
        return second(x)

    recorder, result = record(model, X)
    assert len(recorder.after) == 2
    assert [site.rewritten for site in recorder.sites] == [True, True]
    torch.testing.assert_close(result, model(X))


def test_layers_that_are_left_out_at_random_are_found_where_they_run():
    layers = [MLP(F.gelu) for _ in range(3)]

    def dropping(x):
        for layer in layers:
            if torch.rand([]) < 0.5:
                x = x + layer(x)
        return x

    torch.manual_seed(0)  # draws 0.50, 0.77, 0.09
    recorder, result = record(dropping, X)
    torch.manual_seed(0)
    torch.testing.assert_close(result, dropping(X))
    assert [site.rewritten for site in recorder.sites] == [True] * len(recorder.sites)
    assert recorder.sites


def _scanned(model, x):
    def step(state, row):
        state = model(row) + state
        return state, state.clone()

    return scan(step, torch.zeros_like(x[0]), x)[1]


NESTED = {
    "branch of cond": lambda model, x: torch.cond(x.sum() > 0, model, lambda y: y + 1, (x,)),
    "region": lambda model, x: torch.compiler.nested_compile_region(lambda y: model(y))(x),
    "step of scan": _scanned,
    "body of a loop": lambda model, x: while_loop(
        lambda i, y: i < 2, lambda i, y: (i + 1, model(y)), (torch.tensor(0), x)
    )[1],
}


@pytest.mark.parametrize("name", NESTED)
def test_nested_graphs_are_searched(name):
    model = MLP(F.gelu)

    def nesting(x):
        return NESTED[name](model, x)

    with torch.no_grad():
        recorder, result = record(nesting, X)
        assert [site.rewritten for site in recorder.sites] == [True]
        torch.testing.assert_close(result, nesting(X))


def test_an_mlp_in_inference_mode_is_fused():
    model = MLP(F.gelu)

    def inferring(x):
        with torch.inference_mode():
            return model(x)

    recorder, result = record(inferring, X)
    assert [site.rewritten for site in recorder.sites] == [True]
    torch.testing.assert_close(result, inferring(X))


@pytest.mark.parametrize(
    "mark", [torch._dynamo.mark_dynamic, torch._dynamo.decorators.mark_unbacked]
)
@pytest.mark.parametrize("leading", [(7,), (7, 3)])
def test_rows_may_be_marked_as_dynamic_or_unbacked(mark, leading):
    model = Gated(lambda g, u: F.silu(g) * u)
    x = torch.randn(*leading, 8)
    mark(x, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # of what PyTorch calls sizes elsewhere
        recorder, result = record(model, x)
    assert [site.rewritten for site in recorder.sites] == [True]
    torch.testing.assert_close(result, model(x))


def test_a_graph_that_does_not_run_on_its_inputs_is_refused():
    traced = torch.fx.symbolic_trace(MLP(F.gelu))
    with pytest.raises(FusionError, match="must run on its example inputs"):
        fuse(traced, [torch.randn(3, 9)], ALWAYS)


@pytest.mark.parametrize("rows", [(), (0,), (1,), (2, 0, 3)])
def test_any_number_of_rows_gives_what_eager_gives(rows):
    model = MLP(F.gelu)
    x = torch.randn(*rows, 8)
    recorder, result = record(model, x)
    assert [site.rewritten for site in recorder.sites] == [True]
    torch.testing.assert_close(result, model(x))


def test_gradients_of_every_operand_are_those_of_eager():
    model = Gated(lambda g, u: F.silu(g) * u, bias=True)
    ours = X.clone().requires_grad_()
    recorder, result = record(model, ours)
    assert [site.rewritten for site in recorder.sites] == [True]
    result.square().sum().backward()
    gradients = [ours.grad] + [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    theirs = X.clone().requires_grad_()
    model(theirs).square().sum().backward()
    expected = [theirs.grad] + [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(gradients, expected)
