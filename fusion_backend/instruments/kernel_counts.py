"""From the events of steps to exact counts: what one call launches, the same in every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from fusion_backend.errors import ProfileError
from fusion_backend.instruments.cpu_operators import operators_in
from fusion_backend.instruments.profiler_trace import KERNEL, MEMCPY, MEMSET, Event, Step

GPU_KERNELS = "GPU kernels"
CPU_OPERATORS = "CPU operators"


@dataclass(frozen=True)
class Counts:
    """What one call of a model launches.

    Attributes:
        names: how often each kernel (on a CPU: operator) runs in one call.
        memcpys: copies by the driver, ``None`` on a CPU.
        memsets: fills by the driver, ``None`` on a CPU. cuBLAS adds some on Hopper.
        times: how long each takes in one call, in microseconds, all its launches added up.
        gpu_us: how long a GPU was at work on these, in microseconds, see :func:`busy`; ``None`` on
            a CPU.
    """

    names: Mapping[str, int]
    memcpys: int | None = None
    memsets: int | None = None
    gpu_us: float | None = None
    times: Mapping[str, float] = field(default_factory=dict)

    @property
    def kernels(self) -> int:
        """Number of kernels (on a CPU: operators)."""
        return sum(self.names.values())

    @property
    def totals(self) -> tuple[int, int | None, int | None]:
        """The numbers that must be the same in every step."""
        return self.kernels, self.memcpys, self.memsets


def count_gpu(step: Step) -> Counts:
    """Count the GPU events of one step by their category."""
    categories = Counter(event.category for event in step.gpu)
    return Counts(
        names=Counter(event.name for event in step.gpu if event.category == KERNEL),
        memcpys=categories[MEMCPY],
        memsets=categories[MEMSET],
        gpu_us=busy(step.gpu),
        times=added_up((e.name, e.duration) for e in step.gpu if e.category == KERNEL),
    )


def added_up(timed: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Times by name."""
    total: dict[str, float] = {}
    for name, time in timed:
        total[name] = total.get(name, 0.0) + time
    return total


def median_times(counts: Sequence[Counts]) -> dict[str, float]:
    """The median over steps of what each kernel takes; kernels may differ in name."""
    names = dict.fromkeys(name for each in counts for name in each.times)
    return {name: median(each.times.get(name, 0.0) for each in counts) for name in names}


def busy(events: Iterable[Event]) -> float:
    """Microseconds in which a GPU was at work on these events, added up over the GPUs.

    Where several are under way on one GPU the time counts once: a kernel may begin before the one
    before it ends (programmatic dependent launch), to wait on the chip for its results.
    """
    total = 0.0
    until: dict[Any, float] = {}
    for event in sorted(events, key=lambda event: event.start):
        covered = until.get(event.gpu, event.start)
        total += max(0.0, event.end - max(event.start, covered))
        until[event.gpu] = max(event.end, covered)
    return total


def count_cpu(step: Step) -> Counts:
    """Count the CPU operators of one step, as defined in ``cpu_operators``."""
    timed = [(call.name, call.duration) for call in operators_in(step.cpu)]
    return Counts(names=Counter(name for name, _ in timed), times=added_up(timed))


def count(backend: str, steps: Sequence[Step], unit: str) -> Counts:
    """The counts of one call of ``backend``: those of every step, ``gpu_us`` their median.

    Raises:
        ProfileError: nothing was recorded on the GPU, or the steps differ in their counts.
    """
    counts = [count_gpu(step) if unit == GPU_KERNELS else count_cpu(step) for step in steps]
    if unit == GPU_KERNELS and not any(step.gpu for step in steps):
        raise ProfileError(
            f"no GPU event was recorded for {backend!r} on a model whose tensors are on a GPU: let "
            "no other tool (Nsight, CUPTI) trace this process, and record the GPU from the first "
            "torch.profiler session of the process on"
        )
    if len({each.totals for each in counts}) > 1:
        listed = ", ".join(map(describe, counts))
        raise ProfileError(
            f"every call of {backend!r} must run the same {unit}, got step by step: {listed}; "
            "a model whose work depends on its state or on random numbers cannot be counted"
        )
    times = median_times(counts)
    if unit == CPU_OPERATORS:
        return replace(counts[0], times=times)
    gpu_us = median(each.gpu_us or 0.0 for each in counts)
    return replace(counts[0], gpu_us=gpu_us, times=times)


def describe(counts: Counts) -> str:
    """``3`` or, with copies and fills, ``3+1+2``."""
    return "+".join(str(number) for number in counts.totals if number is not None)
