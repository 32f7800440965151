"""The identity of this package's source, so that a cache never serves what older code compiled."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

import fusion_backend
from fusion_backend import patterns

_SUFFIXES = (".py", ".json", ".h")


@functools.cache
def source_hash() -> str:
    """SHA-256, in hexadecimal, of the version and of every source file and table of the package."""
    roots = [Path(file).parent for file in (fusion_backend.__file__, patterns.__file__) if file]
    return hash_of(fusion_backend.__version__, roots)


@functools.cache
def kernels_hash() -> str:
    """SHA-256, in hexadecimal, of the sources that decide how fast a plan runs."""
    package = Path(fusion_backend.__file__).parent
    names = ("kernels", "dispatch.py", "gradients.py", "library.py")
    return hash_of("", [package / name for name in names])


def hash_of(version: str, roots: Iterable[Path]) -> str:
    """The hash of ``version`` and of the names and contents of all sources in or under ``roots``.

    It depends neither on where they lie nor on when they were written.
    """
    digest = hashlib.sha256(version.encode())
    for root in roots:
        files = [root] if root.is_file() else root.rglob("*")
        for file in sorted(file for file in files if file.suffix in _SUFFIXES):
            digest.update(f"\0{root.name}/{file.relative_to(root).as_posix()}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
