"""What ``import torch`` does of this package: so fused programs load without an import of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fusion_backend.autoload
from capture import ALWAYS
from fusion_backend import fuse
from fusion_backend.compat import operator_namespace

PROGRAM = """
import sys, torch

def ours():
    return {name for name in sys.modules if name.startswith("fusion_backend")}

imported = ours()
assert not hasattr(torch.ops.fusedmlp, "__origin__")
assert ours() == imported, "what is no operator imports nothing"
x, expected = torch.load("tensors.pt")
torch.testing.assert_close(torch.export.load("fused.pt2").module()(x), expected)
assert not hasattr(torch.ops.fusedmlp, "unheard_of")
print(torch.ops.fusedmlp.mlp.default, torch.ops.fusedmlp.mlp.__module__)
print(torch.ops.aten.mm.default, torch.ops.aten.mm.__module__)
print(*sorted(imported))
"""


def save(folder: Path) -> None:
    """A fused program, an input and what eager makes of it."""
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), torch.randn(4, 8)
    with torch.no_grad():
        fused = fuse(torch.export.export(model, (x,)), options=ALWAYS).exported_program
        torch.export.save(fused, folder / "fused.pt2")
        torch.save((x, model(x)), folder / "tensors.pt")


def test_a_fused_program_loads_where_nothing_of_ours_is_imported(tmp_path: Path) -> None:
    save(tmp_path)
    command = [sys.executable, "-c", PROGRAM]  # a new process, which imports torch itself
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ours, torchs, imported = done.stdout.splitlines()
    assert ours == torchs.replace("aten", "fusedmlp").replace("mm", "mlp")
    assert imported.split() == [
        "fusion_backend",
        "fusion_backend.autoload",
        "fusion_backend.compat",
        "fusion_backend.compat.operator_namespace",
    ]


def test_an_import_that_fails_is_raised_by_the_first_lookup() -> None:
    operator_namespace.import_on_first_use("fusedmlp_broken", "a_module_that_is_missing")
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
            _ = torch.ops.fusedmlp_broken.mlp


def test_import_torch_does_not_fail_where_the_namespace_cannot_be_made(monkeypatch) -> None:
    tried = []

    def fail(*names: str) -> None:
        tried.append(names)
        raise TypeError("another layout of torch.ops")

    monkeypatch.setattr(operator_namespace, "import_on_first_use", fail)
    fusion_backend.autoload.register_operators_on_first_use()
    assert tried == [("fusedmlp", "fusion_backend.operators")]
