"""The templates of the report. All that is put into them is escaped."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

# Between a number and its unit no line ends.
_SPACE = "\N{NO-BREAK SPACE}"
_TEMPLATES = Path(__file__).parent / "templates"


def rendered(template: str, **content: Any) -> str:
    """A template, filled in.

    Args:
        template: name of its file.
        content: what it speaks of.
    """
    return _environment().get_template(template).render(**content)


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        number=number, microseconds=microseconds, bytes=byte_count, factor=factor
    )
    return environment


def number(value: float) -> str:
    """Few digits, for coordinates."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


def microseconds(value: float) -> str:
    """A time with its unit, in three significant digits."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{_SPACE}{unit}"
    return f"{value:.3g}{_SPACE}µs"


def byte_count(value: float) -> str:
    """An amount of memory with its unit."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:.3g}{_SPACE}{unit}"
    return f"{value:.0f}{_SPACE}B"


def factor(value: float | None) -> str:
    """How many times as fast; a dash where that is not known."""
    return "–" if value is None else f"{value:.2f}×"
