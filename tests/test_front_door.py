"""What a program calls first: what it takes, and what it says of what it does not take."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusion_backend
from capture import ALWAYS, fused_calls
from fusion_backend import Options, explain, fuse, profile
from fusion_backend.errors import ArgumentError, OptionError
from fusion_backend.inductor_pass import FusionPass

X = torch.randn(4, 8)

pytestmark = pytest.mark.usefixtures("rows_by_reference")


class Counting(nn.Module):
    """An MLP that ends the program, and a buffer that every call writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls.add_(1)
        return {"calls": self.calls + 0, "y": self.down(F.gelu(self.up(x)) * scale)}


def exported() -> tuple[Counting, torch.export.ExportedProgram, dict[str, torch.Tensor]]:
    model, scale = Counting(), {"scale": torch.rand(16)}
    shapes = {"x": {0: torch.export.Dim("rows", min=2, max=64)}, "scale": None}
    with torch.no_grad():
        return model, torch.export.export(model, (X,), scale, dynamic_shapes=shapes), scale


def test_an_exported_program_becomes_one_of_the_same_signature_and_ranges():
    _, program, _ = exported()
    result = fuse(program, options=ALWAYS)
    (site,) = result.sites
    assert (site.form, site.module, site.rewritten) == ("plain", "", True)
    fused = result.exported_program
    assert fused is not None
    assert fused_calls(fused.graph_module) == 1
    assert fused_calls(program.graph_module) == 0
    before, after = program.graph_signature, fused.graph_signature
    assert after.input_specs == before.input_specs
    assert [spec.kind for spec in after.output_specs] == [spec.kind for spec in before.output_specs]
    assert fused.range_constraints == program.range_constraints
    assert fused.call_spec == program.call_spec
    assert all(fused.state_dict[name] is value for name, value in program.state_dict.items())


@torch.no_grad()
def test_a_fused_program_that_was_saved_and_loaded_computes_what_eager_does():
    model, program, scale = exported()
    buffer = io.BytesIO()
    torch.export.save(fuse(program, options=ALWAYS).exported_program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    for rows in (4, 7):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(loaded(x, **scale), model(x, **scale))


@torch.no_grad()
def test_a_decomposed_program_is_fused_and_keeps_the_write_to_its_buffer():
    model, program, scale = exported()
    result = fuse(program.run_decompositions(), options=ALWAYS)
    assert [site.rewritten for site in result.sites] == [True]
    assert result.exported_program.graph_signature.buffers_to_mutate
    expected = copy.deepcopy(model)  # the program shares the buffer with the model
    for _ in range(2):
        torch.testing.assert_close(result.graph_module(X, **scale), expected(X, **scale))


def test_inputs_may_be_called_as_pythons_own_functions_are():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    program = torch.export.export(model, (X,))
    assert "input" in program.graph_signature.user_inputs
    fused = fuse(program, options=ALWAYS).exported_program
    assert fused.graph_signature.user_inputs == program.graph_signature.user_inputs
    torch.testing.assert_close(fused.module()(X), model(X))


def test_of_a_graph_module_there_is_no_exported_program():
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)))
    assert fuse(traced, (X,), ALWAYS).exported_program is None


def double(x):
    return 2 * x


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (nn.Linear(2, 2), "got the module Linear; pass torch.export.export(module, args), or comp"),
        (torch.compile(nn.ReLU()), "got the module OptimizedModule; pass torch.export.export(mod"),
        (double, "got the function double; pass torch.fx.symbolic_trace(function) and example_in"),
        ({"fusedmlp.policy": "always"}, "got an object of type dict; options are its third argu"),
        (None, "got None; pass torch.export.export(module, args)"),
        (nn.Linear, "got the class Linear; pass torch.export.export(module, args)"),
    ],
    ids=["module", "compiled", "function", "options", "nothing", "class"],
)
def test_fuse_says_in_one_line_what_to_give_instead(given, message):
    with pytest.raises(ArgumentError) as raised:
        fuse(given, (X,))
    assert str(raised.value).startswith(
        "fuse takes a torch.export.ExportedProgram or a torch.fx.GraphModule, " + message
    )
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (X, r"got one Tensor; pass \(x,\)"),
        (None, "got None"),
        ({"fusedmlp.policy": "always"}, "pass options by name, as fuse"),
        (ALWAYS, "pass options by name, as fuse"),
    ],
)
def test_example_inputs_are_a_sequence(given, message):
    with pytest.raises(ArgumentError, match=f"example_inputs must be a tuple or list, .*{message}"):
        fuse(torch.fx.symbolic_trace(nn.ReLU()), given)


MODEL = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
TAKING_OPTIONS = {
    "fuse": lambda options: fuse(torch.fx.symbolic_trace(MODEL), (X,), options),
    "explain": lambda options: explain(MODEL, X, options=options),
    "profile": lambda options: profile(MODEL, X, options=options),
    "FusionPass": FusionPass,
}


@pytest.mark.parametrize("name", TAKING_OPTIONS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fusedmlp.polcy": "always"}, r"'fusedmlp\.polcy' \(did you mean 'fusedmlp\.policy'\?\)"),
        ({"policy": "always"}, r"'policy' \(did you mean 'fusedmlp\.policy'\?\)"),
        ({"fusedmlp_exlude": ""}, r"'fusedmlp_exlude' \(did you mean 'fusedmlp\.exclude'\?\)"),
        ({"fusedmlp.policy": "alwys"}, "must be one of auto, always, never, got 'alwys'"),
        ("always", "options must be a dict with keys such as 'fusedmlp.policy', an Options, or No"),
        ([ALWAYS], "options must be a dict"),
        ({1: 2}, "options must be a dict"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_compiled(name, options, message):
    with pytest.raises(OptionError, match=message) as raised:
        TAKING_OPTIONS[name](options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["fuse", "FusionPass"])
def test_where_inductor_has_no_part_its_options_are_refused(name):
    with pytest.raises(OptionError, match=r"'max_autotune'; .*; no options of Inductor are taken"):
        TAKING_OPTIONS[name]({"max_autotune": True})


@pytest.mark.parametrize("options", [ALWAYS, {"fusedmlp.policy": "always"}], ids=["object", "dict"])
def test_an_options_object_and_a_dict_say_the_same(options):
    assert [site.rewritten for site in TAKING_OPTIONS["fuse"](options).sites] == [True]
    assert [site.rewritten for site in TAKING_OPTIONS["explain"](options).sites] == [True]
    assert TAKING_OPTIONS["FusionPass"](options).options.policy == "always"


def test_no_option_is_also_called_as_one_of_inductors():
    from torch._inductor import config

    assert not [name for name in Options.names() if hasattr(config, name.split(".")[1])]


def test_the_package_runs_as_the_command(tmp_path: Path):
    command = [sys.executable, "-m", "fusion_backend", "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"fusedmlp {fusion_backend.__version__}\n"
