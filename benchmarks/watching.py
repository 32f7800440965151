"""What `fusion_backend.watch` costs a loop: python benchmarks/watching.py on an idle machine.

It runs on a GPU in bfloat16 if there is one; a call is then what the host takes to launch it.

Loops with and without `watch.step()` take turns. The step alone is timed, too, and steps that are
profiled.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter

import torch
from torch import nn

import fusion_backend

TURNS, CALLS, STEPS = 30, 200, 300_000
NEVER = 10**9


def times(call: Callable[[], object], step: Callable[[], None], count: int) -> list[float]:
    """Microseconds of each round of a loop."""
    found = []
    for _ in range(count):
        start = perf_counter()
        call()
        step()
        found.append((perf_counter() - start) * 1e6)
    return found


def profiled_steps(call: Callable[[], object]) -> list[float]:
    """By how many microseconds each profiled step takes longer; its begin and end are included."""
    with fusion_backend.watch(first=10, every=100) as watch:
        ended: list[int] = []

        def step() -> None:
            before = watch.profiled
            watch.step()
            if watch.profiled > before:
                ended.append(watch.steps - 1)

        found = times(call, step, 1000)
    usual = statistics.median(found)
    return [found[i - 1] + found[i] - 2 * usual for i in ended]


@torch.no_grad()
def main() -> None:
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)]
    options = {"fusedmlp.policy": "always"}
    model = nn.Sequential(*blocks).to(device, dtype)
    compiled = torch.compile(model, backend="fusedmlp", options=options)
    x = torch.randn(256, 64, device=device, dtype=dtype)

    def call() -> object:
        return compiled(x)

    def nothing() -> None:
        pass

    times(call, nothing, 50)
    without, watched = [], []
    with fusion_backend.watch(first=NEVER) as watch:
        for _ in range(TURNS):
            without += times(call, nothing, CALLS)
            watched += times(call, watch.step, CALLS)
        start = perf_counter()
        for _ in range(STEPS):
            watch.step()
        alone = (perf_counter() - start) / STEPS * 1e9
    longer = statistics.median(profiled_steps(call))
    where = torch.cuda.get_device_name() if on_gpu else "CPU"
    medians = [statistics.median(each) for each in (without, watched)]
    print(f"{where}: a call, median: {medians[0]:.0f} µs, watched {medians[1]:.0f} µs")
    print(f"watch.step() between steps that are profiled: {alone:.0f} ns")
    print(f"a step that is profiled takes longer by {longer / 1e3:.1f} ms")


if __name__ == "__main__":
    main()
