"""Building activation expressions without the operations that change nothing.

Only identities that hold for every number are used, for NaN, infinities and both zeros too, and
for every rounding: ``x * 1.0`` is ``x``, but ``x * 0.0`` and ``x + 0.0`` stay.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

from fusion_backend.mlp.expression.functions import FUNCTIONS, NumberKind
from fusion_backend.mlp.expression.nodes import (
    Call,
    Constant,
    Expression,
    Variable,
    check_constants,
)
from fusion_backend.mlp.expression.parsing import parse_template

# What float32 holds with full precision, with room for a sum or product of two.
_LEAST, _GREATEST = 1e-18, 1e18

_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")
}


def call(function: str, *arguments: Expression | float) -> Expression:
    """Applies ``function``, folding constants and dropping operations that change nothing.

    Raises:
        ExpressionError: there is no such function, or its arguments do not fit it.
    """
    made = Call(function, tuple(a if isinstance(a, Expression) else Constant(a) for a in arguments))
    check_constants(made)
    return _folded(made) or _shortened(made) or made


def as_kind(expression: Expression, kind: NumberKind) -> Expression:
    """The expression as a number of this kind, by a conversion where it is of another one."""
    if expression.kind == kind:
        return expression
    return call("ne", expression, 0.0) if kind == "bool" else call(kind, expression)


def _folded(made: Call) -> Constant | None:
    """The value of a call of constants; None where it is not known, or not to every dtype."""
    values = [a.value for a in made.arguments if isinstance(a, Constant)]
    if len(values) < len(made.arguments):
        return None
    if made.function in _COMPARISONS:
        return Constant(_COMPARISONS[made.function](values[0], values[1]))
    if made.function in ("float", "int"):
        return Constant(values[0])
    scalar = FUNCTIONS[made.function].scalar
    if scalar is None or made.kind != "float" or not all(map(_is_moderate, values)):
        return None
    try:
        value = scalar(*values)
    except (ArithmeticError, ValueError):
        return None
    return Constant(float(value)) if _is_moderate(value) else None


def _is_moderate(value: float) -> bool:
    return value == 0.0 or _LEAST <= abs(value) <= _GREATEST


def _shortened(made: Call) -> Expression | None:
    """A part of the call that has its value, or None."""
    if made.kind == "bool":
        return _shortened_condition(made)
    found: Expression | None = None
    match made.function, made.arguments:
        case ("add", (x, Constant(0.0) as zero)) | ("add", (Constant(0.0) as zero, x)):
            # -0.0 + 0.0 is 0.0
            found = x if zero == Constant(-0.0) or zero.kind == "int" else None
        case ("sub", (x, Constant(0.0) as zero)):
            found = x if zero != Constant(-0.0) else None
        case ("mul", (x, Constant(1.0))) | ("mul", (Constant(1.0), x)):
            found = x
        case ("mul", (x, Constant(-1.0))) | ("mul", (Constant(-1.0), x)):
            found = call("neg", x)
        case ("div", (x, Constant(1.0))):
            found = x
        case ("neg", (Call("neg", (x,)),)):
            found = x
        case ("pow", (x, Constant(1.0))):
            found = x
        case ("pow", (_, Constant(0.0))):
            found = Constant(1.0)
        case ("where", (_, x, y)) if x == y:
            found = x
        case ("where", (Constant(condition), x, y)):
            found = x if condition else y
        case ("dropout", (x, _, Constant(0.0))):
            found = x
        case ("float" | "int", (x,)) if x.kind == made.kind:
            found = x
        case ("float", (Call("int", (x,)),)):
            return call("float", x)
    return None if found is None else as_kind(found, made.kind)


def _shortened_condition(made: Call) -> Expression | None:
    match made.function, made.arguments:
        case ("logical_and" | "mul", (x, Constant(True))) | (
            "logical_and" | "mul",
            (Constant(True), x),
        ):
            return as_kind(x, "bool")
        case ("logical_or" | "add", (x, Constant(False))) | (
            "logical_or" | "add",
            (Constant(False), x),
        ):
            return as_kind(x, "bool")
        case ("logical_and" | "mul", (_, Constant(False))) | (
            "logical_and" | "mul",
            (Constant(False), _),
        ):
            return Constant(False)
        case ("logical_or" | "add", (_, Constant(True))) | (
            "logical_or" | "add",
            (Constant(True), _),
        ):
            return Constant(True)
        case ("logical_not", (Constant(value),)):
            return Constant(not value)
        case ("where", (_, x, y)) if x == y:
            return x
        case ("where", (Constant(condition), x, y)):
            return as_kind(x if condition else y, "bool")
        case ("ne", (Call() as x, Constant(0))) if x.kind == "bool":
            return x
    return None


def substitute(expression: Expression, values: Mapping[str, Expression]) -> Expression:
    """Replaces variables by expressions, simplifying as :func:`call` does."""
    if isinstance(expression, Variable):
        return values.get(expression.name, expression)
    if isinstance(expression, Call):
        return call(expression.function, *(substitute(a, values) for a in expression.arguments))
    return expression


def bind(text: str, applied: Call) -> Expression:
    """A text of the table of functions, with the arguments of a call for the parameters.

    The texts are of floats.
    """
    parameters = FUNCTIONS[applied.function].parameters
    arguments = (as_kind(argument, "float") for argument in applied.arguments)
    return substitute(parse_template(text), dict(zip(parameters, arguments, strict=True)))
