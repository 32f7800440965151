"""README.md: short, and what it shows runs. (tests/test_docs.py follows its links.)"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from processes import Children

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def lines() -> list[str]:
    """The lines of the shell blocks."""
    return [line for block in blocks("sh") for line in block.splitlines() if line]


def commands() -> list[str]:
    """The lines of the shell blocks, without their comments."""
    return [line.split("#")[0].strip() for line in lines()]


def test_readme_opens_with_one_sentence_and_an_example() -> None:
    title, sentence, example = README.split("\n\n")[:3]
    assert title == "# fusedmlp"
    assert sentence.count(". ") == 0
    assert example.startswith("```python")


def test_python_blocks_run_one_after_the_other(tmp_path: Path, children: Children) -> None:
    printed = children.printed("\n".join(blocks("python")), folder=tmp_path)
    assert "1 of 1 MLP fused, planned for an NVIDIA H200" in README
    assert "1 of 1 MLP fused, planned for an NVIDIA H200" in printed


@pytest.mark.parametrize("line", [line for line in lines() if line.startswith("fusedmlp ")])
def test_command_runs_and_does_what_is_said_beside_it(line: str, children: Children) -> None:
    command, _, comment = line.partition(" #")
    if "gpt2" in command:
        pytest.importorskip("transformers")
    program = "import sys, fusion_backend.cli as c; sys.exit(c.main())"
    wide = {"COLUMNS": "100"}
    printed = children.printed(
        program, arguments=shlex.split(command)[1:], folder=ROOT, environment=wide
    )
    assert printed
    for claim in re.findall(r"\d+ of \d+", comment):
        assert claim in printed


def test_the_two_commands_are_there() -> None:
    assert {"make demo", "make test"} <= set(commands())


def test_it_can_be_read_in_a_few_minutes() -> None:
    assert len(README.split()) < 900


MEASURED = json.loads((ROOT / "benchmarks/results/h200/mlps.json").read_text())["cells"]
PICTURE = (ROOT / "docs/images/before-after.svg").read_text()


def time_of(mlp: str, *peers: str) -> str:
    """The least time of some peers, as it is published."""
    us = min(MEASURED[mlp]["peers"][peer]["us"] for peer in peers)
    return f"{us:.0f}" if us >= 100 else f"{us:.3g}"


@pytest.mark.parametrize(
    "mlp",
    [
        "gelu_tanh 4096×768→3072→768, bfloat16, biases",
        "gelu_tanh 262144×64→256→64, bfloat16, biases",
    ],
)
def test_the_picture_shows_what_was_measured(mlp: str) -> None:
    for peer in ("inductor", "fusedmlp"):
        kernels = MEASURED[mlp]["peers"][peer]["kernels"]
        assert f"{time_of(mlp, peer)} µs, {kernels} kernel" in PICTURE
    assert time_of(mlp, "bare") in PICTURE


@pytest.mark.parametrize(
    ("label", "mlp"),
    [
        ("tanh-GELU 64/256, 262,144 rows", "gelu_tanh 262144×64→256→64, bfloat16, biases"),
        ("tanh-GELU 768/3072, 1 row", "gelu_tanh 1×768→3072→768, bfloat16, biases"),
        ("SwiGLU 4096/14336, 4096 rows", "swiglu 4096×4096→14336→4096, bfloat16, no biases"),
    ],
)
def test_the_results_are_what_was_measured(label: str, mlp: str) -> None:
    (line,) = [line for line in README.splitlines() if line.startswith(f"| {label} ")]
    assert f" {time_of(mlp, 'inductor', 'max-autotune')} µs " in line
    assert f" {time_of(mlp, 'fusedmlp')} µs " in line
    assert f" {MEASURED[mlp]['speedup']:.2f}× " in line
