"""A session of torch.profiler, cut into the steps that ran in it.

The events are read from the Chrome trace that the profiler exports. It is the only public form in
which every supported torch names the *category* of an event (``kernel``, ``gpu_memcpy``, ...);
names of runtime calls such as ``cudaLaunchKernel`` say nothing certain about the work on the GPU.
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import profile, record_function

from fusion_backend.compat.dispatcher import profiler_is_active
from fusion_backend.errors import ProfileError

KERNEL, MEMCPY, MEMSET = "kernel", "gpu_memcpy", "gpu_memset"
ON_GPU = frozenset({KERNEL, MEMCPY, MEMSET})
CPU_OPERATOR = "cpu_op"
LAUNCH = frozenset({"cuda_runtime", "cuda_driver"})
ANNOTATION = "user_annotation"
STEP = "fusedmlp step: "


class Event(NamedTuple):
    """One event of a trace; ``start`` and ``duration`` in microseconds.

    ``sequence`` is autograd's number of what an operator records, which the node that runs in the
    backward pass has, too; -1 where there is none.
    """

    category: str
    name: str
    start: float
    duration: float
    thread: tuple[Any, Any] = (None, None)
    correlation: int = 0
    sequence: int = -1

    @property
    def end(self) -> float:
        """When it ended, in microseconds."""
        return self.start + self.duration

    @property
    def gpu(self) -> Any:
        """Which one it ran on: in a trace each is a process, and its streams are threads."""
        return self.thread[0]


@dataclass(frozen=True)
class Step:
    """What happened in one call: ``label`` names who was called."""

    label: str
    gpu: list[Event] = field(default_factory=list)
    cpu: list[Event] = field(default_factory=list)
    launches: list[Event] = field(default_factory=list)
    annotations: list[Event] = field(default_factory=list)

    @property
    def replays_graph(self) -> bool:
        """Whether a CUDA graph was launched."""
        return any("GraphLaunch" in launch.name for launch in self.launches)


def mark_step(label: str) -> AbstractContextManager[Any]:
    """Inside of :func:`record`: what runs in this context is one step of ``label``.

    GPU work must be waited for before the context is entered and before it is left.
    """
    return record_function(STEP + label)


def record(body: Callable[[], None]) -> list[Step]:
    """Run ``body`` under the profiler and return the steps it marked, in order.

    CPU and GPU activities are recorded even where only the CPU is of interest: after a first
    session of the process without the GPU, later ones can miss every GPU event.

    Raises:
        ProfileError: another session of torch.profiler is active.
    """
    if profiler_is_active():
        raise ProfileError(
            "profile() must be called outside of torch.profiler sessions, got an active one"
        )
    device = "cuda" if torch.cuda.is_available() else None
    with profile(use_device=device, use_kineto=True) as session:
        body()
    with tempfile.TemporaryDirectory(prefix="fusedmlp-") as folder:
        path = Path(folder, "trace.json")
        session.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(errors="replace"), strict=False)
    return split_steps(read_events(trace["traceEvents"]))


def read_events(entries: Iterable[Mapping[str, Any]]) -> list[Event]:
    """The complete events (phase ``X``) of a Chrome trace."""
    return [
        Event(
            category=entry["cat"],
            name=entry["name"],
            start=float(entry["ts"]),
            duration=float(entry["dur"]),
            thread=(entry.get("pid"), entry.get("tid")),
            correlation=entry.get("args", {}).get("correlation", 0),
            sequence=entry.get("args", {}).get("Sequence number", -1),
        )
        for entry in entries
        if entry.get("ph") == "X" and "cat" in entry
    ]


def split_steps(events: Iterable[Event]) -> list[Step]:
    """Assign events to the step in which they were issued; events outside of steps are dropped.

    A GPU event belongs to the step in which the CPU launched it (found by its correlation id), as
    it may run later. Where the launch was not recorded, its own start decides.
    """
    events = list(events)
    marks = sorted(
        (event for event in events if event.category == ANNOTATION and event.name.startswith(STEP)),
        key=lambda event: event.start,
    )
    starts = [mark.start for mark in marks]
    steps = [Step(mark.name.removeprefix(STEP)) for mark in marks]
    launched = {event.correlation: event.start for event in events if event.category in LAUNCH}

    for event in sorted(events, key=lambda event: event.start):
        issued = event.start
        if event.category in ON_GPU and event.correlation:
            issued = launched.get(event.correlation, event.start)
        index = bisect_right(starts, issued) - 1
        if index < 0 or issued > marks[index].end:
            continue
        if event.category in ON_GPU:
            steps[index].gpu.append(event)
        elif event.category == CPU_OPERATOR:
            steps[index].cpu.append(event)
        elif event.category in LAUNCH:
            steps[index].launches.append(event)
        elif event.category == ANNOTATION and event is not marks[index]:
            steps[index].annotations.append(event)
    return steps
