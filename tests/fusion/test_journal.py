"""A running process says what became of its graphs, by PyTorch's own means."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import fusion_backend
from fusion_backend.backend import fusedmlp
from fusion_backend.compat import patches
from fusion_backend.inductor_pass import FusionPass

FUSED = {"fusedmlp.policy": "always"}
LEFT = {"fusedmlp.exclude": "*"}


class Block(nn.Module):
    """An MLP with a name, and a layer behind it that is none."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        return self.mlp(x)


@pytest.fixture
def recorded(monkeypatch):
    """Fuse a model with options, without Inductor; what it says is left in the logs."""
    from fusion_backend import backend

    def run(**options):
        inner = backend.inductor.inductor_compiler

        def compiler_of(mode, given):
            config = inner(mode, given).config

            def compiler(graph_module, example_inputs):
                return graph_module.forward

            compiler.config = config
            return compiler

        monkeypatch.setattr(backend.inductor, "inductor_compiler", compiler_of)
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(Block(), backend=fusedmlp, options=options)(torch.randn(4, 8))

    return run


@pytest.mark.parametrize(
    ("options", "line"),
    [(FUSED, "1 of 1 MLP fused"), (LEFT, "0 of 1 MLP fused")],
    ids=["fused", "left"],
)
def test_a_line_tells_what_became_of_each_site(recorded, caplog, options, line):
    with caplog.at_level(logging.INFO, logger="fusedmlp"):
        recorded(**options)
    assert line in caplog.text
    assert "mlp: plain gelu(x), 4×8→16→8 float32" in caplog.text
    assert "graph before" not in caplog.text
    assert ("excluded" in caplog.text) == (options is LEFT)


def test_level_debug_shows_both_graphs(recorded, caplog):
    with caplog.at_level(logging.DEBUG, logger="fusedmlp"):
        recorded(**FUSED)
    before, after = caplog.text.split("graph after:")
    assert "torch.ops.fusedmlp" not in before
    assert "torch._C._nn.gelu" in before
    assert "torch.ops.fusedmlp.mlp" in after


def test_the_history_has_what_was_compiled_and_compiles_nothing(recorded):
    before = len(fusion_backend.history())
    recorded(**FUSED)
    recorded(**LEFT)
    first, second = fusion_backend.history()[before:]
    assert first.compilation == second.compilation == "0/0"
    assert [site.module for site in first.sites] == ["mlp"]
    assert (first.sites[0].reason, second.sites[0].reason)[1] == "excluded"
    assert "0 of 1 MLP fused" in str(second)


def test_counters_add_up(recorded):
    counters["fusedmlp"].clear()
    recorded(**FUSED)
    recorded(**LEFT)
    recorded(**LEFT)
    counted = dict(counters["fusedmlp"])
    assert counted.pop("graphs") == 3
    assert counted.pop("not fused: excluded") == 2
    assert sum(counted.values()) == 1


def test_a_structured_trace_holds_sites_and_graphs(recorded, monkeypatch):
    artifacts = {}

    class Kept(logging.Handler):
        def emit(self, record):
            name = record.metadata.get("artifact", {}).get("name", "")
            artifacts[name] = str(record.payload)

    log, kept = logging.getLogger("torch.__trace"), Kept()
    monkeypatch.setattr(torch._logging._internal, "trace_log", log)  # tests have it write nothing
    log.addHandler(kept)
    level, log.level = log.level, logging.DEBUG
    try:
        recorded(**FUSED)
    finally:
        log.removeHandler(kept)
        log.level = level
    assert "1 of 1 MLP fused" in artifacts["fusedmlp_sites"]
    assert "torch._C._nn.gelu" in artifacts["fusedmlp_before"]
    assert "torch.ops.fusedmlp.mlp" in artifacts["fusedmlp_after"]


def test_inductors_debug_folder_gets_ours_beside(recorded, tmp_path):
    from torch._dynamo import config as dynamo

    with (
        dynamo.patch(debug_dir_root=str(tmp_path)),
        torch._inductor.config.patch({"trace.enabled": True}),
    ):
        recorded(**FUSED)
    (own,) = tmp_path.glob("*/fusedmlp/*")
    assert "1 of 1 MLP fused" in (own / "sites.txt").read_text()
    assert "torch.ops.fusedmlp.mlp" not in (own / "before.py").read_text()
    assert "torch.ops.fusedmlp.mlp" in (own / "after.py").read_text()


def test_the_pass_of_inductor_tells_as_the_backend_does(caplog):
    model, x = Block(), torch.randn(4, 8)
    with torch.no_grad():
        exported = torch.export.export(model, (x,)).module()
        with caplog.at_level(logging.INFO, logger="fusedmlp"):
            FusionPass(FUSED)(exported.graph)
    assert "1 of 1 MLP fused" in caplog.text


def test_scripts_that_repeat_a_failure_import_the_operators():
    from torch._dynamo.repro import after_aot

    graph_module, before = torch.fx.symbolic_trace(Block()), after_aot.extra_imports
    arguments = [torch.randn(4, 8)]
    with patches.repros_import("fusion_backend.operators"):
        script = after_aot.generate_compiler_repro_string(graph_module, arguments)
    assert "\nimport fusion_backend.operators\n" in script
    assert after_aot.extra_imports == before


_PROGRAM = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
model = torch.compile(model, backend="fusedmlp", options={"fusedmlp.policy": "always"})
with torch.no_grad():
    model(torch.ones(4, 8))
"""


@pytest.mark.slow
def test_torch_logs_knows_the_name_and_a_repro_script_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_LOGS", "fusedmlp")
    monkeypatch.setenv("TORCH_COMPILE_DEBUG", "1")
    said = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True
    ).stderr
    assert "1 of 1 MLP fused" in said
    (script,) = Path.cwd().glob("torch_compile_debug/**/fx_graph_runnable.py")
    assert "torch.ops.fusedmlp" in script.read_text()
    monkeypatch.delenv("TORCH_COMPILE_DEBUG")
    subprocess.run([sys.executable, str(script)], check=True, capture_output=True)
