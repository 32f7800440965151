"""Expressions in the terms of NVIDIA's special-function unit, exact enough for 16 bits.

The unit computes powers of two, so exponentials of any other base first multiply their argument:
here by changing constants that the argument has already. It has no error function; the normal
distribution function is a logistic function of a polynomial instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion_backend.mlp.expression import FUNCTIONS, Call, Constant, Expression, call
from fusion_backend.mlp.expression.simplification import bind

# log((1 + erf(z)) / (1 - erf(z))) / z as a polynomial of z². Of Φ = (1 + erf(z)) / 2, the normal
# distribution function, it makes an error of no more than 2^-11.3 (Φ + 2^-14) for bfloat16, and
# 2^-16.3 (Φ + 2^-11) for float16. The float32 sum 1 + erf(z) also has an error that does not fall
# with Φ, of about 2^-25. Weighted least squares, reweighted until the largest errors were equal.
_LOG_ODDS = {
    torch.bfloat16: (
        2.2547848759785567,
        0.21033140074314846,
        -0.0038634615001101485,
        -0.00015080493816117149,
        1.20813746628911e-05,
    ),
    torch.float16: (
        2.256687129099932,
        0.20577972622153376,
        -0.0006231606333026881,
        -0.0011411140683849521,
        0.0001569284330926084,
        -9.875113509597022e-06,
        2.4748780003136517e-07,
    ),
}


# What the unit computes with an error that does not fall with the value: of functions that fall to
# zero, little of it is right there.
_APPROXIMATED = ("sigmoid", "erf", "tanh", "sin", "cos")
# Near zero, or of small differences, these make small errors large, or see them.
_AMPLIFYING = (
    *("log", "log2", "sqrt", "rsqrt", "reciprocal", "pow", "sign"),
    *("lt", "le", "gt", "ge", "eq", "ne"),
)


def tolerates_approximation(expression: Expression) -> bool:
    """Whether nothing in an expression makes the errors of approximations large."""
    if not isinstance(expression, Call):
        return True
    inner = expression.arguments
    if expression.function == "div":
        inner = inner[1:]
    if expression.function in (*_AMPLIFYING, "div") and any(map(_is_approximated, inner)):
        return False
    return all(map(tolerates_approximation, expression.arguments))


def _is_approximated(expression: Expression) -> bool:
    if not isinstance(expression, Call):
        return False
    if expression.function in _APPROXIMATED:
        return True
    expansion = FUNCTIONS[expression.function].expansion
    if expansion is not None and _is_approximated(bind(expansion, expression)):
        return True
    return any(map(_is_approximated, expression.arguments))


def scaled(expression: Expression, factor: float) -> Expression:
    """``factor * expression``, without the multiplication where a constant can absorb it."""
    if isinstance(expression, Call) and expression.function == "neg":
        return scaled(expression.arguments[0], -factor)
    absorbed = _absorbed(expression, factor)
    return call("mul", factor, expression) if absorbed is None else absorbed


def _absorbed(expression: Expression, factor: float) -> Expression | None:
    match expression:
        case Constant(value):
            return Constant(value * factor)
        case Call("neg", (x,)):
            return _absorbed(x, -factor)
        case Call("div", (x, Constant(divisor))):
            return scaled(x, factor / divisor)
        case Call("mul", (a, b)):
            if (absorbed := _absorbed(a, factor)) is not None:
                return call("mul", absorbed, b)
            if (absorbed := _absorbed(b, factor)) is not None:
                return call("mul", a, absorbed)
        case Call("add" | "sub" as operation, (a, b)):
            first, second = _absorbed(a, factor), _absorbed(b, factor)
            if first is not None and second is not None:
                return call(operation, first, second)
    return None


def normal_cdf(expression: Expression, accuracy: torch.dtype) -> Expression | None:
    """``0.5 * (1.0 + erf(z))`` as a logistic function of z; None for other expressions.

    Args:
        expression: any.
        accuracy: of 16 bits, whose rounding hides the error; of others there is none.
    """
    if accuracy not in _LOG_ODDS:
        return None
    match expression:
        case Call("mul", (Constant(0.5), Call("add", (Constant(1.0), Call("erf", (z,)))))):
            return call("sigmoid", _log_odds(z, _LOG_ODDS[accuracy]))
        case Call("mul", (Constant(0.5), Call("add", (Call("erf", (z,)), Constant(1.0))))):
            return call("sigmoid", _log_odds(z, _LOG_ODDS[accuracy]))
    return None


def _log_odds(z: Expression, coefficients: Sequence[float]) -> Expression:
    match z:
        case Call("mul", (Constant(scale), x)):
            pass
        case _:
            scale, x = 1.0, z
    square = call("square", x)
    *lower, highest = (
        coefficient * scale ** (2 * power + 1) for power, coefficient in enumerate(coefficients)
    )
    polynomial: Expression = Constant(highest)
    for coefficient in reversed(lower):
        polynomial = call("add", coefficient, call("mul", square, polynomial))
    return call("mul", x, polynomial)
