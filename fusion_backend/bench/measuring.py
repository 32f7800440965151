"""One cell under every peer: errors first, then times in turns, then what is launched.

On a GPU times are those of CUDA-graph replays: the GPU's work, nothing of the host. Weights rotate
through so many sets that they come from device memory; the input is the same each time, and so is
in the cache if it fits there, as it is in a model after the layer before. On a CPU times are those
of ordinary calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from fusion_backend.bench.cells import Cell, as_written, operands
from fusion_backend.bench.peer import Peer, Runner
from fusion_backend.bench.precision import products_in
from fusion_backend.bench.roofline import Ceilings, Work
from fusion_backend.errors import CommandError
from fusion_backend.instruments.accuracy import relative_error
from fusion_backend.instruments.compiled_calls import failure
from fusion_backend.instruments.kernel_counts import GPU_KERNELS, Counts, count
from fusion_backend.instruments.profiler_trace import mark_step, record
from fusion_backend.instruments.timing import (
    Operands,
    Timer,
    Times,
    distinct_sets,
    interleaved,
    replays,
    rotated,
    wall,
)
from fusion_backend.mlp.weights import Weights
from fusion_backend.planning.undisturbed import watched

#: So many rows are compared with float64, evenly spread over all.
COMPARED_ROWS = 512
#: On a CPU one sample is so many microseconds of calls, or one call.
SAMPLE_US = 20e3

Row = dict[str, Any]


def measure(
    cell: Cell, peers: Sequence[Peer], device: torch.device, ceilings: Ceilings, rounds: int = 10
) -> dict[str, Any]:
    """What :mod:`results` keeps of a cell: its floor, and one row a peer.

    A row has ``us`` (median), ``spread`` (interquartile range over the median), ``error``
    (relative, against float64), ``kernels``, ``memsets``, ``tflops``, ``gbps``, ``floor_share``;
    or ``absent``, the reason why the peer does not run the cell; or ``failure``. ``idle`` of the
    cell is ``False`` where others computed on the CPU during the timing.

    Raises:
        CommandError: a peer has left the GPU unusable for this process.
    """
    work = Work.of(cell)
    floor = ceilings.floor_us(work, cell.precision)
    torch.manual_seed(0)
    torch.compiler.reset()
    with torch.no_grad(), products_in(cell.precision):
        x, sets = operands(cell, distinct_sets(work.bytes, device), device)
        rows, runners = _started(cell, peers, device, x, sets[0])
        timed = watched(lambda: _timed(cell, runners, rows, x, sets, device, rounds))
        counts = _counted(runners, x, sets[0]) if device.type == "cuda" else {}
    for name, each in timed.result.items():
        rows[name] |= _figures(each, work, floor, counts.get(name))
    return {
        "flops": work.flops,
        "bytes": work.bytes,
        "floor_us": floor,
        "bound": ceilings.bound(work, cell.precision),
        "plan": _plan(runners),
        "idle": timed.undisturbed if device.type == "cpu" else None,
        "peers": {peer.name: rows[peer.name] for peer in peers},
    }


def _started(
    cell: Cell, peers: Sequence[Peer], device: torch.device, x: Tensor, weights: Weights
) -> tuple[dict[str, Row], dict[str, Runner]]:
    """Compile every peer by a first call, and compare its result with float64."""
    rows: dict[str, Row] = {}
    runners: dict[str, Runner] = {}
    sample = torch.linspace(0, cell.rows - 1, min(cell.rows, COMPARED_ROWS)).long().to(device)
    exact = as_written(cell)(x[sample].double(), *(w if w is None else w.double() for w in weights))
    for peer in peers:
        if (reason := peer.absence(cell, device)) is not None:
            rows[peer.name] = {"absent": reason}
            continue
        try:
            runner = peer.build(cell)
            result = runner.function(*runner.operands(x, weights))
            error = relative_error([result[sample]], [exact]) if peer.whole else None
        except Exception as raised:
            rows[peer.name] = _failed(peer.name, raised, device)
            continue
        if error is not None and not math.isfinite(error):
            rows[peer.name] = {"failure": "its result is not finite"}
            continue
        rows[peer.name], runners[peer.name] = {"error": error}, runner
    return rows, runners


def _failed(name: str, error: Exception, device: torch.device) -> Row:
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as fatal:
        raise CommandError(
            f"{name} left the GPU unusable ({failure(error)[:200]}): leave it out with --peers, "
            "and repeat the command for the other cells"
        ) from fatal
    return {"failure": " ".join(failure(error).split())[:300]}


def _timed(
    cell: Cell,
    runners: dict[str, Runner],
    rows: dict[str, Row],
    x: Tensor,
    sets: Sequence[Weights],
    device: torch.device,
    rounds: int,
) -> dict[str, Times]:
    """Times of every runner; one that cannot be timed fails, and leaves the others."""
    timers: dict[str, Timer] = {}
    for name in list(runners):
        runner = runners[name]
        try:
            distinct = [runner.operands(x, weights) for weights in sets]
            timers[name] = _timer(runner.function, distinct, device)
        except Exception as raised:
            rows[name] = _failed(name, raised, device)
            del runners[name]
    return interleaved(timers, rounds) if timers else {}


def _timer(
    function: Callable[..., Any], distinct: Sequence[Operands], device: torch.device
) -> Timer:
    if device.type == "cuda":
        return replays(function, rotated(distinct))
    start = perf_counter_ns()
    function(*distinct[0])
    once = (perf_counter_ns() - start) / 1e3
    calls = rotated(distinct, at_least=min(int(SAMPLE_US / once) + 1, 64))
    return wall(function, calls if once < SAMPLE_US else distinct[:1], device)


def _counted(runners: Mapping[str, Runner], x: Tensor, weights: Weights) -> dict[str, Counts]:
    """Kernels and fills of one call of each runner, made without CUDA graphs."""
    calls = {name: (each.function, each.operands(x, weights)) for name, each in runners.items()}

    def body() -> None:
        for name, (function, arguments) in calls.items():
            torch.cuda.synchronize()
            with mark_step(name):
                function(*arguments)
                torch.cuda.synchronize()

    steps = record(body)
    return {
        name: count(name, [step for step in steps if step.label == name], GPU_KERNELS)
        for name in calls
    }


def _figures(times: Times, work: Work, floor: float, counts: Counts | None) -> Row:
    us = times.median
    return {
        "us": us,
        "best_us": min(times.samples),
        "spread": times.spread,
        "tflops": work.flops / us / 1e6,
        "gbps": work.bytes / us / 1e3,
        "floor_share": floor / us,
        "kernels": counts.kernels if counts else None,
        "memsets": counts.memsets if counts else None,
    }


def _plan(runners: Mapping[str, Runner]) -> str | None:
    """What fusedmlp did with the cell: its plan, or ``not: reason``."""
    sites = runners["fusedmlp"].sites if "fusedmlp" in runners else []
    if not sites:
        return None
    return sites[0].plan or f"not: {sites[0].reason}"
