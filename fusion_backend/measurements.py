"""Times measured on GPUs, shipped with the package: which plan ran how fast for which MLP.

A table is what ``benchmarks/plans.py`` writes: for each MLP the GPU time of Inductor's default mode
and of every plan, in microseconds, medians of interleaved runs.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

# Beyond this many doublings of widths, in sum, a measured MLP says nothing about another.
_MAX_DOUBLINGS = 1.5
# A plan must have been this much faster before it is worth a rewrite: less is noise.
WORTHWHILE = 1.03


@dataclass(frozen=True)
class Kind:
    """What two MLPs must share for one to speak for the other.

    Attributes:
        form: ``swiglu`` for gated MLPs; ``gelu`` for plain ones whose activation needs an ``erf``,
            which is dear; ``gelu_tanh`` for all other plain ones.
        training: forward and backward, not forward alone.
        precision: ``half``, or for float32 ``tf32`` or ``ieee``.
    """

    form: str
    training: bool
    precision: str


@dataclass(frozen=True)
class Measurement:
    """Times of one MLP, ``rows`` × ``width`` → ``hidden`` → ``width``, by plan."""

    kind: Kind
    rows: int
    width: int
    hidden: int
    microseconds: Mapping[str, float]

    def speedup(self, plan: str) -> float | None:
        """How many times faster than Inductor a plan was; ``None`` if it was not measured."""
        if plan not in self.microseconds:
            return None
        return self.microseconds["inductor"] / self.microseconds[plan]


@dataclass(frozen=True)
class Table:
    """The measurements of one GPU."""

    gpu: str
    measurements: tuple[Measurement, ...]

    def column(self, kind: Kind, widths: tuple[int, int, int]) -> tuple[Measurement, ...]:
        """What was measured for the widths nearest to some (in, hidden, out), by rows.

        Empty where nothing near was measured.
        """
        same = [m for m in self.measurements if m.kind == kind]
        near = min((_doublings(widths, m) for m in same), default=math.inf)
        if near > _MAX_DOUBLINGS:
            return ()
        column = [m for m in same if _doublings(widths, m) == near]
        return tuple(sorted(column, key=lambda measurement: measurement.rows))


def _doublings(widths: tuple[int, int, int], measured: Measurement) -> float:
    sizes = (measured.width, measured.hidden, measured.width)
    in_, hidden, out = (
        abs(math.log2(width / size)) for width, size in zip(widths, sizes, strict=True)
    )
    return (in_ + out) / 2 + hidden


@functools.cache
def table_for(capability: tuple[int, int]) -> Table | None:
    """The table that speaks for a compute capability, if one ships with the package."""
    path = resources.files("fusion_backend") / "tables" / f"sm_{capability[0]}{capability[1]}.json"
    if not path.is_file():
        return None
    content = json.loads(path.read_text())
    rows = (row for row in content["rows"] if not row["control"])
    return Table(content["machine"]["gpu"], tuple(map(_measurement, rows)))


def _measurement(row: Mapping[str, Any]) -> Measurement:
    kind = Kind(row["form"], row["training"], row["precision"])
    return Measurement(kind, row["rows"], row["width"], row["hidden"], row["us"])
