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
from fusion_backend.errors import MeasurementError
from fusion_backend.planning import cpu_rates, planner, profit
from fusion_backend.planning.cases import Case, is_described
from fusion_backend.planning.cost_model import (
    EPILOGUE_ON_HOPPER,
    FITTED,
    Work,
    predicted,
)
from fusion_backend.planning.cpu_rates import FINER_GRID, GRID, Cell
from fusion_backend.planning.gpus import gpu_named
from fusion_backend.planning.undisturbed import watched
from fusion_backend.planning.user_table import UserTable

F32 = torch.float32
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
    monkeypatch.setattr(command, "current_device", lambda arguments: torch.device("cuda", 0))
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
        return {**case.row(), "us": predicted(["back_to_back", "epilogue"], work, gpu, slow)}

    monkeypatch.setattr(tuning, "measure", measure)
    assert main(["tune", "--quick"]) == 0
    assert measured == list(quick_grid())
    factors = UserTable.of(gpu).factors()
    kernels = {"epilogue", EPILOGUE_ON_HOPPER}
    assert factors.keys() == {"inductor", "back_to_back", *kernels}
    assert factors["inductor"].start > 2 * FITTED["inductor"].start
    assert "fitted to 22 MLPs of this GPU: inductor ±" in capsys.readouterr().err
    assert len(UserTable.of(gpu).measurements()) == 22  # the factors are no measurement


def test_quick_that_measured_too_little_fits_nothing(measured, capsys):
    main(["tune", "--quick", "--seconds", "-1"])
    assert "too few MLPs to fit the cost model to: 0" in capsys.readouterr().err
    assert UserTable.of(gpu_named("h100")).factors() == {}


def test_what_is_planned_without_measurements_is_what_ships(measured):
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


def fake_rates(case):
    """What the family ``rows`` gains with many rows only, by measurements that are made up."""
    us = {"inductor": 10.0, "rows": 5.0 if case.rows > 64 else 20.0}
    return {**cpu_rates.tuned_line(case), "us": us}


@pytest.fixture
def cpu(tmp_path, monkeypatch):
    """A CPU that calibrates and measures at once; the cases it has measured for rates."""
    cases = []

    def measure_rates(case):
        cases.append(case)
        return fake_rates(case)

    def calibrated(dtype, training):
        yield from (Cell(w, r, {"unfused": 2.0, "rows": 1.0}) for w, e in GRID.items() for r in e)

    monkeypatch.setenv("FUSEDMLP_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FUSEDMLP_CALIBRATE", "1")
    monkeypatch.setattr(tuning, "measure_rates", measure_rates)
    monkeypatch.setattr(cpu_rates, "measured", calibrated)
    monkeypatch.setattr(planner, "available", lambda setting: iter(["rows"]))
    cpu_rates.calibration.cache_clear()
    yield cases
    cpu_rates.calibration.cache_clear()


def sizes(cases):
    return {(case.in_features, case.rows) for case in cases}


def test_on_a_cpu_the_grid_refines_the_rates_that_the_next_process_plans_by(cpu, capsys):
    def expected(rows):
        setting = Case.of_form("gelu", rows, 64, 256, "ieee").setting(torch.device("cpu"))
        return profit.best(("rows",), setting, may_calibrate=True).family

    assert expected(16) == "rows"
    assert main(["tune", "--device", "cpu"]) == 0
    assert sizes(cpu) == {(w, r) for w, each in FINER_GRID.items() for r in each}
    assert {(case.training, case.dtype) for case in cpu} == {(False, torch.float32)}
    cpu_rates.calibration.cache_clear()  # as in another process
    assert expected(16) is None
    assert expected(512) == "rows"
    captured = capsys.readouterr()
    assert f"{len(cpu)} of {len(cpu)} MLPs" in captured.err
    assert "unfused µs" in captured.out


def test_on_a_cpu_regret_is_shown_of_plans_before_and_after(cpu, monkeypatch, capsys):
    monkeypatch.setattr(command, "rates_grid", lambda *_: [cpu_rates.case_of(64, 16, F32, False)])
    assert main(["tune", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "without these measurements 2.00× in the geometric mean, 2.00× at most" in out
    assert "with them 1.00× and 1.00×." in out


def test_on_a_cpu_quick_repeats_the_calibration(cpu):
    main(["tune", "--device", "cpu", "--quick", "--dtype", "bfloat16"])
    assert sizes(cpu) == {(w, r) for w, each in GRID.items() for r in each}
    assert {case.dtype for case in cpu} == {torch.bfloat16}


def test_on_a_cpu_training_steps_are_measured_when_asked_for(cpu):
    main(["tune", "--device", "cpu", "--quick", "--backward"])
    assert sizes(case for case in cpu if case.training) == sizes(
        case for case in cpu if not case.training
    )


def test_on_a_cpu_the_same_command_measures_only_what_is_missing(cpu):
    main(["tune", "--device", "cpu", "--quick"])
    quick = len(cpu)
    main(["tune", "--device", "cpu"])
    assert len(cpu) == len(set(cpu)) > quick
    main(["tune", "--device", "cpu"])
    assert len(cpu) == len(set(cpu))
    main(["tune", "--device", "cpu", "--quick", "--again"])
    assert len(cpu) == len(set(cpu)) + quick


def test_on_a_cpu_that_others_use_nothing_is_kept_and_the_remedy_is_told(cpu, monkeypatch, capsys):
    def disturbed(case):
        raise MeasurementError("its times are not kept")

    monkeypatch.setattr(tuning, "measure_rates", disturbed)
    assert main(["tune", "--device", "cpu", "--quick"]) == 1
    assert not UserTable.of_cpu(torch.get_num_threads()).rows()
    error = capsys.readouterr().err
    number = sum(map(len, GRID.values()))
    assert f"{number} MLPs were disturbed: stop what else computes" in error
    assert f"{number} are missing: the same command continues" in error


def test_an_mlp_of_sizes_that_was_measured_on_a_cpu_is_planned_by_its_own_times(cpu, monkeypatch):
    def measure(case, device, *, max_autotune):
        return {**case.row(), "us": {"inductor": 10.0, "rows": 10.0, "onednn": 8.0}}

    monkeypatch.setattr(tuning, "measure", measure)
    monkeypatch.setattr(planner, "available", lambda setting: iter(["rows", "onednn"]))
    plain = ("--device", "cpu", "--form", "gelu", "--width", "64", "--hidden", "256")
    assert main(["tune", *plain, "--rows", "16"]) == 0
    setting = Case.of_form("gelu", 16, 64, 256, "ieee").setting(torch.device("cpu"))

    def planned(**changes):
        other = replace(setting, **changes)
        return profit.best(("rows", "onednn"), other, may_calibrate=True)

    assert planned().family == "onednn"
    assert "measured here for this MLP" in planned().grounds
    others = ({"rows": 17}, {"has_bias_up": False}, {"training": True}, {"dtype": torch.bfloat16})
    for change in others:
        assert "measured here for this MLP" not in planned(**change).grounds


def test_on_a_cpu_sites_that_no_case_describes_are_not_taken_for_one(cpu):
    setting = Case.of_form("swiglu", 16, 64, 256, "ieee").setting(torch.device("cpu"))
    assert is_described(setting)
    assert is_described(replace(setting, plain_layout=False, transposed=True))
    assert not is_described(replace(setting, plain_layout=False))  # packed
    assert not is_described(replace(setting, strided=True))
    assert not is_described(replace(setting, further_features=(256, 64)))
    assert not is_described(replace(setting, further_features=()))
    assert not is_described(replace(setting, operands=("column",)))


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--max-autotune"], "needs a GPU"),
        (["--out", "table.json"], "--out is for the table of a GPU"),
    ],
)
def test_on_a_cpu_what_only_gpus_have_gets_one_line_and_code_2(argv, complaint, cpu, capsys):
    assert main(["tune", "--device", "cpu", *argv]) == 2
    assert complaint in capsys.readouterr().err
    assert not cpu


def test_on_a_cpu_nothing_is_measured_that_would_not_be_believed(cpu, monkeypatch, capsys):
    monkeypatch.setenv("FUSEDMLP_CALIBRATE", "0")
    assert main(["tune", "--device", "cpu"]) == 2
    assert "FUSEDMLP_CALIBRATE=0" in capsys.readouterr().err
    assert not cpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_none_can_be_measured(capsys):
    assert main(["tune", "--device", "cuda"]) == 2
    assert "no GPU" in capsys.readouterr().err


def seconds_of_one_run(ways, deadline, turns):
    return {name: watched(run).seconds for name, run in ways.items()}


def test_a_cpu_measures_an_mlp_by_inductor_and_by_each_family(tmp_path, monkeypatch, capsys):
    """Nothing is made up here, but times are believed whatever else the machine does."""
    monkeypatch.setenv("FUSEDMLP_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FUSEDMLP_CALIBRATE", "1")
    monkeypatch.setattr(tuning, "least_seconds", seconds_of_one_run)
    asked = ("--form", "gelu_tanh", "--width", "16", "--hidden", "32", "--rows", "4")
    assert main(["tune", "--device", "cpu", *asked, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    setting = Case.of_form("gelu_tanh", 4, 16, 32, "ieee").setting(torch.device("cpu"))
    families = tuple(planner.available(setting))
    assert row["us"].keys() == {"inductor", *families}
    assert all(error < 1e-5 for error in row["error"].values())
    verdict = profit.best(families, setting, may_calibrate=True)
    assert "measured here for this MLP" in verdict.grounds
