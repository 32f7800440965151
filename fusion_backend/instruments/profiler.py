"""Run a model under several backends and compare kernels, times and numerical errors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule

from fusion_backend.compat.dynamo import CompileSettings
from fusion_backend.errors import ProfileError
from fusion_backend.fusion.fuse import FuseResult
from fusion_backend.fusion.journal import numbered
from fusion_backend.fusion.sites import numbered_apart
from fusion_backend.instruments.accuracy import Accuracy, check_accuracy
from fusion_backend.instruments.backend_rows import KernelCounts
from fusion_backend.instruments.claims import (
    Claim,
    SiteLaunches,
    claims_of,
    count_launches,
    gradient_launches,
    graph_runs,
    launches_by_claim,
)
from fusion_backend.instruments.comparison import Comparison
from fusion_backend.instruments.compiled_calls import as_compiled, compiled_call, eager_call
from fusion_backend.instruments.interleaved_runs import Measurement, measure
from fusion_backend.instruments.isolation import Inputs, modules_of, original, preserved
from fusion_backend.instruments.kernel_counts import CPU_OPERATORS, GPU_KERNELS, count
from fusion_backend.instruments.memory import Memory, peak_bytes, saved_bytes
from fusion_backend.instruments.ownership import (
    Found,
    backward_launches,
    by_claims,
    by_code,
    by_order,
)
from fusion_backend.instruments.perfetto import Range, Trace
from fusion_backend.instruments.profiler_trace import Step
from fusion_backend.instruments.timelines import Launch, timeline
from fusion_backend.instruments.workload import Workload, devices_of
from fusion_backend.options import Options, checked_mapping, nearest, split_options


def profile(
    model: Callable[..., Any],
    *args: Any,
    backends: Sequence[str] = ("eager", "inductor", "fusedmlp"),
    steps: int = 10,
    options: Options | Mapping[str, Any] | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    backward: bool = False,
    step: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Comparison:
    """Compare the kernels, the times and the numerical error of a model under several backends.

    Every call gets its own copy of the inputs. Train or eval mode, grad mode and autocast are
    those of the caller. Buffers, gradients, random number generators and the caller's compiled
    code are left as they were.

    Args:
        model: a module or function, or what ``torch.compile`` returned for one: it is compiled
            here with the options, mode and ``dynamic`` that it was compiled with.
        args: its positional arguments.
        backends: ``"eager"`` and names of ``torch.compile`` backends.
        steps: how many calls of each backend are counted, and how many others are timed.
        options: as for ``torch.compile``, or an :class:`Options`; those with the prefix
            ``fusedmlp.`` go to fusedmlp only. Of a compiled model, these replace those of the same
            names.
        mode: as for ``torch.compile``.
        dynamic: as for ``torch.compile``.
        backward: run the backward pass, too, from the sum of the outputs.
        step: profile a whole step instead of a call: a function that takes what to call in place of
            the model, then the inputs, and runs forward and backward passes and an optimizer as it
            likes. What it returns is compared with float64. Every step begins with the same
            parameters and without gradients. Parameters, and the state of the optimizers and the
            like that the function's definition names, are left as they were.
        kwargs: keyword arguments of the model.

    Raises:
        ProfileError: a backend fails on the model, its calls differ in their kernels, nothing was
            recorded on the GPU, or ``backward`` is not possible.
        OptionError: an option of fusedmlp is unknown or has a wrong value.
    """
    if isinstance(backends, str) or not backends or len(set(backends)) != len(backends):
        raise ProfileError(f"backends must be a list of different names, got {backends!r}")
    known = ["eager", "fusedmlp", *torch.compiler.list_backends(exclude_tags=())]
    for name in backends:
        if name not in known:
            raise ProfileError(
                f"there is no backend {name!r}{nearest(name, known)}; known are {', '.join(known)}"
            )
    if steps < 1:
        raise ProfileError(f"steps must be at least 1, got {steps}")
    settings = as_compiled(model, CompileSettings(checked_mapping(options), mode, dynamic))
    split_options(settings.options)  # raises here, not from within Dynamo
    model = original(model)
    if step is not None and backward:
        raise ProfileError("step and backward=True exclude each other: a step runs what it likes")
    inputs = Inputs(args, kwargs)
    devices = devices_of(model, inputs)
    fusions: list[Fusion] = []

    def observe(before: GraphModule, result: FuseResult) -> None:
        fusions.append(Fusion(before, result))

    with preserved(modules_of(model), devices, step) as state:
        workload = Workload(inputs, devices, state, step=step)
        eager = eager_call(model)
        output = workload.run(eager, workload.prepare())
        if backward:
            workload = workload.with_backward(output)
        del output
        calls = {
            name: eager
            if name == "eager"
            else compiled_call(model, name, settings, not workload.on_gpu, observe)
            for name in backends
        }
        accuracy = check_accuracy(workload, model, calls)
        measurements = measure(workload, calls, steps)
        memory = {
            name: Memory(peak_bytes(workload, call), saved_bytes(workload, model, call))
            for name, call in calls.items()
        }
    return compare(workload, measurements, accuracy, memory, fusions)


class Fusion(NamedTuple):
    """A graph as it was captured, and what fusedmlp made of it."""

    before: GraphModule
    result: FuseResult


def compare(
    workload: Workload,
    measurements: Mapping[str, Measurement],
    accuracy: Accuracy,
    memory: Mapping[str, Memory],
    fusions: Sequence[Fusion],
) -> Comparison:
    """Put what was measured side by side."""
    steps = [step for each in measurements.values() for step in each.steps]
    traces = {name: Trace(each.steps[-1]) for name, each in measurements.items() if each.steps}
    sites: tuple[SiteLaunches, ...] = ()
    gradients = Counter[str]()
    if "fusedmlp" in traces:
        sites, gradients, ranges = launched_in(traces["fusedmlp"].step)
        traces["fusedmlp"] = traces["fusedmlp"]._replace(sites=ranges)
    found = (each.result.sites for each in fusions)
    unit = GPU_KERNELS if workload.on_gpu or any(step.gpu for step in steps) else CPU_OPERATORS
    return Comparison(
        rows=tuple(
            row(name, each, unit, accuracy, memory[name]) for name, each in measurements.items()
        ),
        device=device_name(workload) if unit == GPU_KERNELS else "cpu",
        counted=unit,
        steps=len(steps) // len(measurements),
        backward=workload.seeds is not None,
        notes=(*notes(measurements, accuracy), *fusion_notes([each.result for each in fusions])),
        sites=sites,
        gradients=gradients,
        step=getattr(workload.step, "__name__", "step") if workload.step is not None else "",
        traces=traces,
        mlps=tuple(site for sites in numbered_apart(found) for site in sites),
        timelines=timelines(measurements, fusions, accuracy.code),
    )


def timelines(
    measurements: Mapping[str, Measurement],
    fusions: Sequence[Fusion],
    code: Mapping[str, Sequence[str]],
) -> dict[str, tuple[Launch, ...]]:
    """The launches of one call of each backend, with their sites where they are known."""
    graphs = [Found(before.graph, result.sites) for before, result in fusions]
    written = [text for path in code.get("inductor", ()) if (text := text_of(path))]
    owners = {
        "eager": by_order(graphs),
        "inductor": by_code(graphs, written),
        "fusedmlp": by_claims(graphs),
    }
    return {
        name: timeline(each.steps, owners.get(name) if graphs else None)
        for name, each in measurements.items()
    }


def text_of(path: str) -> str:
    """What is in a file; nothing where it is gone."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def launched_in(step: Step) -> tuple[tuple[SiteLaunches, ...], Counter[str], tuple[Range, ...]]:
    """What a step of fusedmlp launched of each site and of backward passes, and when."""
    events = [*step.cpu, *step.launches, *step.gpu]
    graphs = {graph.compilation: graph for graph in numbered()}
    sites: dict[tuple[str, int], SiteLaunches] = {}
    claims: list[tuple[Claim, str]] = []
    ranges = []
    for run in graph_runs(events):
        if run.compilation not in graphs:
            continue
        own = claims_of(graphs[run.compilation].sites)
        claims += [(claim, run.compilation) for claim in own]
        count_launches(sites, run, own)
        for claim, launches in zip(own, launches_by_claim(own, run), strict=True):
            if launches:
                known = {"graph": run.compilation, "plan": claim.family, "launches": len(launches)}
                start, end = launches[0].start, max(launch.end for launch in launches)
                ranges.append(Range(claim.label, start, end, known))
    gradients = gradient_launches((claim for claim, _ in claims), events)
    return tuple(sites.values()), gradients, (*ranges, *backward_ranges(claims, step))


def backward_ranges(claims: Sequence[tuple[Claim, str]], step: Step) -> Iterator[Range]:
    """Where the fused kernels of each site's backward pass ran.

    Args:
        claims: in the order in which their graphs ran, with the names of these.
        step: what was recorded.
    """
    own = [(claim, (i, claim, graph)) for i, (claim, graph) in enumerate(claims)]
    found = sorted(backward_launches(own, step), key=lambda each: each[0].start)
    for (_, claim, graph), group in groupby(found, lambda each: each[1]):
        launches = [event for event, _ in group]
        known = {"graph": graph, "plan": claim.family, "launches": len(launches)}
        end = max(launch.end for launch in launches)
        yield Range(f"{claim.label}, backward", launches[0].start, end, known)


def device_name(workload: Workload) -> str:
    """The GPU's name, with their number where there are several."""
    gpus = [device for device in workload.devices if device.type == "cuda"]
    name = torch.cuda.get_device_name(gpus[0] if gpus else None)
    return name if len(gpus) < 2 else f"{len(gpus)}× {name}"


def row(
    backend: str, measurement: Measurement, unit: str, accuracy: Accuracy, memory: Memory
) -> KernelCounts:
    """One backend's row."""
    counts = count(backend, measurement.steps, unit)
    error, gradient_error = (
        None if each is None or not math.isfinite(each) else each
        for each in accuracy.errors[backend]
    )
    return KernelCounts(
        backend=backend,
        kernels=counts.kernels,
        memcpys=counts.memcpys,
        memsets=counts.memsets,
        gpu_us=counts.gpu_us,
        wall_us=measurement.wall_us,
        error=error,
        gradient_error=gradient_error,
        names=counts.names,
        times=counts.times,
        first_call_s=None if backend == "eager" else accuracy.first_call_s[backend],
        peak_bytes=memory.peak,
        saved_bytes=memory.saved,
    )


def notes(measurements: Mapping[str, Measurement], accuracy: Accuracy) -> list[str]:
    """What the numbers do not show."""
    found = [accuracy.note] if accuracy.note else []
    for name, values in accuracy.errors.items():
        if any(each is not None and not math.isfinite(each) for each in values):
            found.append(f"no error of {name}: its results or those in float64 are not finite")
    replayed = [
        name for name, each in measurements.items() if any(s.replays_graph for s in each.steps)
    ]
    if replayed:
        found.append(
            f"{' and '.join(replayed)} ran in CUDA graphs: their kernels are counted as the GPU "
            "replayed them, and cannot be attributed to operators or modules"
        )
    return found


def fusion_notes(fusions: Sequence[FuseResult]) -> list[str]:
    """That there are MLPs, and kernels run none of them: fusedmlp is Inductor then."""
    sites = [site for result in fusions for site in result.sites]
    if not sites or any(site.fused for site in sites):
        return []
    reasons = ", ".join(sorted({str(site.reason) for site in sites}))
    return [f"fusedmlp fused no MLP here ({reasons}): the kernels of its row are Inductor's"]
