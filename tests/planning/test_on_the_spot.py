"""Measuring while a graph is compiled: when, by whom, and what becomes of the result."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace

import pytest
import torch

from fusion_backend.mlp.expression import parse
from fusion_backend.planning import on_the_spot, profit
from fusion_backend.planning.cases import Case
from fusion_backend.planning.gpus import gpu_named
from fusion_backend.planning.user_table import UserTable
from settings import SETTING, symbolic

H100 = gpu_named("h100")
HERE = replace(SETTING, rows=100, target=None)
MAX_AUTOTUNE = {"max_autotune": True}


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """A machine with a GPU of which nothing is known, and a worker that answers; its requests."""
    requests = []

    def answer(command, *, input, **settings):
        requests.append(json.loads(input))
        row = Case(**requests[-1]["case"]).row()
        row["us"] = {"inductor": 10.0, "max_autotune": 8.0, "epilogue": 5.0}
        text = f"a warning\n{json.dumps(row)}\n"
        return subprocess.CompletedProcess(command, 0, text, "")

    on_the_spot.measure_once.cache_clear()
    monkeypatch.setenv("FUSEDMLP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("fusion_backend.planning.setting.gpu_of", lambda device: H100)
    monkeypatch.setattr(profit, "shipped", lambda gpu: ())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(on_the_spot.subprocess, "run", answer)
    return requests


def best(setting, **inductor):
    with torch._inductor.config.patch(**inductor):
        return profit.best(("epilogue",), setting, may_measure=True)


def test_max_autotune_measures_what_no_table_speaks_for(worker):
    verdict = best(HERE, max_autotune=True)
    assert verdict.family == "epilogue"
    assert verdict.expected_speedup == pytest.approx(8 / 5)  # over Inductor in that mode
    assert verdict.grounds.startswith("1.60 times as fast as Inductor on an NVIDIA H100 at 100")
    (request,) = worker
    assert request["device"] == 0
    assert Case(**request["case"]).setting(HERE.device) == HERE


@pytest.mark.parametrize(
    ("activation", "gated", "measured"),
    [
        ("relu(x) * p0", False, "gelu_tanh(x)"),
        ("gelu(x + 2.0 * p0)", False, "gelu(x)"),
        ("silu(g) * u * p0", True, "silu(g) * u"),
    ],
)
def test_where_operands_enter_the_mlp_of_its_form_is_measured(worker, activation, gated, measured):
    setting = replace(HERE, activations=(parse(activation),), gated=gated, operands=("vector",))
    assert best(setting, max_autotune=True).family == "epilogue"
    assert worker[0]["case"]["activation"] == measured


def test_what_was_measured_once_is_read_by_every_mode_and_not_measured_again(worker):
    best(HERE, max_autotune=True)
    assert best(HERE, max_autotune=True).expected_speedup == pytest.approx(8 / 5)
    assert best(HERE).expected_speedup == pytest.approx(10 / 5)
    assert len(worker) == 1
    assert len(UserTable.of(H100).measurements()) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_was_measured_is_planned_by_in_every_precision(dtype, worker):
    for _ in range(2):
        verdict = best(replace(HERE, dtype=dtype), max_autotune=True)
        assert verdict.expected_speedup == pytest.approx(8 / 5)
    assert len(worker) == 1


def test_symbolic_rows_are_measured_for_the_number_that_compiles(worker):
    environment, rows = symbolic(100)
    best(replace(HERE, rows=rows), max_autotune=True)
    assert worker[0]["case"]["rows"] == 100
    assert all("64" in str(guard.expr) or "1024" in str(guard.expr) for guard in environment.guards)


def test_widths_that_are_no_multiples_of_8_are_measured_beside_such(worker, monkeypatch):
    same = replace(HERE, in_features=776)
    table = Case.of_setting(HERE, 100).measurement
    table = replace(table, microseconds={"inductor": 10.0, "epilogue": 9.0})
    monkeypatch.setattr(profit, "shipped", lambda gpu: (table,))
    assert best(same, max_autotune=True).expected_speedup == pytest.approx(10 / 9)
    assert worker == []
    verdict = best(replace(HERE, in_features=775), max_autotune=True)
    assert verdict.expected_speedup == pytest.approx(8 / 5)
    assert len(worker) == 1


@pytest.mark.parametrize("change", [{"dtype": torch.float16}, {"activations": (parse("gelu(x)"),)}])
def test_what_is_only_guessed_from_another_kind_is_measured(change, worker, monkeypatch):
    table = Case.of_setting(HERE, 100).measurement
    table = replace(table, microseconds={"inductor": 10.0, "epilogue": 5.0})
    monkeypatch.setattr(profit, "shipped", lambda gpu: (table,))
    assert best(HERE, max_autotune=True).expected_speedup == pytest.approx(10 / 5)
    setting = replace(HERE, **change)
    assert "expected by the cost model" in best(setting).grounds
    assert worker == []
    assert best(setting, max_autotune=True).expected_speedup == pytest.approx(8 / 5)
    assert len(worker) == 1


def test_other_modes_measure_nothing(worker):
    best(HERE)
    assert worker == []


def test_nothing_is_measured_for_a_gpu_that_is_not_here(worker):
    best(replace(HERE, target=H100), max_autotune=True)
    assert worker == []


def test_nothing_is_measured_while_a_cuda_graph_is_recorded(worker, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    best(HERE, max_autotune=True)
    assert worker == []


def test_nothing_is_measured_where_the_option_says_so(worker):
    with torch._inductor.config.patch(**MAX_AUTOTUNE):
        profit.best(("epilogue",), HERE, may_measure=False)
    assert worker == []


def test_a_near_measurement_is_enough(worker):
    best(HERE, max_autotune=True)
    best(replace(HERE, rows=110, hidden_features=3200), max_autotune=True)
    assert len(worker) == 1
    best(replace(HERE, hidden_features=6144), max_autotune=True)
    assert len(worker) == 2


def test_a_worker_that_fails_is_a_warning_and_the_heuristic_plans(worker, monkeypatch):
    attempts = []

    def fail(command, **settings):
        attempts.append(command)
        return subprocess.CompletedProcess(command, 1, "", "Traceback\nOutOfMemoryError: 3 GiB\n")

    monkeypatch.setattr(on_the_spot.subprocess, "run", fail)
    with pytest.warns(UserWarning, match=r"could not measure.*OutOfMemoryError: 3 GiB"):
        verdict = best(HERE, max_autotune=True)
    assert "heuristic" in verdict.grounds
    best(HERE, max_autotune=True)
    assert len(attempts) == 1


@pytest.mark.slow
def test_the_worker_reads_a_case_and_fails_with_one_reason_where_there_is_no_gpu(children):
    request = json.dumps({"case": Case.of_form("gelu", 1, 2, 3).as_dict(), "device": 99})
    worker = "fusion_backend.bench.tuning_worker"
    done = children.run(
        f"import runpy; runpy.run_module({worker!r}, None, '__main__')", given=request
    )
    assert done.returncode != 0
    assert "CUDA" in done.stderr or "cuda" in done.stderr
