"""How fast MLPs are expected to be on this CPU beside Inductor: products by rates, then f.

Rates are measured on the machine. What is pointwise is not: what functions take was measured on one
core with AVX2, and longer vectors take less.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence

import torch

from fusion_backend.kernels.cpu_rows.cutting import cut, cut_gradients, floats_of_sums
from fusion_backend.kernels.cpu_rows.printed import calls, partial_derivatives
from fusion_backend.mlp.expression import Call, Expression, parse
from fusion_backend.planning.cpu_rates import Rates

# Seconds that a function takes a core for an element: in the kernels of this package, and in the
# vector library that ATen and Inductor call. Others are called by both.
_SECONDS: Mapping[str, tuple[float, float]] = {
    "exp": (0.4e-9, 0.85e-9),
    "tanh": (0.5e-9, 2.8e-9),
    "erf": (0.9e-9, 1.25e-9),
    "log1p": (1.4e-9, 1.4e-9),
    "expm1": (1.2e-9, 1.2e-9),
    "pow": (3.0e-9, 3.0e-9),
    "dropout": (3.0e-9, 3.0e-9),
}
_LIKE_THESE = frozenset(("log", "log2", "exp2", "sin", "cos", "atan", "erfc", "sinh", "cosh"))
_DEAR, _CHEAP = 0.8e-9, 0.05e-9
# Functions that Inductor computes by another function than the kernels of this package.
_BY_TANH = "gelu_tanh"
# Operations below which calls take longer than what they compute. One of a fused MLP then takes as
# long as two products of Inductor's code that add no bias.
_LITTLE = 500_000
# How much longer a training step of a gated MLP was measured to take, beside unfused, than rates of
# plain ones say: two pre-activations are kept, or computed again.
_GATED_TRAINING = 1.25


def speedup(
    way: str,
    rates: Rates,
    rows: int,
    widths: Sequence[int],
    gated: bool,
    activations: Sequence[str],
    threads: int,
    training: bool = False,
) -> float | None:
    """How many times as fast as unfused an MLP or a chain is expected to be; None if unknown.

    Args:
        way: ``rows`` or ``onednn``.
        rates: of this machine.
        rows: how many there are.
        widths: of the input, after each layer.
        gated: whether there are two first layers.
        activations: after each layer but the last, as text.
        threads: that there are.
        training: forward and backward, by ``rates`` of both; there are two layers then.
    """
    layers = [*itertools.pairwise(widths)]
    layers += layers[: int(gated)]
    times = {}
    for each in ("unfused", way):
        products = [rates.seconds(each, rows, k, n) for k, n in layers]
        if any(seconds is None for seconds in products):
            return None
        times[each] = sum(seconds for seconds in products if seconds is not None)
    if way == "rows" and len(widths) > 3:
        how = cut(rows, widths, gated, threads)  # no more threads work than there are blocks
        times[way] *= how.threads / min(how.threads, -(-rows // how.block_rows))
    if training and gated:
        times[way] *= _GATED_TRAINING
    for width, activation in zip(widths[1:-1], activations, strict=True):
        ours, theirs = _pointwise_seconds(activation, gated, training)
        share = rows * width / threads
        times["unfused"] += share * theirs
        times[way] += share * ours
    return times["unfused"] / times[way]


def saves_no_time_of_calls(rows: int, widths: Sequence[int], products: int, biases: bool) -> bool:
    """Whether an MLP is so small that its calls are all that counts, and fusion saves none.

    Args:
        rows: how many there are.
        widths: of the input, after each layer.
        products: that Inductor's code calls.
        biases: whether they add biases.
    """
    weights = sum(k * n for k, n in itertools.pairwise(widths))
    return products <= 2 and not biases and 2 * rows * weights < _LITTLE


def sums_are_small(rows: int, widths: Sequence[int], gated: bool, threads: int) -> bool:
    """Whether sums of gradients take less memory than the hidden values of an unfused step.

    Each part of the rows that a thread computes has sums of its own.
    """
    inner, hidden, out = widths
    sizes = (rows, (inner, hidden, out), gated)
    return floats_of_sums(cut_gradients(*sizes, threads), *sizes) <= rows * hidden * (1 + gated)


@functools.cache
def _pointwise_seconds(activation: str, gated: bool, training: bool) -> tuple[float, float]:
    """Seconds that an element of an activation takes a core: in our kernels, and in Inductor's."""
    expression = parse(activation)
    passes = [[expression]]
    if training:  # the backward pass computes an activation and its derivatives
        passes.append([expression, *partial_derivatives(expression, gated, ())])
    ours = theirs = 0.0
    for each in passes:
        for function, number in calls(*each).items():
            fused, unfused = _SECONDS.get(
                function, (_DEAR, _DEAR) if function in _LIKE_THESE else (_CHEAP, _CHEAP)
            )
            ours += number * fused
            theirs += number * unfused
        if _BY_TANH in _functions(expression):
            theirs += _SECONDS["tanh"][1] - _SECONDS["exp"][1]
    lanes = 0.5 if torch.cpu.get_capabilities().get("avx512_f") else 1.0
    return ours * lanes, theirs * lanes


def _functions(expression: Expression) -> set[str]:
    if not isinstance(expression, Call):
        return set()
    return {expression.function}.union(*map(_functions, expression.arguments))
