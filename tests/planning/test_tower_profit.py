"""Whether MLPs of one input are one launch: what the model of chains says of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusion_backend import reasons
from fusion_backend.compat.tf32 import multiplying_in_tf32
from fusion_backend.options import Options
from fusion_backend.planning import chain_model, chain_profit, tower_profit
from fusion_backend.planning.cases import Case
from fusion_backend.planning.chain_model import ChainWork, of_towers
from fusion_backend.planning.gpus import gpu_named
from fusion_backend.planning.planner import Plan, plan_together
from fusion_backend.reasons import Refusal

H200 = gpu_named("h200")
POLICY, VALUE = (348, 64, 64, 17), (348, 64, 64, 1)
ALONE = Plan("chain", "one kernel", 2.0)


def setting(widths, rows=64, dtype=torch.bfloat16, gpu=H200):
    mlp = Case("tanh(x)", rows, *widths[:3]).setting(torch.device("cuda"), gpu)
    activations = mlp.activations * (len(widths) - 2)
    return replace(mlp, dtype=dtype, further_features=widths[2:], activations=activations)


def settings(*all_widths, **others):
    return [setting(widths, **others) for widths in all_widths]


def best(given, fused=True):
    return tower_profit.best(given, [fused] * len(given))


@pytest.mark.parametrize("rows", [1, 64, 1024, 4096])
@pytest.mark.parametrize("all_widths", [(POLICY, VALUE), ((64, 64, 64, 1),) * 5])
def test_few_rows_are_one_launch(all_widths, rows):
    verdict = best(settings(*all_widths, rows=rows))
    assert verdict.family == "chain"
    assert verdict.expected_speedup > 1.03
    assert f"times as fast at {rows} rows as each in a launch of its own" in verdict.grounds


def test_towers_that_fill_the_gpu_each_have_a_launch_each():
    wide = ((393, 256, 256, 1),) * 2
    assert best(settings(*wide, rows=64)).family == "chain"
    assert best(settings(*wide, rows=1 << 18)).family is None


def test_a_tower_that_is_launched_in_another_way_alone_stays_alone():
    """Weights of the narrow one stay in shared memory; those of the wide one do not fit there."""
    assert best(settings((64, 64, 64, 1), (64, 256, 256, 8))).family is None


@pytest.mark.parametrize(("third", "joins"), [(21.0, True), (23.0, False)])
def test_one_more_must_not_be_slower_than_in_a_launch_of_its_own(monkeypatch, third, joins):
    """Three launches of 10 µs are slower than one of 23, but one of 12 and one of 10 are not."""
    times = (10.0, 12.0, third)
    monkeypatch.setattr(chain_model, "of_towers", lambda works, gpu: times[len(works) - 1])
    assert (best(settings(POLICY, VALUE, VALUE)).family == "chain") is joins


@pytest.mark.parametrize(("rows", "joins"), [(64, False), (1024, True), (4096, True)])
def test_chains_that_do_not_pay_alone_may_pay_together(rows, joins):
    """One is as fast as cuBLAS's products or slower, but two are as fast as one."""
    given = settings((393, 256, 256, 1), (393, 256, 256, 1), rows=rows)
    assert chain_profit.best(given[0]).family is None
    assert (best(given, fused=False).family == "chain") is joins


def test_plain_mlps_must_gain_more_than_the_models_uncertainty():
    pair, margin = ((64, 64, 1), (64, 64, 4)), chain_model.DEVIATIONS["bfloat16"]
    assert best(settings(*pair, rows=64)).family == "chain"
    found = best(settings(*pair, rows=1 << 18, gpu=gpu_named("a100")))
    assert found.family is None
    assert found.expected_speedup < 1 + margin


@pytest.mark.parametrize(
    "other", [{"training": True}, {"dtype": torch.float32}, {"target": gpu_named("mi300x")}]
)
def test_nothing_is_said_of_training_exact_float32_and_other_makers(other):
    with multiplying_in_tf32(False):
        assert best([replace(s, **other) for s in settings(POLICY, VALUE)]).family is None


@pytest.mark.parametrize("rows", [64, 4096])
def test_products_in_tf32_are_one_launch_too(rows):
    with multiplying_in_tf32(True):
        assert best(settings(POLICY, VALUE, rows=rows, dtype=torch.float32)).family == "chain"


@pytest.mark.parametrize("rows", [1, 64, 1000, 5000, 1 << 20])
@pytest.mark.parametrize("widths", [POLICY, (64,) * 4, (256,) * 5], ids=str)
def test_one_tower_takes_as_long_as_its_chain(widths, rows):
    work = ChainWork(rows, widths)
    assert of_towers([work], H200) == chain_model.predicted(work, H200)["chain"]


@pytest.mark.parametrize("rows", [1, 64, 5000, 1 << 20])
def test_a_launch_of_several_is_never_faster_than_one_of_them(rows):
    works = [ChainWork(rows, widths) for widths in (POLICY, VALUE)]
    assert of_towers(works, H200) >= max(of_towers([work], H200) for work in works)


def test_the_policy_always_does_not_ask_whether_it_is_faster():
    given = settings((393, 256, 256, 1), (393, 256, 256, 1), rows=1 << 18)
    assert plan_together(given, [ALONE] * 2, Options()) is None
    found = plan_together(given, [ALONE] * 2, Options(policy="always"))
    assert (found.family, found.expected_speedup) == ("chain", None)
    assert "2 at once; policy 'always'" in found.detail


def test_what_no_launch_can_run_has_a_plan_each():
    given = settings((64, 64, 64, 1), (64, 512, 512, 64))
    assert plan_together(given, [ALONE] * 2, Options(policy="always")) is None


def test_mlps_that_no_kernels_run_keep_that_plan():
    refusal = Refusal(reasons.NO_KERNEL, "there is none")
    plans = [Plan("reference", "as ATen operators", refusal=refusal)] * 2
    given = [replace(s, device=torch.device("cpu"), target=None) for s in settings(POLICY, VALUE)]
    assert plan_together(given, plans, Options(policy="always")) == plans[0]
    assert plan_together(given, [plans[0], ALONE], Options(policy="always")) is None
