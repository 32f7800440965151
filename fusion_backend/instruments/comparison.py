"""What :func:`fusion_backend.profile` returns: kernels, times and errors, one row a backend."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fusion_backend.errors import ProfileError
from fusion_backend.instruments.report import comparison_text
from fusion_backend.instruments.timelines import Launch

NUMBERED = re.compile(r"((?:triton|cpp)_\w+?)_\d+")


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


class Difference(NamedTuple):
    """A kernel that two backends run a different number of times."""

    name: str
    before: int
    after: int


@dataclass(frozen=True)
class Comparison:
    """Backends side by side on one model and the same inputs.

    Attributes:
        rows: one a backend, in the order they were asked for.
        device: name of the device, such as ``"NVIDIA H100 80GB HBM3"`` or ``"cpu"``.
        counted: what ``kernels`` counts: ``"GPU kernels"``, or ``"CPU operators"``, which are
            Inductor's C++ loops and outermost calls of torch operators that do work (no views, no
            allocations).
        steps: calls that were counted and timed, per backend.
        backward: whether a call was forward and backward.
        notes: sentences on what the numbers do not show.
        timelines: of each backend the launches of a call that took the median time, in order.
    """

    rows: tuple[KernelCounts, ...]
    device: str
    counted: str
    steps: int
    backward: bool
    notes: tuple[str, ...] = ()
    timelines: Mapping[str, tuple[Launch, ...]] = field(default_factory=dict)

    def __getitem__(self, backend: str) -> KernelCounts:
        for row in self.rows:
            if row.backend == backend:
                return row
        known = ", ".join(row.backend for row in self.rows)
        raise ProfileError(f"backend must be one of those profiled ({known}), got {backend!r}")

    @property
    def baseline(self) -> KernelCounts:
        """The row that speed-ups refer to: Inductor's, or the first where it was not profiled."""
        return next((row for row in self.rows if row.backend == "inductor"), self.rows[0])

    def speedup(self, row: KernelCounts) -> float:
        """Wall time of the baseline over that of ``row``."""
        return self.baseline.wall_us / row.wall_us

    def runs_same_program(self, row: KernelCounts) -> bool:
        """Whether a row runs the baseline's very kernels: their times differ by chance only."""
        theirs, ours = without_numbers(self.baseline.names), without_numbers(row.names)
        return row is not self.baseline and ours == theirs

    def differences(
        self, before: str = "inductor", after: str = "fusedmlp"
    ) -> tuple[Difference, ...]:
        """The kernels that run a different number of times under two backends, by name.

        Inductor numbers its kernels within a graph; the same work has another number in another
        graph, so numbers are left out here.

        Raises:
            ProfileError: a backend was not profiled.
        """
        old, new = without_numbers(self[before].names), without_numbers(self[after].names)
        return tuple(
            Difference(name, old[name], new[name])
            for name in sorted({*old, *new})
            if old[name] != new[name]
        )

    def assert_fewer_kernels(self, than: str = "inductor", backend: str = "fusedmlp") -> None:
        """Require that ``backend`` runs fewer kernels than another; memcpys and memsets aside.

        Raises:
            AssertionError: it does not; the message holds the table and the differences.
            ProfileError: a backend was not profiled.
        """
        ours, theirs = self[backend].kernels, self[than].kernels
        if ours < theirs:
            return
        differences = "".join(
            f"\n  {each.name}: {each.before} → {each.after}"
            for each in self.differences(than, backend)
        )
        raise AssertionError(
            f"{backend} must run fewer {self.counted} than {than}, got {ours} against {theirs}"
            f"\n\n{self}\n\n{than} → {backend}:{differences or ' the same kernels'}"
        )

    def to_json(self, indent: int | None = 2) -> str:
        """The comparison as JSON.

        One object with ``device``, ``counted``, ``steps``, ``backward``, ``baseline`` (a backend),
        ``rows`` and ``notes`` (strings). Each row has the fields of :class:`KernelCounts`,
        ``speedup`` and ``same_program``; ``names`` maps kernels to counts.
        """
        rows = [
            {
                **vars(row),
                "names": dict(row.names),
                "speedup": self.speedup(row),
                "same_program": self.runs_same_program(row),
            }
            for row in self.rows
        ]
        content: dict[str, Any] = {
            "device": self.device,
            "counted": self.counted,
            "steps": self.steps,
            "backward": self.backward,
            "baseline": self.baseline.backend,
            "rows": rows,
            "notes": list(self.notes),
        }
        return json.dumps(content, indent=indent, ensure_ascii=False)

    def to_html(self, title: str = "") -> str:
        """The comparison as a page: one HTML file, which needs nothing from elsewhere.

        Args:
            title: what the model is called.
        """
        from fusion_backend.instruments.html.page import report_html

        return report_html(None, self, title)

    def _repr_html_(self) -> str:
        from fusion_backend.instruments.html.page import comparison_fragment

        return comparison_fragment(self)

    def __str__(self) -> str:
        return comparison_text(self)


def without_numbers(names: Mapping[str, int]) -> Counter[str]:
    """The counts, those of Inductor's kernels added up over their numbers."""
    counts: Counter[str] = Counter()
    for name, times in names.items():
        numbered = NUMBERED.fullmatch(name)
        counts[numbered.group(1) if numbered else name] += times
    return counts
