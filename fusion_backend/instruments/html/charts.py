"""Roofline, timelines and memory as coordinates, for templates to write as SVG."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from fusion_backend.fusion.sites import Site
from fusion_backend.instruments.html.memory import Memory
from fusion_backend.instruments.html.roofline import Part, Roof, Work, predicted_times, work_of
from fusion_backend.instruments.timelines import Launch, time_by_site
from fusion_backend.planning.gpus import Gpu

# Of the roofline and of memory, in the units of their drawings.
WIDTH, HEIGHT = 640.0, 300.0
_LEFT, _BOTTOM = 84.0, 34.0
_MEMORY_HEIGHT = 80.0
# What a library launches beside a product: sums of its parts, and fills.
_ADDS_UP = re.compile(r"split_?k|reduce|memset", re.IGNORECASE)


class Tick(NamedTuple):
    """A mark of an axis: where, and what it says."""

    at: float
    text: str


class Point(NamedTuple):
    """A kernel in the roofline; of Inductor, all kernels of a site.

    Attributes:
        x: in the drawing.
        y: in the drawing.
        kind: ``fusedmlp`` or ``inductor`` where it was measured, ``predicted``, or ``bound``.
        site: the number of the first of those that are alike.
        text: what it says, for a tooltip and for a table.
    """

    x: float
    y: float
    kind: str
    site: int
    text: str


class KernelRow(NamedTuple):
    """What the table below the roofline says of a kernel.

    Attributes:
        site: the number of the first of those that are alike.
        module: its path.
        kernel: its name, or which layers it computes.
        kind: as :attr:`Point.kind`.
        flops: of its products.
        bytes: that it moves.
        time_us: how long it takes, in microseconds; ``None`` where nothing says.
        bound: ``memory`` or ``arithmetic``; empty without a roof.
    """

    site: int
    module: str
    kernel: str
    kind: str
    flops: int
    bytes: int
    time_us: float | None
    bound: str

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes

    @property
    def speed(self) -> float | None:
        """FLOPs a second."""
        return 1e6 * self.flops / self.time_us if self.time_us else None

    @property
    def text(self) -> str:
        """The row as a sentence."""
        who = {"inductor": "Inductor", "bound": "at most"}.get(self.kind, self.kind)
        speed = "" if self.speed is None else f"{si(self.speed)}FLOP/s at "
        kernel = f", {self.kernel}" if self.kernel else ""
        return f"{self.module}{kernel}: {who} {speed}{self.intensity:.3g} FLOP/byte"


@dataclass(frozen=True)
class Roofline:
    """The chart.

    Attributes:
        points: kernels, at the speed that was measured or predicted, or at the bound.
        roof: the line of the device, as SVG writes it; empty where it is not known.
        source: where that line comes from.
        x_ticks: decades of FLOPs a byte.
        y_ticks: decades of FLOPs a second.
        rows: the kernels of each kind of site, for a table, and Inductor's all together.
    """

    points: tuple[Point, ...]
    roof: str
    source: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    rows: tuple[KernelRow, ...]

    @property
    def kinds(self) -> frozenset[str]:
        """What there is in it."""
        return frozenset(point.kind for point in self.points)


def roofline(
    sites: Sequence[Site],
    launches: Mapping[str, Sequence[Launch]],
    roof: Roof | None,
    gpu: Gpu | None = None,
) -> Roofline | None:
    """The chart of the sites whose sizes are known; ``None`` where there is nothing to draw.

    Args:
        sites: of a model.
        launches: of each backend, with their sites.
        roof: of the device; ``None`` where it is not known.
        gpu: to predict for, where nothing was measured.
    """
    rows = tuple(
        row
        for numbers, work in _kinds(sites)
        for row in _kernel_rows(sites[numbers[0]], numbers, work, launches, roof, gpu)
    )
    placed = [(row, speed) for row in rows if (speed := _speed(row, roof)) is not None]
    if not placed:
        return Roofline((), "", "", (), (), rows) if rows else None
    xs, ys = [row.intensity for row, _ in placed], [speed for _, speed in placed]
    if roof is not None:
        ridge = roof.flops_per_second / roof.bytes_per_second
        xs, ys = [*xs, ridge], [*ys, roof.flops_per_second]
    x_axis, y_axis = Axis.around(xs, _LEFT, WIDTH - 8), Axis.around(ys, HEIGHT - _BOTTOM, 8)
    points = tuple(
        Point(x_axis(row.intensity), y_axis(speed), row.kind, row.site, row.text)
        for row, speed in placed
    )
    line = "" if roof is None else _roof_line(roof, x_axis, y_axis)
    source = "" if roof is None else roof.source
    return Roofline(points, line, source, x_axis.ticks(""), y_axis.ticks("FLOP/s"), rows)


def _kinds(sites: Sequence[Site]) -> list[tuple[list[int], Work]]:
    """The numbers of sites of each size and plan, and what each of them does."""
    found: dict[object, tuple[list[int], Work]] = {}
    for number, site in enumerate(sites):
        work = work_of(site)
        if work is not None:
            found.setdefault((work, site.plan, site.dtype), ([], work))[0].append(number)
    return list(found.values())


def _kernel_rows(
    site: Site,
    numbers: Sequence[int],
    work: Work,
    launches: Mapping[str, Sequence[Launch]],
    roof: Roof | None,
    gpu: Gpu | None,
) -> Iterator[KernelRow]:
    """Inductor's row of one kind of site, and those of its kernels; times are medians."""

    def row(kernel: str, kind: str, flops: int, moved: int, time_us: float | None) -> KernelRow:
        bound = _bound(flops / moved, roof)
        module = site.module or "(model)"
        return KernelRow(numbers[0], module, kernel, kind, flops, moved, time_us, bound)

    theirs = time_by_site(launches.get("inductor", ()))
    times = [theirs[number] for number in numbers if theirs.get(number)]
    known = median(times) if times else None
    yield row("", "inductor" if known else "bound", work.flops, work.unfused, known)
    if not site.fused:
        return
    measured = _kernel_times(numbers, work, launches.get("fusedmlp", ()))
    if measured:
        for kernel, part, time in measured:
            yield row(kernel, "fusedmlp", part.flops, part.bytes, time)
        return
    predicted = predicted_times(site, work, gpu, roof) if gpu is not None and roof else None
    for i, part in enumerate(work.parts):
        time_us = predicted[i] if predicted else None
        yield row(part.name, "predicted" if time_us else "bound", part.flops, part.bytes, time_us)


def _kernel_times(
    numbers: Sequence[int], work: Work, launches: Sequence[Launch]
) -> list[tuple[str, Part, float]]:
    """Names and times of each part; one of all where there are not as many kernels as parts."""
    own = [
        [each for each in launches if each.site == number and not each.backward]
        for number in numbers
    ]
    timed = [_with_reductions(each) for each in own if each]
    if not timed:
        return []
    if any(len(each) != len(work.parts) for each in timed):
        whole = Part("", work.flops, work.fused)
        time = median(sum(time for _, time in each) for each in timed)
        return [(timed[0][0][0], whole, time)]
    return [
        (timed[0][i][0], part, median(each[i][1] for each in timed))
        for i, part in enumerate(work.parts)
    ]


def _with_reductions(launches: Sequence[Launch]) -> list[tuple[str, float]]:
    """Names and times of kernels; what a library adds to one up afterwards counts with it."""
    found: list[tuple[str, float]] = []
    for launch in launches:
        if found and _ADDS_UP.search(launch.name):
            name, time = found[-1]
            found[-1] = name, time + launch.duration
        elif not _ADDS_UP.search(launch.name):
            found.append((launch.name, launch.duration))
    return found


def _speed(row: KernelRow, roof: Roof | None) -> float | None:
    """How high a row stands: at its speed, or at the roof if nothing says how fast it is."""
    if row.speed is None and roof is not None:
        return roof.at(row.intensity)
    return row.speed


def _bound(intensity: float, roof: Roof | None) -> str:
    if roof is None:
        return ""
    ridge = roof.flops_per_second / roof.bytes_per_second
    return "memory" if intensity < ridge else "arithmetic"


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
        names: of the sites, by their number.
    """

    rows: tuple[TimelineRow, ...]
    total: float
    ticks: tuple[Tick, ...]
    unit: str
    has_sites: bool
    names: tuple[str, ...] = ()

    def name_of(self, site: int) -> str:
        """What a launch of a site says."""
        name = f" ({self.names[site]})" if site < len(self.names) else ""
        return f"MLP {site + 1}{name}"


def timelines(
    launches: Mapping[str, Sequence[Launch]], names: Sequence[str] = ()
) -> Timelines | None:
    """The launches of one call under each backend; ``None`` where there are none.

    Args:
        launches: of each backend.
        names: of the sites that they may be of, by their number.
    """
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
    return Timelines(tuple(rows), total, ticks, unit, has_sites, tuple(names))


def _row(backend: str, launches: tuple[Launch, ...]) -> TimelineRow:
    end = max(launch.start + launch.duration for launch in launches)
    lanes = max(launch.lane for launch in launches) + 1
    return TimelineRow(backend, launches, lanes, end, sum(each.duration for each in launches))


def _step(total: float) -> float:
    """A round number, of which five to ten make the total."""
    power = 10.0 ** math.floor(math.log10(max(total, 1e-3)))
    return next(power * n for n in (0.1, 0.2, 0.5, 1.0) if total / (power * n) <= 10)
