"""Building activation expressions without the operations that change nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fusion_backend.functions import FUNCTIONS
from fusion_backend.nodes import Call, Constant, Expression, Variable, check_constants
from fusion_backend.parsing import parse_template


def call(function: str, *arguments: Expression | float) -> Expression:
    """Applies ``function``, folding constants and dropping operations that change nothing.

    Only identities that hold for NaN and infinities too are used: ``x * 1.0`` is ``x``, but
    ``x * 0.0`` stays. (``x + 0.0`` is ``x``: the sign of a zero may differ.)

    Raises:
        ExpressionError: there is no such function, or its arguments do not fit it.
    """
    made = Call(function, tuple(a if isinstance(a, Expression) else Constant(a) for a in arguments))
    check_constants(made)
    return _folded(made) or _shortened(made) or made


def _folded(made: Call) -> Constant | None:
    """The value of a call of constants; None where it is not a finite number."""
    scalar = FUNCTIONS[made.function].scalar
    values = [a.value for a in made.arguments if isinstance(a, Constant)]
    if scalar is None or len(values) < len(made.arguments):
        return None
    try:
        value = scalar(*values)
    except (ArithmeticError, ValueError):
        return None
    return Constant(value) if math.isfinite(value) else None


def _shortened(made: Call) -> Expression | None:
    zero, one = Constant(0.0), Constant(1.0)
    match made.function, made.arguments:
        case ("add", (x, y)) if y == zero or x == zero:
            return x if y == zero else y
        case ("sub", (x, y)) if y == zero or x == zero:
            return x if y == zero else call("neg", y)
        case ("mul", (x, y)) if y == one or x == one:
            return x if y == one else y
        case ("mul", (x, y)) if y == Constant(-1.0) or x == Constant(-1.0):
            return call("neg", x if y == Constant(-1.0) else y)
        case ("div", (x, y)) if y == one:
            return x
        case ("neg", (Call("neg", (x,)),)):
            return x
        case ("pow", (x, Constant(exponent))) if exponent in (0.0, 1.0):
            return x if exponent == 1.0 else one
        case ("where", (_, x, y)) if x == y:
            return x
        case ("dropout", (x, _, Constant(0.0))):
            return x
        case ("logical_and", (a, b)) if _is_no_bound(a) or _is_no_bound(b):
            return b if _is_no_bound(a) else a
    return None


def _is_no_bound(condition: Expression) -> bool:
    """Whether this is the side of a ``clamp`` without a limit: x > -inf or x < inf."""
    match condition:
        case Call("gt" | "ge", (_, Constant(limit))):
            return limit == -math.inf
        case Call("lt" | "le", (_, Constant(limit))):
            return limit == math.inf
    return False


def substitute(expression: Expression, values: Mapping[str, Expression]) -> Expression:
    """Replaces variables by expressions, simplifying as :func:`call` does."""
    if isinstance(expression, Variable):
        return values.get(expression.name, expression)
    if isinstance(expression, Call):
        return call(expression.function, *(substitute(a, values) for a in expression.arguments))
    return expression


def bind(text: str, applied: Call) -> Expression:
    """A text of the table of functions, with the arguments of a call for the parameters."""
    parameters = FUNCTIONS[applied.function].parameters
    return substitute(parse_template(text), dict(zip(parameters, applied.arguments, strict=True)))
