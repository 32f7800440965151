"""One call of a whole model under several backends: kernels, times and errors.

Compiling and measuring are two steps, so that several processes can compile at the same time and
then measure one after the other, each alone on the machine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, nn

from fusion_backend.backend import backend_with_observer, fusedmlp
from fusion_backend.bench.peers import MAX_AUTOTUNE
from fusion_backend.fusion.sites import Site
from fusion_backend.instruments.accuracy import relative_error
from fusion_backend.instruments.compiled_calls import failure
from fusion_backend.instruments.isolation import private_frame
from fusion_backend.instruments.kernel_counts import CPU_OPERATORS, GPU_KERNELS, count
from fusion_backend.instruments.profiler_trace import mark_step, record
from fusion_backend.instruments.timing import Timer, Times, interleaved, replays, wall
from fusion_backend.instruments.workload import floating

#: In the order in which they are compiled and shown; the last chooses plans that beat Inductor's
#: max-autotune, by which it has the rest of the graph compiled, too.
BACKENDS = ("eager", "inductor", "max-autotune", "fusedmlp", "fusedmlp, max-autotune")

#: One sample of a wall time is so many microseconds of calls, or one call.
SAMPLE_US = 5e3
COUNTED_STEPS = 3
CALLS_IN_GRAPH = 4

Call = Callable[[], Any]


@dataclass(frozen=True)
class Compiled:
    """A model under every backend, each compiled by a first call.

    Attributes:
        calls: one call of the model by backend, with its inputs.
        outputs: the floating-point tensors of each first call.
        failures: why a backend could not run the model.
        sites: what fusedmlp did.
        rewind: undoes what a call changes in the model, such as the length of a cache.
        device: where all of it is.
    """

    calls: dict[str, Call]
    outputs: dict[str, list[Tensor]]
    failures: dict[str, str]
    sites: list[Site]
    rewind: Callable[[], None]
    device: torch.device


def nothing() -> None:
    """The ``rewind`` of a model that a call does not change."""


def compile_all(
    model: nn.Module,
    inputs: Mapping[str, Any],
    backends: Sequence[str],
    rewind: Callable[[], None] = nothing,
) -> Compiled:
    """Compile a model by a first call under each backend; under the caller's grad mode.

    Args:
        model: the module.
        inputs: keyword arguments of its forward.
        backends: of ``BACKENDS``.
        rewind: called before each call, see :class:`Compiled`.
    """
    sites: list[Site] = []
    observed = backend_with_observer(lambda _, result: sites.extend(result.sites))
    settings: dict[str, dict[str, Any]] = {
        "inductor": {},
        "max-autotune": {"options": MAX_AUTOTUNE},
        "fusedmlp": {"backend": observed},
        "fusedmlp, max-autotune": {"backend": fusedmlp, "options": MAX_AUTOTUNE},
    }
    device = next(model.parameters()).device
    if device.type == "cpu":  # where Inductor's loops announce themselves only if told to
        for each in settings.values():
            each["options"] = {"cpp.enable_kernel_profile": True, **each.get("options", {})}
    compiled = Compiled({}, {}, {}, sites, rewind, device)
    for backend in backends:
        rewind()
        try:
            call = _call(model, inputs, settings.get(backend))
            compiled.outputs[backend] = [tensor.clone() for tensor in floating(call())]
        except Exception as error:
            compiled.failures[backend] = " ".join(failure(error).split())[:500]
        else:
            compiled.calls[backend] = call
    return compiled


def _call(model: nn.Module, inputs: Mapping[str, Any], settings: Mapping[str, Any] | None) -> Call:
    """One call of the model: compiled with these settings, or eager."""
    if settings is None:
        return lambda: model(**inputs)
    function = torch.compile(private_frame(model), **settings)
    return lambda: function(**inputs)


@dataclass(frozen=True)
class Measured:
    """What was measured, by backend; all numbers are those of one call.

    Attributes:
        default: rows with ``kernels``, ``memcpys``, ``memsets``, ``gpu_us``, ``wall_us``,
            ``spread`` (interquartile range over the median of the wall times) and ``error``; or
            with ``failure``.
        cuda_graphs: rows with ``wall_us`` and ``spread`` of replays of the call as one CUDA graph;
            or with ``failure``. Empty on a CPU.
        sites: number of MLPs found.
        plans: how many of them run on which plan, or are left alone for which reason.
    """

    default: dict[str, dict[str, Any]]
    cuda_graphs: dict[str, dict[str, Any]]
    sites: int
    plans: dict[str, int] = field(default_factory=dict)


def measure(compiled: Compiled, reference: Sequence[Tensor] | None, rounds: int) -> Measured:
    """Time and count all backends in turns.

    Args:
        compiled: by :func:`compile_all`.
        reference: the outputs in float64, ``None`` if there are none.
        rounds: samples a backend.
    """
    default: dict[str, dict[str, Any]] = {
        name: {"failure": reason} for name, reason in compiled.failures.items()
    }
    times = interleaved(
        {name: _wall(compiled, call) for name, call in compiled.calls.items()}, rounds
    )
    for name, row in _counted(compiled).items():
        default[name] = {**row, **_times(times[name]), "error": None}
        if reference is not None:
            error = relative_error(compiled.outputs[name], reference)
            default[name]["error"] = error if error is not None and math.isfinite(error) else None
    return Measured(
        default,
        _replayed(compiled, rounds) if compiled.device.type == "cuda" else {},
        len(compiled.sites),
        dict(Counter(site.plan or f"not: {site.reason}" for site in compiled.sites)),
    )


def _times(times: Times) -> dict[str, float]:
    return {"wall_us": times.median, "spread": times.spread}


def _wall(compiled: Compiled, call: Call) -> Timer:
    def once() -> float:
        compiled.rewind()
        start = perf_counter_ns()
        call()
        _wait(compiled.device)
        return (perf_counter_ns() - start) / 1e3

    once()
    calls = max(1, min(int(SAMPLE_US / once()), 20))
    return _rewinding(compiled, wall(call, [()] * calls, compiled.device))


def _rewinding(compiled: Compiled, timer: Timer) -> Timer:
    def rewound() -> float:
        compiled.rewind()
        return timer()

    return rewound


def _counted(compiled: Compiled) -> dict[str, dict[str, Any]]:
    def body() -> None:
        for name, call in list(compiled.calls.items()) * COUNTED_STEPS:
            compiled.rewind()
            _wait(compiled.device)
            with mark_step(name):
                call()
                _wait(compiled.device)

    steps = record(body)
    unit = GPU_KERNELS if compiled.device.type == "cuda" else CPU_OPERATORS
    rows = {}
    for name in compiled.calls:
        counts = count(name, [step for step in steps if step.label == name], unit)
        rows[name] = {
            "kernels": counts.kernels,
            "memcpys": counts.memcpys,
            "memsets": counts.memsets,
            "gpu_us": counts.gpu_us,
        }
    return rows


def _replayed(compiled: Compiled, rounds: int) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    timers: dict[str, Timer] = {}
    for name, call in compiled.calls.items():
        compiled.rewind()
        try:
            timers[name] = _rewinding(compiled, replays(call, [()] * CALLS_IN_GRAPH))
        except Exception as error:
            rows[name] = {"failure": " ".join(failure(error).split())[:500]}
    for name, times in (interleaved(timers, rounds) if timers else {}).items():
        rows[name] = dict(_times(times))
    return rows


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
