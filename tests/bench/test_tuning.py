"""Measuring one MLP: what is compared, and the line of a table that comes of it.

Here the timer is one of wall time on a CPU; the GPU's is exercised in `gpu/test_tuning.py`.
"""

from __future__ import annotations

import contextlib
import json

import pytest
import torch

from fusion_backend.bench import tuning
from fusion_backend.bench.tuning_grid import grid
from fusion_backend.instruments.timing import wall
from fusion_backend.planning.cases import FORMS, Case
from fusion_backend.planning.user_table import cell

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(tuning, "replays", lambda function, calls: wall(function, calls, CPU))


def small(form="gelu_tanh", **changes):
    return Case.of_form(form, 8, 16, 32, "ieee", **changes)


@pytest.mark.parametrize("form", FORMS)
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
    row = tuning.measure(small(training=True), CPU)
    assert row["training"]
    assert set(row["us"]) == {"inductor", "reference"}


def test_a_plan_that_does_not_run_is_reported_and_the_others_are_timed(monkeypatch):
    monkeypatch.setattr(tuning, "available", lambda setting: ["library", "reference"])
    row = tuning.measure(small(), CPU)
    assert set(row["us"]) == {"inductor", "reference"}
    assert "PlanError" in row["failures"]["library"]


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
