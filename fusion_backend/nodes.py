"""The nodes of activation expressions, and how they print."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fusion_backend.errors import ExpressionError
from fusion_backend.functions import FUNCTIONS


class Expression:
    """Base class of :class:`Constant`, :class:`Variable` and :class:`Call`."""

    __slots__ = ()

    def __str__(self) -> str:
        return _text(self, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Constant(Expression):
    """A number. It may be infinite (a bound of ``clamp``), never NaN; -0.0 and 0.0 differ."""

    value: float

    def __post_init__(self) -> None:
        if math.isnan(self.value):
            raise ExpressionError("a constant of an activation must be a number, got nan")
        object.__setattr__(self, "value", float(self.value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and repr(self.value) == repr(other.value)

    def __hash__(self) -> int:
        return hash(repr(self.value))


@dataclass(frozen=True, slots=True)
class Variable(Expression):
    """An input of the activation."""

    name: str

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name in ("inf", "nan"):
            raise ExpressionError(f"a variable's name must be an identifier, got {self.name!r}")


@dataclass(frozen=True, slots=True)
class Call(Expression):
    """A function of :data:`FUNCTIONS` applied to arguments."""

    function: str
    arguments: tuple[Expression, ...]

    def __post_init__(self) -> None:
        function = FUNCTIONS.get(self.function)
        if function is None:
            raise ExpressionError(
                f"an activation may call {', '.join(FUNCTIONS)}; got {self.function}"
            )
        if len(self.arguments) != len(function.parameters):
            raise ExpressionError(
                f"{self.function} takes {', '.join(function.parameters)}; "
                f"got {len(self.arguments)} arguments"
            )


def check_constants(call: Call) -> None:
    """Raises an ExpressionError if a parameter that must be constant is given something else."""
    function = FUNCTIONS[call.function]
    first = len(call.arguments) - function.constants
    for argument, name in zip(call.arguments[first:], function.parameters[first:], strict=True):
        if not isinstance(argument, Constant):
            raise ExpressionError(f"{function.name} needs a constant {name}, got {argument}")


def variables(expression: Expression) -> tuple[str, ...]:
    """Names of the variables, each once, in the order of their first appearance."""
    if isinstance(expression, Variable):
        return (expression.name,)
    if isinstance(expression, Call):
        return tuple(dict.fromkeys(v for a in expression.arguments for v in variables(a)))
    return ()


_INFIX = {
    "lt": ("<", 1),
    "le": ("<=", 1),
    "gt": (">", 1),
    "ge": (">=", 1),
    "eq": ("==", 1),
    "ne": ("!=", 1),
    "add": ("+", 2),
    "sub": ("-", 2),
    "mul": ("*", 3),
    "div": ("/", 3),
}
_NEGATION = 4


def _text(expression: Expression, minimum: int) -> str:
    """Prints ``expression``, in parentheses if it binds less tightly than ``minimum``."""
    if isinstance(expression, Constant):
        return repr(expression.value)
    if isinstance(expression, Variable):
        return expression.name
    assert isinstance(expression, Call)
    name, arguments = expression.function, expression.arguments
    if name in _INFIX:
        symbol, level = _INFIX[name]
        # Arithmetic associates to the left; comparisons do not associate at all.
        left = _text(arguments[0], level if level > 1 else level + 1)
        text = f"{left} {symbol} {_text(arguments[1], level + 1)}"
    elif name == "neg" and not isinstance(arguments[0], Constant):
        text, level = f"-{_text(arguments[0], _NEGATION)}", _NEGATION
    else:
        return f"{name}({', '.join(_text(argument, 0) for argument in arguments)})"
    return f"({text})" if level < minimum else text
