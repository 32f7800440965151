"""Tests stand alone: what several of them need is in a module that is no test."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parent


def imported(path: Path) -> set[str]:
    """The modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def test_no_file_imports_a_test() -> None:
    tests = {path.stem for path in TESTS.rglob("test_*.py")}
    found = {str(path.relative_to(TESTS)): imported(path) & tests for path in TESTS.rglob("*.py")}
    assert not {path: names for path, names in found.items() if names}
