"""How fast MLPs are expected to be on this CPU beside Inductor: products by rates, then f.

What is pointwise takes as long unfused as fused: both compute it in the same vectors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from fusion_backend.kernels.cpu_rows.cutting import cut, cut_gradients, floats_of_sums
from fusion_backend.kernels.cpu_rows.printed import partial_derivatives
from fusion_backend.mlp.expression import Call, Expression, parse
from fusion_backend.planning.cpu_rates import Rates

# Seconds that one element of an activation takes a core: what is a call of the vector library, and
# what is an instruction or two.
_DEAR, _CHEAP = 1.0e-9, 0.1e-9
# How much longer a training step of a gated MLP was measured to take, beside unfused, than rates of
# plain ones say: two pre-activations are kept, or computed again.
_GATED_TRAINING = 1.25
_CHEAP_FUNCTIONS = frozenset(
    (
        *(
            "add",
            "sub",
            "mul",
            "neg",
            "square",
            "abs",
            "sign",
            "relu",
            "relu6",
            "clamp",
            "hardtanh",
        ),
        *("maximum", "minimum", "where", "lt", "le", "gt", "ge", "eq", "ne", "leaky_relu"),
        *("threshold", "hardsigmoid", "hardswish", "logical_and", "logical_or", "logical_not"),
    )
)


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
        times[way] *= threads / min(threads, -(-rows // how.block_rows))
    if training and gated:
        times[way] *= _GATED_TRAINING
    elements = [rows * width for width in widths[1:-1]]
    functions = [_functions(parse(activation)) for activation in activations]
    pointwise = sum(map(_seconds_of, functions, elements)) / threads
    if training:  # the backward pass computes an activation and its derivatives
        found = functions[0].union(
            *map(_functions, partial_derivatives(parse(activations[0]), gated, ()))
        )
        pointwise += _seconds_of(found, elements[0]) / threads
    return (times["unfused"] + pointwise) / (times[way] + pointwise)


def sums_are_small(rows: int, widths: Sequence[int], gated: bool, threads: int) -> bool:
    """Whether sums of gradients take less memory than the hidden values of an unfused step.

    Each part of the rows that a thread computes has sums of its own.
    """
    inner, hidden, out = widths
    sizes = (rows, (inner, hidden, out), gated)
    return floats_of_sums(cut_gradients(*sizes, threads), *sizes) <= rows * hidden * (1 + gated)


def _seconds_of(functions: Iterable[str], elements: int) -> float:
    return elements * sum(
        _CHEAP if function in _CHEAP_FUNCTIONS else _DEAR for function in functions
    )


def _functions(expression: Expression) -> set[str]:
    if not isinstance(expression, Call):
        return set()
    return {expression.function}.union(*map(_functions, expression.arguments))
