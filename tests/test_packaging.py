"""What is installed, and under which names. Each question is asked in a process of its own, far
from the source tree, so that the answer is the one a user gets."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
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
    inner = inner - {"fusion_backend.alias"} | {"fusedmlp"}
    return inner | {
        "fusion_backend." + ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "patterns").rglob("__init__.py")
    }


def test_the_distribution_has_the_version_of_the_package() -> None:
    assert importlib.metadata.version("fusedmlp") == fusion_backend.__version__


def test_patterns_are_a_subpackage_when_installed(tmp_path: Path) -> None:
    code = "import importlib.util as i; print(i.find_spec('fusion_backend.patterns').name)"
    assert python(code, tmp_path) == "fusion_backend.patterns"


def test_there_is_no_top_level_package_named_patterns(tmp_path: Path) -> None:
    code = "import importlib.util; print(importlib.util.find_spec('patterns'))"
    assert python(code, tmp_path) == "None"


def test_the_name_of_the_distribution_can_be_imported(tmp_path: Path) -> None:
    code = "import fusedmlp, sys; print('torch' in sys.modules, 'explain' in dir(fusedmlp))"
    assert python(code, tmp_path) == "False True"


def test_what_is_imported_by_that_name_is_the_packages_own() -> None:
    fusedmlp = pytest.importorskip("fusedmlp", reason="the package is not installed")
    assert fusedmlp.explain is fusion_backend.explain


def test_every_package_of_the_source_is_declared() -> None:
    tomllib = pytest.importorskip("tomllib", reason="part of Python since 3.11")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert source_packages() == set(declared["packages"])


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree that the sdist unpacks to, built of the files that git knows."""
    known = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if known.returncode != 0:
        pytest.skip("this is no git checkout")
    pytest.importorskip("setuptools", minversion="77")
    tree, made = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("made")
    for name in filter(None, known.stdout.split("\0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    python(f"import setuptools.build_meta as b; b.build_sdist({str(made)!r})", tree)
    (archive,) = made.iterdir()
    with tarfile.open(archive) as packed:
        packed.extractall(made, filter="data")
    return made / archive.name.removesuffix(".tar.gz")


def test_the_sdist_holds_every_file_of_the_tree(sdist: Path) -> None:
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not [name for name in names.stdout.splitlines() if not (sdist / name).is_file()]


def test_the_sdist_holds_nothing_that_was_not_in_the_tree(sdist: Path) -> None:
    found = {str(path.relative_to(sdist)) for path in sdist.rglob("*") if path.is_file()}
    generated = {"PKG-INFO", "setup.cfg"}
    extra = [name for name in found - generated if not (ROOT / name).is_file()]
    assert all(name.startswith("fusedmlp.egg-info/") for name in extra)
