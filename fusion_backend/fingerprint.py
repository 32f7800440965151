"""The identity of this package's source, so that a cache never serves what older code compiled."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

_SUFFIXES = (".py", ".json", ".h")


@functools.cache
def source_hash() -> str:
    """SHA-256, in hexadecimal, of every source file and table of the package.

    The version is in one of them.
    """
    patterns = importlib.util.find_spec("fusion_backend.patterns")  # which may lie elsewhere
    files = (__file__, None if patterns is None else patterns.origin)
    return hash_of([Path(file).parent for file in files if file])


@functools.cache
def kernels_hash() -> str:
    """SHA-256, in hexadecimal, of all that kernels are generated from and operators run.

    It decides whether a table that was measured on this machine is still believed.
    """
    package = Path(__file__).parent
    first = [*package.glob("kernels/**/*.py"), *package.glob("operators/*.py")]
    headers = package.glob("kernels/**/*.h")
    return hash_of(sorted({*imported_by(first, package), *headers}))


def imported_by(files: Iterable[Path], package: Path) -> set[Path]:
    """These files of a package, and all those of it that they import, at whatever depth.

    Imports within functions count; those for type checkers do not, as nothing runs by them.
    """
    found: set[Path] = set()
    pending = [*files]
    while pending:
        file = pending.pop()
        if file not in found:
            found.add(file)
            modules = _imports(ast.parse(file.read_text(encoding="utf-8")))
            pending.extend(filter(None, (_file_of(module, package) for module in modules)))
    return found


def _imports(tree: ast.AST) -> Iterator[str]:
    """Names of modules that are imported, or of what is imported from them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from _imports(node)


def _file_of(module: str, package: Path) -> Path | None:
    """The file of a module of the package; ``None`` for other modules, and what is in a module."""
    first, *names = module.split(".")
    if first != package.name or not names:
        return None
    path = package.joinpath(*names)
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def hash_of(roots: Iterable[Path]) -> str:
    """The hash of the names and contents of all sources in or under ``roots``.

    It depends neither on where they lie nor on when they were written.
    """
    digest = hashlib.sha256()
    for root in roots:
        files = [root] if root.is_file() else root.rglob("*")
        for file in sorted(file for file in files if file.suffix in _SUFFIXES):
            digest.update(f"\0{root.name}/{file.relative_to(root).as_posix()}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
