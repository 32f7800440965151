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


@pytest.fixture
def models() -> ModuleType:
    spec = importlib.util.spec_from_file_location("models", ROOT / "benchmarks" / "models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_states_the_machine_and_every_model(models: ModuleType) -> None:
    page = models.document(RESULTS)
    assert "Some GPU, PyTorch 2.11.0" in page
    assert (
        "| GPT-2 small, 1 × 128 tokens | 12 epilogue | 218 / 101 / 65 | 5.95 / 1.7 / 1.25 "
        "| 11.9 / 3.39 / 2.5 | 0.84 / 0.7 | 1.2e-03 / 1.2e-03 / 1.2e-03 |"
    ) in page
    assert "| Llama 1B, 1 × 1 token | failed: OutOfMemoryError |" in page


def test_page_replaces_what_stands_between_the_markers(
    models: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{models.BEGIN}\nold\n{models.END}\nafter\n")
    monkeypatch.setattr(models, "DOCUMENT", page)
    models.write_document(RESULTS)
    models.write_document(RESULTS)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert text.count("GPT-2 small") == 1
    assert "old" not in text


def test_published_page_is_the_one_that_the_published_results_make(models: ModuleType) -> None:
    results = ROOT / "benchmarks" / "results" / "models.json"
    if not results.is_file():
        pytest.skip("no results are published")
    assert models.document(json.loads(results.read_text())) in models.DOCUMENT.read_text()


def test_a_run_is_continued_and_measures_what_is_missing(
    models: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "models.json"
    monkeypatch.setattr(sys, "argv", ["models.py", str(results), "--seconds", "0"])
    monkeypatch.setattr(models, "measure", lambda case, _: {"failure": f"none: {case.name}"})
    assert models.main() == 0
    assert not results.exists()
    monkeypatch.setattr(sys, "argv", ["models.py", str(results), "--only", "sequential"])
    models.main()
    assert len(json.loads(results.read_text())["cases"]) == 1
    monkeypatch.setattr(sys, "argv", ["models.py", str(results)])
    models.main()
    assert len(json.loads(results.read_text())["cases"]) > 1
