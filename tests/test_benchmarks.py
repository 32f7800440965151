"""The benchmark of whole models: what it measures, and the page that it writes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def row(kernels: int, wall_us: float) -> dict[str, Any]:
    return {"kernels": kernels, "gpu_us": wall_us / 2, "wall_us": wall_us, "error": 0.00123}


RESULTS = {
    "machine": {"device": "Some GPU", "torch": "2.11.0", "fusedmlp": "0.1.0"},
    "cases": {
        "GPT-2 small, 1 × 128 tokens": {
            "sites": 12,
            "plans": {"epilogue": 12},
            "default": {
                "eager": row(218, 11900.0),
                "inductor": row(101, 3390.0),
                "fusedmlp": row(65, 2500.0),
            },
            "cuda_graphs": {"inductor": row(101, 840.0), "fusedmlp": row(65, 700.0)},
        },
        "Llama 1B, 1 × 1 token": {"failure": "OutOfMemoryError: too large"},
    },
}


TABLE = {
    "machine": {"gpu": "Some GPU", "torch": "2.11.0"},
    "rows": [
        {
            "form": "swiglu",
            "rows": 64,
            "width": 128,
            "hidden": 512,
            "us": {"inductor": 10.41, "epilogue": 6.48, "back_to_back": 10.77},
            "precision": "half",
            "training": False,
            "control": False,
        }
    ],
}


PEERS = {
    "machine": {"device": "Some GPU", "torch": "2.11.0", "fusedmlp": "0.1.0"},
    "peers": {
        "bare": {"what": "the products", "version": None},
        "inductor": {"what": "torch.compile", "version": None},
        "quack": {"what": "quack.mlp.MLP", "version": None},
        "fusedmlp": {"what": "ours", "version": None},
    },
    "cells": {
        "gelu_tanh 1024×64→256→64, bfloat16, biases": {
            "form": "gelu_tanh",
            "rows": 1024,
            "width": 64,
            "hidden": 256,
            "precision": "bfloat16",
            "bias": None,
            "floor_us": 2.04,
            "plan": "back_to_back",
            "speedup": 2.0,
            "peers": {
                "bare": {"us": 3.9, "error": None, "floor_share": 0.5, "kernels": 2},
                "inductor": {"us": 8.04, "error": 0.002, "floor_share": 0.25, "kernels": 3},
                "quack": {"absent": "quack-kernels is not installed"},
                "fusedmlp": {"us": 4.02, "error": 0.002, "floor_share": 0.507, "kernels": 1},
            },
        }
    },
    "summary": {
        "forward": {
            "cells": 1,
            "geometric_mean": 2.0,
            "worst": 2.0,
            "worst_cell": "gelu_tanh 1024×64→256→64, bfloat16, biases",
        }
    },
}


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_states_the_machine_and_every_model() -> None:
    section = script("page").models_section(RESULTS)
    assert "Some GPU, PyTorch 2.11.0" in section
    assert (
        "| GPT-2 small, 1 × 128 tokens | 12 epilogue | 218 / 101 / 65 | 5.95 / 1.7 / 1.25 "
        "| 11.9 / 3.39 / 2.5 | – / 0.84 / 0.7 | 1.2e-03 / 1.2e-03 / 1.2e-03 |"
    ) in section
    assert "| Llama 1B, 1 × 1 token | failed: OutOfMemoryError |" in section


def test_page_marks_the_plans_that_are_faster_than_inductor() -> None:
    section = script("page").plans_section(TABLE)
    assert "| MLP | precision | rows | Inductor | `back_to_back` | `epilogue` |" in section
    assert "| swiglu 128/512 | half | 64 | 10.4 | 10.8 | **6.48** |" in section


def test_page_sets_our_time_beside_every_peers() -> None:
    section = script("page").peers_section([PEERS])
    assert "Some GPU, PyTorch 2.11.0" in section
    assert "not installed or nowhere applicable: quack." in section
    assert (
        "| MLP | rows | floor | bare | inductor | fusedmlp | speed-up | of floor | kernels | plan |"
    ) in section
    assert (
        "| gelu_tanh 64/256 bfloat16 | 1024 | 2.04 | 3.9 | 8.04 | **4.02** | 2.00 | 51% | 3 → 1 "
        "| back_to_back |"
    ) in section
    assert "- forward, 1 MLPs: geometric mean 2.00 times Inductor's better mode" in section
    assert "plots/speedup.png" in section


def test_page_says_that_nothing_was_measured_yet() -> None:
    assert script("page").peers_section([]) == "Not measured yet."


def test_page_gets_the_section_of_peers_with_the_first_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = script("page")
    monkeypatch.setattr(page, "MLPS", tmp_path / "mlps.json")
    monkeypatch.setattr(page, "CPU", tmp_path / "cpu.json")
    plain = page.PAGE.read_text()
    if "<!-- peers: begin -->" in plain:
        start = plain.index("## Single MLPs beside")
        plain = plain[:start] + plain[plain.index("## Whole models") :]
    assert page.rewritten(plain) == plain
    (tmp_path / "mlps.json").write_text(json.dumps(PEERS))
    once = page.rewritten(plain)
    assert "| gelu_tanh 64/256 bfloat16 | 1024 |" in once
    assert page.rewritten(once) == once


def test_page_replaces_what_stands_between_the_markers() -> None:
    page = "before\n<!-- x: begin -->\nold\n<!-- x: end -->\nafter\n"
    once = script("page").between(page, "x", "new")
    assert once == page.replace("old", "new")
    assert script("page").between(once, "x", "new") == once


def test_published_page_is_made_of_the_published_results() -> None:
    page = script("page")
    text = page.PAGE.read_text()
    assert text == page.rewritten(text), "run: python benchmarks/page.py"


class Prepared:
    """In place of the real one: measures nothing."""

    def __init__(self, case: Any, names: tuple[str, ...]) -> None:
        self.names = names

    def measured(self, rounds: int) -> dict[str, Any]:
        return {"default": {name: row(rounds, 1.0) for name in self.names}, "plans": {}}


def run(models: ModuleType, monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr(sys, "argv", ["models.py", *argv])
    code: int = models.main()
    return code


def test_a_run_is_continued_and_measures_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, results = script("models"), tmp_path / "models.json"
    monkeypatch.setattr(models, "Prepared", Prepared)
    assert run(models, monkeypatch, str(results), "--seconds", "0") == 0
    assert not results.exists()
    run(models, monkeypatch, str(results), "--only", "sequential", "--rounds", "1")
    assert len(json.loads(results.read_text())["cases"]) == 1
    run(models, monkeypatch, str(results), "--rounds", "2")
    cases = json.loads(results.read_text())["cases"]
    assert [case["default"]["eager"]["kernels"] for case in cases.values()][:2] == [1, 2]


def test_a_model_is_measured_again_where_max_autotune_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, results = script("models"), tmp_path / "models.json"
    monkeypatch.setattr(models, "Prepared", Prepared)
    for _ in range(2):
        run(models, monkeypatch, str(results), "--only", "e", "--max-autotune", "bert")
    with_max = {
        name
        for name, case in json.loads(results.read_text())["cases"].items()
        if "max-autotune" in case["default"]
    }
    assert with_max == {"BERT, 8 × 64 tokens"}


def test_results_of_another_card_are_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, results = script("models"), tmp_path / "models.json"
    results.write_text(json.dumps({"machine": {"device": "Some GPU"}, "cases": {}}))
    with pytest.raises(SystemExit, match="is of another machine or version"):
        run(models, monkeypatch, str(results))


def test_the_8b_models_share_the_card_with_no_others() -> None:
    models = script("models")
    batches, left = [], list(models.GPU_CASES)
    while left:
        batches.append(models.next_batch(left, 9))
        left = left[len(batches[-1]) :]
    assert [{case.name == "Llama 8B" for case in batch} for batch in batches] == [{False}, {True}]


def test_a_model_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, results = script("models"), tmp_path / "models.json"

    def fails(case: Any, names: tuple[str, ...]) -> Prepared:
        if case.name == "BERT":
            raise RuntimeError("no memory")
        return Prepared(case, names)

    monkeypatch.setattr(models, "Prepared", fails)
    run(models, monkeypatch, str(results))
    cases = json.loads(results.read_text())["cases"]
    assert cases["BERT, 8 × 64 tokens"] == {"failure": "RuntimeError: no memory"}
    assert len(cases) > 1


STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
REPORT = "\n".join(
    [
        "==PROF== Connected to process 1",
        '"ID","Kernel Name","gpu__time_duration.sum",'
        '"sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",'
        f'"{STALLED.format("wait")}","{STALLED.format("gmma")}"',
        '"","","nsecond","%","inst","inst"',
        '"0","fusedmlp_back_to_back","1,234","56.9","0.5","1.5"',
    ]
)


def test_counters_are_read_from_the_profilers_report() -> None:
    assert script("counters").rows(REPORT) == [
        {
            "kernel": "fusedmlp_back_to_back",
            "us": 1.234,
            "special functions": 56.9,
            "stalls": {"gmma": 1.5, "wait": 0.5},
        }
    ]


def test_page_says_what_bounds_a_kernel() -> None:
    counters = script("counters")
    kernels = [{"mlp": "gelu 8×4→16→4", "plan": "back_to_back", **counters.rows(REPORT)[0]}]
    results = {"machine": {"device": "Some GPU", "torch": "2.11.0"}, "kernels": kernels}
    section = script("page").counters_section(results)
    assert "| MLP | kernel | us | special functions | waiting for" in section
    assert "| gelu 8×4→16→4 | `back_to_back` | 1.23 | 56.9 | gmma 1.5, wait 0.5 |" in section


def test_page_sets_the_ways_to_run_a_norm_side_by_side() -> None:
    case = {"mlp": "4096×768", "us": {"inductor": 138.6, "epilogue": 93.9, "products": 58.4}}
    results = {"machine": {"device": "Some GPU", "torch": "2.11.0"}, "cases": [case]}
    assert "| 4096×768 | 139 | 93.9 | – | 58.4 |" in script("page").norms_section(results)
