"""Measuring one MLP: Inductor, and every plan that can run it, in turns.

On a GPU it is the time of CUDA-graph replays. Weights rotate through enough sets that they come
from device memory, not from the cache, and a change of the card's clock meets all. On a CPU it is
the least time of compiled calls, as far as it can be believed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import fusion_backend.operators  # noqa: F401  (defines torch.ops.fusedmlp)
from fusion_backend.backend import fusedmlp
from fusion_backend.compat import tf32
from fusion_backend.errors import CommandError, MeasurementError
from fusion_backend.instruments.timing import Operands, distinct_sets, interleaved, replays, rotated
from fusion_backend.kernels import reference
from fusion_backend.kernels.cpu_rows.compiling import CompilationError
from fusion_backend.mlp.expression import parse
from fusion_backend.mlp.weights import Weights
from fusion_backend.planning import cpu_rates
from fusion_backend.planning.cases import Case
from fusion_backend.planning.measurements import INDUCTOR, MAX_AUTOTUNE
from fusion_backend.planning.planner import available
from fusion_backend.planning.undisturbed import PATIENTLY, least_seconds

# Enough rows to compare with float64; more would only cost time.
_CHECKED_ROWS = 512
# With more rows than this, reading the weights is a small part of the work.
_FEW_ROWS = 4096
# On a CPU a sample is so many seconds of calls, by what a core is sure to compute in a second; not
# more, because a sample in which a thread waited for a core is thrown away.
_SAMPLE, _OPERATIONS_A_SECOND, _MOST_CALLS = 1e-3, 1e10, 16
# After so many seconds of an MLP, no more samples are taken than needed.
_SECONDS = 5.0

Call = Callable[..., Any]


def measure(case: Case, device: torch.device, *, max_autotune: bool = False) -> dict[str, Any]:
    """Time Inductor and every plan for one MLP.

    For a process of its own: it resets Dynamo, sets how float32 products are computed, and fills
    the GPU's memory with weights.

    Args:
        case: what to measure.
        device: a GPU or the CPU.
        max_autotune: also measure Inductor's ``max-autotune``; on a GPU.

    Returns:
        The line of a table, JSON-compatible: the fields of :meth:`Case.row`, ``us`` (median
        microseconds by plan; on a CPU the least), ``spread`` (of the samples, relative; on a GPU),
        ``error`` (relative, against float64), and ``failures`` (plans that did not run, and why),
        if there are any.

    Raises:
        MeasurementError: other programs computed on the CPU, so its times cannot be believed.
        Exception: Inductor itself cannot compile or run the MLP.
    """
    torch.compiler.reset()
    tf32.allow_tf32(case.precision == "tf32")
    on_gpu = device.type == "cuda"
    with torch.cuda.device(device) if on_gpu else contextlib.nullcontext(), torch.no_grad():
        x, sets = operands(case, device)
        fewest = 8 if on_gpu else _calls_of_a_sample(case)
        calls = rotated([(x, *weights) for weights in sets], fewest)
        timer = replays if on_gpu else _sample
        timers: dict[str, Any] = {}
        errors, failures = {}, {}
        for name, function in candidates(case, device, max_autotune).items():
            try:
                errors[name] = error_of(case, function, x, sets[0])
                timers[name] = timer(training_step(function) if case.training else function, calls)
            except Exception as error:
                if name == INDUCTOR:
                    raise
                failures[name] = f"{type(error).__name__}: {error}"[:300]
        figures = _medians(timers) if on_gpu else _least(timers, len(calls))
    row = {**case.row(), **figures}
    row["error"] = {name: float(f"{errors[name]:.3g}") for name in timers}
    return {**row, "failures": failures} if failures else row


def measure_rates(case: Case) -> dict[str, Any]:
    """Time one MLP of those that a CPU's rates follow from; the line of a table.

    Raises:
        CommandError: there is no kernel to be timed.
        MeasurementError: other programs computed, so the times cannot be believed.
    """
    try:
        row = cpu_rates.tune(case, PATIENTLY, _SECONDS)
    except CompilationError as error:
        raise CommandError(f"there is no kernel to be timed: {error}") from error
    if row is None:
        raise MeasurementError(_DISTURBED)
    return row


_DISTURBED = "other programs took the cores that its threads wanted: its times are not kept"


def _calls_of_a_sample(case: Case) -> int:
    """How many calls a CPU makes between two looks at the clock."""
    weights = case.bytes_of_weights // case.dtype.itemsize
    operations = 2 * case.rows * weights * (3 if case.training else 1)
    return min(1 + int(_SAMPLE * _OPERATIONS_A_SECOND / operations), _MOST_CALLS)


def _sample(function: Call, calls: list[Operands]) -> Callable[[], None]:
    """What makes all calls; the function was called once before."""
    function(*calls[0])

    def sample() -> None:
        for each in calls:
            function(*each)

    return sample


def _medians(timers: Mapping[str, Callable[[], float]]) -> dict[str, dict[str, float]]:
    """Microseconds of a call on a GPU, and how far samples are spread."""
    times = interleaved(timers)
    return {
        "us": {name: round(each.median, 2) for name, each in times.items()},
        "spread": {name: round(each.spread, 3) for name, each in times.items()},
    }


def _least(samples: Mapping[str, Callable[[], None]], calls: int) -> dict[str, dict[str, float]]:
    """Microseconds of a call on the CPU, where each sample makes so many."""
    found = least_seconds(samples, time.perf_counter() + _SECONDS, PATIENTLY)
    if found is None:
        raise MeasurementError(_DISTURBED)
    return {"us": {name: round(1e6 * each / calls, 2) for name, each in found.items()}}


def operands(case: Case, device: torch.device) -> tuple[Tensor, list[Operands]]:
    """An input, and sets of weights enough to rotate through."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=case.dtype, device=device, generator=generator)

    def linear(out_features: int, in_features: int) -> tuple[Tensor, Tensor | None]:
        bias = normal(out_features) if case.biases else None
        if case.transposed:
            return (normal(in_features, out_features) / in_features**0.5).t(), bias
        return normal(out_features, in_features) / in_features**0.5, bias

    def weights() -> Weights:
        first = (case.hidden_features, case.in_features)
        gate, bias_gate = linear(*first) if case.gated else (None, None)
        up, bias_up = linear(*first)
        return Weights(
            gate, bias_gate, up, bias_up, *linear(case.out_features, case.hidden_features)
        )

    few = case.rows <= _FEW_ROWS
    distinct = distinct_sets(case.bytes_of_weights, device) if few else 2
    return normal(case.rows, case.in_features), [weights() for _ in range(distinct)]


def candidates(case: Case, device: torch.device, max_autotune: bool = False) -> dict[str, Call]:
    """Inductor in its modes, and every plan, as functions of the input and the weights."""
    expression = parse(case.activation)

    def unfused(x: Tensor, *weights: Tensor | None) -> Tensor:
        return reference.forward(x, Weights(*weights), expression)  # type: ignore[arg-type]

    found: dict[str, Call] = {INDUCTOR: torch.compile(unfused, dynamic=False)}
    if max_autotune:
        mode = "max-autotune-no-cudagraphs"  # the timer records a CUDA graph itself
        found[MAX_AUTOTUNE] = torch.compile(unfused, dynamic=False, mode=mode)
    plans = available(case.setting(device))
    return found | {plan: _planned(case, plan, device) for plan in plans}


def _planned(case: Case, plan: str, device: torch.device) -> Call:
    """The MLP as one call of the operator: launched at once on a GPU, unless it is trained.

    On a CPU it is compiled, as Inductor's is: there the time of calls counts.
    """

    def call(x: Tensor, *weights: Tensor | None) -> Any:
        return torch.ops.fusedmlp.mlp(x, *weights, [], case.activation, plan)

    if device.type == "cpu":
        return torch.compile(call, dynamic=False, backend=fusedmlp)
    return torch.compile(call, dynamic=False) if case.training else call


def training_step(function: Call) -> Call:
    """Forward and backward of a function, with the gradients of all of its inputs."""

    def step(*inputs: Tensor | None) -> Any:
        with torch.enable_grad():
            leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
            y = function(*leaves)
            wanted = [leaf for leaf in leaves if leaf is not None]
            return torch.autograd.grad(y, wanted, torch.ones_like(y))

    return step


def error_of(case: Case, function: Call, x: Tensor, weights: Operands) -> float:
    """Relative error of the forward pass against float64, over the first rows."""
    x_exact = x[:_CHECKED_ROWS].double()
    w_exact = (None if w is None else w.double() for w in weights)
    exact = reference.forward(x_exact, Weights(*w_exact), parse(case.activation))  # type: ignore[arg-type]
    found = function(x, *weights)[:_CHECKED_ROWS].double()
    return float((found - exact).norm() / exact.norm())
