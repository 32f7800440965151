"""The `fusedmlp` command: what it prints, and how it fails."""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fusion_backend
from fusion_backend import explain
from fusion_backend.cli import demo, main
from fusion_backend.cli.demo import fused_by_always
from fusion_backend.planning import cpu_profit, onednn_profit
from processes import Children

FACTORIES = """
import torch
from torch import nn

def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), (torch.randn(8, 16),)

def with_keywords():
    model, (x,) = mlp()
    return model, (), {"input": x}

def talks():
    print("loading the weights")
    return mlp()

def raises():
    raise ValueError("the weights\\nare missing")

def no_tuple():
    return nn.Linear(2, 2)

def no_module():
    return "model", ()

def wrong_input():
    return mlp()[0], (torch.randn(8, 15),)

NUMBER = 3
"""


@pytest.fixture
def factories(tmp_path: Path) -> Path:
    """A file with factories, good and bad."""
    path = tmp_path / "factories.py"
    path.write_text(FACTORIES)
    return path


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """The exit code and the one line on stderr of a command line that fails."""
    try:
        code = main(argv)
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(lines) == 1, lines
    assert lines[0].startswith("fusedmlp: error: ")
    return code, lines[0]


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"fusedmlp {fusion_backend.__version__}\n"


def test_version_answers_without_loading_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from fusion_backend.cli import main\n"
        "try: main(['--version'])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--exclude", "head,0"], "excluded"),
        (["--disable-forms", "plain,gated"], "form-off"),
    ],
)
def test_explain_leaves_alone_what_flags_name(
    factories: Path, capsys: pytest.CaptureFixture[str], flags: list[str], reason: str
) -> None:
    assert main(["explain", f"{factories}:mlp", "--json", "--policy", "always", *flags]) == 0
    (site,) = json.loads(capsys.readouterr().out)["sites"]
    assert site["reason"] == reason


def test_a_form_that_there_is_not_is_a_wrong_command_line(
    factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, line = fails(capsys, "explain", f"{factories}:mlp", "--disable-forms", "plian")
    assert code == 2
    assert "got 'plian' (did you mean 'plain'?)" in line


def test_explain_prints_the_site(factories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{factories}:mlp"]) == 0
    output = capsys.readouterr().out
    assert "gelu(x)" in output
    assert "8×16→32→16" in output


def test_explain_takes_keyword_arguments(
    factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", f"{factories}:with_keywords"]) == 0
    assert "gelu(x)" in capsys.readouterr().out


def test_explain_takes_a_module_of_the_current_directory(
    factories: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(factories.parent)
    assert main(["explain", "factories:mlp"]) == 0
    assert "gelu(x)" in capsys.readouterr().out


def test_explain_under_policy_never_says_so(
    factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", f"{factories}:mlp", "--policy", "never", "--json"]) == 0
    (site,) = json.loads(capsys.readouterr().out)["sites"]
    assert site["reason"] == "policy"


def test_explain_converts_the_model_to_the_dtype(
    factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", f"{factories}:mlp", "--dtype", "bfloat16", "--json"]) == 0
    (site,) = json.loads(capsys.readouterr().out)["sites"]
    assert site["dtype"] == "bfloat16"


def test_explain_graph_shows_the_operator_only_after_the_rewrite(
    factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", f"{factories}:mlp", "--policy", "always", "--graph"]) == 0
    before, after = capsys.readouterr().out.split("# graph 0, before")[1].split("# graph 0, after")
    assert "fusedmlp." not in before
    assert "fusedmlp." in after


def test_profile_compares_the_three_backends(
    factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", f"{factories}:mlp", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["backend"] for row in rows] == ["eager", "inductor", "fusedmlp"]


def test_profile_backward_measures_the_gradients(
    factories: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    eagerly = functools.partial(fusion_backend.profile, backends=["eager"])  # compiles nothing
    monkeypatch.setattr(fusion_backend, "profile", eagerly)
    assert main(["profile", f"{factories}:mlp", "--backward", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert 0 < row["gradient_error"] < 1e-5


def test_progress_goes_to_stderr_and_json_stays_clean(
    factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["explain", f"{factories}:talks", "--json"])
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert "compiling" in captured.err
    assert "loading the weights" in captured.err


def test_a_gpu_that_is_not_known_gets_code_2(
    factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, line = fails(capsys, "explain", f"{factories}:mlp", "--target", "h1000")
    assert code == 2
    assert "h100" in line


def test_no_samples_at_all_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, line = fails(capsys, "bench", "--rounds", "0")
    assert code == 2
    assert "must be 1 or more, got 0" in line


@pytest.mark.parametrize(
    "command", [("profile", "--trace"), ("report", "--output")], ids=lambda each: each[0]
)
def test_a_file_that_cannot_be_written_is_refused_beforehand(
    command: tuple[str, str], factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, flag = command
    code, line = fails(capsys, name, f"{factories}:mlp", flag, "/no/such/folder/file")
    assert code == 2
    assert f"{flag} must name a file in a folder that there is" in line


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("no_such_module:mlp", "there is no module 'no_such_module'"),
        ("torch.no_such_part:mlp", "there is no module 'torch.no_such_part'"),
        ("no_such_file.py:mlp", "there is no file no_such_file.py"),
        ("mlp", "package.module:factory"),
        ("torch:", "package.module:factory"),
        ("{file}:missing", "has no 'missing'; it has mlp, with_keywords, talks"),
        ("{file}:NUMBER", "must be a function, got int"),
        ("{file}:raises", "raised ValueError: the weights are missing"),
        ("{file}:no_tuple", "must return (model, args) or (model, args, kwargs), got Linear"),
        ("{file}:no_module", "with a torch.nn.Module, got str"),
    ],
)
@pytest.mark.parametrize("command", ["explain", "profile"])
def test_a_bad_factory_gets_one_line_and_code_2(
    command: str,
    target: str,
    complaint: str,
    factories: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, line = fails(capsys, command, target.format(file=factories))
    assert code == 2
    assert complaint in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["explain", "profile", "demo"])
def test_a_gpu_asked_for_by_name_is_not_replaced_by_the_cpu(
    command: str, factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = [] if command == "demo" else [f"{factories}:mlp"]
    code, line = fails(capsys, command, *target, "--device", "cuda")
    assert code == 2
    assert "finds no GPU" in line


@pytest.mark.parametrize(
    "argv",
    [
        ["frobnicate"],
        [],
        ["doctor", "--frobnicate"],
        ["explain", "torch:nn", "--policy", "sometimes"],
        ["explain", "torch:nn", "--dtype", "float7"],
    ],
)
def test_a_bad_option_gets_one_line_and_code_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, line = fails(capsys, *argv)
    assert code == 2
    assert "--help" in line


@pytest.mark.parametrize("command", ["explain", "profile"])
def test_a_model_that_fails_gets_one_line_and_code_1(
    command: str, factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = fails(capsys, command, f"{factories}:wrong_input")
    assert code == 1


def test_a_bad_value_in_the_environment_gets_one_line(
    factories: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEDMLP_POLICY", "sometimes")
    code, line = fails(capsys, "explain", f"{factories}:mlp")
    assert code == 2
    assert "sometimes" in line


def test_traceback_is_shown_when_asked_for(
    factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", f"{factories}:raises", "--traceback"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_doctor_finds_that_the_backend_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert torch.__version__ in output
    assert "trial" in output


def test_doctor_says_what_the_planner_chooses_by(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from fusion_backend.cli import doctor
    from fusion_backend.planning.gpus import gpu_named

    monkeypatch.setenv("FUSEDMLP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "gpu_of", lambda device: gpu_named("a100"))
    detail = doctor.check_measurements().detail
    assert detail.startswith(f"0 of your own in {tmp_path}")
    assert "0 that ship for sm_80; the heuristic plans until" in detail
    monkeypatch.setattr(doctor, "gpu_of", lambda device: gpu_named("h100"))
    assert "heuristic" not in doctor.check_measurements().detail


def test_doctor_says_what_is_known_of_a_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from fusion_backend.cli import doctor
    from fusion_backend.planning import cpu_rates
    from fusion_backend.planning.user_table import UserTable

    monkeypatch.setenv("FUSEDMLP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "none of this CPU" in doctor.check_measurements().detail
    own = UserTable.of_cpu(torch.get_num_threads())
    own.add({"model": "calibration", "precision": "ieee", "training": False, "cells": []})
    case = cpu_rates.case_of(64, 1, torch.float32, training=False)
    own.add({**cpu_rates.tuned_line(case), "us": {"inductor": 2.0}})
    own.add({**case.row(), "us": {"inductor": 2.0}})
    detail = doctor.check_measurements().detail
    assert detail.startswith("1 calibrations of this CPU, 1 rates and 1 MLPs of `fusedmlp tune`")
    assert str(tmp_path) in detail


def test_doctor_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    assert main(["doctor", "--quick", "--json"]) == 1
    findings = {found["subject"]: found for found in json.loads(capsys.readouterr().out)}
    assert findings["backend name"]["status"] == "no"
    assert "pip install" in findings["backend name"]["detail"]
    assert findings["exported programs"]["status"] == "absent"
    assert "pip install" in findings["exported programs"]["detail"]


def test_doctor_says_whether_fused_programs_load(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusion_backend.cli import doctor

    monkeypatch.delenv(doctor.AUTOLOAD_VARIABLE, raising=False)
    assert doctor.check_autoload().status == "yes"
    monkeypatch.setenv(doctor.AUTOLOAD_VARIABLE, "0")
    found = doctor.check_autoload()
    assert found.status == "absent"
    assert "import fusion_backend.operators" in found.detail


@pytest.mark.parametrize(
    ("name", "value", "status", "said"),
    [
        ("FUSEDMLP_POLICY", "always", "yes", "always"),
        ("FUSEDMLP_STRICT", "perhaps", "no", "must be 1 or 0"),
        ("FUSEDMLP_EXCLUD", "head", "absent", "did you mean 'FUSEDMLP_EXCLUDE'?"),
        ("FUSEDMLP_CACHE_DIR", "/nowhere", "yes", "/nowhere"),
        ("FUSED_MLP_POLICY", "auto", "absent", "did you mean 'FUSEDMLP_POLICY'?"),
        ("fusedmlp_strict", "1", "absent", "did you mean 'FUSEDMLP_STRICT'?"),
    ],
)
def test_doctor_has_a_row_for_each_variable_that_is_set(
    name: str, value: str, status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fusion_backend.cli import doctor

    monkeypatch.setenv(name, value)
    findings = {found.subject: found for found in doctor.check_variables()}
    assert findings[name].status == status
    assert said in findings[name].detail


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ["bench", "--out", "results.json"],
            "what was measured is kept, and the same command goes on",
        ),
        (["bench"], "with --out FILE the same command would go on"),
        (["doctor"], "interrupted; nothing was kept: the same command begins again"),
    ],
)
def test_an_interrupted_command_says_so_and_what_is_kept(
    argv: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import importlib

    def interrupted(arguments: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(
        importlib.import_module(f"fusion_backend.cli.{argv[0]}"), "run", interrupted
    )
    assert main(argv) == 130
    assert said in capsys.readouterr().err


def test_demo_shows_sites_graphs_kernels_and_errors_and_goes_on_without_transformers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "transformers" else find_spec(name, *rest),
    )
    monkeypatch.setattr(onednn_profit, "was_measured", lambda dtype: True)  # on whatever CPU
    monkeypatch.setattr(demo, "STEPS", 2)
    assert main(["demo", "--device", "cpu", "--model", "GPT-2", "--model", "sequential"]) == 0
    output, progress = capsys.readouterr()
    assert "GPT-2 are left out: pip install transformers" in progress
    assert "gelu_tanh(x)" in output
    assert "# graph 0, after" in output
    table = output.split("eager / Inductor / fusedmlp:")[1]
    assert all(heading in table for heading in ("MLPs fused", "CPU operators", "wall ms", "error"))
    rows = [line for line in table.splitlines() if line.startswith("nn.Sequential")]
    assert len(rows) == 2
    for row in rows:
        assert " 1 / 1 / 1 " in row
        assert row.count(" / ") == 2 * 4  # sites, kernels, times and errors, each of three
    assert "2 of 2 MLPs are fused, in 2 of 2 models" in table


# Inductor compiles the layer of a transformer for half a minute, forward and backward.
@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("many rows", "nn.Sequential"),
        pytest.param("layer (training)", "nn.Transformer", marks=pytest.mark.slow),
    ],
)
def test_demo_without_a_gpu_plans_for_one_and_compiles_a_kernel(
    model: str,
    name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    no_cpp_compiler: None,
) -> None:
    monkeypatch.setattr(cpu_profit, "onednn_is_faster", lambda *_: False)  # on whatever CPU
    monkeypatch.setattr(demo, "STEPS", 2)
    assert main(["demo", "--device", "cpu", "--model", model]) == 0
    output = capsys.readouterr().out
    planned, kernel = output.split("On an H100, in bfloat16")[1].split("One of the kernels: ")
    assert any(line.startswith(name) for line in planned.splitlines())
    assert "compiled for sm_90" in kernel
    assert "def activation(x" in kernel
    assert "0 instructions for products" not in kernel
    assert "None of 1 MLPs is fused on this machine" in output


def test_demo_counts_the_kernels_that_a_gpu_would_run() -> None:
    (case,) = demo.chosen_cases(torch.device("cpu"), ["many rows"])
    (row,) = [line for line in demo.on_an_h100([case]).splitlines() if line.startswith("nn.Seq")]
    assert row.split()[3:-1] == ["1", "/", "1", "/", "1", "back_to_back", "3", "→", "1"]


@pytest.mark.slow
def test_demo_says_that_the_encoder_layer_is_one_operator_in_evaluation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "STEPS", 2)
    assert main(["demo", "--device", "cpu", "--model", "layer (evaluation)"]) == 0
    output = capsys.readouterr().out
    assert "opaque-operator" not in output
    assert "one operator of its own" in output


def test_demo_counts_what_policy_always_would_fuse_without_asking_twice() -> None:
    pytest.importorskip("triton")
    model, x = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64)), torch.randn(9, 64)
    with torch.no_grad():
        found = explain(model, x, target="h100")  # in float32
        always = explain(model, x, target="h100", options={"fusedmlp.policy": "always"})
    assert {site.reason for site in found.sites} == {"not-faster"}
    assert fused_by_always(found) == len(always.fused) > 0


def test_demo_of_an_unknown_model_lists_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, line = fails(capsys, "demo", "--model", "GPT-7")
    assert code == 2
    assert "GPT-2, BERT, ViT, SigLIP, Llama, T5" in line


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("explian a.py:b", "did you mean 'explain'"),
        ("explain {factories}:mpl", "did you mean 'mlp'"),
        ("explain {factories}:MLP", "did you mean 'mlp'"),
        ("explain a.py:b --polcy always", "did you mean '--policy'"),
        ("explain a.py:b --policy allways", "did you mean 'always'"),
        ("explain {factories}:mlp --target H10", "did you mean 'h100'"),
        ("explain {factories}:mlp --disable-forms gatd", "did you mean 'gated'"),
        ("bench --rows 1 --width 8 --form SwiGLU2", "did you mean 'swiglu'"),
        ("bench --rows 1 --width 8 --peers Inducter", "did you mean 'inductor'"),
        ("demo --model gtp-2", "did you mean 'GPT-2'"),
        ("explain {factories}:raises --target H10", "did you mean 'h100'"),
        ("explain {factories}:raises --exclude a --disable-forms gatd", "did you mean 'gated'"),
        ("tune --peers inductor", "--peers is an option of bench, behind its name"),
        ("--traceback explain a.py:b", "--traceback stands after the command"),
    ],
)
def test_a_name_that_there_is_not_is_refused_with_the_nearest_one(
    line: str, hint: str, factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = fails(capsys, *line.format(factories=factories).split())
    assert code in (1, 2)
    assert hint in error


def test_names_of_choices_may_be_in_any_case(
    factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["explain", f"{factories}:mlp", "--policy", "Always", "--dtype", "BFloat16"]
    assert main(argv) == 0
    assert "bfloat16" in capsys.readouterr().out


@pytest.mark.parametrize("directory", ["{file}", "~nobody-of-this-name/x", "/proc/no", "a" * 5000])
def test_doctor_survives_any_cache_directory(
    directory: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSEDMLP_CACHE_DIR", directory.format(file=file))
    assert main(["doctor", "--quick"]) == 0
    (row,) = [r for r in capsys.readouterr().out.splitlines() if r.startswith("fusedmlp cache")]
    works = directory.startswith("~")  # a folder of that name, as a shell makes it
    assert ("cannot be written" in row) is not works


@pytest.mark.parametrize(
    "name",
    ["TORCHINDUCTOR_CACHE_DIR", pytest.param("TRITON_CACHE_DIR", marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_doctor_survives_compilers_that_have_no_directory(
    name: str, tmp_path: Path, children: Children
) -> None:
    file = tmp_path / "file"
    file.touch()
    # PyTorch looks at the variable once in a process.
    program = (
        "import sys; from fusion_backend.cli import main; sys.exit(main(['doctor', '--json']))"
    )
    done = children.run(program, environment={name: f"{file}/below"})
    found = {each["subject"]: each for each in json.loads(done.stdout)}
    assert done.returncode == 1
    (cache,) = [f for f in found.values() if f["status"] == "no" and f["subject"] != "trial"]
    assert f"{file}/below cannot be written" in cache["detail"]
    assert "nothing can be compiled" in found["trial"]["detail"]


def test_an_interrupted_step_is_not_said_to_have_failed(capsys: pytest.CaptureFixture[str]) -> None:
    from fusion_backend.cli.progress import step

    for error, said in ((KeyboardInterrupt(), "interrupted"), (ValueError(), "failed")):
        with pytest.raises(type(error)), step("counting"):
            raise error
        assert capsys.readouterr().err == f"counting … {said}\n"


def test_doctor_tells_of_the_table_whatever_the_cache_directory_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fusion_backend.cli import doctor
    from fusion_backend.planning.gpus import gpu_named

    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "gpu_of", lambda device: gpu_named("h100"))
    file = tmp_path / "file"
    file.touch()
    for directory in (str(file), "a" * 5000):
        monkeypatch.setenv("FUSEDMLP_CACHE_DIR", directory)
        assert "0 of your own" in doctor.check_measurements().detail


def test_demo_says_what_is_missing_instead_of_an_empty_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fusion_backend.cli import demo

    find = demo.importlib.util.find_spec
    monkeypatch.setattr(
        demo.importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "transformers" else find(name, *rest),
    )
    assert main(["demo", "--model", "gpt-2"]) == 2
    said = capsys.readouterr()
    assert "all models that --model names need transformers" in said.err
    assert "pip install transformers" in said.err
