"""An exception at one site costs that site, and leaves the graph as it was there."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from capture import ALWAYS, fused_calls
from fusion_backend import Options, fuse
from fusion_backend.errors import FusionError
from fusion_backend.fusion import decisions, neighbours, rewriting, walk
from fusion_backend.fusion import fuse as fusion
from fusion_backend.fusion.transaction import transaction
from fusion_backend.planning.planner import plan
from repetition import slow_but

STRICT = Options(policy="always", strict=True)
X = torch.randn(4, 8)


class Two(nn.Module):
    """Two MLPs one after the other, of which the second one's activation is a sine."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.sin(self.up(self.norm(self.first(x)))))


def fail_at_sine(monkeypatch, module, name):
    """Let a function raise if the site that it is given has a sine between its layers."""
    original = getattr(module, name)

    def failing(*args, **kwargs):
        for site in args:
            calls = getattr(getattr(site, "match", site), "calls", ())
            named = "sin(" in str(getattr(site, "activation", ""))
            if named or any(node.name.startswith("sin") for node in calls):
                raise ArithmeticError("broken")
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, failing)


def pointwise_raises(monkeypatch):
    original = walk.pointwise_expression

    def failing(node, operand):
        if node.name.startswith("sin"):
            raise ArithmeticError("broken")
        return original(node, operand)

    monkeypatch.setattr(walk, "pointwise_expression", failing)


STAGES = {
    "matching": pointwise_raises,
    "legality": lambda m: fail_at_sine(m, decisions, "refusal"),
    "planning": lambda m: fail_at_sine(m, decisions, "plan"),
    "the norm before": lambda m: fail_at_sine(m, neighbours, "prenorm_of"),
    "the sum after": lambda m: fail_at_sine(m, neighbours, "residual_of"),
    "the record": lambda m: fail_at_sine(m, fusion, "describe"),
    "rewriting": lambda m: fail_at_sine(m, rewriting, "_operands"),
    "verification": lambda m: fail_at_sine(m, rewriting, "result_shape"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_costs_one_site_and_warns_once(stage, monkeypatch):
    STAGES[stage](monkeypatch)
    model = Two()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fuse(torch.fx.symbolic_trace(model), [X], ALWAYS)
    (warning,) = caught
    assert "left a site as it was: ArithmeticError: broken" in str(warning.message)
    reasons = [None if site.rewritten else site.reason for site in result.sites]
    assert sorted(reasons, key=str) == [None, "internal-error"]
    assert fused_calls(result.graph_module) == 1
    torch.testing.assert_close(result.graph_module(X), model(X))


@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_is_raised_under_strict(stage, monkeypatch):
    STAGES[stage](monkeypatch)
    with pytest.raises(FusionError, match="ArithmeticError: broken"):
        fuse(torch.fx.symbolic_trace(Two()), [X], STRICT)


def test_a_chain_that_raises_leaves_its_links_to_be_fused(monkeypatch):
    def fail_of_chains(setting, *others):
        if setting.is_chain:
            raise ArithmeticError("broken")
        return plan(setting, *others)

    monkeypatch.setattr(decisions, "plan", fail_of_chains)
    widths = (8, 16, 16, 8)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    with pytest.warns(UserWarning, match="broken"):
        result = fuse(torch.fx.symbolic_trace(model), [X], ALWAYS)
    assert fused_calls(result.graph_module) == 1
    torch.testing.assert_close(result.graph_module(X), model(X))


def test_a_call_that_would_return_another_shape_is_not_made(monkeypatch):
    monkeypatch.setattr(rewriting, "result_shape", lambda match: (2, 2, 8))
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    traced = torch.fx.symbolic_trace(model)
    with pytest.warns(UserWarning, match="must return torch.float32"):
        result = fuse(traced, [X], ALWAYS)
    assert [site.reason for site in result.sites] == ["internal-error"]
    assert not any("fusedmlp" in str(node.target) for node in result.graph_module.graph.nodes)


def test_what_was_inserted_before_an_exception_is_erased():
    graph = torch.fx.symbolic_trace(nn.Linear(8, 16)).graph
    nodes = list(graph.nodes)

    def build():
        with transaction(graph), graph.inserting_before(nodes[-1]):
            first = graph.call_function(torch.relu, (nodes[0],))
            graph.call_function(torch.neg, (first,))
            raise ArithmeticError("broken")

    with pytest.raises(ArithmeticError):
        build()
    assert list(graph.nodes) == nodes


def layers(activation, up=torch.randn(16, 8), down=torch.randn(8, 16)):  # noqa: B008
    """A program of two layers; the activation may read more arguments."""
    return lambda x, *others: F.linear(activation(F.linear(x, up), *others), down)


ONE = torch.randn(1, 8)
ODD = {
    "float8 between": (layers(lambda h: F.relu(h).to(torch.float8_e4m3fn).float()), ()),
    "float8 before": (layers(lambda h: F.gelu(h.to(torch.float8_e5m2).float())), ()),
    "alpha": (layers(lambda h, a: torch.add(h, F.relu(h), alpha=a)), (0.5,)),
    "alpha of a difference": (layers(lambda h, a: torch.sub(h, F.relu(h), alpha=a)), (0.5,)),
    "alpha, reversed": (layers(lambda h, a: torch.rsub(h, F.relu(h), alpha=a)), (0.5,)),
    "alpha is an integer": (layers(lambda h, a: torch.add(h, F.relu(h), alpha=a)), (3,)),
    "alpha is a size": (layers(lambda h: torch.add(h, F.relu(h), alpha=h.shape[0])), ()),
    "alpha is a tensor": (
        layers(lambda h, a: torch.add(h, F.relu(h), alpha=a)),
        (torch.tensor(2.0),),
    ),
    "clamp": (layers(lambda h, a: torch.clamp(h, -a, a)), (0.5,)),
    "clamp by integers": (layers(lambda h, a: h.clamp(max=a)), (3,)),
    "clamp by a size": (layers(lambda h: h.clamp(max=h.shape[0])), ()),
    "slope": (layers(lambda h, a: F.rrelu(h, a, a)), (0.25,)),
    "no dimension left": (
        lambda x, z: F.linear(F.silu(F.linear(x, ONE)) * F.linear(z, ONE).squeeze(), ONE.t()),
        (torch.randn(1, 8),),
    ),
    "reshaped to no dimension": (
        lambda x, z: F.linear(F.silu(F.linear(x, ONE)) * F.linear(z, ONE).reshape([]), ONE.t()),
        (torch.randn(8),),
    ),
    "einsum, broadcast input": (
        lambda x: (
            F.relu(torch.einsum("bi,ij->bj", x[:, :1], torch.ones(8, 16))) @ torch.ones(16, 8)
        ),
        (),
    ),
    "einsum, broadcast weight": (
        lambda x: F.relu(torch.einsum("...i,ji->...j", x, torch.ones(16, 1))) @ torch.ones(16, 8),
        (),
    ),
}


@pytest.mark.parametrize(
    ("name", "dynamic"),
    slow_but(
        [("alpha", False), *((name, True) for name in ODD)], itertools.product(ODD, (False, True))
    ),
)
def test_an_odd_program_loses_no_graph(name, dynamic):
    """Run eagerly after the rewrite, under strict, where an exception would be raised."""
    program, others = ODD[name]
    torch._dynamo.reset()

    def backend(graph_module, example_inputs):
        return fuse(graph_module, example_inputs, STRICT).graph_module

    with torch.no_grad():
        found = torch.compile(program, backend=backend, dynamic=dynamic)(X, *others)
        torch.testing.assert_close(found, program(X, *others))


def test_a_symbolic_alpha_and_bound_are_constants_of_the_activation():
    program = layers(lambda h, a: torch.add(h, h.clamp(-a, a), alpha=a))
    found = []

    def backend(graph_module, example_inputs):
        result = fuse(graph_module, example_inputs, STRICT)
        found.extend(site.activation for site in result.sites if site.rewritten)
        return result.graph_module

    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(program, backend=backend, dynamic=True)
        for alpha in (0.5, 0.25):
            torch.testing.assert_close(compiled(X, alpha), program(X, alpha))
    assert found == ["x + 0.5 * clamp(x, -0.5, 0.5)", "x + 0.25 * clamp(x, -0.25, 0.25)"]
