"""Variables that stand for operands: ``p0``, ``p1`` and so on."""

from __future__ import annotations

import re

_NAME = re.compile(r"p(0|[1-9]\d*)")


def name_of(index: int) -> str:
    """The variable that stands for an operand."""
    return f"p{index}"


def index_of(variable: str) -> int | None:
    """The operand that a variable stands for, or ``None`` where it is a projection."""
    found = _NAME.fullmatch(variable)
    return int(found[1]) if found else None
