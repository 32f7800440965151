"""The functions that activation expressions are made of.

Each function is a row of one table: its parameters, how PyTorch computes it, and its partial
derivatives as expression texts in the same language (:func:`fusion_backend.mlp.expression.parse`
reads them). At kinks the derivatives follow PyTorch's autograd: relu'(0) = 0, ties of ``maximum``
share the gradient, and so on. A function may also have an expansion into simpler ones; kernels use
it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend.compat.dispatcher import clamp_stops_at_limits
from fusion_backend.mlp.expression import philox

NumberKind = Literal["bool", "int", "float"]
"""Truth values, integers and floats, in the order in which PyTorch promotes them."""


@dataclass(frozen=True)
class Function:
    """One function of the expression language.

    Attributes:
        name: how it is called in texts.
        parameters: names of its parameters, which the texts below use.
        evaluate: the same in PyTorch, on tensors of one dtype; all parameters but one may also be
            Python numbers.
        derivatives: partial derivatives by the non-constant parameters, as texts; none for
            ``where``, which passes its gradient on to the branch taken.
        expansion: the function in terms of others, as a text, where it is not elementary.
        constants: how many of the last parameters must be constants.
        scalar: the function on Python floats, given where it is analytic. Constants are folded
            with it, and sub-expressions of analytic functions can be recognised by their values.
        boolean: whether the result is a truth value.
        least: the lowest kind of number that the result has: that of the operands, if it is higher.
        integral: whether its operands must be truth values or integers.
        placed: whether the result depends on where in the tensor an element stands; ``evaluate``
            then takes the shape of the result as well.
    """

    name: str
    parameters: tuple[str, ...]
    evaluate: Callable[..., Tensor]
    derivatives: tuple[str, ...] = ()
    expansion: str | None = None
    constants: int = 0
    scalar: Callable[..., float] | None = None
    boolean: bool = False
    placed: bool = False
    least: NumberKind = "float"
    integral: bool = False


def _unary(
    name: str,
    evaluate: Callable[[Tensor], Tensor],
    derivative: str,
    *,
    expansion: str | None = None,
    scalar: Callable[[float], float] | None = None,
    least: NumberKind = "float",
) -> Function:
    return Function(name, ("x",), evaluate, (derivative,), expansion, scalar=scalar, least=least)


def _comparison(name: str, evaluate: Callable[..., Tensor]) -> Function:
    return Function(name, ("a", "b"), evaluate, ("0.0", "0.0"), boolean=True)


def _logical(name: str, parameters: tuple[str, ...], evaluate: Callable[..., Tensor]) -> Function:
    return Function(name, parameters, evaluate, ("0.0",) * len(parameters), boolean=True)


def _bitwise(name: str, parameters: tuple[str, ...], evaluate: Callable[..., Tensor]) -> Function:
    return Function(name, parameters, evaluate, least="bool", integral=True)


def _tensors(*values: Tensor | float) -> Iterator[Tensor]:
    """All as tensors: ``torch.maximum`` and its like take no Python numbers."""
    like = next(value for value in values if isinstance(value, Tensor))
    return (v if isinstance(v, Tensor) else torch.full_like(like, v) for v in values)


def _finite(x: Tensor, nan: float, high: float, low: float, limit: float) -> Tensor:
    bounded = torch.where(x <= -limit, low, torch.where(x >= limit, high, x))
    return torch.where(x != x, nan, bounded)


def _clamped(x: Tensor, low: float, high: float) -> Tensor:
    """An infinite limit is one that is not given."""
    if math.isinf(low) and math.isinf(high):
        return x.clone()
    least, greatest = (None if math.isinf(limit) else limit for limit in (low, high))
    return torch.clamp(x, least, greatest)


def _dropout(value: Tensor, seed: Tensor, p: float, shape: torch.Size) -> Tensor:
    return value * (philox.kept(seed, p, shape).to(value.dtype) * philox.scale(p))


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0.0 else 1.0 - 1.0 / (1.0 + math.exp(x))


# An infinite limit is one that is not given, and then the gradient passes at infinity as well.
_WITHIN = "logical_and(logical_or(min == -inf, x {0} min), logical_or(max == inf, x {1} max))"
_CLAMP_DERIVATIVE = (
    f"where({_WITHIN.format('>', '<') if clamp_stops_at_limits() else _WITHIN.format('>=', '<=')}"
    ", 1.0, 0.0)"
)

# tanh-GELU is 0.5 x (1 + tanh(z)) = x sigmoid(2z), z = sqrt(2/pi) (x + 0.044715 x³). The second
# form needs one exponential and does not cancel for negative x; its derivative shares the sigmoid.
_GELU_SIGMOID = "sigmoid(x * (1.5957691216057308 + 0.07135481627260025 * square(x)))"
_GELU_CDF = "0.5 * (1.0 + erf(0.7071067811865476 * x))"
_MISH_TANH = "tanh(softplus(x, 1.0, 20.0))"

# atan(a) for 0 <= a <= 1, by halving the angle twice and five terms of its series.
_HALF_ANGLE = "({0} / (1.0 + sqrt(1.0 + square({0}))))"
_QUARTER = _HALF_ANGLE.format(_HALF_ANGLE.format("where(abs(x) > 1.0, 1.0 / abs(x), abs(x))"))
_ATAN_SERIES = (
    f"4.0 * {_QUARTER} * (1.0 + square({_QUARTER}) * (-0.3333333333333333 + square({_QUARTER})"
    f" * (0.2 + square({_QUARTER}) * (-0.14285714285714285 + 0.1111111111111111"
    f" * square({_QUARTER})))))"
)

_ARITHMETIC = (
    # As in PyTorch, a sum of truth values is their disjunction and a product their conjunction.
    Function("add", ("a", "b"), operator.add, ("1.0", "1.0"), scalar=operator.add, least="bool"),
    Function("sub", ("a", "b"), operator.sub, ("1.0", "-1.0"), scalar=operator.sub, least="int"),
    Function("mul", ("a", "b"), operator.mul, ("b", "a"), scalar=operator.mul, least="bool"),
    Function(
        "div", ("a", "b"), operator.truediv, ("1.0 / b", "-(a / b) / b"), scalar=operator.truediv
    ),
    _unary("neg", operator.neg, "-1.0", scalar=operator.neg, least="int"),
    Function("pow", ("x", "n"), torch.pow, ("n * pow(x, n - 1.0)",), constants=1, scalar=math.pow),
    _unary("square", torch.square, "2.0 * x", scalar=lambda x: x * x, least="int"),
    _unary("sqrt", torch.sqrt, "1.0 / (2.0 * sqrt(x))", scalar=math.sqrt),
    _unary(
        "rsqrt",
        torch.rsqrt,
        "-0.5 * rsqrt(x) * square(rsqrt(x))",
        scalar=lambda x: 1.0 / math.sqrt(x),
    ),
    _unary("reciprocal", torch.reciprocal, "-square(reciprocal(x))", scalar=lambda x: 1.0 / x),
)

_ELEMENTARY = (
    _unary("exp", torch.exp, "exp(x)", scalar=math.exp),
    _unary("exp2", torch.exp2, "0.6931471805599453 * exp2(x)", scalar=lambda x: math.pow(2.0, x)),
    _unary("expm1", torch.expm1, "expm1(x) + 1.0", scalar=math.expm1),
    _unary("log", torch.log, "1.0 / x", scalar=math.log),
    _unary("log2", torch.log2, "1.0 / (0.6931471805599453 * x)", scalar=math.log2),
    _unary("log1p", torch.log1p, "1.0 / (x + 1.0)", scalar=math.log1p),
    _unary("sin", torch.sin, "cos(x)", scalar=math.sin),
    _unary("cos", torch.cos, "-sin(x)", scalar=math.cos),
    _unary(
        "atan",
        torch.atan,
        "1.0 / (1.0 + square(x))",
        expansion="sign(x) * where(abs(x) > 1.0, "
        f"1.5707963267948966 - {_ATAN_SERIES}, {_ATAN_SERIES})",
        scalar=math.atan,
    ),
    _unary(
        "sinh",
        torch.sinh,
        "cosh(x)",
        expansion="0.5 * (expm1(x) - expm1(-x))",
        scalar=math.sinh,
    ),
    _unary(
        "cosh",
        torch.cosh,
        "sinh(x)",
        expansion="0.5 * (exp(x) + exp(-x))",
        scalar=math.cosh,
    ),
    _unary("tanh", torch.tanh, "1.0 - square(tanh(x))", scalar=math.tanh),
    _unary("erf", torch.erf, "1.1283791670955126 * exp(-square(x))", scalar=math.erf),
    _unary("erfc", torch.erfc, "-1.1283791670955126 * exp(-square(x))", scalar=math.erfc),
    _unary(
        "sigmoid",
        torch.sigmoid,
        "sigmoid(x) * (1.0 - sigmoid(x))",
        expansion="1.0 / (1.0 + exp(-x))",
        scalar=_sigmoid,
    ),
    _unary("abs", torch.abs, "sign(x)", least="int"),
    _unary("sign", torch.sign, "0.0"),
)

_SMOOTH_ACTIVATIONS = (
    _unary(
        "gelu",
        F.gelu,
        f"{_GELU_CDF} + x * (0.3989422804014327 * exp(-0.5 * square(x)))",
        expansion=f"x * ({_GELU_CDF})",
    ),
    _unary(
        "gelu_tanh",
        lambda x: F.gelu(x, approximate="tanh"),
        f"{_GELU_SIGMOID} + x * ({_GELU_SIGMOID} * (1.0 - {_GELU_SIGMOID}))"
        " * (1.5957691216057308 + 0.21406444881780076 * square(x))",
        expansion=f"x * {_GELU_SIGMOID}",
    ),
    _unary(
        "silu",
        F.silu,
        "sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x)))",
        expansion="x * sigmoid(x)",
    ),
    _unary(
        "mish",
        F.mish,
        f"{_MISH_TANH} + x * sigmoid(x) * (1.0 - square({_MISH_TANH}))",
        expansion=f"x * {_MISH_TANH}",
    ),
    _unary(
        "logsigmoid",
        F.logsigmoid,
        "sigmoid(-x)",
        expansion="minimum(x, 0.0) - log1p(exp(-abs(x)))",
    ),
    _unary(
        "softsign",
        F.softsign,
        "1.0 / (1.0 + abs(x)) - x / (1.0 + abs(x)) / (1.0 + abs(x)) * sign(x)",
        expansion="x / (1.0 + abs(x))",
    ),
    _unary(
        "tanhshrink",
        F.tanhshrink,
        "1.0 - (1.0 - square(tanh(x)))",
        expansion="x - tanh(x)",
    ),
    Function(
        "logaddexp",
        ("a", "b"),
        lambda a, b: torch.logaddexp(*_tensors(a, b)),
        ("sigmoid(a - b)", "sigmoid(b - a)"),
        "maximum(a, b) + log1p(exp(-abs(where(a == b, 0.0, a - b))))",
    ),
    Function(
        "softplus",
        ("x", "beta", "threshold"),
        F.softplus,
        ("where(beta * x > threshold, 1.0, sigmoid(beta * x))",),
        "where(beta * x > threshold, x, log1p(exp(beta * x)) / beta)",
        constants=2,
    ),
)

_KINKED_ACTIVATIONS = (
    _unary("relu", torch.relu, "where(x <= 0.0, 0.0, 1.0)"),
    _unary(
        "relu6",
        F.relu6,
        "where(logical_and(x > 0.0, x < 6.0), 1.0, 0.0)",
        expansion="clamp(x, 0.0, 6.0)",
    ),
    _unary(
        "hardsigmoid",
        F.hardsigmoid,
        "where(logical_and(x > -3.0, x < 3.0), 0.1666666716337204, 0.0)",  # as in float32
        expansion="clamp(x + 3.0, 0.0, 6.0) / 6.0",
    ),
    _unary(
        "hardswish",
        F.hardswish,
        "where(x <= -3.0, 0.0, where(x >= 3.0, 1.0, x / 3.0 + 0.5))",
        expansion="x * clamp(x + 3.0, 0.0, 6.0) / 6.0",
    ),
    Function(
        "hardtanh",
        ("x", "min", "max"),
        F.hardtanh,
        ("where(logical_and(x > min, x < max), 1.0, 0.0)",),
        "clamp(x, min, max)",
        constants=2,
    ),
    Function("clamp", ("x", "min", "max"), _clamped, (_CLAMP_DERIVATIVE,), constants=2),
    Function(
        "leaky_relu",
        ("x", "slope"),
        F.leaky_relu,
        ("where(x > 0.0, 1.0, slope)",),
        "where(x > 0.0, x, slope * x)",
        constants=1,
    ),
    Function(
        "threshold",
        ("x", "limit", "value"),
        F.threshold,
        ("where(x <= limit, 0.0, 1.0)",),
        "where(x <= limit, value, x)",
        constants=2,
    ),
    Function(
        "elu",
        ("x", "alpha", "scale", "input_scale"),
        torch.ops.aten.elu.default,
        ("where(x > 0.0, scale, alpha * scale * input_scale * exp(input_scale * x))",),
        "where(x > 0.0, scale * x, alpha * scale * expm1(input_scale * x))",
        constants=3,
    ),
    Function(
        "celu",
        ("x", "alpha"),
        F.celu,
        ("where(x > 0.0, 1.0, exp(x / alpha))",),
        "elu(x, alpha, 1.0, 1.0 / alpha)",
        constants=1,
    ),
    _unary(
        "selu",
        F.selu,
        "where(x > 0.0, 1.0507009873554805, 1.7580993408473766 * exp(x))",
        expansion="elu(x, 1.6732632423543772, 1.0507009873554805, 1.0)",
    ),
)

_CHOICES = (
    Function(
        "maximum",
        ("a", "b"),
        lambda a, b: torch.maximum(*_tensors(a, b)),
        (
            "where(a == b, 0.5, where(a < b, 0.0, 1.0))",
            "where(a == b, 0.5, where(a > b, 0.0, 1.0))",
        ),
        least="bool",
    ),
    Function(
        "minimum",
        ("a", "b"),
        lambda a, b: torch.minimum(*_tensors(a, b)),
        (
            "where(a == b, 0.5, where(a > b, 0.0, 1.0))",
            "where(a == b, 0.5, where(a < b, 0.0, 1.0))",
        ),
        least="bool",
    ),
    Function("where", ("condition", "a", "b"), torch.where, least="bool"),
    # No `where` in graphs: these select their gradients, which `where` multiplies by 0.
    Function(
        "prelu",
        ("x", "weight"),
        lambda x, weight: torch.where(x > 0.0, x, weight * x),
        ("where(x > 0.0, 1.0, weight)", "where(x > 0.0, 0.0, x)"),
        "where(x > 0.0, x, weight * x)",
    ),
    # Its gradient is multiplied by what is finite. Beyond ``limit`` numbers count as infinite.
    Function(
        "nan_to_num",
        ("x", "other", "high", "low", "limit"),
        _finite,
        ("float(abs(x) < limit)",),
        "where(x != x, other, where(x <= -limit, low, where(x >= limit, high, x)))",
        constants=4,
    ),
    Function(
        "addcdiv",
        ("x", "a", "b", "value"),
        lambda x, a, b, value: torch.addcdiv(*_tensors(x, a, b), value=value),
        ("1.0", "value / b", "-value * a / (b * b)"),
        "x + value * a / b",
        constants=1,
    ),
    Function(
        "lerp",
        ("start", "end", "weight"),
        lambda start, end, weight: torch.lerp(*_tensors(start, end, weight)),
        ("1.0 - weight", "weight", "end - start"),
        # Counted from the nearer end.
        "where(abs(weight) < 0.5, start + weight * (end - start),"
        " end - (end - start) * (1.0 - weight))",
    ),
    _comparison("lt", operator.lt),
    _comparison("le", operator.le),
    _comparison("gt", operator.gt),
    _comparison("ge", operator.ge),
    _comparison("eq", operator.eq),
    _comparison("ne", operator.ne),
    _logical("logical_and", ("a", "b"), torch.logical_and),
    _logical("logical_or", ("a", "b"), torch.logical_or),
    _logical("logical_not", ("a",), torch.logical_not),
)

# Numbers of one kind taken for another. Floats are not taken for integers: what becomes of those
# that no integer is near differs between devices.
_CONVERSIONS = (
    Function("float", ("x",), operator.pos, least="float"),
    Function("int", ("x",), operator.pos, least="int", integral=True),
)

_BITWISE = (
    _bitwise("bitwise_and", ("a", "b"), operator.and_),
    _bitwise("bitwise_or", ("a", "b"), operator.or_),
    _bitwise("bitwise_xor", ("a", "b"), operator.xor),
    _bitwise("bitwise_not", ("a",), operator.invert),
)

# The derivative is the mask itself, so a dropout and its derivative share one.
_RANDOM = (
    Function(
        "dropout",
        ("value", "seed", "p"),
        _dropout,
        ("dropout(1.0, seed, p)", "0.0"),
        constants=1,
        placed=True,
    ),
)


def _table(*groups: tuple[Function, ...]) -> Mapping[str, Function]:
    return MappingProxyType({function.name: function for group in groups for function in group})


FUNCTIONS: Mapping[str, Function] = _table(
    _ARITHMETIC,
    _ELEMENTARY,
    _SMOOTH_ACTIVATIONS,
    _KINKED_ACTIVATIONS,
    _CHOICES,
    _CONVERSIONS,
    _BITWISE,
    _RANDOM,
)
