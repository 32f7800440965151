"""The cost model: it grows with the work, fitting finds what made the times, and it decides."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusion_backend.bench.fitting import (
    Sample,
    errors,
    fitted,
    of_today,
    planned,
    ratio_errors,
    sample,
    samples,
)
from fusion_backend.kernels.codegen.activation import exact_functions
from fusion_backend.kernels.host.problems import Problem
from fusion_backend.kernels.preferences import lost_to_class
from fusion_backend.mlp.expression import parse
from fusion_backend.planning import planner, profit
from fusion_backend.planning.cases import Case
from fusion_backend.planning.cost_model import (
    EPILOGUE_ON_HOPPER,
    FITTED,
    STREAM_ON_HOPPER,
    Work,
    deviation,
    family_of,
    kernel_of,
    of_kernel,
    predicted,
    speaks_for,
)
from fusion_backend.planning.gpus import gpu_named, kernel_target
from fusion_backend.planning.measurements import INDUCTOR, WORTHWHILE, shipped
from fusion_backend.planning.setting import Setting
from settings import SETTING, symbolic

pytest.importorskip("triton")

H100, H200 = gpu_named("h100"), gpu_named("h200")
RANDOM = Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "random.json"
MLPS = [(Case(**row["case"]), row["us"]) for row in json.loads(RANDOM.read_text())["rows"]]
FEW_ROWS = ("stream", STREAM_ON_HOPPER)
SXM = kernel_target(H200)
MLP_OF_HEAVY_FUNCTIONS = Case("softplus(x, 1.0, 20.0)", 8192, 1024, 4096, 1000)


@pytest.mark.parametrize("name", FITTED)
def test_more_work_takes_longer(name):
    widths = (64, 256, 64) if name == "back_to_back" else (768, 3072, 768)
    sizes = (2, 33, 64, 128) if name in FEW_ROWS else (2, 64, 4096, 65536)
    times = [of_kernel(name, Work(rows, widths), H200) for rows in sizes]
    assert times == sorted(times)
    assert times[-1] > (1.1 if name in FEW_ROWS else 4.0) * times[0]
    wider = tuple(4 * width for width in widths)
    assert of_kernel(name, Work(sizes[1], wider), H200) > 1.1 * times[1]
    if name != "library":  # which has no gated layers
        assert of_kernel(name, Work(sizes[-1], widths, gated=True), H200) > times[-1]


def test_a_faster_gpu_takes_less():
    for name, work in (
        ("epilogue", Work(16, (4096, 16384, 4096))),
        ("back_to_back", Work(65536, (64, 256, 64))),
    ):
        for kernel in (INDUCTOR, name):
            assert of_kernel(kernel, work, gpu_named("l4")) > of_kernel(kernel, work, H200)


@pytest.mark.parametrize(
    ("family", "work", "gpu", "kernel"),
    [
        ("epilogue", Work(4096, (768, 3072, 768)), "h200", EPILOGUE_ON_HOPPER),
        ("epilogue", Work(4096, (768, 3072, 10)), "h200", EPILOGUE_ON_HOPPER),
        ("epilogue", Work(4096, (768, 3072, 768), any_gpu=True), "h200", "epilogue"),
        ("epilogue", Work(16, (768, 3072, 768)), "h200", "epilogue"),
        ("epilogue", Work(4096, (768, 3072, 768)), "a100", "epilogue"),
        ("stream", Work(16, (768, 3072, 768)), "h200", STREAM_ON_HOPPER),
        ("stream", Work(16, (4096, 16384, 4096)), "h200", "stream"),
        ("library", Work(16, (768, 3072, 768)), "h200", "library"),
    ],
)
def test_the_factors_are_those_of_the_kernel_that_runs(family, work, gpu, kernel):
    assert kernel_of(family, work, gpu_named(gpu)) == kernel
    assert family_of(kernel) == family
    expected = of_kernel(kernel, work, gpu_named(gpu))
    assert predicted([family], work, gpu_named(gpu))[family] == expected


def test_of_one_row_of_epilogue_it_says_nothing():
    assert predicted(["epilogue"], Work(1, (768, 3072, 768)), H200).keys() == {INDUCTOR}


def test_what_it_is_off_by_is_that_of_the_kernel():
    few, many = Work(100, (768, 3072, 768)), Work(4096, (768, 3072, 768))
    assert deviation("epilogue", INDUCTOR, few, H200) == FITTED["epilogue"].ratio
    assert deviation("epilogue", INDUCTOR, many, H200) == FITTED[EPILOGUE_ON_HOPPER].ratio
    both = deviation("epilogue", "library", many, H200)
    assert both == math.hypot(FITTED[EPILOGUE_ON_HOPPER].ratio, FITTED["library"].ratio)


def test_what_changed_configurations_since_it_was_measured_no_longer_speaks():
    times = {"inductor": 70.0, "epilogue": 75.0, "library": 60.0}
    case = Case.of_form("gelu_tanh", 100, 768, 3072)
    changed = replace(case.measurement, microseconds=times)
    assert of_today(changed, H200).microseconds.keys() == {INDUCTOR, "library"}
    same = replace(changed, rows=4096)  # the kernel for Hopper has no configurations
    assert of_today(same, H200) is same


def test_a_packed_weight_is_one_product_of_inductors():
    packed = Work(64, (768, 3072, 768), gated=True, packed=True)
    apart = replace(packed, packed=False)
    assert of_kernel(INDUCTOR, packed, H200) < of_kernel(INDUCTOR, apart, H200)


def test_rows_that_are_no_whole_lines_take_libraries_longer():
    times = [of_kernel(INDUCTOR, Work(4096, (512, h, 512)), H200) for h in (2016, 2048)]
    assert times[0] > 1.1 * times[1]


@pytest.mark.parametrize("activation", ["mish(x)", "softplus(x, 1.0, 20.0)", "erf(x)", "gelu(x)"])
def test_functions_that_are_computed_exactly_are_counted(activation):
    expression = parse(activation)
    counted = Work.of(replace(SETTING, activations=(expression,))).exact
    assert counted == exact_functions(expression, torch.bfloat16, differentiated=False)
    work = Work(65536, (768, 3072, 768), exact=counted)
    for kernel in ("epilogue", EPILOGUE_ON_HOPPER):
        longer = of_kernel(kernel, work, H200) / of_kernel(kernel, replace(work, exact=0), H200)
        assert (longer > 1.02) == (counted > 0)


def test_operands_of_an_exact_function_count_as_one():
    setting = replace(SETTING, activations=(parse("erf(x + p0)"),), operands=("vector",))
    assert (Work.of(setting).exact, Work.of(setting).any_gpu) == (1, True)


def test_fitting_finds_the_factors_that_made_the_times():
    true = {
        **FITTED,
        INDUCTOR: replace(FITTED[INDUCTOR], start=3.1, memory=0.6, products=0.5),
        "library": replace(FITTED["library"], start=1.2, products=0.45),
    }
    sizes = [(rows, width) for rows in (2, 64, 512, 4096) for width in (64, 512, 2048)]
    found = []
    for rows, width in sizes:
        work = Work(rows, (width, 4 * width, width))
        found.append(Sample(work, H200, predicted(["library"], work, H200, true)))
    factors = fitted(found[::2], rounds=14)
    assert factors.keys() == {INDUCTOR, "library"}
    for name in factors:
        assert fmean(map(abs, errors(name, found[1::2], factors))) < 0.05
        assert fmean(map(abs, errors(name, found[1::2], FITTED))) > 0.1


def test_a_kernel_that_ran_too_few_mlps_keeps_the_factors_that_ship():
    work = Work(64, (512, 2048, 512))
    found = [Sample(work, H200, predicted(["library"], work, H200))] * 4
    assert fitted(found, rounds=1).keys() == {INDUCTOR}


@pytest.mark.parametrize(
    ("kernel", "off"),
    [("epilogue", 0.09), ("library", 0.04), ("back_to_back", 0.15)],
)
def test_it_is_near_on_a_gpu_that_it_was_not_fitted_to(kernel, off):
    """Fitted to the H200, held to the H100 with its older kernels: ratios to Inductor's time."""
    own = [m for m in shipped(H100) if "H100" in m.source]
    held = [each._replace(work=replace(each.work, any_gpu=True)) for each in samples(own, H100)]
    found = ratio_errors(kernel, held, FITTED)
    assert len(found) > 30
    assert median(map(abs, found)) < off
    assert median(map(abs, found)) < FITTED[kernel].ratio


def test_the_factors_that_ship_are_off_by_as_much_as_they_say():
    """Of random MLPs; a kernel that ran few of them may by chance be off by more."""
    found = [sample(case, us, H200) for case, us in MLPS]
    for kernel, factors in FITTED.items():
        off = ratio_errors(kernel, found, FITTED) if kernel != INDUCTOR else []
        if len(off) > 12:
            assert math.sqrt(fmean(e**2 for e in off)) < 1.25 * factors.ratio, kernel


def test_of_random_mlps_none_is_planned_to_be_slower_and_most_gains_are_taken():
    gains, possible = [], []
    for case, us in MLPS:
        taken = planned(sample(case, us, H200), FITTED)
        gains.append(math.log(us[INDUCTOR] / us[taken]))
        possible.append(math.log(us[INDUCTOR] / min(us.values())))
    assert min(gains) > math.log(0.97)
    assert sum(gain < math.log(0.98) for gain in gains) <= 1
    assert sum(gains) > 0.93 * sum(possible)
    assert fmean(possible) - fmean(gains) < 0.03


def test_of_random_mlps_those_that_are_compared_have_the_fastest():
    """By rivals' times as they were measured apart."""
    regrets = []
    for case, us in MLPS:
        families = [name for name in us if name != INDUCTOR]
        rivals = profit.rivals(families, case.setting(torch.device("cuda"), H200))
        best = min((us[name] for name in rivals), default=us[INDUCTOR])
        taken = best if us[INDUCTOR] / best >= WORTHWHILE else us[INDUCTOR]
        regrets.append(math.log(taken / min(us.values())))
    assert fmean(regrets) < 0.005


def test_it_decides_where_the_very_mlp_was_not_measured(monkeypatch):
    monkeypatch.setattr(profit, "shipped", lambda gpu: ())
    narrow = replace(SETTING, rows=5000, in_features=72, hidden_features=288)
    narrow = replace(narrow, further_features=(72,))
    verdict = profit.best(("back_to_back", "epilogue", "library"), narrow)
    assert verdict.family == "back_to_back"
    assert verdict.expected_speedup > 1.5
    assert "expected by the cost model: Inductor" in verdict.grounds
    assert "times as fast ±" in verdict.grounds
    wide = replace(SETTING, rows=1, in_features=8192, hidden_features=8192)
    assert profit.best(("library",), replace(wide, further_features=(8192,))).family is None
    assert profit.best(("epilogue",), replace(SETTING, rows=1)).family is None


def for_any_rows(case: Case) -> tuple[Setting, ShapeEnv]:
    environment, rows = symbolic(case.rows)
    return replace(case.setting(torch.device("cuda"), H200), rows=rows), environment


def test_of_random_mlps_with_symbolic_rows_none_is_slower_and_most_is_gained():
    gains, possible, ranges = [], [], []
    for case, us in MLPS:
        if case.rows > 1:
            setting, environment = for_any_rows(case)
            family = profit.best(tuple(planner.available(setting)), setting).family
            gains.append(math.log(us[INDUCTOR] / us.get(family, us[INDUCTOR])))
            possible.append(math.log(us[INDUCTOR] / min(us.values())))
            ranges.append(1 + len(environment.guards))
    assert min(gains) > math.log(0.97)
    assert sum(gains) > 0.88 * sum(possible)
    assert fmean(ranges) < 2.1
    assert max(ranges) <= 8  # the graphs that Dynamo makes of a function by default


def test_symbolic_rows_are_planned_by_it_but_by_what_was_measured_of_the_very_widths():
    setting, _ = for_any_rows(MLP_OF_HEAVY_FUNCTIONS)
    verdict = profit.best(("epilogue", "stream"), setting)
    assert verdict.family is None
    assert "stream" not in verdict.grounds  # which takes few rows
    assert "expected of 8192 rows by the cost model: Inductor" in verdict.grounds
    _, rows = symbolic(20000)
    measured = replace(SETTING, rows=rows, target=H200)
    assert "as Inductor on an NVIDIA H200" in profit.best(("epilogue",), measured).grounds


def test_a_class_of_rows_has_a_configuration_that_may_be_slower():
    """128 rows of 2048→1024, whose large tiles are fewer than multiprocessors."""
    problem = Problem(1024, 2048, 1024, 0, False, torch.bfloat16, exact_rows=128)
    assert 3 < lost_to_class(problem, SXM) < 8
    assert lost_to_class(problem._replace(exact_rows=0), SXM) == 0
    work = Work(128, (2048, 1024, 2048))
    known, by_class = (
        of_kernel("epilogue", each, H200) for each in (work, replace(work, by_class=True))
    )
    assert by_class - known == lost_to_class(problem._replace(tma=True), SXM)


@pytest.mark.parametrize(
    "changes",
    [
        {"training": True},
        {"dtype": torch.float32},
        {"target": gpu_named("a100")},
        {"rows": 0},
        {"transposed": True, "plain_layout": False},
        {"operands": ("vector",)},
        {"strided": True},
    ],
)
def test_it_decides_of_what_it_was_checked_on_only(changes):
    assert speaks_for(SETTING)
    assert not speaks_for(replace(SETTING, **changes))
