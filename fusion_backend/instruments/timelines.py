"""When each kernel of one call ran."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fusion_backend.instruments.cpu_operators import operators_in
from fusion_backend.instruments.profiler_trace import Event, Step

#: How a trace names what the autograd engine runs of a backward pass.
BACKWARD = "autograd::engine::evaluate_function: "


class Launch(NamedTuple):
    """A kernel on a timeline; on a CPU, an operator.

    Attributes:
        name: of the kernel.
        start: microseconds since the first one of the call began.
        duration: in microseconds.
        lane: which of the streams, or threads, it ran on, by their order.
        site: number of the site that launched it, in ``Comparison.mlps``; ``None`` where it is
            none's, or not known.
        backward: whether a backward pass launched it.
    """

    name: str
    start: float
    duration: float
    lane: int = 0
    site: int | None = None
    backward: bool = False


class Issued(NamedTuple):
    """A launch as a trace has it.

    Attributes:
        name: of the kernel, or of the operator.
        start: in microseconds of the trace.
        duration: in microseconds.
        lane: stream or thread.
        at: when the CPU launched it.
        event: of the GPU; ``None`` on a CPU.
    """

    name: str
    start: float
    duration: float
    lane: Any
    at: float
    event: Event | None = None


#: Of a step and its launches in order, whose each is: the number of a site, or ``None``.
Owners = Callable[[Step, Sequence[Issued]], Sequence[int | None]]


def timeline(steps: Sequence[Step], owners: Owners | None = None) -> tuple[Launch, ...]:
    """The launches of the step that took the median time, in the order in which they began.

    Args:
        steps: of one backend.
        owners: says whose launches are; none are anybody's without it.
    """
    timed = [(step, found) for step in steps if (found := issued_in(step))]
    if not timed:
        return ()
    step, found = sorted(timed, key=lambda each: _length(each[1]))[len(timed) // 2]
    sites = owners(step, found) if owners is not None else [None] * len(found)
    lanes = {lane: i for i, lane in enumerate(dict.fromkeys(each.lane for each in found))}
    passes = backward_passes(step)
    first = found[0].start
    return tuple(
        Launch(
            each.name,
            each.start - first,
            each.duration,
            lanes[each.lane],
            site,
            any(event.start <= each.at <= event.end for event in passes),
        )
        for each, site in zip(found, sites, strict=True)
    )


def issued_in(step: Step) -> list[Issued]:
    """The launches of a step, in the order in which they began."""
    if not step.gpu:
        calls = operators_in(step.cpu)
        found = [Issued(c.name, c.start, c.end - c.start, None, c.start) for c in calls]
    else:
        at = {event.correlation: event.start for event in step.launches}
        found = [
            Issued(e.name, e.start, e.duration, e.thread, at.get(e.correlation, e.start), e)
            for e in step.gpu
        ]
    return sorted(found, key=lambda each: each.start)


def backward_passes(step: Step) -> list[Event]:
    """What the autograd engine ran in a step, one event a node of its graph."""
    return [event for event in step.cpu if event.name.startswith(BACKWARD)]


def _length(launches: Sequence[Issued]) -> float:
    return max(each.start + each.duration for each in launches) - launches[0].start


def time_by_site(launches: Iterable[Launch]) -> Mapping[int, float]:
    """Microseconds of the launches of each site, backward passes aside."""
    times: dict[int, float] = {}
    for launch in launches:
        if launch.site is not None and not launch.backward:
            times[launch.site] = times.get(launch.site, 0.0) + launch.duration
    return times
