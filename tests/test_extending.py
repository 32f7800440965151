"""The ways to extend that CONTRIBUTING names, each done with a toy."""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fusion_backend"


# A release of PyTorch or Triton

#: Modules that touch private names outside of `compat`, and which.
EXCEPTIONS = {
    # Each lowers our operators to calls of Inductor's own intermediate representation and does
    # nothing else: there is no part of them that a public interface could serve.
    "operators/cpu_calls.py": ("torch._inductor.ir", "torch._inductor.lowering"),
    "operators/inductor_lowering.py": ("torch._inductor.ir", "torch._inductor.lowering"),
    "operators/training_calls.py": (
        *("torch._inductor.ir", "torch._inductor.lowering"),
        "torch.utils._sympy.functions.FloorDiv",
    ),
}


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


@pytest.mark.parametrize(
    "path",
    sorted(path for path in PACKAGE.rglob("*.py") if path.parent.name != "compat"),
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_no_module_outside_compat_touches_private_names(path: Path) -> None:
    allowed = EXCEPTIONS.get(path.relative_to(PACKAGE).as_posix(), ())
    found = private_names(path.read_text(encoding="utf-8"))
    assert not [name for name in found if not name.startswith(allowed or " ")]


def test_every_exception_is_still_one() -> None:
    for name, allowed in EXCEPTIONS.items():
        found = private_names((PACKAGE / name).read_text(encoding="utf-8"))
        assert all(any(each.startswith(one) for each in found) for one in allowed), name
