"""What :func:`fusion_backend.profile` returns: kernels, times and errors, one row a backend."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fusion_backend.errors import ProfileError
from fusion_backend.fusion.sites import Site
from fusion_backend.instruments.claims import SiteLaunches
from fusion_backend.instruments.perfetto import Trace, write
from fusion_backend.instruments.report import changes_text, comparison_text
from fusion_backend.instruments.timelines import Launch

# What a flat row has no place for.
_NESTED = frozenset({"names", "times"})
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


#: Of :meth:`Comparison.to_json`: it changes where a key changes its meaning or goes away.
SCHEMA_VERSION = 1


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
        sites: the MLPs that fusedmlp fused, in program order: what the plan of each claims to
            launch in a call, and what was launched in the call that was counted last.
        gradients: how often a call launches each fused kernel of backward passes.
        step: the name of the function that was profiled as a step; empty for calls of the model.
        traces: one recorded step of each backend; :meth:`save_trace` writes them.
        timelines: of each backend the launches of a call that took the median time, in order.
        mlps: every MLP that fusedmlp found, fused or not, graph by graph in program order; it is
            by their place here that launches of :attr:`timelines` name them.
    """

    rows: tuple[KernelCounts, ...]
    device: str
    counted: str
    steps: int
    backward: bool
    notes: tuple[str, ...] = ()
    sites: tuple[SiteLaunches, ...] = ()
    gradients: Mapping[str, int] = field(default_factory=dict)
    step: str = ""
    traces: Mapping[str, Trace] = field(default_factory=dict, repr=False, compare=False)
    timelines: Mapping[str, tuple[Launch, ...]] = field(default_factory=dict)
    mlps: tuple[Site, ...] = field(default=(), repr=False)

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

    def changes(
        self, before: str = "inductor", after: str = "fusedmlp"
    ) -> tuple[KernelChange, ...]:
        """Every kernel of two backends, by name, those that take longest first.

        As in :meth:`differences`, Inductor's numbers are left out.

        Raises:
            ProfileError: a backend was not profiled.
        """
        old, new = without_numbers(self[before].names), without_numbers(self[after].names)
        old_us, new_us = (without_numbers(self[name].times) for name in (before, after))
        changes = [
            KernelChange(name, old[name], new[name], old_us[name], new_us[name])
            for name in sorted({*old, *new})
        ]
        return tuple(sorted(changes, key=lambda each: -max(each.before_us, each.after_us)))

    def changes_text(self, before: str = "inductor", after: str = "fusedmlp") -> str:
        """:meth:`changes` as a table, with the sums of its columns."""
        return changes_text(self.changes(before, after), before, after)

    def save_trace(self, path: str | Path) -> None:
        """Write one recorded step of each backend, for https://ui.perfetto.dev or Chrome.

        The backends stand below each other, all beginning at 0. Of fusedmlp each MLP is a range
        with its name, and so are its kernels of the backward pass.

        Args:
            path: of the file; compressed where it ends in ``.gz``.
        """
        write(path, self.traces)

    def to_rows(self) -> list[dict[str, Any]]:
        """One flat dict a backend, for ``pandas.DataFrame``."""
        whole = {"device": self.device, "counted": self.counted, "steps": self.steps}
        return [
            {
                **whole,
                **{key: value for key, value in self._row(row).items() if key not in _NESTED},
            }
            for row in self.rows
        ]

    def _row(self, row: KernelCounts) -> dict[str, Any]:
        return {
            **vars(row),
            "names": dict(row.names),
            "times": dict(row.times),
            "speedup": self.speedup(row),
            "same_program": self.runs_same_program(row),
        }

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

        One object with ``schema_version``, ``device``, ``counted``, ``steps``, ``backward``,
        ``step``, ``baseline`` (a backend), ``rows``, ``sites``, ``gradients`` and ``notes``
        (strings). Each row has the fields of :class:`KernelCounts`, ``speedup`` and
        ``same_program``; each site those of :class:`SiteLaunches`. The documentation has a page on
        it, "The profile as JSON".
        """
        content: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "device": self.device,
            "counted": self.counted,
            "steps": self.steps,
            "backward": self.backward,
            "step": self.step,
            "baseline": self.baseline.backend,
            "rows": [self._row(row) for row in self.rows],
            "sites": [vars(site) for site in self.sites],
            "gradients": dict(self.gradients),
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


def without_numbers(names: Mapping[str, float]) -> Counter[str]:
    """The counts or times, those of Inductor's kernels added up over their numbers."""
    counts: Counter[str] = Counter()
    for name, amount in names.items():
        numbered = NUMBERED.fullmatch(name)
        counts[numbered.group(1) if numbered else name] += amount  # type: ignore[assignment]
    return counts
