"""How long calls take: in turns, on operands that come from device memory and not from a cache.

A *timer* is a function that makes some calls and returns the mean time of one in microseconds.
:func:`replays` makes one of CUDA-graph replays (GPU time, nothing of the host), :func:`wall` one of
ordinary calls (host and device). :func:`interleaved` lets timers take turns.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch

Timer = Callable[[], float]
Operands = tuple[Any, ...]

# Enough for every cache to have forgotten an operand before its turn comes again.
_CACHES = 4
_MOST_SETS = 64
# The first rounds find a cold instruction cache and a clock that is still rising.
_WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class Times:
    """What one timer measured, microseconds a call, in the order of measuring."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The figure to report."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Interquartile range over the median; 0 for a single sample."""
        if len(self.samples) < 2:
            return 0.0
        lower, _, upper = statistics.quantiles(self.samples, n=4, method="inclusive")
        return (upper - lower) / self.median


def interleaved(timers: Mapping[str, Timer], rounds: int = 10) -> dict[str, Times]:
    """Let timers take turns, ``rounds`` times each after two rounds that do not count.

    A GPU that clocks down, or a cache that one leaves behind for the next, favours none.
    """
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for name in turns(list(timers), rounds + _WARM_UP_ROUNDS):
        samples[name].append(timers[name]())
    return {name: Times(tuple(values[_WARM_UP_ROUNDS:])) for name, values in samples.items()}


def turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Every name once a round, each round in another order, drawn at random but the same each time.

    Whoever came before matters on a GPU at its power limit: after one that needs little power, the
    same kernel took up to 5 % less.
    """
    drawn = random.Random(0)
    for _ in range(rounds):
        yield from drawn.sample(names, len(names))


def distinct_sets(bytes_each: int, device: torch.device) -> int:
    """How many sets of operands must rotate so that each comes from device memory; at least 2.

    Args:
        bytes_each: size of one set.
        device: where the sets are; on a CPU, 2.
    """
    if device.type != "cuda":
        return 2
    cache: int = torch.cuda.get_device_properties(device).L2_cache_size
    return min(_CACHES * cache // max(bytes_each, 1) + 2, _MOST_SETS)


def rotated(sets: Sequence[Operands], at_least: int = 8) -> list[Operands]:
    """Sets of operands in the order of calls: each once, and again until ``at_least`` calls."""
    return [sets[i % len(sets)] for i in range(max(len(sets), at_least))]


def replays(function: Callable[..., Any], calls: Sequence[Operands]) -> Timer:
    """A timer of the GPU's work alone: one replay of a CUDA graph that makes all the calls.

    The function is called a few times beforehand, so that compilers and libraries have set up what
    they need; it must not wait for the GPU. Its results are kept by the graph until the timer goes.

    Args:
        function: what to time, under the caller's grad mode.
        calls: the arguments of each call, tensors of the current GPU; see :func:`rotated`.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for operands in calls[:3]:
            function(*operands)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for operands in calls:
            function(*operands)

    def timer() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # keeps the GPU busy until what is timed has been issued
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / len(calls)

    return timer


def wall(function: Callable[..., Any], calls: Sequence[Operands], device: torch.device) -> Timer:
    """A timer of host and device: all the calls, one after the other, until the device is done."""

    def timer() -> float:
        _wait(device)
        start = perf_counter_ns()
        for operands in calls:
            function(*operands)
        _wait(device)
        return (perf_counter_ns() - start) / 1e3 / len(calls)

    return timer


def issue(function: Callable[..., Any], calls: Sequence[Operands], device: torch.device) -> Timer:
    """A timer of the host alone: until all calls have been issued, the device not waited for.

    It says something only where the device keeps up, as it does with small operands.
    """

    def timer() -> float:
        _wait(device)
        start = perf_counter_ns()
        for operands in calls:
            function(*operands)
        return (perf_counter_ns() - start) / 1e3 / len(calls)

    return timer


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
