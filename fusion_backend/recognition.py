"""Finding well-known activations in expressions that spell them out.

Activations with a kink are found by structure. Smooth ones are spelled in more ways than can be
listed (``0.5`` inside or outside, ``pow(x, 3)`` or ``x * x * x``, ``sqrt(2 / pi)`` rounded to any
number of digits), so they are found by value: the expression and the activation are computed in
double precision at 64 points of [-8, 8], and are the same if they agree at all of them. That is
sound for what is compared here, short formulas of analytic functions of one variable: two that
differ at all differ by many times the tolerance somewhere (GELU and its tanh form by 35 times,
GELU and quick-GELU by 2000).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from fusion_backend.functions import FUNCTIONS
from fusion_backend.nodes import Call, Constant, Expression, Variable, variables
from fusion_backend.ordering import Product, factored, reordered, size
from fusion_backend.parsing import parse
from fusion_backend.simplification import bind, substitute

# Relative to x. Rounding sqrt(2 / pi) to four significant digits changes a GELU by 4.3e-6.
_TOLERANCE = 5e-6
# Irregular, so that no periodic term can vanish at all of them.
_POINTS = tuple(8.0 * math.sin(i) for i in range(1, 65))
# Larger expressions spell no known activation, and searching them would take long.
_MOST_FACTORS, _MOST_NODES = 6, 60

_HOLE = Variable("_")
_SMOOTH = tuple(map(parse, ("gelu_tanh(_)", "gelu(_)", "silu(_)", "sigmoid(_)", "sigmoid(-_)")))
# No clamps here: in autograd before torch 2.14 their limits are not those of relu6.
_KINKED = {
    "hardsigmoid(_)": "relu6(_ + 3.0) / 6.0",
    "hardswish(_)": "_ * hardsigmoid(_)",
    "mish(_)": "_ * tanh(softplus(_, 1.0, 20.0))",
    "softsign(_)": "_ / (1.0 + abs(_))",
}


def recognise(expression: Expression) -> Expression | None:
    """Replaces a spelled-out activation by its name in an ordered sum or product.

    Returns:
        An equal, shorter expression, or None if no known activation is spelled out in it.
    """
    product = factored(expression)
    factors = [Product(1.0, (f,)) for f in product.over]
    factors += [Product(1.0, (), (f,)) for f in product.under]
    if len(factors) > _MOST_FACTORS or size(expression) > _MOST_NODES:
        return None
    for count in range(len(factors), 0, -1):
        for chosen in itertools.combinations(range(len(factors)), count):
            part = _multiplied(factors[i] for i in chosen)
            others = _multiplied(f for i, f in enumerate(factors) if i not in chosen)
            named = _named(part, product.constant)
            if named is not None:
                result = others.times(named).expression()
                return result if size(result) < size(expression) else None
    return None


def _multiplied(factors: Iterable[Product]) -> Product:
    return functools.reduce(Product.times, factors, Product(1.0))


def _named(part: Product, constant: float) -> Product | None:
    """``constant * part`` as a multiple of a known activation of some sub-expression of it."""
    whole = part.expression()
    scaled = part._replace(constant=constant).expression()
    for inner in dict.fromkeys(_inner(whole)):
        shape = _with_hole(whole, inner)
        if variables(shape) != (_HOLE.name,):
            continue
        smooth, factor = _smooth(shape)
        if smooth is not None:
            return Product(constant * factor, (substitute(smooth, {"_": inner}),))
        kinked = _kinked().get(reordered(_with_hole(scaled, inner)))
        if kinked is not None:
            return Product(1.0, (substitute(kinked, {"_": inner}),))
    return None


def _inner(expression: Expression) -> Iterator[Expression]:
    """All proper sub-expressions that are not numbers."""
    if isinstance(expression, Call):
        for argument in expression.arguments:
            if not isinstance(argument, Constant):
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
    return {reordered(parse(formula)): parse(name) for name, formula in _KINKED.items()}


def _smooth(shape: Expression) -> tuple[Expression | None, float]:
    """The smooth activation of which ``shape`` is a multiple, and the factor."""
    candidate = _analytic(shape)
    for name in _SMOOTH:
        known = _analytic(name)
        assert known is not None
        try:
            factor = None if candidate is None else _factor(candidate, known)
        except (ArithmeticError, ValueError):  # outside of the domain, or beyond double precision
            factor = None
        if factor is not None:
            return name, factor
    return None, 1.0


def _factor(candidate: Callable[[float], float], known: Callable[[float], float]) -> float | None:
    """The number of at most six digits with which candidate = factor * known; None without one."""
    # Where activations are nearly linear, their quotient does not depend on rounded constants.
    saturated = max(_POINTS)
    factor = float(f"{candidate(saturated) / known(saturated):.6g}")
    agree = all(
        abs(candidate(x) - factor * known(x)) <= _TOLERANCE * abs(factor * x) for x in _POINTS
    )
    return factor if agree and factor != 0.0 else None


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
