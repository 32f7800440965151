"""How long a rank is in collectives during a step, such as all-reduces: from a step's events.

On a GPU these are NCCL's kernels, one of which runs until all ranks have come to it: the time
includes waiting for others. On a CPU they are what gloo's threads do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fusion_backend.instruments.profiler_trace import Event, Step


class Collectives(NamedTuple):
    """What was under way on one rank; all in microseconds.

    Attributes:
        step: from the beginning of the first event to the end of the last.
        all: collectives.
        exposed: of these, while the GPU did nothing else; ``None`` on a CPU, whose other threads
            may wait or work.
    """

    step: float
    all: float
    exposed: float | None


def collectives_in(step: Step) -> Collectives:
    """The collectives of one step."""
    if not step.gpu:
        found = [event for event in step.annotations if event.name.startswith("gloo:")]
        return Collectives(_span([*step.cpu, *found]), covered(found), None)
    found = [event for event in step.gpu if event.name.startswith("nccl")]
    others = [event for event in step.gpu if not event.name.startswith("nccl")]
    return Collectives(_span(step.gpu), covered(found), covered(step.gpu) - covered(others))


def covered(events: Iterable[Event]) -> float:
    """Microseconds during which at least one of the events was under way."""
    total, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start):
        total += max(0.0, event.end - max(event.start, until))
        until = max(until, event.end)
    return total


def _span(events: Iterable[Event]) -> float:
    times = [(event.start, event.end) for event in events]
    return max(end for _, end in times) - min(start for start, _ in times) if times else 0.0
