"""Measuring one MLP: Inductor, and every plan that can run it, as GPU time of CUDA-graph replays.

Weights rotate through enough sets that they come from device memory, not from the cache, and what
is compared takes turns, so that a change of the card's clock meets all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fusion_backend.operators  # noqa: F401  (defines torch.ops.fusedmlp)
from fusion_backend.compat import tf32
from fusion_backend.instruments.timing import Operands, distinct_sets, interleaved, replays, rotated
from fusion_backend.kernels import reference
from fusion_backend.mlp.expression import parse
from fusion_backend.mlp.weights import Weights
from fusion_backend.planning.cases import Case
from fusion_backend.planning.measurements import INDUCTOR, MAX_AUTOTUNE
from fusion_backend.planning.planner import available

# Enough rows to compare with float64; more would only cost time.
_CHECKED_ROWS = 512
# With more rows than this, reading the weights is a small part of the work.
_FEW_ROWS = 4096

Call = Callable[..., Any]


def measure(case: Case, device: torch.device, *, max_autotune: bool = False) -> dict[str, Any]:
    """Time Inductor and every plan for one MLP.

    For a process of its own: it resets Dynamo, sets how float32 products are computed, and fills
    the GPU's memory with weights.

    Args:
        case: what to measure.
        device: a GPU.
        max_autotune: also measure Inductor's ``max-autotune``.

    Returns:
        The line of a table, JSON-compatible: the fields of :meth:`Case.row`, ``us`` (median
        microseconds by plan), ``spread`` (of the samples, relative), ``error`` (relative, against
        float64), and ``failures`` (plans that did not run, and why), if there are any.

    Raises:
        Exception: Inductor itself cannot compile or run the MLP.
    """
    torch.compiler.reset()
    tf32.allow_tf32(case.precision == "tf32")
    with torch.cuda.device(device), torch.no_grad():
        x, sets = operands(case, device)
        calls = rotated([(x, *weights) for weights in sets])
        timers, errors, failures = {}, {}, {}
        for name, function in candidates(case, device, max_autotune).items():
            try:
                errors[name] = _error(case, function, x, sets[0])
                timers[name] = replays(
                    training_step(function) if case.training else function, calls
                )
            except Exception as error:
                if name == INDUCTOR:
                    raise
                failures[name] = f"{type(error).__name__}: {error}"[:300]
        times = interleaved(timers)
    row = case.row()
    row["us"] = {name: round(each.median, 2) for name, each in times.items()}
    row["spread"] = {name: round(each.spread, 3) for name, each in times.items()}
    row["error"] = {name: float(f"{errors[name]:.3g}") for name in times}
    return {**row, "failures": failures} if failures else row


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
    return found | {plan: _planned(case, plan) for plan in available(case.setting(device))}


def _planned(case: Case, plan: str) -> Call:
    """The MLP as one call of the operator: launched at once, or compiled where it is trained."""

    def call(x: Tensor, *weights: Tensor | None) -> Any:
        return torch.ops.fusedmlp.mlp(x, *weights, [], case.activation, plan)

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


def _error(case: Case, function: Call, x: Tensor, weights: Operands) -> float:
    """Relative error of the forward pass against float64, over the first rows."""
    x_exact = x[:_CHECKED_ROWS].double()
    w_exact = (None if w is None else w.double() for w in weights)
    exact = reference.forward(x_exact, Weights(*w_exact), parse(case.activation))  # type: ignore[arg-type]
    found = function(x, *weights)[:_CHECKED_ROWS].double()
    return float((found - exact).norm() / exact.norm())
