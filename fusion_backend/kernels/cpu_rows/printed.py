"""Prints an activation expression, and its derivatives, as C++ functions of vectors of float32.

    silu(g) * u    →    template <> inline Vec activation<0>(Vec g, Vec u, …) { …; return t4; }

The vectors are ATen's (``at::vec::Vectorized<float>``), as in Inductor's own C++. Their functions
are accurate to about one unit in the last place on every instruction set. Equal sub-expressions are
computed once. Truth values are masks: all bits of an element set, or none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from fusion_backend.mlp.expression import (
    FUNCTIONS,
    Call,
    Constant,
    Expression,
    Variable,
    call,
    differentiate,
    variables,
)
from fusion_backend.mlp.expression.operand_names import index_of, name_of
from fusion_backend.mlp.expression.philox import scale, threshold
from fusion_backend.mlp.expression.simplification import bind
from fusion_backend.mlp.operands import Kind

# What these functions are in C++; others have an expansion.
SPELLINGS: Mapping[str, str] = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "float": "{0}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "neg": "{0}.neg()",
    "square": "{0} * {0}",
    "reciprocal": "Vec(1.0f) / {0}",
    "sqrt": "{0}.sqrt()",
    "rsqrt": "Vec(1.0f) / {0}.sqrt()",
    "pow": "{0}.pow({1})",
    "exp": "exponential({0})",
    "exp2": "{0}.exp2()",
    "expm1": "{0}.expm1()",
    "log": "{0}.log()",
    "log2": "{0}.log2()",
    "log1p": "{0}.log1p()",
    "sin": "{0}.sin()",
    "cos": "{0}.cos()",
    "atan": "{0}.atan()",
    "sinh": "{0}.sinh()",
    "cosh": "{0}.cosh()",
    "tanh": "hyperbolic_tangent({0})",
    "erf": "error_function({0})",
    "erfc": "{0}.erfc()",
    "abs": "{0}.abs()",
    "sign": "Vec::blendv(Vec::blendv(Vec(0.0f), Vec(-1.0f), {0} < Vec(0.0f)), Vec(1.0f), "
    "{0} > Vec(0.0f))",
    "relu": "at::vec::maximum({0}, Vec(0.0f))",  # which passes NaN on, as does minimum
    "maximum": "at::vec::maximum({0}, {1})",
    "minimum": "at::vec::minimum({0}, {1})",
    "where": "Vec::blendv({2}, {1}, {0})",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "logical_and": "{0} & {1}",
    "logical_or": "{0} | {1}",
    "logical_not": "as_number({0}) == Vec(0.0f)",
}


def is_printable(expression: Expression) -> bool:
    """Whether an expression is of floats, and of truth values that choose or become floats.

    Integers, and arithmetic of truth values, are left to others.
    """
    if not isinstance(expression, Call):
        return True
    function = FUNCTIONS[expression.function]
    if function.boolean:
        taken = "bool" if expression.function.startswith("logical_") else "float"
        fits = set(expression.operand_kinds) == {taken}
    elif expression.function == "where":
        fits = expression.operand_kinds == ("bool", "float", "float")
    else:
        fits = set(expression.operand_kinds) == {"float"} and expression.kind == "float"
    return fits and all(map(is_printable, expression.arguments))


def activation_function(layer: int, expression: Expression, kinds: Sequence[Kind]) -> str:
    """The C++ of one activation.

    Args:
        layer: after which it comes.
        expression: of ``x``, or of ``g`` and ``u``, and of operands.
        kinds: what each operand is.
    """
    writer = _Writer(kinds)
    result = writer.value(expression)
    return (
        f"template <> inline Vec activation<{layer}>(\n"
        "    Vec g, Vec u, int64_t row, int64_t column, int64_t count,\n"
        "    const Operands& operands) {\n"
        f"  // {expression}\n"
        f"{_lines(writer)}  return {result};\n}}\n"
    )


def calls(*expressions: Expression) -> Counter[str]:
    """How often C++ calls each function for an element, by its name in the language.

    What several of the expressions have in common is computed once, and functions that simpler ones
    make up are counted as those.
    """
    operands = [index_of(name) for each in expressions for name in variables(each)]
    writer = _Writer(["scalar"] * (1 + max((i for i in operands if i is not None), default=-1)))
    for expression in expressions:
        writer.value(expression)
    return writer.calls


def partial_derivatives(
    expression: Expression, gated: bool, wanted: Sequence[int]
) -> tuple[Expression, ...]:
    """The gradients of up, of the gate where there is one, and of the operands that are wanted.

    They are expressions of the variables of ``expression`` and of its own gradient ``d``, which
    autograd multiplies by one derivative after the other.
    """
    names = ("u", "g") if gated else ("x",)
    whole = call("mul", Variable("d"), expression)
    return tuple(differentiate(whole, name) for name in (*names, *map(name_of, wanted)))


def differentiated_function(
    expression: Expression,
    gated: bool,
    kinds: Sequence[Kind],
    wanted: Sequence[int],
) -> str:
    """The C++ of an activation and of the gradients of what it is of.

    ``results`` begins with the activation, the gradient of up and that of the gate, if there is
    one. Those of operands follow, of which a tensor of a value an element is written where it
    belongs, and the terms of the others' sums are results.

    Args:
        expression: of ``x``, or of ``g`` and ``u``, and of operands.
        gated: whether it is of two.
        kinds: what each operand is.
        wanted: of which operands the gradient is wanted.
    """
    writer = _Writer(kinds)
    postact = writer.value(expression)
    of_up, *others = partial_derivatives(expression, gated, wanted)
    results = [postact, writer.value(of_up)]
    results.append(writer.value(others.pop(0)) if gated else "Vec(0.0f)")
    values = [writer.value(partial) for partial in others]
    lines = "".join(f"  results[{i}] = {value};\n" for i, value in enumerate(results))
    place = "row * operands.hidden + column, count"
    for i, (index, value) in enumerate(zip(wanted, values, strict=True)):
        if kinds[index] == "elementwise":
            lines += f"  write({value}, operands.d{index} + {place});\n"
        else:
            lines += f"  results[{3 + i}] = {value};\n"
    return (
        "inline void differentiated(\n"
        "    Vec g, Vec u, Vec d, int64_t row, int64_t column, int64_t count,\n"
        "    const Operands& operands, Vec* results) {\n"
        f"  // {expression}\n"
        f"{_lines(writer)}{lines}}}\n"
    )


def _lines(writer: _Writer) -> str:
    return "".join(f"  const Vec {line};\n" for line in writer.lines)


class _Writer:
    """Straight-line code under construction: a line for each different operation."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self.lines: list[str] = []
        self.calls: Counter[str] = Counter()
        self._kinds = kinds
        self._names: dict[Expression, str] = {}
        self._exponentials: dict[Expression, str] = {}  # by arguments of sigmoids

    def value(self, expression: Expression, boolean: bool = False) -> str:
        """The C++ of a value, as a mask or as a vector of numbers."""
        if isinstance(expression, Constant):
            number = f"Vec({_number(expression.value)})"
            return f"{number} != Vec(0.0f)" if boolean else number
        name = self._name(expression)
        if _is_boolean(expression) == boolean:
            return name
        return f"({name} != Vec(0.0f))" if boolean else f"as_number({name})"

    def _name(self, expression: Expression) -> str:
        if expression not in self._names:
            if isinstance(expression, Variable):
                self._names[expression] = self._variable(expression.name)
            else:
                assert isinstance(expression, Call)
                self._names[expression] = self._computed(expression)
        return self._names[expression]

    def _variable(self, name: str) -> str:
        index = index_of(name)
        if index is None:
            return {"x": "u", "g": "g", "u": "u", "d": "d"}[name]
        operand = f"operands.p{index}"
        code = {
            "scalar": f"Vec(static_cast<float>(*{operand}))",
            "vector": f"read({operand} + column, count)",
            "elementwise": f"read({operand} + row * operands.ld{index} + column, count)",
        }
        return self._assigned(code[self._kinds[index]])

    def _computed(self, expression: Call) -> str:
        match expression:
            case Call("dropout", (Constant(1.0), Variable(seed), Constant(p))):
                self.calls["dropout"] += 1
                limit, factor = threshold(p), _number(scale(p))
                seed_of = f"*operands.p{index_of(seed)}"
                return self._assigned(f"kept({seed_of}, row, column, {limit}u, {factor})")
            case Call("sigmoid", (x,)):
                return self._assigned(f"Vec(1.0f) / (Vec(1.0f) + {self._exponential_of(x)})")
            case Call("sub", (Constant(1.0), Call("sigmoid", (x,)) as sigmoid)):
                # A sigmoid near 1 leaves few digits of the difference, which is sigmoid(-x).
                s, e = self.value(sigmoid), self._exponential_of(x)
                code = f"Vec::blendv({e} * {s}, Vec(1.0f) - {s}, {self.value(x)} < Vec(1.0f))"
                return self._assigned(code)
        simpler = _expanded(expression)
        if simpler is not None:
            return self.value(simpler)
        self.calls[expression.function] += 1
        logical = expression.function.startswith("logical_")
        chooses = expression.function == "where"
        operands = [
            self.value(argument, boolean=logical or (chooses and position == 0))
            for position, argument in enumerate(expression.arguments)
        ]
        bracketed = [f"({operand})" if " " in operand else operand for operand in operands]
        return self._assigned(SPELLINGS[expression.function].format(*bracketed))

    def _exponential_of(self, x: Expression) -> str:
        """e^-x as the sigmoid of x needs it."""
        if x not in self._exponentials:
            self.calls["exp"] += 1
            code = f"exponential_for_sigmoid(({self.value(x)}).neg())"
            self._exponentials[x] = self._assigned(code)
        return self._exponentials[x]

    def _assigned(self, code: str) -> str:
        name = f"t{len(self.lines)}"
        self.lines.append(f"{name} = {code}")
        return name


def _expanded(expression: Call) -> Expression | None:
    """The call in terms of simpler functions; None if C++ has it."""
    match expression:
        case Call("clamp", (x, Constant(low), Constant(high))):
            x = x if low == -math.inf else call("maximum", x, low)
            return x if high == math.inf else call("minimum", x, high)
        case Call("pow", (x, Constant(exponent))):
            return _power(x, exponent)
        case Call("dropout", (x, seed, p)):
            return call("mul", x, Call("dropout", (Constant(1.0), seed, p)))
    if expression.function in SPELLINGS:
        return None
    expansion = FUNCTIONS[expression.function].expansion
    assert expansion is not None, f"{expression.function} has neither spelling nor expansion"
    return bind(expansion, expression)


def _power(x: Expression, exponent: float) -> Expression | None:
    """The powers that ATen computes by multiplications and roots; None for the others."""
    if exponent < 0.0:
        return call("reciprocal", call("pow", x, -exponent))
    if exponent == 0.5:
        return call("sqrt", x)
    if exponent == 2.0:
        return call("square", x)
    if exponent > 64.0 or exponent != int(exponent):
        return None
    half, odd = divmod(int(exponent), 2)
    even = call("square", call("pow", x, float(half)))
    return call("mul", x, even) if odd else even


def _number(value: float) -> str:
    if math.isinf(value):
        sign = "-" if value < 0.0 else ""
        return f"{sign}std::numeric_limits<float>::infinity()"
    return f"static_cast<float>({value!r})"


def _is_boolean(expression: Expression) -> bool:
    return isinstance(expression, Call) and FUNCTIONS[expression.function].boolean
