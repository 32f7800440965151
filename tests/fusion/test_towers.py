"""Towers: MLPs and chains of one input that share a call, and those that must not."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

from capture import calls_of, record
from fusion_backend import explain, fuse
from fusion_backend.options import Options
from fusion_backend.patterns import TOWERS
from repetition import slow_but

X = torch.randn(4, 8)
TARGET = torch.ops.fusedmlp.towers.default
ALWAYS = Options(policy="always", strict=True)

pytestmark = pytest.mark.usefixtures("no_cpp_compiler")


def layers(*widths):
    pairs = (nn.Linear(a, b) for a, b in itertools.pairwise(widths))
    return nn.Sequential(*itertools.chain.from_iterable((each, nn.Tanh()) for each in pairs))[:-1]


class Model(nn.Module):
    """Towers of given widths; ``body(self.towers, x)`` says how they are called."""

    def __init__(self, body=None, all_widths=((8, 16, 12, 3), (8, 5, 6, 7, 1))) -> None:
        super().__init__()
        self.towers = nn.ModuleList(layers(*widths) for widths in all_widths)
        self.body = body

    def forward(self, x):
        if self.body is not None:
            return self.body(self.towers, x)
        return [tower(x) for tower in self.towers]


def calls(recorder):
    return [call for graph in recorder.after for call in calls_of(graph, TARGET)]


def counts(recorder):
    """How many layers each tower of each call has."""
    return [list(call.args[4]) for call in calls(recorder)]


def test_the_declared_example_is_one_call():
    model, inputs = TOWERS.example()
    recorder, result = record(model, *inputs)
    assert counts(recorder) == [[2, 2]]
    assert [(site.form, site.rewritten, site.call) for site in recorder.sites] == 2 * [
        ("plain", True, 1)
    ]
    torch.testing.assert_close(result, model(*inputs))


def test_a_chain_and_an_mlp_share_a_call_that_shows_all_of_them():
    model = Model(all_widths=((8, 16, 12, 3), (8, 16, 1)))
    recorder, result = record(model, X)
    (call,) = calls(recorder)
    assert call.args[3:] == (["tanh(x)"] * 3, [3, 2], "reference")
    assert [site.form for site in recorder.sites] == ["chain", "plain"]
    assert [site.call for site in recorder.sites] == [1, 1]
    torch.testing.assert_close(result, model(X))
    assert [y.stride() for y in result] == [y.stride() for y in model(X)]


def test_towers_that_are_switched_off_have_calls_of_their_own():
    options = {"fusedmlp.policy": "always", "fusedmlp.disable_forms": "towers"}
    explanation = explain(Model(), X, options=options)
    assert not calls_of(explanation.graphs[0].after, TARGET)
    assert [(site.rewritten, site.call) for site in explanation.sites] == [(True, 0)] * 2


@pytest.mark.parametrize("policy", ["always", "auto"])
def test_chains_with_norms_between_their_layers_have_calls_of_their_own(policy):
    def tower(out):
        hidden = (nn.Linear(64, 64), nn.LayerNorm(64), nn.Tanh())
        return nn.Sequential(*hidden, nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, out))

    model = Model()
    model.towers = nn.ModuleList([tower(17), tower(1)])
    model, x = model.bfloat16().eval(), torch.randn(64, 64).bfloat16()
    options = {"fusedmlp.policy": policy, "fusedmlp.strict": True}
    with torch.no_grad():
        explanation = explain(model, x, target="h200", options=options)
    assert len(explanation.sites) == (2 if policy == "always" else 4)  # chains, or their pairs
    assert {site.call for site in explanation.sites} == {0}


@pytest.mark.parametrize(
    ("compiler", "dynamic"),
    slow_but([("aot_eager", True)], itertools.product(["aot_eager", "inductor"], [None, True])),
)
def test_gradients_are_those_of_eager(compiler, dynamic):
    model = Model(all_widths=((8, 16, 12, 3), (8, 16, 1)))
    compiled = torch.compile(model, backend=fused_for(compiler, [], ALWAYS), dynamic=dynamic)
    x = X.clone().requires_grad_()
    for name, parameter in model.named_parameters():  # a bias's gradient is one more C++ program
        parameter.requires_grad_(name in ("towers.0.0.bias", "towers.1.2.bias") or "weight" in name)
    given = (x, *(parameter for parameter in model.parameters() if parameter.requires_grad))
    found, right = (
        torch.autograd.grad([(y * y).sum() for y in f(x)], given) for f in (compiled, model)
    )
    torch.testing.assert_close(found, right)


def results_used_at_once(towers, x):
    action = torch.softmax(towers[0](x), -1)
    return action, towers[1](x).squeeze(-1)


def one_row(towers, x):
    row = x[0]
    return towers[0](row), towers[1](row)


def reshaped(towers, x):
    x = x.view(2, 2, 8)
    return towers[0](x).view(-1), towers[1](x)


def with_a_trunk(towers, x):
    x = F.relu(x)
    return towers[0](x), towers[1](x) + x.sum()


def writes_to_a_result(towers, x):
    policy = towers[0](x)
    policy.mul_(2.0)
    return policy, towers[1](x)


def writes_to_the_input_afterwards(towers, x):
    found = towers[0](x), towers[1](x)
    x.zero_()
    return found


def writes_in_between_to_something_else(towers, x):
    policy = towers[0](x)
    log = torch.zeros(3)
    log.add_(policy.sum())
    return policy, towers[1](x), log


def in_place_activations(towers, x):
    found = []
    for tower in towers:
        value = x
        for i in range(0, len(tower), 2):
            value = tower[i](F.relu_(value) if i else value)
        found.append(value)
    return found


@pytest.mark.parametrize(
    "body",
    [
        results_used_at_once,
        one_row,
        reshaped,
        with_a_trunk,
        writes_to_a_result,
        writes_to_the_input_afterwards,
        writes_in_between_to_something_else,
        in_place_activations,
    ],
)
@torch.no_grad()
def test_what_may_stand_around_towers(body):
    model = Model(body)
    recorder, result = record(model, X.clone())
    assert counts(recorder) == [[3, 4]]
    torch.testing.assert_close(result, model(X.clone()))


def other_input(towers, x):
    return towers[0](x), towers[1](x + 1.0)


def reads_the_other(towers, x):
    policy = towers[0](x)
    return policy, towers[1](F.pad(policy, (0, 5)))


def parameters_of_the_other(towers, x):
    policy = towers[0](x)
    first, *others = towers[1]
    hidden = F.linear(x, first.weight, first.bias * policy.mean())
    return policy, nn.Sequential(*others)(hidden)


def writes_to_the_input(towers, x):
    policy = towers[0](x)
    x.mul_(2.0)
    return policy, towers[1](x)


def writes_to_a_view_of_the_input(towers, x):
    policy = towers[0](x)
    x[0].zero_()
    return policy, towers[1](x)


def writes_to_a_parameter(towers, x):
    policy = towers[0](x)
    towers[1][0].bias.mul_(2.0)
    return policy, towers[1](x)


def under_autocast(towers, x):
    policy = towers[0](x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return policy, towers[1](x)


def flattened(towers, x):
    x = x.view(2, 2, 8)
    return [tower[2:](torch.tanh(tower[0](x)).flatten(0, 1)) for tower in towers]


@pytest.mark.parametrize(
    "body",
    [
        other_input,
        reads_the_other,
        parameters_of_the_other,
        writes_to_the_input,
        writes_to_a_view_of_the_input,
        writes_to_a_parameter,
        under_autocast,
        flattened,
    ],
)
@torch.no_grad()
def test_what_stands_in_the_way_leaves_a_call_each(body):
    model = Model(body)
    expected = copy.deepcopy(model)(X.clone())
    recorder, result = record(model, X.clone())
    assert counts(recorder) == []
    torch.testing.assert_close(result, expected)


def test_gradients_of_one_tower_alone_leave_a_call_each():
    """The operator keeps what it reads, and eager nothing of a tower without gradients."""

    def body(towers, x):
        return towers[0](x), towers[1](x)

    model = Model(body)
    model.towers[1].requires_grad_(False)
    recorder, result = record(model, X)
    assert counts(recorder) == []
    torch.testing.assert_close(result, model(X))


def test_results_are_where_the_first_tower_ended():
    recorder, _ = record(Model(results_used_at_once), X)
    (call,) = calls(recorder)
    (softmax,) = call.graph.find_nodes(op="call_function", target=torch.softmax)
    assert call < softmax


def test_towers_of_one_input_are_told_from_those_of_another():
    def body(towers, x):
        other = x + 1.0
        return [tower(each) for tower, each in zip(towers, [x, other, x, other], strict=True)]

    model = Model(body, ((8, 16, 1), (8, 16, 2), (8, 16, 3), (8, 4, 4, 4)))
    recorder, result = record(model, X)
    assert sorted(counts(recorder)) == [[2, 2], [2, 3]]
    assert [site.call for site in recorder.sites] == [1, 2, 1, 2]
    torch.testing.assert_close(result, model(X))


def test_a_gated_mlp_is_no_tower():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
            self.value = layers(8, 16, 1)

        def forward(self, x):
            return self.down(F.silu(self.gate(x)) * self.up(x)), self.value(x)

    model = Gated()
    recorder, result = record(model, X)
    assert counts(recorder) == []
    torch.testing.assert_close(result, model(X))


def test_an_exported_program_has_its_towers_fused():
    model = Model()
    program = torch.export.export(model, (X,))
    result = fuse(program, options=Options(policy="always"))
    assert len(calls_of(result.graph_module, TARGET)) == 1
    torch.testing.assert_close(result.graph_module(X), model(X))
    torch.testing.assert_close(result.exported_program.module()(X), model(X))


def test_a_graph_that_fetches_parameters_where_they_are_used_has_its_towers_fused():
    model = Model()
    traced = torch.fx.symbolic_trace(model)
    result = fuse(traced, (X,), Options(policy="always"))
    assert len(calls_of(result.graph_module, TARGET)) == 1
    torch.testing.assert_close(result.graph_module(X), model(X))


def test_calls_of_nested_graphs_are_numbered_apart():
    model = Model()

    def body(x):
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)

    def twice(x):
        return body(x), body(x + 1.0)

    recorder, result = record(twice, X)
    assert len({site.call for site in recorder.sites} - {0}) == len(calls(recorder)) == 2
    torch.testing.assert_close(result, twice(X))


def fused_for(compiler, calls, options):
    """A backend that fuses, collects the calls, and leaves the rest to another backend."""

    def backend(graph_module, example_inputs):
        result = fuse(graph_module, example_inputs, options).graph_module
        calls.extend(calls_of(result, TARGET))
        return lookup_backend(compiler)(result, example_inputs)

    return backend


def test_what_is_computed_again_in_the_backward_pass_has_right_gradients():
    calls = []
    options = Options(policy="always", strict=True, recompute=True)
    model = Model()
    compiled = torch.compile(model, backend=fused_for("aot_eager_decomp_partition", calls, options))
    found, right = (
        torch.autograd.grad([y.sum() for y in f(X)], tuple(model.parameters()))
        for f in (compiled, model)
    )
    torch.testing.assert_close(found, right)
    assert len(calls) == 1


def test_a_call_that_cannot_be_made_leaves_its_mlps_as_they_were(monkeypatch):
    from fusion_backend.fusion import fuse as fusing

    def fails(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(fusing, "rewrite_together", fails)
    model = Model()
    with pytest.warns(UserWarning, match="left a site as it was: RuntimeError: no"):
        recorder, result = record(model, X)
    assert [site.reason for site in recorder.sites] == ["internal-error"] * 2
    torch.testing.assert_close(result, model(X))


def planned(model, rows, **options):
    """The sites of a model with so many rows on an H200."""
    x = torch.randn(rows, model.towers[0][0].in_features).bfloat16()
    with torch.no_grad():
        return explain(model.bfloat16(), x, target="h200", options=options)


TWINS = ((393, 256, 256, 1), (393, 256, 256, 1))


def test_chains_that_do_not_pay_alone_take_the_place_of_their_pairs_together():
    explanation = planned(Model(all_widths=TWINS), 1024)
    assert [(site.form, site.plan, site.call) for site in explanation.sites] == [
        ("chain", "chain", 1)
    ] * 2
    (call,) = calls_of(explanation.graphs[0].after, TARGET)
    assert call.args[4] == [3, 3]


@pytest.mark.parametrize(
    ("all_widths", "rows", "options", "first"),
    [
        (TWINS[:1], 1024, {}, "activated"),
        (TWINS, 64, {}, "plain"),
        (TWINS, 1024, {"fusedmlp.disable_forms": "chain"}, "activated"),
        (TWINS, 1024, {"fusedmlp.disable_forms": "towers"}, "activated"),
        (TWINS, 1024, {"fusedmlp.policy": "never"}, "plain"),
    ],
)
def test_pairs_stay_where_chains_do_not_pay_or_are_switched_off(all_widths, rows, options, first):
    """Of many rows the first one is fused up to its hidden value, and the second one, too."""
    explanation = planned(Model(all_widths=all_widths), rows, **options)
    assert [site.form for site in explanation.sites] == [first, "plain"] * len(all_widths)
    assert not calls_of(explanation.graphs[0].after, TARGET)


def test_a_tower_whose_hidden_value_is_returned_shares_a_call_up_to_that_value():
    def body(towers, x):
        hidden = towers[0][2](torch.tanh(towers[0][0](x)))
        return towers[0][4](torch.tanh(hidden)), hidden, towers[1](x)

    explanation = planned(Model(body, TWINS), 1024)
    assert [site.reason for site in explanation.sites].count("hidden-escapes") == 1
    (call,) = calls_of(explanation.graphs[0].after, TARGET)
    assert call.args[4] == [2, 3]
