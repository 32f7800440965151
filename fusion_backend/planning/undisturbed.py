"""Times on a machine that other programs use, too: which of them can be believed.

A thread that is ready to run and has to wait for a core makes a run longer. Linux counts for how
long each did, and a run in which they did not wait is believed. Where nobody counts, and beside
that, a time is believed when it was found twice.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

Result = TypeVar("Result")


class Turns(NamedTuple):
    """How often each way runs at least, and at most where times cannot be believed."""

    fewest: int
    most: int


#: Where somebody waits for a graph to be compiled, and where time was given to measuring.
BRIEFLY, PATIENTLY = Turns(5, 15), Turns(20, 100)
# Of a run's time, for how long threads may have waited for a core.
_WAITED = 0.02
# Two times that are as near as this are the same time, found twice.
_SAME = 1.1


def least_seconds(
    ways: Mapping[str, Callable[[], object]], deadline: float, turns: Turns
) -> dict[str, float] | None:
    """The least seconds of each way, which run in turns; ``None`` where they cannot be believed.

    Args:
        ways: what is timed, by name.
        deadline: of :func:`time.perf_counter`, from which on only the fewest turns are made.
        turns: how many are made.
    """
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns.most):
        if turn >= turns.fewest and time.perf_counter() > deadline:
            break
        for name, run in ways.items():
            timed = watched(run)
            if timed.undisturbed is not False:
                samples[name].append(timed.seconds)
        if turn + 1 >= turns.fewest and all(map(_found_twice, samples.values())):
            break
    if not all(map(_found_twice, samples.values())):
        return None
    return {name: min(times) for name, times in samples.items()}


@dataclass(frozen=True)
class Watched(Generic[Result]):
    """A run.

    Attributes:
        result: what it gave.
        seconds: how long it took.
        undisturbed: whether threads of this process had cores when they were ready; ``None`` if
            nobody says.
    """

    result: Result
    seconds: float
    undisturbed: bool | None


def watched(run: Callable[[], Result]) -> Watched[Result]:
    """Run something, and see whether other programs took the cores that it wanted."""
    before, start = waited_seconds(), time.perf_counter()
    result = run()
    seconds, after = time.perf_counter() - start, waited_seconds()
    if before is None or after is None:
        return Watched(result, seconds, None)
    return Watched(result, seconds, after - before <= _WAITED * seconds)


def _found_twice(samples: list[float]) -> bool:
    least = sorted(samples)[:2]
    return len(least) == 2 and least[1] <= _SAME * least[0]


def waited_seconds() -> float | None:
    """For how long threads of this process were ready and had no core; ``None`` if nobody says."""
    waited = None
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError, ValueError, IndexError):  # a thread that has ended
                text = Path(f"/proc/self/task/{name}/schedstat").read_text()
                waited = (waited or 0.0) + int(text.split()[1]) * 1e-9
    return waited
