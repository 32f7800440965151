"""What :func:`fusion_backend.profile` returns: kernels, times and errors, one row a backend."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusion_backend.errors import ProfileError
from fusion_backend.fusion.sites import Site
from fusion_backend.instruments.backend_rows import (
    Difference,
    KernelChange,
    KernelCounts,
    baseline_of,
    changes,
    differences,
    runs_same_program,
)
from fusion_backend.instruments.claims import SiteLaunches
from fusion_backend.instruments.perfetto import Trace, write
from fusion_backend.instruments.report import (
    changes_text,
    comparison_cells,
    note_text,
    sites_text,
    table,
)
from fusion_backend.instruments.timelines import Launch

# What a flat row has no place for.
_NESTED = frozenset({"names", "times"})


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
        return baseline_of(self.rows)

    def speedup(self, row: KernelCounts) -> float:
        """Wall time of the baseline over that of ``row``."""
        return self.baseline.wall_us / row.wall_us

    def runs_same_program(self, row: KernelCounts) -> bool:
        """Whether a row runs the baseline's very kernels: their times differ by chance only."""
        return runs_same_program(row, self.baseline)

    def differences(
        self, before: str = "inductor", after: str = "fusedmlp"
    ) -> tuple[Difference, ...]:
        """The kernels that run a different number of times under two backends, by name.

        Inductor numbers its kernels within a graph; the same work has another number in another
        graph, so numbers are left out here.

        Raises:
            ProfileError: a backend was not profiled.
        """
        return differences(self[before], self[after])

    def changes(
        self, before: str = "inductor", after: str = "fusedmlp"
    ) -> tuple[KernelChange, ...]:
        """Every kernel of two backends, by name, those that take longest first.

        As in :meth:`differences`, Inductor's numbers are left out.

        Raises:
            ProfileError: a backend was not profiled.
        """
        return changes(self[before], self[after])

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
        pass_ = "forward and backward" if self.backward else self.step or "forward"
        title = (
            f"{self.device}, {pass_}: {self.counted} of one call, "
            f"the same in each of {self.steps}; median times"
        )
        lines = [title, "", table(*comparison_cells(self.rows, self.counted))]
        if self.sites:
            lines += ["", sites_text(self.sites, self.gradients)]
        return "\n".join([*lines, *(f"\n{note_text(note)}" for note in self.notes)])
