"""A tensor to which eager's autograd finds no way gets no gradient, not even zeros."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from capture import record
from repetition import walked

X = torch.randn(4, 8)
SLOPE = torch.rand(16)


class Layers(nn.Module):
    """Linear layers, joined as a function of them, the parameter ``p`` and x says."""

    def __init__(self, program, bias=True):
        super().__init__()
        self.gate, self.up = nn.Linear(8, 16, bias), nn.Linear(8, 16, bias)
        self.packed, self.middle = nn.Linear(8, 32, bias), nn.Linear(16, 16, bias)
        self.down, self.norm = nn.Linear(16, 8, bias), nn.LayerNorm(16)
        self.p = nn.Parameter(SLOPE.clone())
        self.program = program

    def forward(self, x):
        return self.program(self, x)


def gated(f):
    return lambda m, x: m.down(f(m.gate(x), m.up(x)))


def plain(f):
    return lambda m, x: m.down(f(m.up(x)))


PROGRAMS = {
    "a compared gate": gated(lambda g, u: (g > 0) * u),
    "a chosen gate": gated(lambda g, u: torch.where(g > 0, u, u * 0.5)),
    "a gate that cancels": gated(lambda g, u: torch.where(g > 0, u, u)),
    "a masking gate": gated(lambda g, u: u.masked_fill(g < 0, 0.0)),
    "the other way round": gated(lambda g, u: torch.where(u > 0, g, -g)),
    "both compared": gated(lambda g, u: (g > u).float()),
    "a flat gate": gated(lambda g, u: g.sign() * u),
    "a gate of which the sign is taken": gated(lambda g, u: torch.sign(g) * u),
    "a gate that becomes one": gated(lambda g, u: g**0 * (g > 0) * u),
    "a step": plain(lambda h: (h > 0).float()),
    "a step of made constants": plain(
        lambda h: torch.where(h > 0, torch.ones_like(h), torch.zeros_like(h))
    ),
    "a sign": plain(torch.sign),
    "a compared parameter": lambda m, x: m.down(m.up(x) * (m.up(x) > m.p)),
    "a parameter chosen by a step": lambda m, x: m.down((m.up(x) > 0) * m.p),
    "a packed gate": lambda m, x: m.down((lambda g, u: (g > 0) * u)(*m.packed(x).chunk(2, dim=-1))),
    "packed, both compared": lambda m, x: m.down(
        (lambda g, u: (g > u).float())(*m.packed(x).chunk(2, dim=-1))
    ),
    "a compared layer of another input": lambda m, x: m.down(m.up(x) * (m.gate(x * 2) > 0)),
    "the first of a chain": lambda m, x: m.down(F.relu(m.middle((m.up(x) > 0).float()))),
    "the second of a chain": lambda m, x: m.down((m.middle(F.relu(m.up(x))) > 0).float()),
    "up to the hidden value": lambda m, x: m.down(m.norm((m.gate(x) > 0) * m.up(x))),
    "a step up to the hidden value": lambda m, x: m.down(m.norm((m.up(x) > 0).float())),
}


def gradients(model, run):
    model.zero_grad()
    x = X.clone().requires_grad_()
    run(x).square().sum().backward()
    return {"x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


def same(found, expected):
    assert {n for n, g in found.items() if g is None} == {
        n for n, g in expected.items() if g is None
    }
    for name, gradient in expected.items():
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient)


@pytest.mark.parametrize(("name", "bias"), walked(PROGRAMS, [True, False]))
def test_the_same_gradients_are_made_as_in_eager(name, bias):
    model = Layers(PROGRAMS[name], bias)
    recorder, _ = record(model, X)
    assert any(site.rewritten for site in recorder.sites)
    (fused,) = recorder.after

    def run(x):
        torch._dynamo.reset()
        return torch.compile(model, backend=recorder)(x)

    assert "fusedmlp" in fused.code
    same(gradients(model, run), gradients(model, model))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a compared gate", "a step", "the first of a chain"])
def test_compiled_code_makes_the_same_gradients(name):
    model = Layers(PROGRAMS[name])
    torch._dynamo.reset()
    run = torch.compile(model, backend="fusedmlp", options={"fusedmlp.policy": "always"})
    same(gradients(model, run), gradients(model, model))


def test_weight_decay_leaves_a_compared_gate_alone():
    model = Layers(PROGRAMS["a compared gate"])
    before = model.gate.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    record(model, X)[1].sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.gate.weight, before, rtol=0, atol=0)


def test_autograd_grad_says_that_a_compared_gate_is_unused():
    model = Layers(PROGRAMS["a compared gate"])
    y = record(model, X)[1].sum()
    of_gate, of_up = torch.autograd.grad(y, (model.gate.weight, model.up.weight), allow_unused=True)
    assert of_gate is None
    assert of_up is not None


def test_an_infinite_weight_of_a_compared_gate_stays_out_of_the_gradient():
    model = Layers(PROGRAMS["a compared gate"])
    with torch.no_grad():
        model.gate.weight[0, 0] = float("inf")
    recorder, _ = record(model, X)
    run = torch.compile(model, backend=recorder)
    found = gradients(model, run)["x"]
    assert found.isfinite().all()
    torch.testing.assert_close(found, gradients(model, model)["x"])


@pytest.mark.parametrize("name", ["a compared gate", "a chosen gate", "a step"])
def test_second_derivatives_are_those_of_eager(name):
    model = Layers(PROGRAMS[name])

    def penalty(run):
        x = X.clone().requires_grad_()
        wanted = (x, model.up.weight, model.gate.weight, model.down.weight)
        first = torch.autograd.grad(
            run(x).square().sum(), wanted, create_graph=True, allow_unused=True
        )
        total = sum(g.square().sum() for g in first if g is not None)
        second = torch.autograd.grad(total, wanted, allow_unused=True)
        return [*first, *second]

    recorder, _ = record(model, X)
    for found, expected in zip(
        penalty(torch.compile(model, backend=recorder)), penalty(model), strict=True
    ):
        if expected is None or found is None:
            assert found is expected
        else:
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["a compared gate", "a flat gate", "a step", "a sign"])
def test_transforms_of_a_fused_graph_are_those_of_eager(name):
    model = Layers(PROGRAMS[name]).requires_grad_(False)
    fused = record(model, X)[0].after[0]
    order = [node.name for node in fused.graph.find_nodes(op="placeholder")]
    inputs = {
        "l_self_modules_{}_parameters_{}_".format(*path.split(".")): parameter
        for path, parameter in model.named_parameters()
        if "." in path
    }

    def run(x):
        return fused(*[x if name == "l_x_" else inputs[name] for name in order])[0]

    direction = torch.ones_like(X)
    for transform in (
        lambda f: torch.func.grad(lambda x: f(x).square().sum())(X),
        lambda f: torch.func.vmap(f)(X),
        lambda f: torch.func.jvp(f, (X,), (direction,))[1],
        lambda f: torch.func.jacrev(lambda x: f(x).sum(-1))(X),
        lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(X),
    ):
        torch.testing.assert_close(transform(run), transform(model))
