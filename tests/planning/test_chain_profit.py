"""Whether a chain is fused: what measurements of others say."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from fusion_backend import explain
from fusion_backend.planning import chain_profit
from fusion_backend.planning.cases import Case
from fusion_backend.planning.chain_profit import ChainMeasurement, measured, shipped
from fusion_backend.planning.gpus import gpu_named

H100 = gpu_named("h100")
WIDTHS = (64, 64, 64, 64)


def measurement(rows, chain, *, pairs=10.0, widths=WIDTHS, form="gelu_tanh"):
    times = {"unfused": 20.0, "pairs": pairs, "chain": chain}
    return ChainMeasurement(form, widths, rows, times, "on an H100")


@pytest.fixture
def table(monkeypatch):
    """Has ``measured`` look at other measurements than those that ship."""
    return lambda *rows: monkeypatch.setattr(chain_profit, "shipped", lambda _: rows)


def setting(rows=1000, activation="relu(x)", dtype=torch.bfloat16, widths=WIDTHS):
    mlp = Case(activation, rows, *widths[:3]).setting(torch.device("cuda"), H100)
    activations = mlp.activations * (len(widths) - 2)
    return replace(mlp, dtype=dtype, further_features=widths[2:], activations=activations)


def test_a_chain_pays_that_beats_unfused_layers_and_pairs(table):
    table(measurement(1000, 5.0))
    verdict = measured(setting())
    assert (verdict.family, verdict.expected_speedup) == ("chain", 4.0)
    assert "2.00 times as pairs fused, on an H100 at 1000 rows of 64→64→64→64" in verdict.grounds


def test_a_chain_slower_than_pairs_does_not_pay(table):
    table(measurement(1000, 5.0, pairs=4.0))
    assert measured(setting()).family is None


@pytest.mark.parametrize(("rows", "pays"), [(100, True), (500, False), (5000, False)])
def test_it_must_pay_at_the_next_fewer_and_the_next_more_rows(table, rows, pays):
    table(measurement(64, 5.0), measurement(256, 5.0), measurement(1024, 12.0))
    assert (measured(setting(rows)).family == "chain") is pays


@pytest.mark.parametrize(
    ("widths", "known"),
    [(WIDTHS, True), ((50, 60, 64, 33), True), ((64,) * 5, True), ((256,) * 5, False)],
)
def test_measurements_speak_for_chains_like_them(table, widths, known):
    table(measurement(1000, 5.0))
    assert (measured(setting(widths=widths)).family == "chain") is known


@pytest.mark.parametrize(
    "other", [{"activation": "gelu(x)"}, {"dtype": torch.float32}], ids=["erf", "float32"]
)
def test_measurements_do_not_speak_for_other_work(table, other):
    table(measurement(1000, 5.0))
    assert measured(setting(**other)).family is None


@pytest.mark.parametrize(
    ("activation", "dtype", "pays"),
    [
        ("tanh(x)", torch.bfloat16, True),
        ("tanh(x)", torch.float16, False),
        ("sin(x)", torch.bfloat16, False),
        ("relu(x)", torch.float16, True),
    ],
)
def test_special_functions_that_are_computed_exactly_cost_more(table, activation, dtype, pays):
    table(measurement(1000, 12.0, pairs=30.0))
    verdict = measured(setting(activation=activation, dtype=dtype))
    assert (verdict.family == "chain") is pays


def test_nothing_is_known_of_a_gpu_without_a_table():
    assert shipped(gpu_named("a100")) == ()


def chain_of(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inner, out in itertools.pairwise(widths):
        layers += [nn.Linear(inner, out), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).bfloat16()


@pytest.mark.parametrize("rows", [16, 4096])
def test_on_an_h100_a_narrow_chain_is_planned_as_one_kernel(rows):
    with torch.no_grad():
        x = torch.randn(rows, 64).bfloat16()
        (site,) = explain(chain_of(64, 64, 64, 64, 16), x, target="h100").sites
    assert (site.form, site.plan) == ("chain", "chain")
    assert site.expected_speedup > 1.0


def test_the_activations_of_a_chain_may_differ():
    model = chain_of(64, 64, 64, 64, 16)
    model[3] = nn.SiLU()
    with torch.no_grad():
        (site,) = explain(model, torch.randn(4096, 64).bfloat16(), target="h100").sites
    assert (site.plan, site.activation) == ("chain", "relu(x), silu(x)")


def test_on_an_h100_training_leaves_pairs():
    x = torch.randn(4096, 64).bfloat16()
    sites = explain(chain_of(64, 64, 64, 64), x, target="h100").sites
    assert {site.form for site in sites} == {"plain"}
