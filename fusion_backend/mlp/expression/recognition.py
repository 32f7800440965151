"""Finding well-known activations in expressions that spell them out.

Activations with a kink are found by structure. Smooth ones are spelled in more ways than can be
listed (``0.5`` inside or outside, ``pow(x, 3)`` or ``x * x * x``, ``sqrt(2 / pi)`` with more or
fewer digits), so they are found by value: a glance in double precision at few points chooses the
candidate, and ``agreement`` says whether it is the same, with
its derivative, up to the rounding of what is written. So ``x / (1.0 + exp(-x))`` stays: unlike
SiLU's, its derivative is NaN where ``exp(-x)`` is infinite.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping

from fusion_backend.mlp.expression.agreement import agree
from fusion_backend.mlp.expression.functions import FUNCTIONS
from fusion_backend.mlp.expression.nodes import Call, Constant, Expression, Variable, variables
from fusion_backend.mlp.expression.ordering import reordered, size
from fusion_backend.mlp.expression.parsing import parse
from fusion_backend.mlp.expression.programs import of_expressions
from fusion_backend.mlp.expression.simplification import bind, substitute

# For the glance: relative to x.
_TOLERANCE = 1e-5
_POINTS = tuple(6.0 * math.sin(i) for i in range(1, 9))
# Larger expressions spell no known activation, and searching them would take long.
_MOST_NODES = 60

_HOLE = Variable("_")
_SMOOTH = tuple(map(parse, ("gelu_tanh(_)", "gelu(_)", "silu(_)", "sigmoid(_)")))
# No clamps here: in autograd before torch 2.14 their limits are not those of relu6.
_KINKED = {
    "relu6(_ + 3.0) / 6.0": "hardsigmoid(_)",
    "_ * hardsigmoid(_)": "hardswish(_)",
    "_ * relu6(_ + 3.0) / 6.0": "hardswish(_)",
    "_ * tanh(softplus(_, 1.0, 20.0))": "mish(_)",
    "_ / (1.0 + abs(_))": "softsign(_)",
}


def recognise(expression: Expression) -> Expression | None:
    """The known activation that an ordered expression spells out.

    Returns:
        An equal, shorter expression, or None if it spells out none.
    """
    if not isinstance(expression, Call) or expression.kind != "float":
        return None
    if expression.function not in ("mul", "div", "add", "sub") or size(expression) > _MOST_NODES:
        return None
    for inner in dict.fromkeys(_inner(expression)):
        shape = _with_hole(expression, inner)
        if variables(shape) != (_HOLE.name,):
            continue
        named = _kinked().get(shape) or _smooth(shape)
        if named is not None:
            return substitute(named, {_HOLE.name: inner})
    return None


def _inner(expression: Expression) -> Iterator[Expression]:
    """All proper sub-expressions that are not numbers."""
    if isinstance(expression, Call):
        for argument in expression.arguments:
            if argument.kind == "float" and not isinstance(argument, Constant):
                yield argument
                yield from _inner(argument)


def _with_hole(expression: Expression, inner: Expression) -> Expression:
    if expression == inner:
        return _HOLE
    if isinstance(expression, Call):
        arguments = (_with_hole(argument, inner) for argument in expression.arguments)
        return Call(expression.function, tuple(arguments))
    return expression


@functools.cache
def _kinked() -> Mapping[Expression, Expression]:
    return {reordered(parse(formula)): parse(name) for formula, name in _KINKED.items()}


@functools.cache
def _smooth(shape: Expression) -> Expression | None:
    """The smooth activation that ``shape`` is."""
    for known in _SMOOTH:
        if size(known) < size(shape) and _looks_like(shape, known):
            return known if agree(of_expressions((shape,), (_HOLE.name,)), known) else None
    return None


def _looks_like(shape: Expression, known: Expression) -> bool:
    candidate, function = _analytic(shape), _analytic(known)
    if candidate is None or function is None:
        return False
    try:
        return all(abs(candidate(x) - function(x)) <= _TOLERANCE * abs(x) for x in _POINTS)
    except (ArithmeticError, ValueError):  # outside of the domain, or beyond double precision
        return False


@functools.cache
def _analytic(expression: Expression) -> Callable[[float], float] | None:
    """The expression as a function of the hole; None unless it is made of analytic functions."""
    if isinstance(expression, Variable):
        return lambda x: x
    if isinstance(expression, Constant):
        value = expression.value
        return lambda x: value
    assert isinstance(expression, Call)
    function = FUNCTIONS[expression.function]
    scalar = function.scalar
    if scalar is None:
        expansion = function.expansion
        return None if expansion is None else _analytic(bind(expansion, expression))
    arguments = [f for f in map(_analytic, expression.arguments) if f is not None]
    if len(arguments) < len(expression.arguments):
        return None
    return lambda x: scalar(*(argument(x) for argument in arguments))
