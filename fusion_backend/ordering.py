"""One order for the operands of sums, products and other commutative functions.

A product is a constant times sorted factors, over sorted factors; equal factors become powers. A
sum is its positive terms, then its negative ones, with the constant last. Constants are folded in
double precision, so what a sum or product computes can change by a rounding of its operands.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fusion_backend.nodes import Call, Constant, Expression, variables
from fusion_backend.operands import index_of
from fusion_backend.simplification import call

_COMMUTATIVE = ("maximum", "minimum", "eq", "ne", "logical_and", "logical_or")
_MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}


def ordered(expression: Expression) -> Expression:
    """Puts the operands of the outermost function in order; those inside must be ordered."""
    match expression:
        case Call("add" | "sub", _):
            return _sum(expression)
        case Call("neg", (Call("add" | "sub", _),)):
            return _sum(expression)
        case Call("mul" | "div" | "neg" | "square" | "reciprocal" | "pow", _):
            return factored(expression).expression()
        case Call(name, (a, b)) if name in _COMMUTATIVE:
            return call(name, *sorted((a, b), key=_key))
        case Call(name, (Constant() as a, b)) if name in _MIRRORED:
            return call(_MIRRORED[name], b, a)
        case Call(name, arguments):
            return call(name, *arguments)
    return expression


def reordered(expression: Expression) -> Expression:
    """Puts the operands of all functions in order."""
    if isinstance(expression, Call):
        return ordered(Call(expression.function, tuple(map(reordered, expression.arguments))))
    return expression


def size(expression: Expression) -> int:
    """How many numbers, variables and calls the expression is written with."""
    return 1 + sum(map(size, expression.arguments)) if isinstance(expression, Call) else 1


@functools.cache
def _key(expression: Expression) -> tuple[bool, tuple[tuple[int, str], ...], int, str]:
    """Constants last; then by variables: the gate, the up value, operands; simple first."""
    constant = isinstance(expression, Constant)
    by_variables = tuple(sorted(map(_place, variables(expression))))
    return constant, by_variables, size(expression), str(expression)


def _place(variable: str) -> tuple[int, str]:
    """Where a variable stands among others: operands after projections, by their numbers."""
    index = index_of(variable)
    return (0, variable) if index is None else (1 + index, "")


class Product(NamedTuple):
    """``constant`` times the factors ``over``, divided by the factors ``under``."""

    constant: float
    over: tuple[Expression, ...] = ()
    under: tuple[Expression, ...] = ()

    def times(self, other: Product) -> Product:
        constant = self.constant * other.constant
        over, under = self.over + other.over, self.under + other.under
        if math.isfinite(constant):
            return Product(constant, over, under)
        return Product(1.0, (*over, Constant(self.constant), Constant(other.constant)), under)

    def inverse(self) -> Product:
        if self.constant == 0.0 or math.isinf(1.0 / self.constant):
            return Product(1.0, self.under, (*self.over, Constant(self.constant)))
        return Product(1.0 / self.constant, self.under, self.over)

    def expression(self) -> Expression:
        sign = -1.0 if self.constant == -1.0 else 1.0
        over = _multiplied([Constant(sign * self.constant), *_powers(self.over)])
        return call("mul", sign, call("div", over, _multiplied(_powers(self.under))))


def factored(expression: Expression) -> Product:
    """The factors of an expression, each as often as it occurs."""
    match expression:
        case Constant(value) if math.isfinite(value):
            return Product(value)
        case Call("mul", (a, b)):
            return factored(a).times(factored(b))
        case Call("div", (a, b)):
            return factored(a).times(factored(b).inverse())
        case Call("neg", (a,)):
            return factored(a).times(Product(-1.0))
        case Call("reciprocal", (a,)):
            return factored(a).inverse()
        case Call("square", (a,)):
            return factored(a).times(factored(a))
        case Call("pow", (a, Constant(2.0 | 3.0 | 4.0 as exponent))):
            return functools.reduce(Product.times, [factored(a)] * int(exponent))
    return Product(1.0, (expression,))


def _powers(factors: Iterable[Expression]) -> list[Expression]:
    powers = [
        call("square", base) if count == 2 else call("pow", base, float(count))
        for base, count in Counter(factors).items()
    ]
    return sorted(powers, key=_key)


def _multiplied(factors: Iterable[Expression]) -> Expression:
    one: Expression = Constant(1.0)
    return functools.reduce(functools.partial(call, "mul"), factors, one)


def _sum(expression: Expression) -> Expression:
    constant, positive, negative = 0.0, list[Expression](), list[Expression]()
    for sign, term in _terms(expression, 1.0):
        if isinstance(term, Constant) and math.isfinite(constant + sign * term.value):
            constant += sign * term.value
        else:
            (positive if sign > 0.0 else negative).append(term)
    positive, negative = _multiples(positive), _multiples(negative)
    (positive if constant > 0.0 else negative).append(Constant(abs(constant)))
    zero: Expression = Constant(0.0)
    total = functools.reduce(functools.partial(call, "add"), positive, zero)
    return functools.reduce(functools.partial(call, "sub"), negative, total)


def _terms(expression: Expression, sign: float) -> Iterator[tuple[float, Expression]]:
    match expression:
        case Call("add", (a, b)):
            yield from _terms(a, sign)
            yield from _terms(b, sign)
        case Call("sub", (a, b)):
            yield from _terms(a, sign)
            yield from _terms(b, -sign)
        case Call("neg", (Call("add" | "sub", _) as a,)):
            yield from _terms(a, -sign)
        case _:
            product = factored(expression)
            if product.constant < 0.0:
                sign, product = -sign, product._replace(constant=-product.constant)
            yield sign, product.expression()


def _multiples(terms: Iterable[Expression]) -> list[Expression]:
    multiples = [
        term if count == 1 else factored(term).times(Product(float(count))).expression()
        for term, count in Counter(terms).items()
    ]
    return sorted(multiples, key=_key)
