"""Whether a chain is fused: what measurements of it say, and the model of chains."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace

import pytest
import torch
from torch import nn

from fusion_backend import explain
from fusion_backend.compat.tf32 import multiplying_in_tf32
from fusion_backend.mlp.steps import Steps
from fusion_backend.planning import chain_model, chain_profit
from fusion_backend.planning.cases import Case
from fusion_backend.planning.chain_profit import ChainMeasurement, best, shipped
from fusion_backend.planning.discounts import any_gpu
from fusion_backend.planning.gpus import gpu_named

H100 = gpu_named("h100")
WIDTHS = (64, 64, 64, 64)


def measurement(rows, chain, *, pairs=10.0, widths=WIDTHS, form="gelu_tanh"):
    times = {"unfused": 20.0, "pairs": pairs, "chain": chain}
    return ChainMeasurement(form, widths, rows, times, "on an H100")


@pytest.fixture
def table(monkeypatch):
    """Has ``best`` look at other measurements than those that ship."""
    return lambda *rows: monkeypatch.setattr(chain_profit, "shipped", lambda _: rows)


def setting(rows=1000, activation="relu(x)", dtype=torch.bfloat16, widths=WIDTHS):
    mlp = Case(activation, rows, *widths[:3]).setting(torch.device("cuda"), H100)
    activations = mlp.activations * (len(widths) - 2)
    return replace(mlp, dtype=dtype, further_features=widths[2:], activations=activations)


def test_a_chain_pays_that_beats_unfused_layers_and_pairs(table):
    table(measurement(1000, 5.0))
    verdict = best(setting())
    assert (verdict.family, verdict.expected_speedup) == ("chain", 4.0)
    assert "2.00 times as pairs fused, on an H100 at 1000 rows of 64→64→64→64" in verdict.grounds


def test_a_chain_slower_than_pairs_does_not_pay(table):
    table(measurement(1000, 5.0, pairs=4.0))
    assert best(setting()).family is None


@pytest.mark.parametrize(("rows", "pays"), [(100, True), (500, False), (4000, False)])
def test_it_must_pay_at_the_next_fewer_and_the_next_more_rows(table, rows, pays):
    table(measurement(64, 5.0), measurement(256, 5.0), measurement(1024, 12.0))
    assert (best(setting(rows)).family == "chain") is pays


@pytest.mark.parametrize(
    ("other", "measured"),
    [
        ({}, True),
        ({"widths": (50, 60, 64, 33)}, True),
        ({"rows": 4000}, True),
        ({"rows": 5000}, False),
        ({"widths": (64,) * 5}, False),
        ({"activation": "gelu(x)"}, False),
    ],
)
def test_measurements_speak_for_the_same_padded_chain_and_rows_not_far_from_theirs(
    table, other, measured
):
    table(measurement(1000, 5.0))
    grounds = best(setting(**other)).grounds
    assert ("on an H100 at 1000 rows" in grounds) is measured
    assert ("by the model" in grounds) is not measured


def test_exact_products_of_float32_were_not_measured_to_gain(table):
    table(measurement(1000, 5.0))
    assert best(setting(dtype=torch.float32)).family is None


def test_measurements_in_tf32_speak_where_it_is_allowed(table):
    table(replace(measurement(1000, 5.0), precision="tf32"))
    with multiplying_in_tf32(True):
        verdict = best(setting(dtype=torch.float32))
    assert (verdict.family, verdict.expected_speedup) == ("chain", 4.0)
    assert "on an H100" not in best(setting(dtype=torch.float32)).grounds


def test_where_no_pair_ran_the_unfused_layers_are_the_rival(table):
    table(ChainMeasurement("gelu_tanh", WIDTHS, 1000, {"unfused": 20.0, "chain": 5.0}, ""))
    assert best(setting()).family == "chain"


@pytest.mark.parametrize(
    ("activation", "dtype", "pays"),
    [
        ("tanh(x)", torch.bfloat16, True),
        ("tanh(x)", torch.float16, True),
        ("log1p(x)", torch.float16, False),
        ("log1p(x)", torch.bfloat16, False),
        ("relu(x)", torch.float16, True),
    ],
)
def test_special_functions_that_are_computed_exactly_cost_more(table, activation, dtype, pays):
    table(measurement(1000, 12.0, pairs=30.0))
    verdict = best(setting(activation=activation, dtype=dtype))
    assert (verdict.family == "chain") is pays


def test_nothing_is_known_of_a_gpu_without_a_table():
    assert shipped(gpu_named("a100")) == ()


@pytest.mark.parametrize(
    ("widths", "rows", "pays"),
    [
        ((376, 64, 64, 8), 1000, True),
        ((376, 64, 64, 8), 4096, True),
        ((200, 64, 64, 64, 8), 1000, True),
        ((1024, 128, 128, 128, 1024), 4096, False),
        ((256,) * 5, 64, False),
    ],
)
def test_the_model_forms_chains_whose_gain_exceeds_its_uncertainty(table, widths, rows, pays):
    table()
    verdict = best(setting(rows, widths=widths))
    assert (verdict.family == "chain") is pays
    assert "by the model" in verdict.grounds


def test_the_model_is_about_as_exact_as_it_says():
    """In sample; benchmarks/fit_chain_model.py has it out of sample."""
    off = {"bfloat16": [], "tf32": []}
    measured = [(gpu, m) for gpu in map(gpu_named, ("h100", "h200")) for m in shipped(gpu)]
    for gpu, m in measured:
        if m.precision not in off or (m.precision == "tf32" and m.rows == 1):
            continue
        functions = chain_model.functions_of(f"{m.form}(x)")
        work = chain_model.ChainWork(m.rows, m.widths, functions, m.precision)
        times = chain_model.predicted(work, gpu)
        expected = min(times["unfused"], times["pairs"]) / times["chain"]
        found = min(m.speedup("unfused"), m.speedup("pairs"))
        off[m.precision].append(math.log(found / expected))
    for precision, errors in off.items():
        rms = math.sqrt(statistics.fmean(error**2 for error in errors))
        deviation = chain_model.DEVIATIONS[precision]
        assert 0.5 * deviation < rms <= deviation


JOINED = "linear; activation; linear; activation; linear(0, x); activation; linear"


def joined(text: str, widths=(64,) * 5) -> chain_model.ChainWork:
    return chain_model.ChainWork(65536, widths, inner=Steps.of(text, len(widths) - 1))


def test_what_a_layer_reads_beside_its_value_costs_its_rivals_a_pass_and_a_wider_product():
    plain = chain_model.predicted(chain_model.ChainWork(65536, (64,) * 5), H100)
    found = chain_model.predicted(joined(JOINED), H100)
    assert found["chain"] > plain["chain"]
    assert found["unfused"] > 1.1 * plain["unfused"]
    assert found["pairs"] > plain["pairs"]
    assert found["unfused"] / found["chain"] > plain["unfused"] / plain["chain"]


def test_no_pair_has_a_concatenation_in_its_middle():
    """Of three layers the second and the third are the only ones that might be a pair."""
    text = "linear; activation; linear(0, x); activation; linear"
    work = joined(text, (64, 64, 256, 64))
    assert chain_model.predicted(work, H100)["pairs"] < chain_model.predicted(work, H100)["unfused"]
    text = "linear; activation; linear(0, x); activation; linear(x, 0)"
    times = chain_model.predicted(joined(text, (64, 256, 256, 64)), H100)
    assert times["pairs"] == times["unfused"]


def test_the_model_is_as_sure_of_chains_that_read_their_input_again_as_of_others(table):
    table()
    widths = (376, 64, 64, 64, 8)
    assert "± 22 %" in best(replace(setting(widths=widths), steps=JOINED)).grounds
    text = "linear; activation; linear; activation(2); linear; activation; linear"
    assert "± 44 %" in best(replace(setting(widths=widths), steps=text)).grounds


def test_elsewhere_than_on_hopper_the_kernel_is_taken_to_be_slower(table):
    table()
    a100 = replace(setting(), target=gpu_named("a100"))
    assert "by the model" in best(a100).grounds
    longer = any_gpu(gated=False)["back_to_back"]
    times = chain_model.predicted(chain_model.ChainWork(1000, WIDTHS), gpu_named("a100"))
    gain = times["unfused"] / times["chain"] / longer
    assert best(a100).expected_speedup == pytest.approx(gain)


def test_amds_gpus_are_not_known_to_the_model(table):
    table()
    assert best(replace(setting(), target=gpu_named("mi300x"))).family is None


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
