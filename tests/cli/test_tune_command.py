"""`fusedmlp tune`: what it measures, how it goes on, and how it fails."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fusion_backend.bench import tuning
from fusion_backend.bench.tuning_grid import quick_grid
from fusion_backend.cli import main
from fusion_backend.cli import tune as command
from fusion_backend.planning.cost_model import FITTED, Work, predicted
from fusion_backend.planning.gpus import gpu_named
from fusion_backend.planning.user_table import UserTable

SIZES = ("--form", "swiglu", "--width", "64", "--hidden", "128")
MODEL = """
import torch
from torch import nn

def mlp():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 32))
    return model, (torch.randn(48, 64),)

def none():
    return nn.Linear(2, 2), (torch.randn(2, 2),)
"""


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A machine with a GPU that measures at once; the cases it has measured."""
    cases = []

    def measure(case, device, *, max_autotune):
        cases.append(case)
        if case.rows == 7:
            raise torch.OutOfMemoryError("no memory")
        modes = {"inductor": 10.0} | ({"max_autotune": 8.0} if max_autotune else {})
        return {**case.row(), "us": {**modes, "epilogue": 5.0}}

    monkeypatch.setenv("FUSEDMLP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(command, "current_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(command, "gpu_of", lambda device: gpu_named("h100"))
    monkeypatch.setattr(tuning, "measure", measure)
    return cases


def test_sizes_are_measured_kept_and_shown(measured, capsys):
    assert main(["tune", *SIZES, "--rows", "16,64"]) == 0
    assert [(case.rows, case.activation, case.precision) for case in measured] == [
        (16, "silu(g) * u", "bfloat16"),
        (64, "silu(g) * u", "bfloat16"),
    ]
    assert [m.rows for m in UserTable.of(gpu_named("h100")).measurements()] == [16, 64]
    captured = capsys.readouterr()
    assert "silu(g) * u 64→128→64" in captured.out
    assert captured.out.count(" 2.00×") >= 2
    assert "2 of 2 MLPs" in captured.err
    assert "2/2" in captured.err


def test_regret_is_shown_of_plans_before_and_after(measured, monkeypatch, capsys):
    def measure(case, device, *, max_autotune):
        us = {"inductor": 10.0, "epilogue": 5.0, "stream": 4.0}
        if case.rows == 64:
            us = {"inductor": 10.0, "epilogue": 9.9, "stream": 40.0}  # too little is gained
        return {**case.row(), "us": us}

    monkeypatch.setattr(tuning, "measure", measure)
    monkeypatch.setattr(command, "planned_without", lambda case, device: "epilogue")
    main(["tune", *SIZES, "--rows", "16,64"])
    out = capsys.readouterr().out
    assert "planned without" in out
    assert "without these measurements 1.12× in the geometric mean, 1.25× at most" in out
    assert "with them 1.01× and 1.01×." in out


def test_quick_fits_the_cost_model_to_the_gpu(measured, monkeypatch, capsys):
    """What is measured is what the model predicts of a GPU with three times the launch times."""
    slow = {name: replace(each, start=3 * each.start) for name, each in FITTED.items()}
    gpu = gpu_named("h100")

    def measure(case, device, *, max_autotune):
        measured.append(case)
        work = Work(case.rows, case.measurement.widths, case.gated)
        return {**case.row(), "us": predicted(["epilogue", "stream"], work, gpu, slow)}

    monkeypatch.setattr(tuning, "measure", measure)
    assert main(["tune", "--quick"]) == 0
    assert measured == list(quick_grid())
    factors = UserTable.of(gpu).factors()
    assert factors.keys() == {"inductor", "epilogue", "stream"}
    assert factors["inductor"].start > 2 * FITTED["inductor"].start
    assert "fitted to 22 MLPs of this GPU: inductor ±" in capsys.readouterr().err
    assert len(UserTable.of(gpu).measurements()) == 22  # the factors are no measurement


def test_quick_that_measured_too_little_fits_nothing(measured, capsys):
    main(["tune", "--quick", "--seconds", "-1"])
    assert "too few MLPs to fit the cost model to: 0" in capsys.readouterr().err
    assert UserTable.of(gpu_named("h100")).factors() == {}


def test_what_is_planned_without_measurements_is_what_ships(measured):
    from fusion_backend.planning.cases import Case

    case = Case.of_form("gelu_tanh", 16384, 64, 256, "bfloat16")
    assert command.planned_without(case, torch.device("cuda", 0)) == "back_to_back"


def test_the_same_command_measures_only_what_is_missing(measured):
    main(["tune", *SIZES, "--rows", "16"])
    main(["tune", *SIZES, "--rows", "16,64"])
    assert [case.rows for case in measured] == [16, 64]
    main(["tune", *SIZES, "--rows", "16,64", "--max-autotune"])
    main(["tune", *SIZES, "--rows", "16,64", "--max-autotune"])
    assert [case.rows for case in measured] == [16, 64, 16, 64]
    main(["tune", *SIZES, "--rows", "16", "--again"])
    assert len(measured) == 5


def test_a_measurement_that_fails_is_reported_and_the_others_are_made(measured, capsys):
    assert main(["tune", *SIZES, "--rows", "7,16"]) == 0
    assert [m.rows for m in UserTable.of(gpu_named("h100")).measurements()] == [16]
    error = capsys.readouterr().err
    assert "no memory" in error
    assert "1 are missing" in error
    assert main(["tune", *SIZES, "--rows", "7"]) == 1


def test_out_of_time_nothing_more_is_started(measured, capsys):
    main(["tune", "--seconds", "-1"])
    assert measured == []
    assert "the same command continues" in capsys.readouterr().err


def test_the_default_is_the_grid(measured):
    from fusion_backend.bench.tuning_grid import grid

    assert main(["tune", "--json"]) == 0
    assert measured == list(grid())


def test_the_mlps_of_a_model_are_measured(measured, tmp_path, monkeypatch):
    (tmp_path / "model.py").write_text(MODEL)
    cpu = torch.device("cpu")
    monkeypatch.setattr("fusion_backend.cli.loading.choose_device", lambda asked: cpu)
    assert main(["tune", "--model", f"{tmp_path / 'model.py'}:mlp", "--dtype", "bfloat16"]) == 0
    (case,) = measured
    sizes = (case.rows, case.in_features, case.hidden_features, case.out_features)
    assert sizes == (48, 64, 256, 32)
    assert (case.activation, case.precision, case.training) == ("relu(x)", "bfloat16", False)


def test_a_model_without_mlps_gets_one_line_and_code_2(measured, tmp_path, monkeypatch, capsys):
    (tmp_path / "model.py").write_text(MODEL)
    cpu = torch.device("cpu")
    monkeypatch.setattr("fusion_backend.cli.loading.choose_device", lambda asked: cpu)
    assert main(["tune", "--model", f"{tmp_path / 'model.py'}:none"]) == 2
    assert "no MLP that can be fused" in capsys.readouterr().err


def test_a_file_is_written_in_the_form_of_the_tables_that_ship(measured, tmp_path):
    from fusion_backend.planning.measurements import parsed

    out = tmp_path / "sm_90.json"
    main(["tune", *SIZES, "--rows", "16", "--out", str(out)])
    (measurement,) = parsed(json.loads(out.read_text()))
    assert measurement.speedup("epilogue") == 2.0
    assert UserTable.of(gpu_named("h100")).measurements() == ()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [("nothing", "is no table"), ('{"machine": {"gpu": "A100"}, "rows": []}', "a new file")],
)
def test_a_file_of_something_else_is_not_overwritten(
    content, complaint, measured, tmp_path, capsys
):
    out = tmp_path / "table.json"
    out.write_text(content)
    assert main(["tune", *SIZES, "--out", str(out)]) == 2
    assert complaint in capsys.readouterr().err
    assert out.read_text() == content


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--form", "swiglu"], "sizes need all of"),
        (["--rows", "16"], "sizes need all of"),
        (["--model", "a.py:b", "--width", "16"], "brings its own sizes"),
        (["--quick", "--model", "a.py:b"], "--quick has MLPs of its own"),
        (["--quick", *SIZES], "--quick has MLPs of its own"),
    ],
)
def test_half_a_request_gets_one_line_and_code_2(argv, complaint, measured, capsys):
    assert main(["tune", *argv]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_can_be_measured(capsys):
    assert main(["tune"]) == 2
    assert "no GPU" in capsys.readouterr().err
