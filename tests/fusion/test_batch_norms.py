"""Batch norm in evaluation between two linear layers is part of the activation."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from capture import ALWAYS, check_as_eager, fused_calls, only_site, record
from fusion_backend import fuse
from fusion_backend.fusion.views.dependence import Dependence
from models import MLP, ConvMLP, Gated, Packed

ACTIVATION = "gelu((x - p0) * rsqrt(p1 + 1e-05) * p2 + p3)"
X = torch.randn(6, 8)
SEQUENCES = torch.randn(3, 16, 8)  # as many positions as hidden features


def seasoned(norm, mean=1.0):
    """A norm in evaluation whose statistics and parameters are those of some training."""
    with torch.no_grad():
        norm.running_mean.uniform_(-mean, mean)
        norm.running_var.uniform_(0.5, 2.0)
        if norm.affine:
            norm.weight.uniform_(0.5, 2.0)
            norm.bias.uniform_(-1.0, 1.0)
    return norm.eval()


class Normed(MLP):
    """An MLP with a batch norm before its GELU, in some spelling."""

    def __init__(self, spelling=lambda h, norm: norm(h), **settings):
        super().__init__(F.gelu)
        self.norm, self.spelling = seasoned(nn.BatchNorm1d(16, **settings)), spelling

    def forward(self, x):
        return self.down(self.f(self.spelling(self.up(x), self.norm)))


def statistics(norm):
    return norm.running_mean, norm.running_var


SPELLINGS = {
    "module": lambda h, n: n(h),
    "functional": lambda h, n: F.batch_norm(h, *statistics(n), n.weight, n.bias),
    "keywords": lambda h, n: F.batch_norm(
        input=h,
        running_mean=n.running_mean,
        running_var=n.running_var,
        bias=n.bias,
        weight=n.weight,
        training=False,
        eps=1e-5,
    ),
    "torch": lambda h, n: torch.batch_norm(
        h, n.weight, n.bias, *statistics(n), False, 0.1, 1e-5, True
    ),
    "ATen": lambda h, n: torch.ops.aten.batch_norm.default(
        h, n.weight, n.bias, *statistics(n), False, 0.1, 1e-5, False
    ),
    "with three results": lambda h, n: torch.native_batch_norm(
        h, n.weight, n.bias, *statistics(n), False, 0.1, 1e-5
    )[0],
    "never in training": lambda h, n: torch.ops.aten._native_batch_norm_legit_no_training.default(
        h, n.weight, n.bias, *statistics(n), 0.1, 1e-5
    )[0],
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_part_of_the_activation_and_has_its_gradients(name):
    check_as_eager(Normed(SPELLINGS[name]), X, activation=ACTIVATION)


@pytest.mark.parametrize("decomposed", [False, True])
def test_it_is_part_of_the_activation_in_exported_programs(decomposed):
    model = Normed().requires_grad_(False)
    program = torch.export.export(model, (X,))
    program = program.run_decompositions() if decomposed else program
    result = fuse(program.module(), (X,), ALWAYS)
    assert [(site.activation, site.rewritten) for site in result.sites] == [(ACTIVATION, True)]
    torch.testing.assert_close(result.graph_module(X), model(X))


def test_without_weight_and_bias_the_statistics_enter_alone():
    activation = "gelu((x - p0) * rsqrt(p1 + 1e-05))"
    site = check_as_eager(Normed(affine=False), X, activation=activation)
    assert site.operands == ("vector norm.running_mean", "vector norm.running_var")


def test_symbolic_sizes_leave_eps_a_number():
    site = check_as_eager(Normed(eps=1e-3), X, activation=ACTIVATION.replace("1e-05", "0.001"))
    assert site.rewritten
    check_as_eager(Normed(), X, activation=ACTIVATION, dynamic=True)


@pytest.mark.parametrize("trained", ["norm", "up"])
def test_one_of_norm_and_layer_may_be_frozen(trained):
    model = Normed().requires_grad_(False)
    getattr(model, trained).requires_grad_(True)
    check_as_eager(model, X, activation=ACTIVATION)


def test_it_may_stand_after_the_activation():
    model = MLP(nn.Sequential(nn.ReLU(), seasoned(nn.BatchNorm1d(16))))
    check_as_eager(model, X, activation="(relu(x) - p0) * rsqrt(p1 + 1e-05) * p2 + p3")


def test_it_may_stand_in_one_branch_of_a_gated_mlp():
    model = Gated(lambda g, u: F.silu(g) * u)
    model.gate = nn.Sequential(model.gate, seasoned(nn.BatchNorm1d(16)))
    activation = "silu((g - p0) * rsqrt(p1 + 1e-05) * p2 + p3) * u"
    check_as_eager(model, X, activation=activation, form="gated")


def test_it_may_stand_in_a_part_of_a_packed_layer():
    norm = seasoned(nn.BatchNorm1d(16))

    class NormedPart(Packed):
        def forward(self, x):
            gate, up = self.gate_up(x).chunk(2, -1)
            return self.down(F.silu(norm(gate)) * up)

    activation = "silu((g - p0) * rsqrt(p1 + 1e-05) * p2 + p3) * u"
    site = only_site(NormedPart(None), X)
    assert (site.form, site.activation, site.rewritten) == ("packed", activation, True)


def test_rows_may_be_joined_around_it():
    """As timm's LevIT does."""
    model = Normed(lambda h, norm: norm(h.flatten(0, 1)).reshape_as(h))
    check_as_eager(model, SEQUENCES, activation=ACTIVATION)


@pytest.mark.parametrize("x", [SEQUENCES, torch.randn(3, 5, 8)], ids=["square", "other"])
def test_features_may_be_moved_to_the_second_dimension_and_back(x):
    model = Normed(lambda h, norm: norm(h.transpose(1, 2)).transpose(1, 2))
    check_as_eager(model, x, activation=ACTIVATION)


@pytest.mark.parametrize("positions", [1, 2, 3])
def test_it_is_part_of_the_activation_between_channels_last_convolutions(positions):
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[positions - 1](16)
    model = ConvMLP(nn.Sequential(seasoned(norm), nn.GELU()), positions)
    x = torch.randn(2, *(4, 5, 6)[:positions], 8).movedim(-1, 1)
    reference = copy.deepcopy(model)
    site = check_as_eager(model, x, activation=ACTIVATION)
    assert site.shape == (x[:, 0].numel(), 8, 16, 8)
    assert record(model, x)[1].stride() == reference(x).stride()


DTYPES = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "bfloat16 with statistics in float32": (torch.bfloat16, torch.float32),
    "float16 with statistics in float32": (torch.float16, torch.float32),
}


@pytest.mark.parametrize("mean", [1.0, 30.0])
@pytest.mark.parametrize("name", DTYPES)
def test_results_are_no_further_from_float64_than_those_of_eager(name, mean):
    dtype, of_norm = DTYPES[name]
    model = Normed().requires_grad_(False)
    seasoned(model.norm, mean)
    with torch.no_grad():  # so that what is normalised is about as large as the mean
        model.up.bias.copy_(model.norm.running_mean)
    model.to(dtype)
    model.norm.to(of_norm)
    x = torch.randn(256, 8, dtype=dtype)
    exact = copy.deepcopy(model).double()(x.double())
    recorder, found = record(model, x)
    assert [site.rewritten for site in recorder.sites] == [True]
    mine, eagers = ((y.double() - exact).norm() for y in (found, model(x)))
    assert found.dtype == dtype
    assert mine <= 1.1 * eagers


def test_the_gradient_of_its_weight_is_exact_far_from_a_mean_of_zero():
    model = Normed()
    seasoned(model.norm, 30.0)
    with torch.no_grad():
        model.up.bias.copy_(model.norm.running_mean)
    x = torch.randn(256, 8)

    def gradient(function, model, x):
        model.zero_grad()
        function(x).square().sum().backward()
        return model.norm.weight.grad.double()

    exact = copy.deepcopy(model).double()
    exact = gradient(exact, exact, x.double())
    mine = gradient(lambda x: record(model, x)[1], model, x)
    eagers = gradient(model, model, x)
    assert (mine - exact).norm() <= 1.1 * (eagers - exact).norm()


def test_under_autocast_it_is_part_of_the_activation():
    model = Normed().requires_grad_(False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        recorder, found = record(model, X)
        expected = model(X)
    assert [site.activation for site in recorder.sites] == [ACTIVATION]
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


REFUSED = {
    "in training": lambda h, n: F.batch_norm(h, *statistics(n), n.weight, n.bias, True),
    "by statistics of the batch": lambda h, n: F.batch_norm(h, None, None, training=True),
    "positions as features": lambda h, n: n(h.view(1, 16, 16)).view(h.shape),
    "turned rows": lambda h, n: n(h.t()).t(),
    "statistics of the batch as running ones": lambda h, n: F.batch_norm(
        h, h.mean(0).detach(), h.var(0).detach(), n.weight, n.bias
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_arithmetic_of_each_feature_is_left_alone(name):
    model = Normed(REFUSED[name]).requires_grad_(False)
    x = SEQUENCES[0]
    site = only_site(model, x)
    assert (site.fused, site.reason) == (False, "norm-between")
    torch.testing.assert_close(record(model, x)[1], model(x))


def test_statistics_that_are_written_to_before_the_last_layer_are_read_before():
    def spelling(h, norm):
        normed = norm(h)
        norm.running_mean.zero_()
        return normed

    model = Normed(spelling).requires_grad_(False)
    reference = copy.deepcopy(model)
    recorder, found = record(model, X)
    assert [site.reason for site in recorder.sites] == ["mutated"]
    torch.testing.assert_close(found, reference(X))


def test_statistics_that_another_norm_keeps_are_read_before():
    def spelling(h, norm):
        normed = norm(h)
        F.batch_norm(h, *statistics(norm), training=True)
        return normed

    model = Normed(spelling).requires_grad_(False)
    reference = copy.deepcopy(model)
    recorder, found = record(model, X)
    assert not any(site.rewritten for site in recorder.sites)
    torch.testing.assert_close(found, reference(X))


KEEPING = {
    "batch_norm": lambda x, m, v: F.batch_norm(x, m, v, training=True),
    "torch.batch_norm": lambda x, m, v: torch.batch_norm(
        x, None, None, m, v, True, 0.1, 1e-5, False
    ),
    "instance_norm": lambda x, m, v: F.instance_norm(x, m, v),
}


def written(graph):
    """The inputs that some call of a graph writes to."""
    dependence = Dependence(graph)
    inputs = graph.find_nodes(op="placeholder")
    return [node for node in inputs if any(dependence.writes_to(dependence.storages(node), 0))]


@pytest.mark.parametrize("name", KEEPING)
def test_norms_in_training_write_to_their_statistics(name):
    recorder, _ = record(KEEPING[name], torch.randn(2, 3, 4), torch.zeros(3), torch.ones(3))
    _, *kept = recorder.before[0].graph.find_nodes(op="placeholder")
    assert written(recorder.before[0].graph) == kept


def test_norms_in_evaluation_write_to_nothing():
    recorder, _ = record(Normed(), X)
    assert not written(recorder.before[0].graph)
    assert fused_calls(recorder.after[0]) == 1
