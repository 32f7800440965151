"""Counting and timing calls that take turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from fusion_backend.instruments.compiled_calls import Call
from fusion_backend.instruments.profiler_trace import Step, mark_step, record
from fusion_backend.instruments.timing import turns
from fusion_backend.instruments.workload import Workload

# CUDA graphs run a function, record it and replay it: only the third call is like all later ones.
WARM_UP = 3


@dataclass(frozen=True)
class Measurement:
    """The steps of one backend, and the median wall time of its calls in microseconds."""

    steps: list[Step]
    wall_us: float


def measure(workload: Workload, calls: Mapping[str, Call], steps: int) -> dict[str, Measurement]:
    """Count ``steps`` calls of each backend and time as many others without the profiler.

    Backends take turns call by call, in a different order each time: a GPU that clocks down, or a
    cache that one call leaves behind for the next, favours none.
    """
    for name in turns(list(calls), WARM_UP):
        workload.time(calls[name])

    times: dict[str, list[float]] = {name: [] for name in calls}
    for name in turns(list(calls), steps):
        times[name].append(workload.time(calls[name]))

    def body() -> None:
        for name in calls:  # the first calls in a session pay for setting it up
            workload.time(calls[name])
        for name in turns(list(calls), steps):
            inputs = workload.prepare()
            with mark_step(name):
                workload.run(calls[name], inputs)
                workload.synchronize()

    recorded = record(body)
    return {
        name: Measurement([step for step in recorded if step.label == name], median(times[name]))
        for name in calls
    }
