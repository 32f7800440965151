"""The boundaries between modules that import-linter cannot see: what is loaded, and when.

`make imports` checks the others: who imports whom.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import fusion_backend
from processes import Children

ROOT = Path(__file__).resolve().parent.parent
# What one MLP is, as data, is all that kernels need to know.
BELOW_KERNELS = {f"fusion_backend.{name}" for name in ("compat", "errors", "kernels", "mlp")}


def loaded_after(statements: str, directory: Path) -> set[str]:
    """The modules in `sys.modules` of a fresh process that has run `statements`."""
    code = f"import sys\n{statements}\nprint(*sorted(sys.modules), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=directory, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_package_loads_neither_torch_nor_triton(tmp_path: Path) -> None:
    loaded = loaded_after("import fusion_backend", tmp_path)
    assert not loaded & {"torch", "triton"}


MODULES = ("operators", "fusion.fuse", "backend", "instruments.explanation", "instruments.profiler")
# PyTorch may have imported Triton: then it is imported again.
IMPORT = """
import importlib, sys

for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
    del sys.modules[name]
before = set(sys.modules)
importlib.import_module(sys.argv[1])
print(*sorted(set(sys.modules) - before), sep="\\n")
"""


@pytest.mark.parametrize("module", MODULES)
def test_importing_a_module_above_the_kernels_imports_no_triton(
    module: str, tmp_path: Path, children: Children
) -> None:
    printed = children.printed(IMPORT, arguments=[f"fusion_backend.{module}"], folder=tmp_path)
    loaded = printed.split()
    assert f"fusion_backend.{module}" in loaded
    assert "triton" not in loaded
    assert not any(name.endswith((".kernel", ".kernel_sm90")) for name in loaded)


@pytest.mark.parametrize("name", fusion_backend.__all__)
def test_every_public_name_and_its_methods_have_docstrings(name: str) -> None:
    public = getattr(fusion_backend, name)
    described = {name: public}
    if inspect.isclass(public):
        described |= {
            method: value
            for method, value in vars(public).items()
            if inspect.isfunction(value) and not method.startswith("_")
        }
    bare = [name for name, value in described.items() if not inspect.getdoc(value)]
    assert not bare


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "fusion_backend" / "kernels").rglob("*.py")),
    ids=lambda path: f"{path.parent.name}.{path.stem}",
)
def test_kernels_import_only_torch_triton_expressions_and_each_other(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    ours = {name for name in imported if name.startswith("fusion_backend")}
    foreign = {name.split(".")[0] for name in imported - ours}
    assert foreign <= {*sys.stdlib_module_names, "torch", "triton"}
    assert {".".join(name.split(".")[:2]) for name in ours} <= BELOW_KERNELS
