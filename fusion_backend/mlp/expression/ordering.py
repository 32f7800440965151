"""One order for the operands of sums, products and other commutative functions.

Only what is the same in every rounding is done: two operands change places, a sign moves, a number
that is a power of two divides by multiplying. Terms and factors stay in the groups in which they
are written: ``(x + 1e8) - 1e8`` is a rounding, and ``(x * 1e30) * 1e-30`` may overflow.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from fusion_backend.mlp.expression.nodes import Call, Constant, Expression, variables
from fusion_backend.mlp.expression.operand_names import index_of
from fusion_backend.mlp.expression.simplification import call

_COMMUTATIVE = (
    *("add", "mul", "maximum", "minimum", "eq", "ne", "logical_and", "logical_or"),
    *("bitwise_and", "bitwise_or", "bitwise_xor"),
)
_MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}


def ordered(expression: Expression) -> Expression:
    """Puts the operands of the outermost function in order; those inside must be ordered."""
    match expression:
        case Call("add" | "sub" as name, (a, b)) if expression.kind == "float":
            return _sum(name, a, b)
        case Call("mul", (a, b)) if expression.kind == "float":
            return _product(a, b)
        case Call("neg", (a,)) if expression.kind == "float":
            return _product(Constant(-1.0), a)
        case Call("reciprocal", (a,)):
            return _quotient(Constant(1.0), a)
        case Call("pow", (a, Constant(2.0))):
            return call("square", a)
        case Call("div", (a, b)) if expression.kind == "float":
            return _quotient(a, b)
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


def _sum(name: str, a: Expression, b: Expression) -> Expression:
    """Positive terms first, constants last; twice a term is a product."""
    (of_a, a), (of_b, b) = _signed(a), _signed(b)
    if name == "sub":
        of_b = -of_b
    if a == b and of_a == of_b and not isinstance(a, Constant):
        return ordered(call("mul", of_a * 2.0, a))
    if of_a == of_b:
        a, b = sorted((a, b), key=_key)
        total = call("add", a, b)
        # -a - b has another zero than -(a + b) only if both are zeros, and then it is the sign
        return total if of_a > 0.0 else call("sub", call("neg", a), b)
    return call("sub", a, b) if of_a > 0.0 else call("sub", b, a)


def _signed(term: Expression) -> tuple[float, Expression]:
    """The sign of a term, where it is written, and the rest of it."""
    match term:
        case Constant(value) if math.copysign(1.0, value) < 0.0:
            return -1.0, Constant(-value)
        case Call("neg", (x,)):
            return -1.0, x
        case Call("mul", (Constant(value), x)) if value < 0.0:
            return -1.0, call("mul", -value, x)
    return 1.0, term


def _product(a: Expression, b: Expression) -> Expression:
    """A number first, then sorted factors; a sign outside, equal factors as a power."""
    (of_a, a), (of_b, b) = _signed(a), _signed(b)
    sign = of_a * of_b
    if isinstance(a, Constant) or isinstance(b, Constant):
        number, x = (a, b) if isinstance(a, Constant) else (b, a)
        assert isinstance(number, Constant)
        if abs(number.value) == 1.0 and sign * number.value < 0.0:
            return _negated(x)
        match x:
            case Call("mul", (Constant(inner), y)) if _is_small_power(inner, number.value):
                return call("mul", sign * number.value * inner, y)
        return call("mul", sign * number.value, x)
    power = _power_of(a, b)
    if power is None:
        power = call("mul", *sorted((a, b), key=_key_of_factor))
    return power if sign > 0.0 else call("neg", power)


def _negated(x: Expression) -> Expression:
    match x:
        case Call("mul", (Constant(value), y)):
            return call("mul", -value, y)
        case Call("div", (Constant(value), y)):
            return call("div", -value, y)
    return call("neg", x)


def _key_of_factor(factor: Expression) -> tuple[Any, ...]:
    """Products and quotients first: they need no parentheses there."""
    return not (isinstance(factor, Call) and factor.function in ("mul", "div")), _key(factor)


def _power_of(a: Expression, b: Expression) -> Expression | None:
    if a == b:
        return call("square", a)
    for x, other in ((a, b), (b, a)):
        if other == Call("square", (x,)):
            return call("pow", x, 3.0)
    return None


def _quotient(a: Expression, b: Expression) -> Expression:
    """A sign outside; a power of two multiplies."""
    (of_a, a), (of_b, b) = _signed(a), _signed(b)
    sign = of_a * of_b
    if isinstance(b, Constant) and _is_invertible(b.value) and not isinstance(a, Constant):
        return _product(Constant(sign / b.value), a)
    if isinstance(a, Constant):
        return call("div", sign * a.value, b)
    quotient = call("div", a, b)
    return quotient if sign > 0.0 else call("neg", quotient)


def _is_small_power(*values: float) -> bool:
    """Whether numbers are powers of two, by which all but the largest numbers can be multiplied."""
    return all(_is_invertible(value) and 2.0**-8 <= abs(value) <= 2.0**8 for value in values)


def _is_invertible(value: float) -> bool:
    """Whether the quotient by it is the product with its reciprocal, in every rounding."""
    return 2.0**-100 <= abs(value) <= 2.0**100 and math.frexp(value)[0] in (0.5, -0.5)
