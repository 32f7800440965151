"""The file of results: summary, continuing, and what is shown of it."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fusion_backend.bench import measuring
from fusion_backend.bench import results as results_file
from fusion_backend.bench.cells import Cell
from fusion_backend.bench.grids import GRIDS
from fusion_backend.bench.peers import PEERS, chosen
from fusion_backend.bench.plots import write_plots
from fusion_backend.bench.roofline import Ceilings
from fusion_backend.bench.tables import cell_text, overview
from fusion_backend.errors import CommandError
from fusion_backend.planning import undisturbed

CPU = torch.device("cpu")


def row(us: float) -> dict[str, Any]:
    return {
        "us": us,
        "best_us": us,
        "spread": 0.01,
        "error": 1e-3,
        "tflops": 1.0,
        "gbps": 2.0,
        "floor_share": 10 / us,
        "kernels": 2,
        "memsets": 1,
    }


def measured(**us: float) -> dict[str, Any]:
    peers: dict[str, Any] = {name.replace("_", "-"): row(value) for name, value in us.items()}
    peers["quack"] = {"absent": "quack-kernels is not installed"}
    return {
        "flops": 10**9,
        "bytes": 10**6,
        "floor_us": 10.0,
        "bound": "memory",
        "plan": "epilogue",
        "peers": peers,
    }


@pytest.fixture
def results() -> dict[str, Any]:
    """Three cells, two of them of a published grid."""
    made = results_file.started(None, CPU, PEERS)
    made["machine"]["ceilings"] = {
        "bytes_per_second": 3e12,
        "flops_per_second": {"bfloat16": 8e14},
    }
    forward = GRIDS["forward"]
    results_file.add(made, forward[0], measured(inductor=40, max_autotune=32, fusedmlp=16), "cuda")
    results_file.add(made, forward[1], measured(inductor=40, fusedmlp=50), "cuda")
    results_file.add(made, Cell("gelu", 3, 5, 7), measured(inductor=40, fusedmlp=40), "cuda")
    return made


def test_the_speed_up_is_over_the_better_of_inductors_modes(results: dict[str, Any]) -> None:
    speedups = [cell["speedup"] for cell in results["cells"].values()]
    assert speedups == pytest.approx([2.0, 0.8, 1.0])


def test_the_summary_has_geometric_mean_and_worst_cell_by_grid(results: dict[str, Any]) -> None:
    forward = results["summary"]["forward"]
    assert forward["cells"] == 2
    assert forward["geometric_mean"] == pytest.approx(1.6**0.5)
    assert forward["worst"] == pytest.approx(0.8)
    assert forward["worst_cell"] == GRIDS["forward"][1].name
    assert results["summary"]["all"]["geometric_mean"] == pytest.approx(1.6 ** (1 / 3))


def test_a_cell_without_inductor_does_not_count(results: dict[str, Any]) -> None:
    before = results["summary"]
    results_file.add(results, Cell("gelu", 4, 5, 7), measured(fusedmlp=40), "cuda")
    assert results["summary"] == before


def test_what_was_written_is_read_and_continued(results: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.json"
    results_file.write(results, path)
    again = results_file.started(path, CPU, PEERS)
    assert again == results
    assert results_file.is_done(again, GRIDS["forward"][0], chosen(["inductor", "max-autotune"]))
    assert not results_file.is_done(again, GRIDS["forward"][1], chosen(["max-autotune"]))
    assert not results_file.is_done(again, GRIDS["forward"][2], chosen(["inductor"]))


def test_a_cell_is_measured_again_once_a_peer_is_installed(
    results: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (quack,) = chosen(["quack"])
    cell = GRIDS["forward"][0]
    monkeypatch.setattr(importlib.metadata, "version", not_found)
    assert results_file.is_done(results, cell, [quack])
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.0")
    assert not results_file.is_done(results, cell, [quack])
    results["cells"][cell.name]["peers"]["quack"] = {"absent": "it has no module for this MLP"}
    assert results_file.is_done(results, cell, [quack])


def not_found(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


def test_results_of_another_machine_are_not_continued(
    results: dict[str, Any], tmp_path: Path
) -> None:
    results["machine"]["device"] = "Some GPU"
    results_file.write(results, tmp_path / "results.json")
    with pytest.raises(CommandError, match=r"another machine or version \(device\)"):
        results_file.started(tmp_path / "results.json", CPU, PEERS)


@pytest.mark.parametrize("text", ["{", "[]", '{"cells": {}}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(CommandError, match=r"results\.json"):
        results_file.started(tmp_path / "results.json", CPU, PEERS)


def test_the_overview_has_every_cell_the_summary_and_who_is_missing(
    results: dict[str, Any],
) -> None:
    text = overview(results)
    assert all(name in text for name in results["cells"])
    assert "forward, 2 cells: 1.265× Inductor's better mode in the geometric mean" in text
    assert "0.800× in the worst" in text
    assert "Not measured: quack-kernels is not installed." in text


def test_a_cells_table_has_a_line_for_each_peer_and_says_what_failed(
    results: dict[str, Any],
) -> None:
    name, cell = next(iter(results["cells"].items()))
    cell["peers"]["liger"] = {"failure": "RuntimeError: out of memory"}
    text = cell_text(name, cell)
    assert "floor 10 µs (memory); fusedmlp: epilogue" in text
    (line,) = (line for line in text.splitlines() if line.startswith("fusedmlp "))
    assert "2.00×" in line
    assert "  quack: quack-kernels is not installed" in text
    assert "  liger: failed: RuntimeError: out of memory" in text


def test_tables_say_where_the_machine_was_not_idle(results: dict[str, Any]) -> None:
    (first, cell), (second, idle), *_ = results["cells"].items()
    assert "not idle" not in overview(results)
    cell["idle"], idle["idle"] = False, True
    assert "the machine was not idle" in cell_text(first, cell)
    assert "not idle" not in cell_text(second, idle)
    assert "The machine was not idle in 1 of 3 cells" in overview(results)


def test_tables_say_where_even_the_fastest_is_a_hundred_times_its_floor(
    results: dict[str, Any],
) -> None:
    (first, cell), *_ = results["cells"].items()
    assert "cannot be measured on" not in overview(results)
    floor = max(cell["floor_us"], 1.0)
    times = [row for row in cell["peers"].values() if "us" in row]
    for row in times:
        row["us"] = 101 * floor
    text = " ".join(overview(results).split())
    assert f"100 times the floor in 1 of 3 cells ({first}): this machine cannot be measured" in text
    times[0]["us"] = 99 * floor
    assert "cannot be measured on" not in overview(results)


@pytest.mark.parametrize(("waits", "idle"), [((3.0, 3.0), True), ((0.0, 5.0), False)])
def test_a_cell_is_disturbed_where_threads_waited_for_a_core(
    waits: tuple[float, float], idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(waits)
    monkeypatch.setattr(undisturbed, "waited_seconds", lambda: next(answers))
    ceilings = Ceilings(1e10, {"float32": 1e11})
    (eager,) = chosen(["eager"])
    found = measuring.measure(Cell("relu", 64, 64, 256, "float32"), [eager], CPU, ceilings, 2)
    assert found["idle"] is idle


def test_plots_are_written_as_png(results: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for path in write_plots(results, tmp_path / "plots"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_plots_of_nothing_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(CommandError, match="nothing to plot"):
        write_plots(results_file.started(None, CPU, PEERS), tmp_path)


def test_results_are_json(results: dict[str, Any]) -> None:
    assert json.loads(json.dumps(results)) == results
