"""Chains of linear layers as sites: which are formed, and what stands in the way."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from capture import only_site, record, sites_of
from fusion_backend import explain, fuse
from fusion_backend.options import Options
from fusion_backend.patterns import CHAIN

X = torch.randn(4, 8)


class Tower(nn.Module):
    """Linear layers of given widths; ``body(self, x)`` says what is between."""

    def __init__(self, widths, body=None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.body = body

    def forward(self, x):
        if self.body is not None:
            return self.body(self.layers, x)
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return self.layers[-1](x)


def test_the_declared_example_is_one_site():
    model, inputs = CHAIN.example()
    recorder, result = record(model, *inputs)
    (site,) = recorder.sites
    assert (site.form, site.activation, site.rewritten) == ("chain", "relu(x)", True)
    assert site.shape == (4, 8, 32, 1)
    assert (site.chain, site.sizes) == ((32, 16), "4×8→32→16→1")
    torch.testing.assert_close(result, model(*inputs))


def test_the_chain_is_one_call_after_and_none_before():
    explanation = explain(Tower((8, 4, 5, 6, 2)), X, options={"fusedmlp.policy": "always"})
    ((before, after),) = explanation.graphs
    target = torch.ops.fusedmlp.chain.default
    assert not before.graph.find_nodes(op="call_function", target=target)
    (call,) = after.graph.find_nodes(op="call_function", target=target)
    assert call.args[3:] == (["relu(x)"] * 3, "reference")
    assert "8→4→5→6→2" in str(explanation)


def test_each_activation_keeps_its_place():
    def body(layers, x):
        hidden = torch.sin(layers[1](F.gelu(layers[0](x))))
        return layers[3](F.silu(layers[2](hidden)))

    model = Tower((8, 4, 5, 6, 2), body)
    _recorder, result = record(model, X)
    assert only_site(model, X).activation == "gelu(x), sin(x), silu(x)"
    torch.testing.assert_close(result, model(X))


@pytest.mark.slow  # tests/operators differentiates chains that are compiled
@pytest.mark.parametrize("dynamic", [None, True])
def test_gradients_through_a_chain_are_those_of_eager(dynamic):
    model = Tower((8, 4, 5, 2))
    options = {"fusedmlp.policy": "always", "fusedmlp.strict": True}
    compiled = torch.compile(model, backend="fusedmlp", dynamic=dynamic, options=options)
    for layer in model.layers:
        layer.bias.requires_grad_(False)  # its gradient is a sum, which is one more kernel each
    weights = [layer.weight for layer in model.layers]
    found, right = (torch.autograd.grad(f(X).sum(), weights) for f in (compiled, model))
    torch.testing.assert_close(found, right)


def in_place(layers, x):
    return layers[2](F.relu(layers[1](F.relu(layers[0](x), inplace=True)), inplace=True))


def reshaped(layers, x):
    hidden = F.relu(layers[0](x.view(2, 2, 8))).reshape(4, -1)
    return layers[2](F.relu(layers[1](hidden)).view(2, 2, -1))


def without_bias(layers, x):
    hidden = F.relu(F.linear(x, layers[0].weight))
    return layers[2](F.relu(hidden @ layers[1].weight.t() + layers[1].bias))


def tied(layers, x):
    return layers[2](F.tanh(layers[2](F.tanh(layers[2](x)))))


@pytest.mark.parametrize("body", [in_place, reshaped, without_bias, tied])
def test_what_may_stand_in_a_chain(body):
    widths = (8, 4, 5, 2) if body is not tied else (8, 8, 8, 8)
    model = Tower(widths, body)
    recorder, result = record(model, X)
    (site,) = recorder.sites
    assert (site.form, site.rewritten) == ("chain", True)
    torch.testing.assert_close(result, model(X))
    assert result.stride() == model(X).stride()


def test_an_exported_program_has_its_chains_fused():
    program = torch.export.export(Tower((8, 4, 5, 2)), (X,)).module()
    result = fuse(program, (X,), Options(policy="always"))
    assert [site.form for site in result.sites] == ["chain"]
    torch.testing.assert_close(result.graph_module(X), program(X))


def returns_a_hidden_value(layers, x):
    first = F.relu(layers[0](x))
    second = layers[1](first)
    return layers[2](F.relu(second)), second


def writes_to_the_input(layers, x):
    hidden = layers[1](F.relu(layers[0](x)))
    x.zero_()  # the chain would read it here
    return layers[2](F.relu(hidden))


def writes_to_a_parameter(layers, x):
    hidden = layers[1](F.relu(layers[0](x)))
    layers[0].weight.mul_(2.0)
    return layers[2](F.relu(hidden))


def branches(layers, x):
    hidden = layers[1](F.relu(layers[0](x)))
    return layers[2](F.relu(hidden)) + layers[2](F.tanh(hidden))


@pytest.mark.parametrize(
    ("body", "reasons"),
    [
        (returns_a_hidden_value, [None, "hidden-escapes"]),
        (writes_to_the_input, [None, "overlaps"]),
        (writes_to_a_parameter, [None, "overlaps"]),
        (branches, [None, "hidden-escapes", "hidden-escapes"]),
    ],
)
def test_what_stands_in_the_way_leaves_pairs(body, reasons):
    model = Tower((8, 32, 5, 2), body)
    with torch.no_grad():
        sites = sites_of(model, X.clone())
    found = [(site.form, None if site.rewritten else site.reason) for site in sites]
    assert found == [("plain", reason) for reason in reasons]


def test_a_gated_pair_is_no_link():
    def body(layers, x):
        hidden = layers[1](F.silu(layers[0](x)) * layers[0](x + 0.0))
        return layers[3](F.relu(layers[2](F.relu(hidden))))

    sites = sites_of(Tower((8, 16, 4, 5, 2), body), X)
    assert [site.form for site in sites if site.rewritten] == ["chain"]


@pytest.mark.parametrize(
    ("widths", "forms"),
    [
        ((300, 8, 8, 300), ["chain"]),
        ((300, 300, 8, 8, 8), ["plain", "chain"]),
        ((8, 8, 8, 300, 300), ["chain", "plain"]),
        ((8, 300, 8, 300, 8), ["chain"]),
        ((8, 300, 300, 8), ["plain", "plain"]),
        ((8, 8, 8, 8, 300, 300, 8, 8, 8, 8), ["chain", *["plain"] * 2, "chain"]),
    ],
)
@pytest.mark.usefixtures("no_cpp_compiler")
def test_the_longest_chain_that_one_kernel_can_run_is_formed(widths, forms):
    model, x = Tower(widths), torch.randn(3, widths[0])
    recorder, result = record(model, x)
    assert [site.form for site in recorder.sites] == forms
    torch.testing.assert_close(result, model(x))


@pytest.mark.usefixtures("no_cpp_compiler")
def test_a_pair_that_shares_a_layer_with_a_chain_overlaps():
    pair, chain = sites_of(Tower((300, 300, 8, 8, 8)), torch.randn(3, 300))
    assert (pair.sizes, pair.reason) == ("3×300→300→8", "overlaps")
    assert (chain.sizes, chain.rewritten) == ("3×300→8→8→8", True)


@pytest.mark.usefixtures("no_cpp_compiler")
def test_more_layers_than_one_kernel_takes_become_several_chains():
    model = Tower([8] * 24)
    recorder, result = record(model, X)
    assert [len(site.chain) for site in recorder.sites if site.form == "chain"] == [15, 6]
    torch.testing.assert_close(result, model(X))


@pytest.mark.parametrize("policy", ["auto", "never"])
def test_pairs_are_planned_where_no_chain_is_wanted(policy):
    explanation = explain(Tower((8, 4, 5, 2)), X, options={"fusedmlp.policy": policy})
    assert [site.form for site in explanation.sites] == ["plain", "plain"]
