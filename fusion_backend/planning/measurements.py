"""Times measured on GPUs: which plan ran how fast for which MLP.

A table is what ``fusedmlp tune`` writes: for each MLP the GPU time of Inductor and of every plan,
in microseconds, medians of interleaved runs. Some ship with the package; the user's own are kept by
``user_table``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fusion_backend.planning.gpus import Gpu
from fusion_backend.planning.shipped_tables import contents

#: Under these names a table has the times of Inductor itself, in its two modes.
INDUCTOR, MAX_AUTOTUNE = "inductor", "max_autotune"
# Beyond this many doublings of widths, in sum, a measured MLP says nothing about another.
_MAX_DOUBLINGS = 1.5
# Twice the rows change less than twice the widths, and are measured more densely.
_WEIGHT_OF_ROWS = 0.25
# A plan must have been this much faster before it is worth a rewrite: less is noise.
WORTHWHILE = 1.03

Widths = tuple[int, int, int]
# 16-bit elements that kernels and libraries load at a time, from multiples of as many.
_UNIT = 8


@dataclass(frozen=True)
class Kind:
    """What two MLPs must share for one to speak for the other.

    Attributes:
        form: ``swiglu`` for gated MLPs; ``gelu`` for plain ones whose activation needs an ``erf``,
            which is dear, or a sine, which is as many instructions; ``gelu_tanh`` for all other
            plain ones.
        training: forward and backward, not forward alone.
        precision: ``bfloat16``, ``float16``, or for float32 ``tf32`` or ``ieee``.
        transposed: weights are stored ``(in_features, out_features)``: other kernels read them.
    """

    form: str
    training: bool
    precision: str
    transposed: bool = False


def are_aligned(widths: Widths) -> bool:
    """Whether every row of every 16-bit operand starts where a vector of elements may start."""
    return all(width % _UNIT == 0 for width in widths)


def form_of(activation: str, gated: bool) -> str:
    """The form in :class:`Kind` of an activation, given as its canonical text."""
    if gated:
        return "swiglu"
    dear = ("gelu(", "erf(", "sin(", "cos(")
    return "gelu" if any(function in activation for function in dear) else "gelu_tanh"


@dataclass(frozen=True)
class Measurement:
    """Times of one MLP, ``rows`` × ``width`` → ``hidden`` → ``out``, by plan.

    Attributes:
        microseconds: by plan, and of Inductor as :data:`INDUCTOR` and :data:`MAX_AUTOTUNE`.
        source: where the times come from, such as ``"on an H100"``.
        measured: they were measured, not predicted.
        estimated: plans whose times are longer than measured, by :meth:`lengthened`.
        activation: the canonical text, where it is not that of its form.
    """

    kind: Kind
    rows: int
    width: int
    hidden: int
    out: int
    microseconds: Mapping[str, float]
    source: str = ""
    measured: bool = True
    estimated: frozenset[str] = frozenset()
    activation: str | None = None

    @property
    def widths(self) -> Widths:
        """Input, hidden and output width."""
        return self.width, self.hidden, self.out

    @property
    def cell(self) -> tuple[Kind, int, Widths]:
        """What was measured; the same in another table is a measurement of the same."""
        return self.kind, self.rows, self.widths

    def speedup(self, plan: str, over: str = INDUCTOR) -> float | None:
        """How many times faster than Inductor a plan was; ``None`` if it was not measured.

        Args:
            plan: the plan's name.
            over: the mode of Inductor; where its time is missing, the default mode's counts.
        """
        if plan not in self.microseconds:
            return None
        baseline = self.microseconds.get(over, self.microseconds[INDUCTOR])
        return baseline / self.microseconds[plan]

    def lengthened(self, factors: Mapping[str, float]) -> Measurement:
        """The measurement for kernels that take so many times as long, by plan."""
        times = {
            plan: factors.get(plan, 1.0) * microseconds
            for plan, microseconds in self.microseconds.items()
        }
        return replace(self, microseconds=times, estimated=self.estimated.union(factors))

    def doublings_from(self, widths: Widths) -> float:
        """How far its widths are from others, in doublings."""
        in_, hidden, out = (
            abs(math.log2(max(width, 1) / size))
            for width, size in zip(widths, self.widths, strict=True)
        )
        return (in_ + out) / 2 + hidden

    def distance(self, rows: int, widths: Widths) -> float:
        """How far it is from another MLP, in doublings of widths; rows weigh less."""
        doublings = abs(math.log2(max(rows, 1) / self.rows))
        return self.doublings_from(widths) + _WEIGHT_OF_ROWS * doublings


def column(
    measurements: Iterable[Measurement], kind: Kind, widths: Widths
) -> tuple[Measurement, ...]:
    """What was measured for the widths nearest to some (in, hidden, out), by rows.

    Empty where nothing near was measured.
    """
    same = [m for m in measurements if m.kind == kind]
    near = min((m.doublings_from(widths) for m in same), default=math.inf)
    if near > _MAX_DOUBLINGS:
        return ()
    return tuple(sorted((m for m in same if m.doublings_from(widths) == near), key=_rows))


def nearest(
    measurements: Iterable[Measurement], kind: Kind, rows: int, widths: Widths
) -> Measurement | None:
    """The measurement nearest to an MLP, ``None`` where nothing near was measured."""
    same = [m for m in measurements if m.kind == kind]
    near = min(same, key=lambda m: m.distance(rows, widths), default=None)
    return near if near is not None and near.distance(rows, widths) <= _MAX_DOUBLINGS else None


def merged(own: Iterable[Measurement], others: Iterable[Measurement]) -> tuple[Measurement, ...]:
    """Both; of what both measured, ``own``."""
    cells = {measured.cell: measured for measured in others}
    return tuple((cells | {measured.cell: measured for measured in own}).values())


@functools.cache
def shipped(gpu: Gpu) -> tuple[Measurement, ...]:
    """What ships with the package for a GPU, of its own model first; empty where nothing does."""
    measured: tuple[Measurement, ...] = ()
    for content in contents("mlps", gpu):
        measured = merged(measured, parsed(content))
    return measured


def parsed(content: Mapping[str, Any]) -> tuple[Measurement, ...]:
    """The measurements in the JSON object of a table; those of single sites speak for no other."""
    machine = content["machine"]
    source = f"on an {machine['gpu'] if 'gpu' in machine else machine['cpu']}"
    return tuple(_measurement(row, source) for row in content["rows"] if is_mlp(row))


def is_mlp(row: Mapping[str, Any]) -> bool:
    """Whether a line of a table has the times of an MLP as it is run, not of what stands for it."""
    return "form" in row and "model" not in row


def _measurement(row: Mapping[str, Any], source: str) -> Measurement:
    kind = Kind(row["form"], row["training"], row["precision"], row.get("transposed", False))
    widths = (row["width"], row["hidden"], row.get("out", row["width"]))
    activation = row.get("activation")
    return Measurement(kind, row["rows"], *widths, row["us"], source, activation=activation)


def _rows(measured: Measurement) -> int:
    return measured.rows
