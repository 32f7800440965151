"""Functions that are printed as source, for Triton to compile."""

from __future__ import annotations

import linecache
from typing import Any


def execute(source: str, filename: str, scope: dict[str, Any]) -> None:
    """Define in ``scope`` what a source defines, under the name of a file that does not exist.

    Triton and Inductor read a kernel's source with ``inspect``, which looks into ``linecache`` for
    such files. Without a modification time the entry is never checked against a disk.
    """
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), scope)
