"""The model of training steps, held to what was measured, and what is planned by it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusion_backend.mlp.expression import parse
from fusion_backend.planning import planner, profit, step_model
from fusion_backend.planning.cases import FORMS, Case
from fusion_backend.planning.gpus import gpu_named
from fusion_backend.planning.measurements import INDUCTOR, shipped
from fusion_backend.planning.step_model import Step
from settings import SETTING, symbolic

H200 = gpu_named("h200")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"
CUDA = torch.device("cuda", 0)
NARROW = {"in_features": 64, "hidden_features": 256, "further_features": (64,)}
STEP = replace(SETTING, training=True, target=H200, rows=16384)
BOTH = ("back_to_back", "epilogue")


def random_steps():
    """Sites of the random MLPs, with microseconds of Inductor and of the family of ``always``."""
    for row in json.loads((RESULTS / "training_random.json").read_text())["rows"]:
        setting = Case(**row["case"]).setting(CUDA, H200)
        yield replace(setting, plain_layout=not row.get("packed", False)), row["us"]


def anchors():
    """Sites of the anchors in training, with their lines."""
    for row in json.loads((RESULTS / "training.json").read_text())["cases"]:
        form, sizes, *biases = row["mlp"].removeprefix("packed ").replace(",", "").split()
        rows, width, hidden = map(int, sizes.replace("→", "×").split("×"))
        activation = FORMS.get(form, f"{form}(x)")
        how = ("bfloat16", bool(biases), True)
        setting = Case(activation, rows, width, hidden, width, *how).setting(CUDA, H200)
        yield replace(setting, plain_layout=not row["mlp"].startswith("packed")), row


def measured(step, source=f"on an {H200.name}", **microseconds):
    """A measurement of the very step, as tables have them."""
    case = Case.of_setting(step, step.rows)
    return replace(case.measurement, microseconds=microseconds, source=source)


@pytest.fixture
def tables(monkeypatch):
    """What ships with the package: nothing, unless a test adds to it."""
    found = []
    monkeypatch.setattr(profit, "shipped", lambda gpu: tuple(found))
    return found


def test_none_of_the_random_steps_gets_slower_and_most_of_the_gain_is_taken():
    pytest.importorskip("triton")
    gained, possible = 0.0, 0.0
    for setting, times in random_steps():
        (family,) = times.keys() - {INDUCTOR}
        # Those of narrow layers with many hidden features were measured before they had a kernel.
        able = [f for f in planner.available(setting) if f != BOTH[0] or f in times]
        taken = profit.best(able, setting).family
        assert taken in (family, None)
        if taken is not None:
            assert times[INDUCTOR] / times[family] >= 0.97, setting
            gained += math.log(times[INDUCTOR] / times[family])
        possible += max(0.0, math.log(times[INDUCTOR] / times[family]))
    assert gained / possible > 0.85


def test_of_the_h200s_table_without_its_times_no_step_gets_slower(tables):
    pytest.importorskip("triton")
    gained, possible = 0.0, 0.0
    for each in shipped(H200):
        if not each.kind.training or "H200" not in each.source:
            continue
        activation = each.activation or FORMS[each.kind.form]
        how = (each.kind.precision, each.kind.form != "swiglu", True, each.kind.transposed)
        setting = Case(activation, each.rows, *each.widths, *how).setting(CUDA, H200)
        able = [f for f in planner.available(setting) if f != BOTH[0] or f in each.microseconds]
        taken = profit.best(able, setting).family
        if taken is not None:
            assert each.speedup(taken) >= 0.97, (each, taken)
            gained += math.log(each.speedup(taken))
        possible += math.log(max(map(each.speedup, each.microseconds)))
    assert gained / possible > 0.85


def test_every_anchor_is_fused():
    pytest.importorskip("triton")
    for setting, row in anchors():
        verdict = profit.best([*planner.available(setting)], setting)
        assert verdict.family is not None, (row["mlp"], verdict.grounds)


def test_launches_are_those_that_a_profiler_counted():
    """Without biases and with a gate: there cuBLAS splits no sum, which would be a launch more."""
    compared = 0
    for setting, row in anchors():
        if setting.gated:
            ways = step_model.launches(["epilogue"], Step.of(setting, setting.rows))
            assert len(ways[INDUCTOR]) == row["kernels"]["inductor"]
            assert len(ways["epilogue"]) == row["kernels"]["fusedmlp"]
            compared += 1
    assert compared == 3


def test_more_work_takes_longer():
    for changes, families in (({}, ["epilogue"]), (NARROW, BOTH)):
        steps = [Step.of(replace(STEP, **changes), rows) for rows in (256, 4096, 65536)]
        times = [step_model.predicted(families, step, H200) for step in steps]
        for name in (INDUCTOR, *families):
            assert times[0][name] < times[1][name] < times[2][name]


@pytest.mark.parametrize(
    "changes",
    [
        {"training": False},
        {"dtype": torch.float32},
        {"target": gpu_named("a100")},
        {"target": gpu_named("b200")},
        {"operands": ("seed",)},
        {"strided": True},
        {"gated": True, "transposed": True},
        {"further_features": (3072, 768)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_it_speaks_for_nothing_that_it_was_not_fitted_to(changes):
    assert step_model.speaks_for(STEP)
    assert not step_model.speaks_for(replace(STEP, **changes))


def test_a_gain_within_the_uncertainty_is_not_taken(tables):
    narrow = replace(STEP, **NARROW)
    step = Step.of(narrow, narrow.rows)
    times = step_model.predicted(BOTH[1:], step, H200)
    expected = times[INDUCTOR] / times["epilogue"]
    assert 1.0 < expected < math.exp(step_model.deviation("epilogue", step))
    verdict = profit.best(("epilogue",), narrow)
    assert verdict.family is None
    assert verdict.expected_speedup == pytest.approx(expected)
    assert "epilogue" in verdict.grounds
    assert "± 9 %" in verdict.grounds


def test_a_gain_beyond_it_is_taken_and_the_grounds_have_the_times(tables):
    verdict = profit.best(("epilogue",), STEP)
    assert verdict.family == "epilogue"
    assert verdict.expected_speedup > 1.1
    assert "by the model: Inductor" in verdict.grounds
    assert "± 4 %" in verdict.grounds


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [("softplus(x, 1.0, 20.0)", torch.bfloat16), ("mish(x)", torch.float16)],
)
def test_exact_derivatives_are_left_alone_but_in_narrow_layers(tables, activation, dtype):
    exact = replace(STEP, activations=(parse(activation),), dtype=dtype)
    assert profit.best(("epilogue",), exact).family is None
    cheap = replace(exact, activations=(parse("relu(x)"),))
    assert profit.best(("epilogue",), cheap).family == "epilogue"
    assert profit.best(BOTH, replace(exact, **NARROW)).family == "back_to_back"


@pytest.mark.parametrize(
    ("activation", "families"), [("gelu_tanh(x)", [*BOTH]), ("mish(x)", ["back_to_back"])]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_knows_the_families_that_it_predicts(activation, families, dtype):
    setting = replace(STEP, **NARROW, activations=(parse(activation),), dtype=dtype)
    predicted = step_model.predicted(BOTH, Step.of(setting, setting.rows), H200)
    assert step_model.known(BOTH, setting) == families
    assert predicted.keys() == {INDUCTOR, *families}


def test_what_float16_approximates_takes_longer_in_narrow_layers_and_is_taken_in_wide_ones(tables):
    half = replace(STEP, activations=(parse("gelu_tanh(x)"),), dtype=torch.float16)
    assert profit.best(BOTH, half).family == "epilogue"
    narrow = replace(half, **NARROW)
    in_float16, in_bfloat16 = (
        step_model.predicted(BOTH[:1], Step.of(each, 262144), H200)["back_to_back"]
        for each in (narrow, replace(narrow, dtype=torch.bfloat16))
    )
    assert in_float16 > 1.05 * in_bfloat16


def test_each_exact_function_takes_narrow_kernels_longer(tables):
    narrow = replace(STEP, **NARROW)
    silu, softplus, mish = (
        profit.best(BOTH, replace(narrow, activations=(parse(text),))).expected_speedup
        for text in ("silu(x)", "softplus(x, 1.0, 20.0)", "mish(x)")
    )
    assert silu > softplus > mish


@pytest.mark.parametrize(
    ("rows", "widths", "biases", "us"),
    # Microseconds of Inductor and of the family, on an H200.
    [
        (65536, (128, 512, 128), False, (252.9, 187.2)),
        (16384, (128, 512, 128), True, (95.4, 78.1)),
        (262144, (64, 512, 64), True, (931.3, 670.4)),
        (65536, (128, 256, 128), True, (189.7, 157.0)),
    ],
)
def test_narrow_layers_with_many_hidden_features_are_trained_from_their_input(
    tables, rows, widths, biases, us
):
    inner, hidden, out = widths
    sizes = {"in_features": inner, "hidden_features": hidden, "further_features": (out,)}
    step = replace(STEP, rows=rows, has_bias_up=biases, **sizes)
    verdict = profit.best(BOTH, step)
    assert verdict.family == BOTH[0]
    # What was measured with biases had sums that took a tenth of the step longer than today's.
    faster = 1.1 if biases else 1.0
    assert verdict.expected_speedup == pytest.approx(us[0] / us[1] * faster, rel=0.1)
    assert profit.best(BOTH, replace(step, rows=1024)).family != BOTH[0]


def test_what_was_measured_of_the_very_step_decides(tables):
    tables.append(measured(STEP, inductor=10.0, epilogue=10.0))
    assert profit.best(("epilogue",), STEP).family is None
    # Of a neighbour the model knows more.
    assert profit.best(("epilogue",), replace(STEP, rows=16000)).family == "epilogue"


def test_times_of_one_family_do_not_say_that_another_is_slower(tables):
    narrow = replace(STEP, **NARROW)
    tables.append(measured(narrow, inductor=10.0, epilogue=9.0))
    assert profit.best(BOTH, narrow).family == BOTH[0]
    assert profit.best(BOTH[1:], narrow).expected_speedup == pytest.approx(10 / 9)
    tables.append(measured(narrow, inductor=10.0, epilogue=9.0, back_to_back=11.0))
    assert profit.best(BOTH, narrow).family == BOTH[1]


def test_times_of_two_weights_do_not_speak_for_one_that_holds_both(tables):
    gated = replace(STEP, gated=True, activations=(parse("silu(g) * u"),), has_bias_up=False)
    tables.append(measured(gated, inductor=10.0, epilogue=5.0))
    assert profit.best(("epilogue",), gated).expected_speedup == 2.0
    packed = replace(gated, plain_layout=False)
    assert profit.best(("epilogue",), packed).expected_speedup < 1.3


def test_what_the_user_measured_counts_for_a_step_without_biases_too(tables, monkeypatch, tmp_path):
    site = replace(STEP, has_bias_up=False)
    known = measured(site, inductor=10.0, epilogue=10.0)
    tables.append(known)
    assert profit.best(("epilogue",), site).family == "epilogue"
    here = replace(site, target=None)
    monkeypatch.setattr("fusion_backend.planning.setting.gpu_of", lambda device: H200)
    monkeypatch.setattr(profit.UserTable, "measurements", lambda table: (known,))
    assert profit.best(("epilogue",), here).family is None


def test_symbolic_rows_are_fused_where_all_of_their_class_gain(tables):
    environment, rows = symbolic(8192)
    assert profit.best(("epilogue",), replace(STEP, rows=rows)).family == "epilogue"
    assert len(environment.guards) == 1
    _, rows = symbolic(200)
    assert profit.best(("epilogue",), replace(STEP, rows=rows)).family is None
    environment, rows = symbolic(200)
    assert profit.best(BOTH, replace(STEP, rows=rows, **NARROW)).family == "back_to_back"
    assert environment.guards == []
