"""`fusedmlp bench` from end to end, on shapes for which a CPU needs no time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fusion_backend.bench.cells import Cell
from fusion_backend.cli import main

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU has peers and precisions of its own"
)

SMALL = ("bench", "--rows", "4", "--width", "16", "--rounds", "2", "--device", "cpu")
MODEL = """
import torch
from torch import nn

def mlp():
    layers = nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 4, bias=False)
    return nn.Sequential(*layers, nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 4)), (
        torch.randn(2, 3, 8),
    )
"""


def measured(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """The results that a command line prints as JSON."""
    assert main([*argv, "--json"]) == 0
    results: dict[str, Any] = json.loads(capsys.readouterr().out)
    return results


# Inductor compiles products of its own in C++ for what is left out.
@pytest.mark.parametrize(
    "without",
    [["freezing", "freezing-max"], pytest.param([], marks=pytest.mark.slow)],
    ids=str,
)
def test_a_shape_is_measured_under_every_peer(
    without: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "results.json"
    left_out = ["--without", ",".join(without)] if without else []
    results = measured(capsys, *SMALL, *left_out, "--out", str(path))
    assert json.loads(path.read_text()) == results
    (cell,) = results["cells"].values()
    for peer in {"eager", "inductor", "freezing", "freezing-max", "fusedmlp"} - {*without}:
        assert cell["peers"][peer]["us"] > 0
        assert cell["peers"][peer]["error"] < 1e-5
    assert cell["peers"]["bare"]["error"] is None
    assert "GPU" in cell["peers"]["quack"].get("absent") or "not installed" in str(cell)
    assert results["summary"]["all"]["cells"] == 1
    assert results["machine"]["ceilings"]["flops_per_second"]["float32"] > 0


def test_a_run_is_continued_with_what_is_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "results.json"
    only_eager = (*SMALL, "--peers", "eager", "--out", str(path))
    assert main([*only_eager, "--seconds", "0"]) == 0
    assert "out of time before 1 cells" in capsys.readouterr().err
    before = measured(capsys, *only_eager)
    assert measured(capsys, *only_eager, "--form", "gelu_tanh", "--form", "gelu")[
        "cells"
    ].keys() > (before["cells"].keys())
    after = json.loads(path.read_text())
    assert len(after["cells"]) == 2
    (name,) = before["cells"]
    assert after["cells"][name] == before["cells"][name]


def test_what_was_measured_without_a_peer_is_measured_again_with_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = (*SMALL, "--peers", "eager,bare", "--out", str(tmp_path / "results.json"))
    (short,) = measured(capsys, *command, "--without", "bare")["cells"].values()
    assert list(short["peers"]) == ["eager"]
    (whole,) = measured(capsys, *command)["cells"].values()
    assert list(whole["peers"]) == ["eager", "bare"]
    assert measured(capsys, *command, "--without", "bare")["cells"] == {whole_name(whole): whole}


def whole_name(cell: dict[str, Any]) -> str:
    fields = ("form", "rows", "width", "hidden", "precision", "bias", "out")
    return Cell(**{field: cell[field] for field in fields}).name


def test_the_text_has_a_table_of_the_cell_and_an_overview(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*SMALL, "--peers", "eager", "--form", "swiglu"]) == 0
    output = capsys.readouterr().out
    assert output.count("swiglu 4×16→64→16, float32, no biases") == 2


def test_the_mlps_of_a_model_are_its_cells(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    factory = f"{tmp_path / 'model.py'}:mlp"
    results = measured(capsys, "bench", "--model", factory, "--peers", "eager", "--rounds", "1")
    assert list(results["cells"]) == [
        "silu 6×8→32→4, float32, biases",
        "silu 6×4→8→4, float32, biases",
    ]


@pytest.mark.slow
def test_compiling_beforehand_gives_the_same_cells(capsys: pytest.CaptureFixture[str]) -> None:
    results = measured(capsys, *SMALL, "--peers", "inductor", "--jobs", "1")
    (cell,) = results["cells"].values()
    assert cell["peers"]["inductor"]["us"] > 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--rows", "3"), "--rows and --width"),
        (("--rows", "3", "--width", "0"), "width must be at least 1"),
        (("--peers", "sdpa"), "a peer must be one of eager"),
        (("--without", "sdpa"), "a peer must be one of eager"),
        (("--only", "no such cell"), "--only must be part"),
    ],
)
def test_a_wrong_command_line_says_how_to_put_it_right(
    argv: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *argv]) == 2
    assert said in capsys.readouterr().err


def test_plots_without_matplotlib_fail_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*SMALL, "--plots", str(tmp_path)]) == 2
    assert "pip install 'fusedmlp[bench]'" in capsys.readouterr().err
