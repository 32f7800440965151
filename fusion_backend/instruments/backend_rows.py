"""What a comparison has of each backend, one row a backend, and what differs between two rows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# Inductor numbers its kernels within a graph: the same work has other numbers in another one.
_NUMBERED = re.compile(r"((?:triton|cpp)_\w+?)_\d+")


@dataclass(frozen=True)
class KernelCounts:
    """One backend's part of a :class:`Comparison`; all numbers are those of one call.

    Attributes:
        backend: its name, such as ``"inductor"``.
        kernels: GPU kernels run; on a CPU, operators (see ``Comparison.counted``).
        memcpys: copies by the driver; ``None`` on a CPU.
        memsets: fills by the driver (cuBLAS adds some on Hopper); ``None`` on a CPU.
        gpu_us: microseconds in which a GPU was at work on kernels, memcpys or memsets, median over
            the steps, added up over GPUs; ``None`` on a CPU.
        wall_us: time until the device is done in microseconds, median over the steps.
        error: relative Frobenius norm of the difference of the outputs from those of the same
            model in float64; ``None`` where a note says why.
        gradient_error: the same for the gradients of parameters and inputs; ``None`` without
            backward.
        names: how often each kernel (operator) runs.
        times: how long each kernel (operator) takes in microseconds, all its launches added up,
            median over the steps; on a CPU the profiler's own work is in it.
        first_call_s: seconds that the first call took, which compiles; less where caches have the
            code.
        peak_bytes: the most that a call allocates at once, beyond what was there before; memory
            that CUDA graphs hold is not seen.
        saved_bytes: what a call keeps for its backward pass, beside parameters, buffers and
            inputs; ``None`` where nothing is differentiated.
    """

    backend: str
    kernels: int
    memcpys: int | None
    memsets: int | None
    gpu_us: float | None
    wall_us: float
    error: float | None
    gradient_error: float | None
    names: Mapping[str, int]
    times: Mapping[str, float] = field(default_factory=dict)
    first_call_s: float | None = None
    peak_bytes: int | None = None
    saved_bytes: int | None = None


class Difference(NamedTuple):
    """A kernel that two backends run a different number of times."""

    name: str
    before: int
    after: int


class KernelChange(NamedTuple):
    """A kernel under two backends: how often one call runs it, and for how many microseconds."""

    name: str
    before: int
    after: int
    before_us: float
    after_us: float

    @property
    def change(self) -> int:
        """By how many launches there are more."""
        return self.after - self.before

    @property
    def change_us(self) -> float:
        """By how many microseconds it takes longer."""
        return self.after_us - self.before_us


def baseline_of(rows: Sequence[KernelCounts]) -> KernelCounts:
    """The row that speed-ups refer to: Inductor's, or the first where it was not profiled."""
    return next((row for row in rows if row.backend == "inductor"), rows[0])


def runs_same_program(row: KernelCounts, baseline: KernelCounts) -> bool:
    """Whether a row runs the very kernels of another one: their times differ by chance only."""
    theirs, ours = _without_numbers(baseline.names), _without_numbers(row.names)
    return row is not baseline and ours == theirs


def differences(before: KernelCounts, after: KernelCounts) -> tuple[Difference, ...]:
    """The kernels that run a different number of times under two backends, by name."""
    old, new = _without_numbers(before.names), _without_numbers(after.names)
    return tuple(
        Difference(name, old[name], new[name])
        for name in sorted({*old, *new})
        if old[name] != new[name]
    )


def changes(before: KernelCounts, after: KernelCounts) -> tuple[KernelChange, ...]:
    """Every kernel of two backends, by name, those that take longest first."""
    old, new = _without_numbers(before.names), _without_numbers(after.names)
    old_us, new_us = (_without_numbers(row.times) for row in (before, after))
    found = [
        KernelChange(name, old[name], new[name], old_us[name], new_us[name])
        for name in sorted({*old, *new})
    ]
    return tuple(sorted(found, key=lambda each: -max(each.before_us, each.after_us)))


def _without_numbers(names: Mapping[str, float]) -> Counter[str]:
    """The counts or times, those of Inductor's kernels added up over their numbers."""
    counts: Counter[str] = Counter()
    for name, amount in names.items():
        numbered = _NUMBERED.fullmatch(name)
        counts[numbered.group(1) if numbered else name] += amount  # type: ignore[assignment]
    return counts
