"""Steps of several backends as one trace that https://ui.perfetto.dev and Chrome open.

Each backend is a process, and its step begins at 0, so that they stand below each other. Its
threads are the MLPs (a range for each, from its first launch to the end of its last), the streams
of GPUs, and threads of the CPU.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fusion_backend.instruments.profiler_trace import Event, Step

#: The thread on which the MLPs are shown, above all others.
_MLPS = 1


class Range(NamedTuple):
    """A site in one step: its name, start and end in µs, and what else is known of it."""

    name: str
    start: float
    end: float
    known: Mapping[str, Any]


class Trace(NamedTuple):
    """A step of a backend, and the sites in it."""

    step: Step
    sites: tuple[Range, ...] = ()


def write(path: str | Path, traces: Mapping[str, Trace]) -> None:
    """Write the trace, compressed where the name ends in ``.gz``.

    Args:
        path: of the file; an existing one is replaced.
        traces: a step of each backend.
    """
    events = [
        event
        for process, (backend, trace) in enumerate(traces.items(), 1)
        for event in _process(process, backend, *trace)
    ]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, ensure_ascii=False)
    data = text.encode()
    Path(path).write_bytes(gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)


def _process(
    process: int, backend: str, step: Step, ranges: Sequence[Range]
) -> Iterator[dict[str, Any]]:
    events = [*step.gpu, *step.launches, *step.cpu]
    first = min((event.start for event in events), default=0.0)
    yield _named("process_name", process, 0, backend)
    if ranges:
        yield _named("thread_name", process, _MLPS, "MLPs")
    for site in ranges:
        times = {"ts": site.start - first, "dur": site.end - site.start}
        yield _complete(process, _MLPS, "mlp", site.name, {**times, "args": dict(site.known)})
    threads: dict[str, int] = {}
    on_gpu = {id(event) for event in step.gpu}
    for event in events:
        thread = threads.setdefault(_thread(event, id(event) in on_gpu), len(threads) + _MLPS + 1)
        times = {"ts": event.start - first, "dur": event.duration}
        yield _complete(process, thread, event.category, event.name, times)
    for name, thread in threads.items():
        yield _named("thread_name", process, thread, name)


def _thread(event: Event, on_gpu: bool) -> str:
    device, number = event.thread
    return f"GPU {device}, stream {number}" if on_gpu else f"CPU thread {number}"


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _complete(
    process: int, thread: int, category: str, name: str, rest: Mapping[str, Any]
) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": process, "tid": thread, **rest}
