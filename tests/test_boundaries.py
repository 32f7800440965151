"""The boundaries between modules that import-linter cannot see: what is loaded, and circles.

`make imports` checks the others: which room imports which.
"""

from __future__ import annotations

import ast
import graphlib
import inspect
import subprocess
import sys
from collections.abc import Iterator, Mapping
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


def imported(text: str) -> Iterator[str]:
    """What a module imports, wherever the import stands: in a function, or for type checkers."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def refuse_circles(sources: Mapping[str, str]) -> None:
    """Raise a `graphlib.CycleError`, which has the circle, where modules import each other.

    Of `from package import name` the package is imported only where no module has that name.
    """
    graph = {
        module: {name if name in sources else name.rpartition(".")[0] for name in imported(source)}
        for module, source in sources.items()
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_no_modules_import_each_other_in_a_circle() -> None:
    files = [*ROOT.glob("fusion_backend/**/*.py"), *ROOT.glob("patterns/*.py")]
    sources = {}
    for file in files:
        *rooms, name = file.relative_to(ROOT).with_suffix("").parts
        rooms = rooms if rooms[0] == "fusion_backend" else ["fusion_backend", *rooms]
        module = ".".join(rooms if name == "__init__" else [*rooms, name])
        sources[module] = file.read_text()
    assert "fusion_backend.fusion.fuse" in sources
    refuse_circles(sources)


@pytest.mark.parametrize(
    "back",
    [
        "import a.first",
        "from a.first import name",
        "from a import first",
        "def f():\n    from a.first import name",
        "if TYPE_CHECKING:\n    from a.first import name",
    ],
)
def test_a_circle_is_seen_wherever_its_imports_stand(back: str) -> None:
    sources = {"a": "", "a.first": "from a.second import name", "a.second": "import torch"}
    refuse_circles(sources)
    with pytest.raises(graphlib.CycleError):
        refuse_circles(sources | {"a.second": back})


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is compiled by Triton, here or where it is specialized."""
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    return function.name.startswith("fusedmlp_") or any(".jit" in each for each in decorators)


def with_many_parameters(text: str, most: int = 8) -> list[str]:
    """Functions that are no kernels and have more parameters than that.

    The object of a method does not count, nor do `*args` and `**kwargs`.
    """
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not is_kernel(node):
            given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            names = [argument.arg for argument in given]
            if len(names) - (names[:1] in (["self"], ["cls"])) > most:
                found.append(node.name)
    return found


def test_no_function_but_kernels_has_more_than_eight_parameters() -> None:
    files = [ROOT.glob(f"{folder}/**/*.py") for folder in ("fusion_backend", "patterns")]
    files.append((ROOT / "benchmarks").glob("*.py"))
    texts = {str(file.relative_to(ROOT)): file.read_text() for found in files for file in found}
    found = {name: with_many_parameters(text) for name, text in texts.items()}
    assert not {name: functions for name, functions in found.items() if functions}


def test_parameters_are_counted_within_classes_and_functions() -> None:
    nine = "a, b, c, d, *e, f, g, h, i, j=0, **k"
    assert with_many_parameters(f"def f({nine}): pass") == ["f"]
    assert with_many_parameters(f"class C:\n    def m(self, {nine}): pass") == ["m"]
    assert with_many_parameters(f"def f():\n    def g({nine}): pass") == ["g"]
    assert not with_many_parameters(f"@triton.jit\ndef f({nine}): pass")
    assert not with_many_parameters("def f(self, a, b, c, d, *e, f, g, h, i, **j): pass")
