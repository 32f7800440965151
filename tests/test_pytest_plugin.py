"""The pytest plugin: fixtures that pin fusions, in the test suites of others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fusion_backend.pytest_plugin import Fusions

SUITE = """
import sys

def test_the_plugin_gives_its_fixture_without_torch(fusedmlp):
    assert callable(fusedmlp.assert_fused)
    assert "torch" not in sys.modules
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


def test_a_suite_uses_the_fixture(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "fusion_backend.pytest_plugin"],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
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
