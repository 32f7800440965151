"""What is installed, and under which names. Each question is asked in a process of its own, far
from the source tree, so that the answer is the one a user gets."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import fusion_backend

ROOT = Path(__file__).resolve().parent.parent


def python(code: str, directory: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=directory, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def source_packages() -> set[str]:
    """Every directory with an `__init__.py` under fusion_backend/ and patterns/, as a package."""
    inner = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "fusion_backend").rglob("__init__.py")
    }
    return inner | {
        "fusion_backend." + ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "patterns").rglob("__init__.py")
    }


def test_the_distribution_has_the_version_of_the_package() -> None:
    assert importlib.metadata.version("fusedmlp") == fusion_backend.__version__


def test_patterns_are_a_subpackage_when_installed(tmp_path: Path) -> None:
    code = "import fusion_backend.patterns as p; print(p.__name__)"
    assert python(code, tmp_path) == "fusion_backend.patterns"


def test_there_is_no_top_level_package_named_patterns(tmp_path: Path) -> None:
    code = "import importlib.util; print(importlib.util.find_spec('patterns'))"
    assert python(code, tmp_path) == "None"


def test_every_package_of_the_source_is_declared() -> None:
    tomllib = pytest.importorskip("tomllib", reason="part of Python since 3.11")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert source_packages() == set(declared["packages"])
