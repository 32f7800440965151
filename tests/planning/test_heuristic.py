"""The heuristic, held to the measurements that ship with the package."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusion_backend.planning import discounts
from fusion_backend.planning.cases import Case
from fusion_backend.planning.cost_model import FITTED
from fusion_backend.planning.gpus import gpu_named
from fusion_backend.planning.heuristic import predicted
from fusion_backend.planning.measurements import INDUCTOR, MAX_AUTOTUNE, WORTHWHILE, Kind, shipped

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
HALF = Kind("gelu_tanh", training=False, precision="bfloat16")
FAMILIES = ("back_to_back", "epilogue", "library")


def choices(gpu):
    """Each MLP measured on a GPU, and the family that the heuristic would have taken without it."""
    for measured in shipped(gpu_named(gpu)):
        families = [name for name in measured.microseconds if name not in (INDUCTOR, MAX_AUTOTUNE)]
        guess = predicted(families, measured.kind, measured.rows, measured.widths, gpu_named(gpu))
        family = max(families, key=lambda family: guess.speedup(family) or 0.0)
        yield measured, family if (guess.speedup(family) or 0.0) >= WORTHWHILE else None


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_all_that_it_would_fuse_was_measured_not_to_be_slower(gpu):
    for measured, family in choices(gpu):
        if family is not None:
            assert measured.speedup(family) >= 0.98, (measured, family)


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_it_finds_much_of_what_is_worthwhile(gpu):
    found = [
        family is not None and measured.speedup(family) >= WORTHWHILE
        for measured, family in choices(gpu)
        if max(map(measured.speedup, measured.microseconds)) >= WORTHWHILE
    ]
    assert sum(found) / len(found) > 0.45, f"{sum(found)} of {len(found)}"


def test_on_a_gpu_that_it_was_not_fitted_to_it_gains_most_of_what_there_is():
    gained, possible = 0.0, 0.0
    for measured, family in choices("h100"):
        kind = measured.kind
        if kind.training or kind.precision in ("ieee", "tf32") or "H100" not in measured.source:
            continue
        speedup = 1.0 if family is None else measured.speedup(family)
        assert speedup >= 0.98
        gained += math.log(speedup)
        possible += math.log(max(map(measured.speedup, measured.microseconds)))
    assert gained / possible > 0.8


def test_of_random_mlps_it_gains_most_of_what_there_is():
    """On the H200, without its table."""
    gpu, gained, possible = gpu_named("h200"), 0.0, 0.0
    rows = json.loads((RESULTS / "h200" / "random.json").read_text())["rows"]
    for row in rows:
        case, times = Case(**row["case"]), row["us"]
        families = [name for name in times if name != INDUCTOR]
        guess = predicted(families, case.measurement.kind, case.rows, case.measurement.widths, gpu)
        guess = discounts.of_its_activation(guess, case.setting(torch.device("cuda"), gpu))
        family = max(families, key=lambda name: guess.speedup(name) or 0.0)
        taken = family if (guess.speedup(family) or 0.0) >= WORTHWHILE else INDUCTOR
        gained += math.log(times[INDUCTOR] / times[taken])
        possible += math.log(times[INDUCTOR] / min(times.values()))
    assert gained / possible > 0.8


@pytest.mark.parametrize("gpu", ["a100", "l40s", "b200", "mi300x"])
def test_a_narrow_mlp_of_many_rows_is_fused_on_every_gpu(gpu):
    guess = predicted(FAMILIES, HALF, 1 << 16, (64, 256, 64), gpu_named(gpu))
    assert guess.speedup("back_to_back") > 1.5
    assert not guess.measured


@pytest.mark.parametrize("gpu", ["a100", "l40s", "b200", "mi300x"])
@pytest.mark.parametrize(
    ("kind", "rows", "widths"),
    [
        (Kind("gelu_tanh", training=True, precision="bfloat16"), 16, (768, 3072, 768)),
        (Kind("gelu_tanh", training=False, precision="ieee"), 16, (768, 3072, 768)),
        (Kind("gelu_tanh", training=False, precision="tf32"), 16, (768, 3072, 768)),
        (Kind("swiglu", training=False, precision="bfloat16"), 4096, (4096, 14336, 4096)),
        (Kind("gelu", training=False, precision="bfloat16"), 1, (768, 3072, 768)),
    ],
)
def test_where_nothing_structural_is_saved_nothing_is_fused(gpu, kind, rows, widths):
    guess = predicted(("back_to_back", "epilogue"), kind, rows, widths, gpu_named(gpu))
    assert all(
        (guess.speedup(family) or 0.0) < WORTHWHILE
        for family in guess.microseconds
        if family != INDUCTOR
    )


def test_only_what_was_fitted_on_a_gpu_is_taken_at_its_word_there():
    a100, families = gpu_named("a100"), ("epilogue", "stream")
    arguments = (families, HALF, 16, (768, 3072, 768), a100)
    shipped = predicted(*arguments).microseconds
    own = {**FITTED, "stream": replace(FITTED["stream"])}  # equal factors, fitted here
    found = predicted(*arguments, own).microseconds
    assert found["stream"] < shipped["stream"]
    assert found["epilogue"] == shipped["epilogue"]


def test_a_plan_that_cannot_run_is_not_predicted():
    guess = predicted(("epilogue",), HALF, 16, (768, 3072, 768), gpu_named("a100"))
    assert set(guess.microseconds) == {INDUCTOR, "epilogue"}
