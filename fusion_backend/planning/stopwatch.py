"""How long work takes on a GPU, within a given time, beside nothing that a program could notice.

Calls are issued behind a pause of the GPU, so that the host is ahead of it, and CUDA events stand
around them: what is measured is the GPU's work and nothing of the host. Everything runs on the
current stream. No graph is recorded and no random number is drawn.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch

from fusion_backend.compat import cuda

# Of a sample, in microseconds: events are no finer than half of one.
_SAMPLE_US = 100.0
_MOST_CALLS = 12
_ROUNDS = 9
# A call of the host takes up to 0.2 ms, a pause of one millisecond about as many cycles.
_CYCLES_A_CALL, _FIRST_CYCLES, _MOST_CYCLES = 400_000, 400_000, 40_000_000


class Candidate(NamedTuple):
    """A function, and the arguments to call it with in turn."""

    function: Callable[..., Any]
    operands: Sequence[tuple[Any, ...]]


class Stopwatch(Protocol):
    """Anything that measures calls."""

    def __call__(self, candidate: Candidate, calls: int) -> float:
        """Mean microseconds of one of so many calls."""
        ...


class GpuStopwatch:
    """Measures on the current stream of the current GPU.

    Args:
        pauses: makes the GPU wait for a number of cycles.
    """

    def __init__(self, pauses: Callable[[int], None] = cuda.pause) -> None:
        self._pauses = pauses
        self._cycles = _CYCLES_A_CALL

    def __call__(self, candidate: Candidate, calls: int) -> float:
        """As :class:`Stopwatch`; longer pauses are tried until the host is ahead."""
        while True:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._pauses(_FIRST_CYCLES + calls * self._cycles)
            start.record()
            for i in range(calls):
                candidate.function(*candidate.operands[i % len(candidate.operands)])
            end.record()
            ahead = not start.query()
            end.synchronize()
            if ahead or calls * self._cycles >= _MOST_CYCLES:
                return float(start.elapsed_time(end)) * 1e3 / calls
            self._cycles *= 4


def compared(
    candidates: Mapping[str, Candidate],
    stopwatch: Stopwatch,
    seconds: float,
    clock: Callable[[], float] = perf_counter,
) -> dict[str, float]:
    """Median microseconds of a call of each candidate, which take turns.

    Args:
        candidates: each has been called before, so that nothing is left to compile.
        stopwatch: measures them.
        seconds: how long it may take. One round is made in any case.
        clock: tells the time in seconds.
    """
    began = clock()
    samples = {name: [stopwatch(candidate, 1)] for name, candidate in candidates.items()}
    round_took = clock() - began
    calls = {
        name: max(1, min(_MOST_CALLS, round(_SAMPLE_US / max(first[0], 1.0))))
        for name, first in samples.items()
    }
    longer = max(calls.values())
    counted: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(_ROUNDS):
        expected = round_took * (longer if turn == 0 else 1)
        if clock() - began + expected > seconds:
            break
        round_began = clock()
        names = list(candidates)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            counted[name].append(stopwatch(candidates[name], calls[name]))
        round_took = clock() - round_began
    return {name: statistics.median(counted[name] or samples[name]) for name in candidates}
