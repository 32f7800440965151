"""The ways to extend that CONTRIBUTING names, each done with a toy."""

from __future__ import annotations

import ast
import importlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fusion_backend import Options, Site, explain
from fusion_backend.inductor_pass import FusionPass
from fusion_backend.patterns.installed import installed_forms
from fusion_backend.planning import gpus, measurements, shipped_tables
from fusion_backend.planning.gpus import Gpu
from processes import Children

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fusion_backend"


# A release of PyTorch or Triton


def names_of(tree: ast.AST) -> Iterator[str]:
    """What a module imports of torch and Triton, and the attributes of them that it reads."""
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                known[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        path, inner = [], node
        while isinstance(inner, ast.Attribute):
            path.append(inner.attr)
            inner = inner.value
        if path and isinstance(inner, ast.Name) and inner.id in known:
            yield ".".join((known[inner.id], *reversed(path)))


def is_private(name: str) -> bool:
    """Whether a dotted name is of torch or Triton and promised to nobody; operators have names."""
    room, *parts = name.split(".")
    private = any(part.startswith("_") and not part.startswith("__") for part in parts)
    return room in ("torch", "triton") and parts[:1] != ["ops"] and private


def private_names(text: str) -> set[str]:
    return {name for name in names_of(ast.parse(text)) if is_private(name)}


@pytest.mark.parametrize(
    "line",
    [
        "from torch._guards import detect_fake_mode",
        "import torch; torch._C._cuda_getDevice()",
        "import torch._inductor as i; i.config",
        "from torch.utils import _pytree",
        "import triton\ndef f(): return triton.runtime._async_compile.x",
    ],
)
def test_a_private_name_is_seen_however_it_is_spelled(line: str) -> None:
    assert private_names(line)


def test_public_names_and_operators_are_not_private() -> None:
    assert not private_names(
        "import torch; torch.compile; torch.__version__; torch.ops.aten._softmax; x._y"
    )


def test_no_module_outside_compat_touches_private_names() -> None:
    touched = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        found = private_names(path.read_text(encoding="utf-8"))
        if found and not name.startswith("compat/"):
            touched[name] = sorted(found)
    assert not touched


# A function in activations

ENTRY = """
    (
        _unary(
            "ndtr",
            torch.special.ndtr,
            "0.3989422804014327 * exp(-0.5 * square(x))",
            expansion="0.5 * erfc(-0.7071067811865476 * x)",
        ),
    ),
"""
POINTWISE = "fusion/views/pointwise.py"
#: By file, after which text what is added.
EDITS = (
    ("mlp/expression/functions.py", "FUNCTIONS: Mapping[str, Function] = _table(", ENTRY),
    (POINTWISE, "_PLAIN = {", '\n    "ndtr": 1,'),
    (POINTWISE, '    "special_log1p": "log1p",', '\n    "special_ndtr": "ndtr",'),
)
HERE = "import os, sys; sys.path.insert(0, os.getcwd())"
USE = """
import torch
from torch import nn

import fusion_backend
from fusion_backend.kernels.cpu_rows.printed import activation_function
from fusion_backend.mlp.expression import parse
from fusion_backend.mlp.expression.differentiation import differentiate
from fusion_backend.mlp.expression.evaluation import evaluate

assert fusion_backend.__file__.startswith({place!r})

x = torch.linspace(-4.0, 4.0, 33, requires_grad=True)
expression = parse("x * ndtr(x)")
value = evaluate(expression, {{"x": x}})
torch.testing.assert_close(value, torch.nn.functional.gelu(x))
(right,) = torch.autograd.grad(value.sum(), x)
torch.testing.assert_close(evaluate(differentiate(expression, "x"), {{"x": x}}), right)
assert "erfc" in activation_function(0, expression, ())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.special.ndtr(self.up(x)))


model, x = Model(), torch.randn(4, 8)
result = fusion_backend.fuse(torch.fx.symbolic_trace(model), (x,), {{"fusedmlp.policy": "always"}})
(site,) = result.sites
assert (site.activation, site.rewritten) == ("ndtr(x)", True), site
torch.testing.assert_close(result.graph_module(x), model(x))
both = (result.graph_module, model)
found, right = (torch.autograd.grad(f(x).sum(), model.up.weight) for f in both)
torch.testing.assert_close(found, right)
"""
PRINT = """
import torch
from fusion_backend.kernels.codegen.activation import emit
from fusion_backend.mlp.expression import parse

code = emit(parse("x * ndtr(x)"), torch.float32)
assert "erfc" in code.forward.src and "exp" in code.gradient.src, code
"""


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with one function more, added as CONTRIBUTING says."""
    place = tmp_path_factory.mktemp("extended")
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, place / "fusion_backend", ignore=unwanted)
    shutil.copytree(ROOT / "patterns", place / "fusion_backend" / "patterns", ignore=unwanted)
    for name, after, added in EDITS:
        path = place / "fusion_backend" / name
        before, found, behind = path.read_text().partition(after)
        assert found, (name, after)
        path.write_text(before + found + added + behind)
    return place


def test_a_new_function_is_evaluated_differentiated_and_fused(
    extended: Path, children: Children
) -> None:
    children.printed(HERE + USE.format(place=str(extended)), folder=extended)


def test_a_new_function_is_printed_for_triton(extended: Path, children: Children) -> None:
    pytest.importorskip("triton")
    children.printed(HERE + PRINT, folder=extended)


# A form of MLP

#: All that a user writes, in a package of their own.
MODULE = """
import torch
from torch import nn

from fusion_backend.patterns.form import Form, PackedProjection, Projection


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.wide, self.down = nn.Linear(8, 16), nn.Linear(8, 32), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.sigmoid(self.gate(x)) * self.wide(x)[..., :16])


MIXED = Form(
    name="mixed",
    summary="[u, …] = W_wide x + b_wide;  y = W_down · f(W_gate x + b_gate, u) + b_down",
    hidden=(Projection("g"), PackedProjection("u")),
    example=lambda: (Mixed(), (torch.randn(4, 8),)),
)
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Installs a distribution whose entry points are the given lines."""

    def installed(lines: str) -> None:
        record = tmp_path / "toy_forms-1.0.dist-info"
        record.mkdir()
        (record / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-forms\nVersion: 1.0\n")
        (record / "entry_points.txt").write_text(f"[fusedmlp.forms]\n{lines}\n")
        (tmp_path / "toy_forms.py").write_text(MODULE)
        monkeypatch.syspath_prepend(str(tmp_path))
        installed_forms.cache_clear()

    yield installed
    sys.modules.pop("toy_forms", None)
    installed_forms.cache_clear()


def test_a_form_is_less_than_thirty_lines() -> None:
    assert len(MODULE.split("\n")) < 30


@pytest.mark.usefixtures("rows_by_reference")
@pytest.mark.parametrize("grad", [False, True])
def test_a_form_of_an_installed_package_is_fused(
    install: Callable[[str], None], grad: bool
) -> None:
    before = FusionPass().uuid()
    install("mixed = toy_forms:MIXED")
    assert FusionPass().uuid() != before
    model, inputs = importlib.import_module("toy_forms").MIXED.example()
    options = {"fusedmlp.policy": "always", "fusedmlp.strict": True}
    with torch.set_grad_enabled(grad):
        (site,) = explain(model, *inputs, options=options).sites
        assert (site.form, site.activation, site.rewritten) == ("mixed", "sigmoid(g) * u", True)
        compiled = torch.compile(model, backend="fusedmlp", options=options)
        torch.testing.assert_close(compiled(*inputs), model(*inputs))
    if grad:
        wanted = tuple(model.parameters())
        found, right = (torch.autograd.grad(f(*inputs).sum(), wanted) for f in (compiled, model))
        torch.testing.assert_close(found, right)


def test_a_form_of_an_installed_package_can_be_switched_off(install: Callable[[str], None]) -> None:
    install("mixed = toy_forms:MIXED")
    model, inputs = importlib.import_module("toy_forms").MIXED.example()
    (site,) = explain(model, *inputs, options=Options(disable_forms=("mixed",))).sites
    assert (site.form, site.reason) == ("mixed", "form-off")


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("mixed = toy_forms:GONE", "toy_forms:GONE of an installed package: AttributeError"),
        ("mixed = nowhere:MIXED", "nowhere:MIXED of an installed package: ModuleNotFoundError"),
        ("mixed = toy_forms:Mixed", "it must be a Form, got type"),
        ("a = toy_forms:MIXED\nb = toy_forms:MIXED", "there is another form 'mixed'"),
    ],
)
def test_a_broken_entry_point_costs_its_form_and_a_warning(
    install: Callable[[str], None], lines: str, why: str
) -> None:
    install(lines)
    with pytest.warns(UserWarning, match=f"fusedmlp leaves out the form .*{why}"):
        found = installed_forms()
    assert len(found) == lines.count("\n")


# A GPU's table

TOY = Gpu("ACME TOY1", (8, 9), 101376, 100, 1000, 200)


def table(**microseconds: float) -> str:
    row = {"form": "gelu_tanh", "rows": 64, "width": 64, "hidden": 256}
    measured = {**row, "precision": "bfloat16", "training": False, "us": microseconds}
    machine = {"gpu": TOY.name, "architecture": TOY.architecture}
    return json.dumps({"machine": machine, "rows": [measured]})


@pytest.fixture
def site_on_toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Site]]:
    """Plans an MLP for the toy with a table of these times in microseconds."""
    layers = torch.nn.Linear(64, 256), torch.nn.GELU("tanh"), torch.nn.Linear(256, 64)
    model = torch.nn.Sequential(*layers).bfloat16()

    def planned(**microseconds: float) -> Site:
        folder = tmp_path / "tables"
        folder.mkdir()
        if microseconds:
            (folder / "mlps_toy1.json").write_text(table(**microseconds))
        monkeypatch.setitem(gpus.KNOWN, "toy1", TOY)
        place = SimpleNamespace(files=lambda package: tmp_path)
        monkeypatch.setattr(shipped_tables, "resources", place)
        measurements.shipped.cache_clear()
        with torch.no_grad():
            (site,) = explain(model, torch.randn(64, 64).bfloat16(), target="toy1").sites
        return site

    yield planned
    measurements.shipped.cache_clear()


def test_a_family_that_a_new_table_has_as_the_fastest_is_chosen(site_on_toy) -> None:
    site = site_on_toy(inductor=10.0, back_to_back=8.0, epilogue=4.0)
    assert (site.plan, site.expected_speedup) == ("epilogue", 2.5)
    assert TOY.name in site.detail


def test_where_a_new_table_has_inductor_as_the_fastest_nothing_is_fused(site_on_toy) -> None:
    site = site_on_toy(inductor=4.0, back_to_back=8.0, epilogue=10.0)
    assert (site.fused, site.reason) == (False, "not-faster")
    assert TOY.name in site.detail


def test_without_a_table_no_measurement_is_named(site_on_toy) -> None:
    assert "nothing like it was measured there" in site_on_toy().detail
