"""The nodes of activation expressions, their kinds of number, and how they print.

Every node is a truth value, an integer or a float. As in PyTorch, arithmetic has the highest kind
of its operands, comparisons are truth values, and a number has the kind of what it meets. Integers
are made of truth values and whole numbers only, so their range is known, see :func:`bounds`.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fusion_backend.errors import ExpressionError
from fusion_backend.mlp.expression.functions import FUNCTIONS, NumberKind

_KINDS: tuple[NumberKind, ...] = ("bool", "int", "float")
_MONOTONIC: Mapping[str, Callable[..., int]] = {
    "add": operator.add,
    "bitwise_not": operator.invert,
    "int": operator.pos,
    "maximum": max,
    "minimum": min,
    "mul": operator.mul,
    "neg": operator.neg,
    "sub": operator.sub,
}
_TYPES = {"bool": bool, "int": int, "float": float}


class Expression:
    """Base class of :class:`Constant`, :class:`Variable` and :class:`Call`."""

    __slots__ = ()

    @property
    def kind(self) -> NumberKind:
        """The kind of number that it is."""
        raise NotImplementedError

    def __str__(self) -> str:
        return _text(self, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Constant(Expression):
    """A number. It may be infinite (a bound of ``clamp``), never NaN; -0.0 and 0.0 differ."""

    value: float

    def __post_init__(self) -> None:
        if not isinstance(self.value, (bool, int, float)) or math.isnan(self.value):
            raise ExpressionError(f"a constant of an activation must be a number, got {self.value}")

    @property
    def kind(self) -> NumberKind:
        return "float" if isinstance(self.value, float) else _kind_of_whole(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and repr(self.value) == repr(other.value)

    def __hash__(self) -> int:
        return hash(repr(self.value))


def _kind_of_whole(value: int) -> NumberKind:
    return "bool" if isinstance(value, bool) else "int"


@dataclass(frozen=True, slots=True)
class Variable(Expression):
    """An input of the activation: a float, or the seed of a dropout."""

    name: str

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name in ("inf", "nan"):
            raise ExpressionError(f"a variable's name must be an identifier, got {self.name!r}")

    @property
    def kind(self) -> NumberKind:
        return "float"


@dataclass(frozen=True, slots=True)
class Call(Expression):
    """A function of :data:`FUNCTIONS` applied to arguments.

    Attributes:
        function: its name.
        arguments: what it is applied to; numbers among them are of the kind in ``operand_kinds``.
        kind: of the result.
        operand_kinds: the kind that each argument is converted to before the function is computed.
    """

    function: str
    arguments: tuple[Expression, ...]
    kind: NumberKind = field(init=False, compare=False, repr=False)
    operand_kinds: tuple[NumberKind, ...] = field(init=False, compare=False, repr=False)
    _hash: int = field(init=False, compare=False, repr=False)

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
        met = self.arguments[1:] if self.function == "where" else self.arguments
        highest = joined(*(argument.kind for argument in met))
        if function.integral and highest == "float":
            raise ExpressionError(f"{self.function} needs integers, got {self}")
        kind = "bool" if function.boolean else joined(function.least, highest)
        taken = _operand_kinds(self.function, len(self.arguments), kind, highest)
        arguments = map(_of_kind, self.arguments, taken)
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "operand_kinds", taken)
        object.__setattr__(self, "arguments", tuple(arguments))
        object.__setattr__(self, "_hash", hash((self.function, self.arguments)))

    def __hash__(self) -> int:
        # Computed once: whatever is made of an activation is looked up by it in every eager call.
        return self._hash

    def __reduce__(self) -> tuple[type[Call], tuple[str, tuple[Expression, ...]]]:
        # Hashes of text differ from process to process.
        return Call, (self.function, self.arguments)


def joined(*kinds: NumberKind) -> NumberKind:
    """The highest of some kinds: what PyTorch promotes their sum to."""
    return max(kinds, key=_KINDS.index)


def _operand_kinds(
    function: str, count: int, kind: NumberKind, highest: NumberKind
) -> tuple[NumberKind, ...]:
    if function == "where":
        return ("bool", kind, kind)
    taken: NumberKind = kind
    if function.startswith("logical_"):
        taken = "bool"
    elif _compares(function):
        taken = joined("int", highest)  # truth values are compared as the integers they stand for
    return (taken,) * count


def _compares(function: str) -> bool:
    return FUNCTIONS[function].boolean


def _of_kind(argument: Expression, kind: NumberKind) -> Expression:
    """A number as one of this kind; any other expression as it is."""
    if isinstance(argument, Constant) and argument.kind != kind:
        return Constant(_TYPES[kind](argument.value))
    return argument


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


def bounds(expression: Expression) -> tuple[int, int]:
    """The least and the greatest value that a truth value or an integer may have.

    Raises:
        ExpressionError: it is a float.
    """
    match expression:
        case Constant(int() as value):
            return int(value), int(value)
        case Call(_, arguments) if expression.kind == "int":
            if expression.function == "where":
                arguments = arguments[1:]
            return _bounds(expression.function, [bounds(argument) for argument in arguments])
        case Call(_, _) if expression.kind == "bool":
            return 0, 1
    raise ExpressionError(f"only an integer has bounds, got {expression}")


def _bounds(function: str, operands: list[tuple[int, int]]) -> tuple[int, int]:
    corners = list(itertools.product(*operands))
    scalar = _MONOTONIC.get(function)
    if scalar is not None:
        # Of functions that rise or fall in each operand the extremes are at corners.
        values = [scalar(*corner) for corner in corners]
    elif function in ("abs", "square"):
        values = [abs(a) ** (2 if function == "square" else 1) for (a,) in corners] + [0]
    elif function == "where":
        values = [bound for corner in corners for bound in corner]
    else:
        # Bits of two's complement: as many as the longer operand has.
        length = max(bound.bit_length() for corner in corners for bound in corner)
        values = [-(2**length), 2**length - 1]
    return min(values), max(values)
