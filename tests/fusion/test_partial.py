"""Sites that are fused up to the hidden value, as something else than the last layer needs it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from capture import Recorder, fused_calls, record, sites_of
from fusion_backend import Options, explain, fuse
from fusion_backend.backend import fusedmlp
from fusion_backend.patterns import ACTIVATED
from models import MLP, Around, X

OPERATOR = torch.ops.fusedmlp.activated_linear.default


def _rms_norm_by_hand(m, x):
    h = F.gelu(m.up(x))
    return m.down(h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))


def _learnt_norm_by_hand(m, x):
    h = F.gelu(m.up(x)).float()
    normed = (h - h.mean(-1, keepdim=True)) * torch.rsqrt(h.var(-1, keepdim=True) + 1e-6)
    return m.down(normed * (1 + m.up.bias) + m.up.bias)


def _gated_norm(m, x):
    h = F.silu(m.up(x)) * F.linear(x, 2 * m.up.weight)
    return m.down(F.layer_norm(h, (16,), m.up.bias, m.up.bias))


def _packed_norm(m, x):
    weight = torch.cat([m.up.weight, -m.up.weight])
    gate, up = F.linear(x, weight, m.up.bias.repeat(2)).chunk(2, -1)
    return m.down(F.rms_norm(F.silu(gate) * up, (16,)))


def _norm_and_function(m, x):
    return m.down(torch.tanh(F.layer_norm(F.gelu(m.up(x)), (16,))))


def _norm_of_a_residual(m, x):
    h = F.gelu(m.up(x))
    return m.down(F.layer_norm(h, (16,)) + h)


def _returned(m, x):
    h = F.gelu(m.up(x))
    return m.down(h), h


def _returned_as_a_view(m, x):
    h = F.gelu(m.up(x))
    return m.down(h), h.view(-1, 4)


def _view_read_by_the_layer(m, x):
    h = F.gelu(m.up(x))
    return m.down(h.flatten(0, 1)), h


def _activated_in_place(m, x):
    h = F.relu(m.up(x), inplace=True)
    return m.down(h), h


def _written_to_afterwards(m, x):
    h = F.gelu(m.up(x))
    y = m.down(F.layer_norm(h, (16,)))
    h.mul_(2.0)
    return y, h


def _view_written_to_afterwards(m, x):
    h = F.gelu(m.up(x))
    y = m.down(F.layer_norm(h, (16,)))
    h[:1].add_(1.0)
    return y, h


def _auxiliary_loss(m, x):
    h = F.gelu(m.up(x))
    return m.down(h), h.abs().mean()


FUSED = {
    "layer norm": ("gelu(x)", lambda m, x: m.down(F.layer_norm(F.gelu(m.up(x)), (16,)))),
    "rms norm": ("gelu(x)", lambda m, x: m.down(F.rms_norm(F.gelu(m.up(x)), (16,)))),
    "learnt layer norm": (
        "relu(x)",
        lambda m, x: m.down(F.layer_norm(F.relu(m.up(x)), (16,), m.up.bias, m.up.bias)),
    ),
    "rms norm by hand": ("gelu(x)", _rms_norm_by_hand),
    "learnt norm by hand": ("gelu(x)", _learnt_norm_by_hand),
    "norm of a gated activation": ("silu(g) * u", _gated_norm),
    "norm of a packed activation": ("silu(g) * u", _packed_norm),
    "norm, then a function": ("gelu(x)", _norm_and_function),
    "norm and residual": ("gelu(x)", _norm_of_a_residual),
    "returned": ("gelu(x)", _returned),
    "returned as a view": ("gelu(x)", _returned_as_a_view),
    "read as a view": ("gelu(x)", _view_read_by_the_layer),
    "activated in place": ("relu(x)", _activated_in_place),
    "auxiliary loss": ("gelu(x)", _auxiliary_loss),
    "written to afterwards": ("gelu(x)", _written_to_afterwards),
    "view written to afterwards": ("gelu(x)", _view_written_to_afterwards),
}
IN_PLACE = ("written to afterwards", "view written to afterwards")


def outcome(function, model, x, grad):
    """All results, and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_(grad)
    results = function(x)
    results = results if isinstance(results, tuple) else (results,)
    if not grad:
        return results, ()
    loss = sum((i + 1) * result.square().sum() for i, result in enumerate(results))
    return results, torch.autograd.grad(loss, [x, *model.parameters()])


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_it_is_fused_up_to_the_hidden_value_and_gives_what_eager_gives(name, grad):
    activation, body = FUSED[name]
    model = Around(body)
    grad = grad and name not in IN_PLACE  # there, eager has no gradients
    with torch.set_grad_enabled(grad):
        recorder = Recorder()
        ours = outcome(torch.compile(model, backend=recorder), model, X, grad)
        theirs = outcome(model, model, X, grad)
    (site,) = recorder.sites
    assert (site.form, site.activation, site.plan) == ("activated", activation, "reference")
    assert fused_calls(recorder.after[0], OPERATOR) == 1
    assert fused_calls(recorder.after[0]) == 0
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert [mine.stride() for mine in ours[0]] == [right.stride() for right in theirs[0]]


@pytest.mark.parametrize("norm", [nn.LayerNorm(16), nn.GroupNorm(4, 16), nn.BatchNorm1d(16)])
def test_it_is_fused_before_a_norm_of_an_exported_program_that_is_decomposed(norm):
    model, x = MLP(nn.Sequential(nn.GELU(), norm)), torch.randn(6, 8)
    program = torch.export.export(model, (x,)).run_decompositions()
    sites = fuse(program.module(), (x,), Options(policy="always")).sites
    assert [(site.form, site.activation, site.rewritten) for site in sites] == [
        ("activated", "gelu(x)", True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["learnt layer norm", "returned as a view"])
def test_inductor_compiles_it_forward_and_backward(name):
    model = Around(FUSED[name][1])
    options = {"fusedmlp.policy": "always", "fusedmlp.strict": True}
    compiled = torch.compile(model, backend=fusedmlp, options=options)
    ours, theirs = (outcome(function, model, X, True) for function in (compiled, model))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def _preactivation_escapes(m, x):
    h = m.up(x)
    return m.down(F.gelu(h)), h


def _part_escapes(m, x):
    h = F.gelu(m.up(x))
    return m.down(h * 2.0), h


def _written_to_between(m, x):
    h = F.gelu(m.up(x))
    h.mul_(2.0)
    return m.down(F.layer_norm(h, (16,)))


def _input_written_to(m, x):
    h = m.up(x)
    x.zero_()
    return m.down(F.layer_norm(F.gelu(h), (16,)))


def _kept_in_float32(m, x):
    m = m.bfloat16()
    h = F.gelu(m.up(x.bfloat16()).float())
    return m.down(h.bfloat16()), h


def _softmax_after_the_norm(m, x):
    return m.down(F.softmax(F.layer_norm(F.gelu(m.up(x)), (16,)), -1))


def _other_rows(m, x):
    return m.down(F.layer_norm(F.gelu(m.up(x)).view(3, -1, 5), (5,)).view(3, 5, 16))


def _batch_norm(m, h):
    return F.batch_norm(h, m.up.bias.detach(), m.up.bias.detach().exp())


def _after_a_batch_norm_of_positions(m, x):
    h = F.gelu(_batch_norm(m, m.up(x).transpose(1, -1)).transpose(1, -1))
    return m.down(h), h


def _after_a_batch_norm_of_rows(m, x):
    h = F.gelu(_batch_norm(m, m.up(x).flatten(0, 1)))
    return m.down(h), h


def test_what_follows_a_batch_norm_of_positions_keeps_the_strides_of_eager():
    model = Around(_after_a_batch_norm_of_positions)
    with torch.no_grad():
        _, (_, h) = record(model, X)
        assert h.stride() == model(X)[1].stride()
        assert not h.is_contiguous()
        (site,) = sites_of(model, X.clone())
        assert (site.fused, site.reason) == (False, "hidden-escapes")
        (site,) = sites_of(Around(_after_a_batch_norm_of_rows), X.clone())
        assert site.rewritten


DECLINED = {
    "the pre-activation escapes": ("hidden-escapes", _preactivation_escapes),
    "a part of the activation escapes": ("hidden-escapes", _part_escapes),
    "f is kept in float32": ("hidden-escapes", _kept_in_float32),
    "the norm stands before the activation": (
        "norm-between",
        lambda m, x: m.down(F.gelu(F.layer_norm(m.up(x), (16,)))),
    ),
    "the input is written to": ("norm-between", _input_written_to),
    "something else stands between too": ("non-pointwise", _softmax_after_the_norm),
}


@pytest.mark.parametrize("name", DECLINED)
def test_what_cannot_be_fused_in_part_keeps_its_reason(name):
    reason, body = DECLINED[name]
    model = Around(body)
    with torch.no_grad():
        sites = sites_of(model, X.clone())
    assert {(site.rewritten, site.reason) for site in sites} == {(False, reason)}


@pytest.mark.parametrize("body", [_written_to_between, _other_rows])
def test_writes_and_views_before_the_norm_give_what_eager_gives(body):
    model = Around(body)
    with torch.no_grad():
        torch.testing.assert_close(record(model, X)[1], model(X))


def test_two_layers_that_read_one_hidden_value_share_a_call():
    def body(m, x):  # as LoRA of the last layer does
        h = F.gelu(m.up(x))
        return m.down(h) + F.linear(F.linear(h, m.down.weight[:4]), m.down.weight[:, :4])

    model = Around(body)
    recorder, result = record(model, X)
    assert [(s.form, None if s.rewritten else s.reason) for s in recorder.sites] == [
        ("activated", None),
        ("activated", "overlaps"),
    ]
    assert fused_calls(recorder.after[0], OPERATOR) == 1
    torch.testing.assert_close(result, model(X))


def test_the_next_mlp_may_begin_at_a_hidden_value():
    def body(m, x):
        h = F.gelu(m.up(x))
        inner = F.linear(F.relu(F.linear(h, m.down.weight)), m.up.weight)
        return m.down(F.layer_norm(h, (16,))) + inner.sum()

    model = Around(body)
    recorder, result = record(model, X)
    assert sorted(site.form for site in recorder.sites if site.rewritten) == ["activated", "plain"]
    torch.testing.assert_close(result, model(X))


def test_of_a_chain_the_wider_of_a_whole_and_a_part_is_fused():
    layers = (nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 24), nn.GELU(), nn.LayerNorm(24))
    model = nn.Sequential(*layers, nn.Linear(24, 8))
    recorder, result = record(model, X)
    assert [(s.form, None if s.rewritten else s.reason) for s in recorder.sites] == [
        ("plain", "overlaps"),
        ("activated", None),
    ]
    torch.testing.assert_close(result, model(X))


def test_autocast_keeps_the_dtype_of_the_hidden_value():
    def body(m, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = F.gelu(m.up(x))
            return m.down(F.layer_norm(h, (16,))), h

    model = Around(body)
    recorder, results = record(model, X)
    assert [(site.form, site.dtype) for site in recorder.sites] == [("activated", "bfloat16")]
    for found, right in zip(results, model(X), strict=True):
        assert found.dtype == right.dtype
        torch.testing.assert_close(found, right, atol=0.05, rtol=0.05)


def test_symbolic_rows_are_fused_in_part():
    model = Around(_returned)
    recorder, results = record(model, X, dynamic=True)
    assert [site.form for site in recorder.sites] == ["activated"]
    torch.testing.assert_close(results, model(X))


def test_an_exported_program_is_fused_in_part():
    model, args = ACTIVATED.example()
    result = fuse(torch.export.export(model, args).module(), args, Options(policy="always"))
    assert [site.form for site in result.sites] == ["activated"]
    torch.testing.assert_close(result.graph_module(*args), model(*args))


@pytest.mark.parametrize(
    ("body", "stays"),
    [
        (_returned, "the hidden activation is also returned by the graph"),
        (_auxiliary_loss, "the hidden activation is also read by"),
        (_rms_norm_by_hand, "a normalisation (its mean) stands between"),
    ],
)
def test_the_report_says_what_stays_outside(body, stays):
    (site,) = explain(Around(body), X, options={"fusedmlp.policy": "always"}).sites
    assert site.rewritten
    assert stays in site.detail
    assert site.shape == (15, 8, 16, 8)


def test_where_it_does_not_pay_the_reason_is_that_of_the_whole_site(fusedmlp):
    model = MLP(lambda h: F.layer_norm(F.gelu(h), (16,)))
    pin = {"form": "plain", "plan": None, "reason": "norm-between"}
    fusedmlp.assert_sites(model, X, pins={"*": pin}, policy="auto")


def planned_on_h100(body, rows, width):
    model = Around(body)
    model.up, model.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    x = torch.randn(rows, width, dtype=torch.bfloat16)
    (site,) = explain(model.bfloat16(), x, target="h100").sites
    return site


def _normalised(m, x):
    h = F.gelu(m.up(x))
    return m.down(F.layer_norm(h, h.shape[-1:]))


@pytest.mark.parametrize("body", [_normalised, _returned])
def test_it_is_fused_where_an_mlp_was_measured_to_gain_by_the_epilogue(body):
    with torch.no_grad():
        site = planned_on_h100(body, 1024, 64)
        assert (site.form, site.plan, site.expected_speedup) == ("activated", "epilogue", None)
        assert "for an MLP of these layers: 1." in site.detail
        assert not planned_on_h100(body, 128, 768).fused


@pytest.mark.parametrize("body", [_normalised, _returned])
def test_training_is_left_to_inductor(body):
    assert not planned_on_h100(body, 1024, 64).fused


def test_a_layer_that_ends_a_chain_begins_no_part():
    layers = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)]
    model = nn.Sequential(*layers, nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8))
    recorder, result = record(model, X)
    assert [(s.form, None if s.rewritten else s.reason) for s in recorder.sites] == [
        ("chain", None),
        ("plain", "norm-between"),
    ]
    torch.testing.assert_close(result, model(X))
