"""Measuring one MLP: what is compared, and the line of a table that comes of it.

Here it is the CPU that measures, whatever else it does; a GPU does in `gpu/test_tuning.py`.
"""

from __future__ import annotations

import json

import pytest
import torch

from fusion_backend.bench import tuning
from fusion_backend.bench.tuning_grid import grid
from fusion_backend.errors import CommandError, MeasurementError
from fusion_backend.kernels.cpu_rows.compiling import CompilationError
from fusion_backend.planning import cpu_rates
from fusion_backend.planning.cases import FORMS, Case
from fusion_backend.planning.undisturbed import watched
from fusion_backend.planning.user_table import cell
from repetition import slow_but

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _believed(monkeypatch):
    def seconds_of_one_run(ways, deadline, turns):
        return {name: watched(run).seconds for name, run in ways.items()}

    for module in (tuning, cpu_rates):
        monkeypatch.setattr(module, "least_seconds", seconds_of_one_run)


def small(form="gelu_tanh", **changes):
    return Case.of_form(form, 8, 16, 32, "ieee", **changes)


@pytest.mark.parametrize("form", slow_but(["swiglu"], FORMS))
def test_inductor_and_every_plan_are_timed_and_compared_with_float64(form, monkeypatch):
    monkeypatch.setattr(tuning, "available", lambda setting: ["reference", "onednn"])
    row = tuning.measure(small(form), CPU)
    assert list(row["us"]) == list(row["error"]) == ["inductor", "reference", "onednn"]
    assert all(time > 0 for time in row["us"].values())
    assert all(error < 1e-5 for error in row["error"].values())
    assert "failures" not in row
    json.dumps(row)


def test_training_is_timed_with_all_gradients(monkeypatch):
    monkeypatch.setattr(tuning, "available", lambda setting: ["reference"])
    row = tuning.measure(small("swiglu", training=True), CPU)
    assert row["training"]
    assert set(row["us"]) == {"inductor", "reference"}


def test_a_plan_that_does_not_run_is_reported_and_the_others_are_timed(monkeypatch):
    monkeypatch.setattr(tuning, "available", lambda setting: ["library", "reference"])
    row = tuning.measure(small(), CPU)
    assert set(row["us"]) == {"inductor", "reference"}
    assert "PlanError" in row["failures"]["library"]


def test_times_that_cannot_be_believed_are_an_error(monkeypatch):
    monkeypatch.setattr(tuning, "available", lambda setting: [])
    monkeypatch.setattr(tuning, "least_seconds", lambda samples, deadline, turns: None)
    with pytest.raises(MeasurementError, match="other programs took the cores"):
        tuning.measure(small(), CPU)


def test_a_call_takes_a_share_of_what_its_sample_takes(monkeypatch):
    """A sample of a small MLP has many calls, one of a large MLP few."""
    calls = []

    def least_seconds(samples, deadline, turns):
        return dict.fromkeys(samples, 1e-3)

    monkeypatch.setattr(tuning, "least_seconds", least_seconds)
    monkeypatch.setattr(
        tuning, "candidates", lambda *_: {"inductor": lambda x, *w: calls.append(x)}
    )
    monkeypatch.setattr(tuning, "error_of", lambda *_: 0.0)
    for rows in (1, 1 << 14):
        us = tuning.measure(Case.of_form("gelu", rows, 16, 64, "ieee"), CPU)["us"]["inductor"]
        assert us == pytest.approx(1e3 / (16 if rows == 1 else 2))


def test_an_mlp_that_rates_follow_from_becomes_a_line_of_the_table():
    row = tuning.measure_rates(cpu_rates.case_of(64, 1, torch.float32, training=False))
    assert row["us"].keys() >= {"inductor", "rows"}
    assert all(us > 0 for us in row["us"].values())
    assert (row["width"], row["rows"], row["hidden"]) == (64, 1, 256)
    json.dumps(row)


def test_without_a_compiler_rates_are_refused_once(monkeypatch):
    def refuse(case, turns, seconds):
        raise CompilationError("no C++ compiler was found")

    monkeypatch.setattr(cpu_rates, "tune", refuse)
    with pytest.raises(CommandError, match="no C\\+\\+ compiler was found"):
        tuning.measure_rates(cpu_rates.case_of(64, 1, torch.float32, training=False))


def test_max_autotune_is_compared_when_asked_for(monkeypatch):
    monkeypatch.setattr(tuning, "available", lambda setting: [])
    assert "max_autotune" in tuning.measure(small(), CPU, max_autotune=True)["us"]


def test_a_step_of_training_gives_the_gradient_of_every_input():
    step = tuning.training_step(lambda x, w, b: (x @ w).sum() if b is None else x)
    x, w = torch.randn(2, 3), torch.randn(3, 4)
    assert [tuple(g.shape) for g in step(x, w, None)] == [(2, 3), (3, 4)]


def test_the_grid_measures_nothing_twice_and_all_that_tables_are_asked_for():
    cells = [cell(case.row()) for case in grid()]
    assert len(cells) == len(set(cells))
    kinds = {case.measurement.kind for case in grid()}
    assert {kind.form for kind in kinds} == set(FORMS)
    assert {kind.precision for kind in kinds} == {"bfloat16", "float16", "tf32", "ieee"}
    assert any(kind.training for kind in kinds)


@pytest.mark.parametrize("form", FORMS)
def test_a_case_counts_among_its_form(form):
    case = Case.of_form(form, 1, 2, 3)
    assert (case.form, case.gated, case.biases) == (form, form == "swiglu", form != "swiglu")
    assert Case(**case.as_dict()) == case


def test_what_differs_from_the_form_stands_in_the_row():
    assert not {"out", "activation"} & Case.of_form("gelu", 1, 2, 3).row().keys()
    row = Case("relu(x)", 1, 2, 3, 4).row()
    assert (row["form"], row["activation"], row["out"]) == ("gelu_tanh", "relu(x)", 4)
