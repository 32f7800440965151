"""Each example runs and prints what it promises."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from html_page import read
from processes import Children
from repetition import slow_but

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def output_of(
    name: str, capsys: pytest.CaptureFixture[str], *arguments: list[str], **sizes: dict[str, int]
) -> str:
    """What the `main()` of an example prints, if some of its constants have other entries."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where Dynamo looks up the globals of a function
    spec.loader.exec_module(module)
    for constant, entries in sizes.items():
        getattr(module, constant).update(entries)
    module.main(*arguments)
    return capsys.readouterr().out


def test_quickstart_is_as_exact_as_eager(capsys: pytest.CaptureFixture[str]) -> None:
    output = output_of("quickstart", capsys)
    eager, fused = (float(line.split()[-1]) for line in output.splitlines()[1:])
    assert fused <= 2 * eager


@pytest.mark.usefixtures("rows_by_reference")
def test_inspect_graph_shows_the_fused_and_the_refused_site(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = output_of("inspect_graph", capsys)
    assert "hidden-escapes" in output
    before, after = output.split("# graph 0, before")[1].split("# graph 0, after")
    assert "fusedmlp" not in before
    assert "fusedmlp" in after


def test_profile_mlp_compares_three_backends(capsys: pytest.CaptureFixture[str]) -> None:
    output = output_of("profile_mlp", capsys).lower()
    assert all(name in output for name in ("eager", "inductor", "fusedmlp"))


def test_unforeseen_activation_has_exact_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    output = output_of("unforeseen_activation", capsys)
    assert "sin(g)" in output
    rows = [line.split() for line in output.splitlines() if line.split()[-1].count("e-") == 1]
    assert len(rows) == 8  # the output, and the gradients of x and of six parameters
    for *_, eager, fused in rows:
        assert float(fused) <= 2 * float(eager)


@pytest.mark.usefixtures("no_inductor")
def test_huggingface_models_are_recognised(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    output = output_of("huggingface_models", capsys, SMALL={"num_hidden_layers": 1})
    assert "silu(g) * u" in output
    assert "gelu(x)" in output


@pytest.mark.usefixtures("rows_by_reference")
def test_export_pass_puts_the_operator_into_the_graph(capsys: pytest.CaptureFixture[str]) -> None:
    assert "fusedmlp" in output_of("export_pass", capsys)


def test_inductor_pass_computes_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    output = output_of("inductor_pass", capsys)
    assert float(output.split()[-1]) < 1e-5


def test_models_lists_the_factories(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert "examples/models.py:gpt2" in output_of("models", capsys)


def counted_by(name: str, package: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What an example prints whose callback counts the launches of a training run."""
    pytest.importorskip(package)
    output = output_of(name, capsys)
    assert "8 steps, 2 profiled: 1 fused MLP ran" in output
    assert "fusedmlp::rows_gradients 2×" in output
    return output


@pytest.mark.slow
def test_trainer_callback_counts_the_launches_of_a_training_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = counted_by("trainer_callback", "accelerate", capsys)
    assert re.search(r"transformer\.h\.0\.mlp +rows +2 +2 +2\n", output)


def test_lightning_callback_counts_the_launches_of_a_training_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    counted_by("lightning_callback", "lightning", capsys)


NOTEBOOK = nbformat.read(EXAMPLES / "report.ipynb", as_version=4)

#: Runs cells as Jupyter does, and prints the HTML of what the last lines evaluate to.
CELLS = """
import ast, json, sys

shown, scope = [], {"__name__": "__main__"}
for cell in json.loads(sys.argv[1]):
    *statements, last = ast.parse(cell).body
    exec(compile(ast.Module(statements, []), "<cell>", "exec"), scope)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), scope)
        shown += [value._repr_html_()] if value is not None else []
    else:
        exec(compile(ast.Module([last], []), "<cell>", "exec"), scope)
print(json.dumps(shown))
"""


def test_the_notebook_shows_sites_graphs_and_times(children: Children) -> None:
    cells = [cell for cell in NOTEBOOK.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in cells)  # none is kept in the file
    printed = children.printed(CELLS, arguments=[json.dumps([cell.source for cell in cells])])
    check_what_the_notebook_shows(json.loads(printed.splitlines()[-1]))


@pytest.mark.slow
def test_jupyter_runs_the_notebook() -> None:
    notebook = copy.deepcopy(NOTEBOOK)
    NotebookClient(notebook, timeout=600).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    check_what_the_notebook_shows([o.data["text/html"] for o in outputs if "data" in o])


def check_what_the_notebook_shows(shown: list[str]) -> None:
    explanation, graph, comparison = map(read, shown)
    assert "and 1 more like it" in explanation.text
    assert any("fusedmlp.mlp" in text.text for text in graph.all("text"))
    assert "inductor" in comparison.text


def test_every_example_is_tested() -> None:
    tested = Path(__file__).read_text()
    assert all(f'"{path.stem}"' in tested for path in EXAMPLES.glob("*.py"))
    assert [path.stem for path in EXAMPLES.glob("*.ipynb")] == ["report"]


TINY = ["--steps", "3", "--layers", "1", "--width", "32", "--heads", "2", "--context", "16"]
TINY += ["--batch", "2", "--policy", "always", "--device", "cpu"]
TWO = ["--backends", "eager,fusedmlp"]


@pytest.mark.usefixtures("no_inductor")  # which compiles the same blocks below
def test_train_gpt_compares_backends_and_draws_their_losses(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / "losses.png", tmp_path / "losses.json"]
    arguments = [*TINY, *TWO, "--curves", str(files[0]), "--json", str(files[1])]
    output = output_of("train_gpt", capsys, arguments)
    assert [line.split()[0] for line in output.splitlines()[2:]] == ["eager", "fusedmlp"]
    assert files[0].stat().st_size > 0
    written = json.loads(files[1].read_text())
    assert (written["ranks"], written["rows"], len(written["devices"])) == (1, 2, 1)
    eager, fused = written["results"]
    assert fused["sites"] == ["1 of 1"]
    assert 0 < fused["kernels"] < eager["kernels"]
    assert eager["losses"] == pytest.approx(fused["losses"], rel=1e-4)


@pytest.mark.parametrize("mlp", slow_but(["gelu"], ["gelu", "swiglu"]))
@pytest.mark.slow
def test_train_gpt_compiles_blocks_that_are_alike_once(
    mlp: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "results.json"
    arguments = [*TINY, "--layers", "9", "--mlp", mlp, "--json", str(path)]
    output_of("train_gpt", capsys, [*arguments, "--backends", "fusedmlp"])
    (fused,) = json.loads(path.read_text())["results"]
    assert fused["sites"] == ["1 of 1"]


def trained_on(ranks: int, path: Path, *arguments: str) -> dict[str, Any]:
    """What train_gpt writes after it ran on some ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    example = [str(EXAMPLES / "train_gpt.py"), *TINY, *TWO, "--mlp", "swiglu", *arguments]
    done = subprocess.run(
        [sys.executable, *launcher, *example, "--json", str(path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    written: dict[str, Any] = json.loads(path.read_text())
    eager, fused = written["results"]
    assert fused["sites"] == ranks * ["1 of 1"]
    assert fused["losses"] == pytest.approx(eager["losses"], rel=1e-4)
    for each in written["results"]:
        assert len(each["collectives"]) == ranks
        assert all(0 < share < 1 for share in each["collectives"])
    return written


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [(2, "ddp"), (2, "fsdp"), (2, "tp"), (4, "tp-fsdp")],
)
def test_train_gpt_loses_the_same_however_many_ranks_share_a_batch(
    ranks: int, parallel: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    alone, spread = tmp_path / "alone.json", tmp_path / "spread.json"
    output_of("train_gpt", capsys, [*TINY, *TWO, "--mlp", "swiglu", "--json", str(alone)])
    strong = ("--scaling", "strong", "--parallel", parallel)
    found = trained_on(ranks, spread, *strong)
    assert (found["ranks"], found["rows"]) == (ranks, 2)
    for one, many in zip(json.loads(alone.read_text())["results"], found["results"], strict=True):
        assert many["losses"] == pytest.approx(one["losses"], rel=1e-4)


def test_train_gpt_refuses_ranks_that_cannot_share_the_work(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="needs torchrun"):
        output_of("train_gpt", capsys, [*TINY, "--parallel", "tp-fsdp"])
