"""The pytest plugin: fixtures that pin fusions, in the test suites of others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion_backend.errors import PinError
from fusion_backend.pytest_plugin import Fusions

SUITE = """
import sys

def test_the_plugin_gives_its_fixture_without_torch(fusedmlp):
    assert callable(fusedmlp.assert_fused)
    assert "torch" not in sys.modules
"""


SNAPSHOT = """
import torch
from torch import nn

def test_the_graph(fusedmlp):
    model = nn.Sequential(nn.Linear(8, 16), nn.ACTIVATION(), nn.Linear(16, 8))
    fusedmlp.assert_graph(model, torch.randn(4, 8))
"""


class Escaping(nn.Sequential):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        preact = self[0](x)
        return self[2](self[1](preact)), preact


@pytest.fixture
def layers() -> list[nn.Module]:
    return [nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 8)


def pytest_of(folder: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a suite of one file that has nothing of this project's settings."""
    (folder / "test_suite.py").write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "fusion_backend.pytest_plugin", *arguments],
        cwd=folder,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_suite_uses_the_fixture(tmp_path: Path) -> None:
    done = pytest_of(tmp_path, SUITE)
    assert "1 passed" in done.stdout, done.stdout


def test_a_fused_model_passes(layers: list[nn.Module], x: Tensor) -> None:
    assert len(Fusions().assert_fused(nn.Sequential(*layers), x).fused) == 1


def test_another_number_of_fusions_fails_with_the_report(
    layers: list[nn.Module], x: Tensor
) -> None:
    with pytest.raises(AssertionError, match="2 MLPs must be fused, got:\n\n1 of 1 MLP fused"):
        Fusions().assert_fused(nn.Sequential(*layers), x, sites=2)


def test_a_model_without_mlp_fails(x: Tensor) -> None:
    with pytest.raises(AssertionError, match="No MLP found"):
        Fusions().assert_fused(nn.Linear(8, 8), x)


def test_a_model_that_is_left_alone_fails_and_its_reason_can_be_pinned(
    layers: list[nn.Module], x: Tensor
) -> None:
    model = Escaping(*layers)
    with pytest.raises(AssertionError, match="hidden-escapes"):
        Fusions().assert_fused(model, x)
    Fusions().assert_left_alone(model, x, reason="hidden-escapes")
    with pytest.raises(AssertionError, match="must be fused, for 'mutated'"):
        Fusions().assert_left_alone(model, x, reason="mutated")


@pytest.mark.usefixtures("no_cpp_compiler")
def test_a_site_that_no_kernels_run_is_legal_and_not_fused(x: Tensor) -> None:
    layers = [nn.Linear(8, 16), nn.ELU(), nn.Linear(16, 8)]  # oneDNN has no ELU
    model = nn.Sequential(*layers)
    with pytest.raises(AssertionError, match="0 of 1 MLP fused; 1 is legal, not fused"):
        Fusions().assert_fused(model, x)
    assert len(Fusions().assert_legal(model, x, sites=1).sites) == 1
    Fusions().assert_left_alone(model, x, reason="no-kernel")
    with pytest.raises(AssertionError, match="2 MLPs must be legal"):
        Fusions().assert_legal(model, x, sites=2)
    with pytest.raises(AssertionError, match=r"every MLP must be legal, got:[\s\S]*hidden-escapes"):
        Fusions().assert_legal(Escaping(*layers), x)


def test_a_fusion_can_be_pinned_for_a_gpu_that_is_not_here(x: Tensor) -> None:
    pytest.importorskip("triton")
    model = nn.Sequential(nn.Linear(8, 16), nn.ELU(), nn.Linear(16, 8))
    (site,) = Fusions().assert_fused(model, x, sites=1, target="h100").sites
    assert site.plan in {"back_to_back", "stream", "epilogue"}


def test_fewer_kernels_can_be_pinned(layers: list[nn.Module], x: Tensor) -> None:
    model = nn.Sequential(*layers)
    comparison = Fusions().assert_fewer_kernels(model, x, than="eager")
    assert comparison["fusedmlp"].kernels < comparison["eager"].kernels


class Two(nn.Module):
    """An MLP that is fused, and one whose hidden value escapes."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = Escaping(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(self.mlp(x))


def test_sites_are_pinned_by_module_form_and_reason(x: Tensor) -> None:
    Fusions().assert_sites(Two(), x, pins={"mlp": "plain", "head": "hidden-escapes"})
    pins = {"m*": {"form": "plain", "activation": "gelu(x)", "plan": "rows", "training": False}}
    Fusions().assert_sites(Two(), x, pins=pins, others=True)


def test_training_and_a_target_can_be_pinned(x: Tensor) -> None:
    pytest.importorskip("triton")
    model = Two().mlp
    Fusions().assert_sites(model, x, pins={"*": {"fused": True, "training": True}}, backward=True)
    found = Fusions().assert_sites(model, x, pins={"*": "back_to_back"}, target="h100")
    assert found.target == "NVIDIA H100"


def test_a_site_that_differs_stands_in_the_table_beside_its_pin(x: Tensor) -> None:
    with pytest.raises(AssertionError) as raised:
        Fusions().assert_sites(Two(), x, pins={"mlp": "gated", "head": "fused", "tail": "fused"})
    text = str(raised.value)
    assert text.startswith("3 of 3 MLPs differ from what is pinned:")
    assert re.search(r"✗ +mlp +plain .* rows +fused, gated +form is 'plain'", text)
    assert re.search(r"✗ +head .* hidden-escapes +fused +fused is False", text)
    assert re.search(r"✗ +tail .* fused +there is no such MLP", text)


def test_a_site_that_no_pin_names_fails_unless_others_are_allowed(x: Tensor) -> None:
    with pytest.raises(AssertionError, match=r"1 of 2 MLPs differ[\s\S]*✗ +head.*no pin names it"):
        Fusions().assert_sites(Two(), x, pins={"mlp": "fused"})
    Fusions().assert_sites(Two(), x, pins={"mlp": "fused"}, others=True)


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ("hidden-escape", "did you mean 'hidden-escapes'"),
        ("row", "did you mean 'rows'"),
        ("gatd", "did you mean 'gated'"),
        ({"plan": "epilog"}, "the plan that is pinned of 'mlp'.*did you mean 'epilogue'"),
        ({"reason": "no"}, "the reason that is pinned of 'mlp'"),
        ({"from": "gated"}, "a key of what is pinned of 'mlp'.*did you mean 'form'"),
        ({"training": "yes"}, "training that is pinned of 'mlp' must be a bool, got 'yes'"),
        (1, "must be a text or a dict, got 1"),
    ],
)
def test_what_does_not_exist_cannot_be_pinned(x: Tensor, pin: Any, message: str) -> None:
    with pytest.raises(PinError, match=message):
        Fusions().assert_sites(Two(), x, pins={"mlp": pin})


def test_a_reason_that_does_not_exist_cannot_be_asked_for(x: Tensor) -> None:
    with pytest.raises(PinError, match="got 'mutatd'; did you mean 'mutated'"):
        Fusions().assert_left_alone(Two(), x, reason="mutatd")


def test_options_can_be_given(x: Tensor) -> None:
    options = {"fusedmlp.exclude": "mlp"}
    Fusions().assert_sites(
        Two(), x, pins={"mlp": "excluded", "head": "hidden-escapes"}, options=options
    )
    with pytest.raises(AssertionError, match="must run fewer"):
        Fusions().assert_fewer_kernels(Two().mlp, x, options={"fusedmlp.exclude": "*"})


def test_fewer_kernels_of_a_training_step_can_be_pinned(layers: list[nn.Module], x: Tensor) -> None:
    model = nn.Sequential(*layers)
    comparison = Fusions().assert_fewer_kernels(model, x, than="eager", backward=True)
    assert comparison.backward


@pytest.mark.slow
def test_a_snapshot_is_written_when_asked_for_and_then_compared_with(tmp_path: Path) -> None:
    suite = SNAPSHOT.replace("ACTIVATION", "GELU")
    missing = pytest_of(tmp_path, suite)
    assert "run pytest --fusedmlp-update to write it" in missing.stdout
    assert "torch.__trace" not in missing.stdout  # records without text, hundreds a model
    assert "1 passed" in pytest_of(tmp_path, suite, "--fusedmlp-update").stdout
    file = tmp_path / "snapshots" / "test_suite.test_the_graph.txt"
    assert "fusedmlp.mlp" in file.read_text()
    assert "1 passed" in pytest_of(tmp_path, suite).stdout
    changed = pytest_of(tmp_path, SNAPSHOT.replace("ACTIVATION", "SiLU")).stdout
    assert "must be that of the snapshot" in changed
    assert re.search(r"^E +-.*'gelu\(x\)'", changed, re.MULTILINE)
    assert re.search(r"^E +\+.*'silu\(x\)'", changed, re.MULTILINE)


def test_the_fixture_knows_its_test(fusedmlp: Fusions, layers: list[nn.Module], x: Tensor) -> None:
    with pytest.raises(AssertionError, match=r"snapshots/test_pytest_plugin.test_the_fixture"):
        fusedmlp.assert_graph(nn.Sequential(*layers), x)
