"""Roofline, timelines and memory as coordinates, for templates to write as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fusion_backend.fusion.sites import Site
from fusion_backend.instruments.html.memory import Memory
from fusion_backend.instruments.html.roofline import Roof, Work, work_of
from fusion_backend.instruments.timelines import Launch, time_by_site

# Of the roofline and of memory, in the units of their drawings.
WIDTH, HEIGHT = 640.0, 300.0
_LEFT, _BOTTOM = 84.0, 34.0
_MEMORY_HEIGHT = 80.0


class Tick(NamedTuple):
    """A mark of an axis: where, and what it says."""

    at: float
    text: str


class Point(NamedTuple):
    """A site in the roofline.

    Attributes:
        x: in the drawing.
        y: in the drawing.
        kind: ``fusedmlp`` or ``inductor``; ``bound`` where nothing was measured.
        site: the number of the first of those that are alike.
        text: what it says, for a tooltip and for a table.
    """

    x: float
    y: float
    kind: str
    site: int
    text: str


@dataclass(frozen=True)
class Roofline:
    """The chart.

    Attributes:
        points: sites, measured or at the bound.
        roof: the line of the device, as SVG writes it; empty where it is not known.
        source: where that line comes from.
        x_ticks: decades of FLOPs a byte.
        y_ticks: decades of FLOPs a second.
        rows: intensity of each kind of site, for a table: site, unfused and fused, and what bounds.
    """

    points: tuple[Point, ...]
    roof: str
    source: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    rows: tuple[tuple[int, str, Work, str], ...]


def roofline(
    sites: Sequence[Site],
    launches: Mapping[str, Sequence[Launch]],
    roof: Roof | None,
) -> Roofline | None:
    """The chart of the sites whose sizes are known; ``None`` where there is nothing to draw.

    Args:
        sites: of a model.
        launches: of each backend, with their sites.
        roof: of the device; ``None`` where it is not known.
    """
    kinds = _kinds(sites)
    times = {name: time_by_site(found) for name, found in launches.items()}
    placed = list(_measured(kinds, times))
    if roof is not None and not placed:
        placed = [
            (number, "bound", intensity, roof.at(intensity))
            for number, (_, work) in kinds.items()
            for intensity in {work.flops / work.unfused, work.flops / work.fused}
        ]
    rows = tuple(
        (number, site.module or "(model)", work, _bound(work, roof))
        for number, (site, work) in kinds.items()
    )
    if not placed:
        return Roofline((), "", "", (), (), rows) if rows else None
    xs = [intensity for _, _, intensity, _ in placed]
    ys = [speed for _, _, _, speed in placed]
    if roof is not None:
        ridge = roof.flops_per_second / roof.bytes_per_second
        xs, ys = [*xs, ridge], [*ys, roof.flops_per_second]
    x_axis, y_axis = Axis.around(xs, _LEFT, WIDTH - 8), Axis.around(ys, HEIGHT - _BOTTOM, 8)
    points = tuple(
        Point(x_axis(x), y_axis(y), kind, number, _sentence(sites[number], kind, x, y))
        for number, kind, x, y in placed
    )
    line = "" if roof is None else _roof_line(roof, x_axis, y_axis)
    source = "" if roof is None else roof.source
    return Roofline(points, line, source, x_axis.ticks(""), y_axis.ticks("FLOP/s"), rows)


def _kinds(sites: Sequence[Site]) -> dict[int, tuple[Site, Work]]:
    """One site of each size and plan."""
    found: dict[object, tuple[int, Site, Work]] = {}
    for number, site in enumerate(sites):
        work = work_of(site)
        if work is not None:
            found.setdefault((work, site.plan, site.dtype), (number, site, work))
    return {number: (site, work) for number, site, work in found.values()}


def _measured(
    kinds: Mapping[int, tuple[Site, Work]], times: Mapping[str, Mapping[int, float]]
) -> Iterator[tuple[int, str, float, float]]:
    for number, (_, work) in kinds.items():
        for backend in ("inductor", "fusedmlp"):
            time = times.get(backend, {}).get(number)
            if time:
                moved = work.fused if backend == "fusedmlp" else work.unfused
                yield number, backend, work.flops / moved, 1e6 * work.flops / time


def _bound(work: Work, roof: Roof | None) -> str:
    if roof is None:
        return ""
    ridge = roof.flops_per_second / roof.bytes_per_second
    return "memory" if work.flops / work.fused < ridge else "arithmetic"


def _sentence(site: Site, kind: str, intensity: float, speed: float) -> str:
    who = {"bound": "at most", "inductor": "Inductor", "fusedmlp": "fusedmlp"}[kind]
    return f"{site.module or '(model)'}: {who} {si(speed)}FLOP/s at {intensity:.3g} FLOP/byte"


def _roof_line(roof: Roof, x_axis: Axis, y_axis: Axis) -> str:
    ridge = roof.flops_per_second / roof.bytes_per_second
    # Along the slope it may leave the drawing below.
    left = max(x_axis.low, y_axis.low / roof.bytes_per_second)
    corners = [left, min(max(ridge, left), x_axis.high), x_axis.high]
    return "M" + "L".join(f"{x_axis(x):.1f} {y_axis(roof.at(x)):.1f}" for x in corners)


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis from ``low`` at ``start`` to ``high`` at ``end``."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def around(cls, values: Sequence[float], start: float, end: float) -> Axis:
        """Whole decades around values, two at least."""
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        return cls(10.0**low, 10.0 ** max(high, low + 2), start, end)

    def __call__(self, value: float) -> float:
        share = math.log10(value / self.low) / math.log10(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, unit: str) -> tuple[Tick, ...]:
        """Its decades."""
        exponents = range(round(math.log10(self.low)), round(math.log10(self.high)) + 1)
        return tuple(Tick(self(10.0**e), si(10.0**e) + unit) for e in exponents)


def si(value: float) -> str:
    """A number with a prefix of the SI, ready for its unit."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.4g} "


class MemoryChart(NamedTuple):
    """Two curves of bytes over the run of a graph, and their peaks.

    Attributes:
        before: a path, as SVG writes it.
        after: likewise.
        peak_before: in bytes.
        peak_after: in bytes.
        weights: parameters and buffers, in bytes.
    """

    before: str
    after: str
    peak_before: int
    peak_after: int
    weights: int


def memory_chart(before: Memory, after: Memory) -> MemoryChart:
    """The chart of a graph before and after."""
    top = max(before.peak, after.peak, 1)
    peaks = before.peak, after.peak
    return MemoryChart(_area(before.live, top), _area(after.live, top), *peaks, before.weights)


def _area(live: Sequence[int], top: int) -> str:
    """Steps over the whole width, closed below."""
    height, step = _MEMORY_HEIGHT, WIDTH / max(len(live), 1)
    path = f"M0 {height:.0f}"
    for i, amount in enumerate(live):
        path += f"V{height - (height - 6) * amount / top:.1f}H{(i + 1) * step:.1f}"
    return f"{path}V{height:.0f}Z"


@dataclass(frozen=True)
class TimelineRow:
    """One backend.

    Attributes:
        backend: its name.
        launches: in order.
        lanes: streams, or threads.
        total: from the first launch to the end of the last, in microseconds.
        busy: all launches added up, in microseconds.
    """

    backend: str
    launches: tuple[Launch, ...]
    lanes: int
    total: float
    busy: float


@dataclass(frozen=True)
class Timelines:
    """All backends to one scale.

    Attributes:
        rows: one a backend.
        total: what the width stands for, in microseconds.
        ticks: ``at`` in percent of the width, in ``unit``.
        unit: ``"ms"`` or ``"µs"``.
        has_sites: whether launches are known to be those of sites.
    """

    rows: tuple[TimelineRow, ...]
    total: float
    ticks: tuple[Tick, ...]
    unit: str
    has_sites: bool


def timelines(launches: Mapping[str, Sequence[Launch]]) -> Timelines | None:
    """The launches of one call under each backend; ``None`` where there are none."""
    rows = [_row(backend, tuple(found)) for backend, found in launches.items() if found]
    if not rows:
        return None
    total = max(row.total for row in rows)
    step = _step(total)
    size, unit = (1e3, "ms") if step >= 1e3 else (1.0, "µs")
    ticks = tuple(
        Tick(100 * i * step / total, f"{i * step / size:.4g}") for i in range(int(total / step) + 1)
    )
    has_sites = any(launch.site is not None for row in rows for launch in row.launches)
    return Timelines(tuple(rows), total, ticks, unit, has_sites)


def _row(backend: str, launches: tuple[Launch, ...]) -> TimelineRow:
    end = max(launch.start + launch.duration for launch in launches)
    lanes = max(launch.lane for launch in launches) + 1
    return TimelineRow(backend, launches, lanes, end, sum(each.duration for each in launches))


def _step(total: float) -> float:
    """A round number, of which five to ten make the total."""
    power = 10.0 ** math.floor(math.log10(max(total, 1e-3)))
    return next(power * n for n in (0.1, 0.2, 0.5, 1.0) if total / (power * n) <= 10)
