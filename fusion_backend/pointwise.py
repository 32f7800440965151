"""Pointwise calls as expressions: what each spelling of each function means.

One table from the canonical name of a call (see :func:`fusion_backend.views.operation`) to the
expression of its operands. Whatever is not in it is no pointwise function to the matcher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import Node

from fusion_backend.expression import Constant, Expression, call
from fusion_backend.views import argument, operation, tensor_of

Operand = Callable[[Any], Expression]

_MISSING = object()

_SYNONYMS = {
    "__and__": "logical_and",
    "__or__": "logical_or",
    "absolute": "abs",
    "and_": "logical_and",
    "bitwise_and": "logical_and",
    "bitwise_not": "logical_not",
    "bitwise_or": "logical_or",
    "clip": "clamp",
    "divide": "div",
    "greater": "gt",
    "greater_equal": "ge",
    "invert": "logical_not",
    "less": "lt",
    "less_equal": "le",
    "log_sigmoid": "logsigmoid",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "or_": "logical_or",
    "special_erf": "erf",
    "special_expit": "sigmoid",
    "special_expm1": "expm1",
    "special_log1p": "log1p",
    "subtract": "sub",
    "true_divide": "div",
    "truediv": "div",
}
_IN_PLACE_OPERATORS = {
    "iadd": "add",
    "imul": "mul",
    "ipow": "pow",
    "isub": "sub",
    "itruediv": "div",
}

# Functions of their operands and nothing else.
_PLAIN = {
    **dict.fromkeys(
        ("abs", "cos", "erf", "exp", "exp2", "expm1", "hardsigmoid", "hardswish", "log", "log1p"), 1
    ),
    **dict.fromkeys(("logsigmoid", "mish", "neg", "reciprocal", "relu", "rsqrt", "selu"), 1),
    **dict.fromkeys(("sigmoid", "sign", "silu", "sin", "softsign", "sqrt", "square", "tanh"), 1),
    **dict.fromkeys(("tanhshrink", "logical_not"), 1),
    **dict.fromkeys(("eq", "ge", "gt", "le", "lt", "ne", "logical_and", "logical_or"), 2),
    **dict.fromkeys(("maximum", "minimum", "mul", "pow", "div"), 2),
}
# Functions with parameters after the first operand: their names and PyTorch's defaults.
_PARAMETRIC: Mapping[str, tuple[tuple[str, Any], ...]] = {
    "add": (("other", _MISSING), ("alpha", 1)),
    "celu": (("alpha", 1.0),),
    "clamp": (("min", None), ("max", None)),
    "clamp_max": (("max", _MISSING),),
    "clamp_min": (("min", _MISSING),),
    "elu": (("alpha", 1.0), ("scale", 1.0), ("input_scale", 1.0)),
    "gelu": (("approximate", "none"),),
    "hardshrink": (("lambd", 0.5),),
    "hardtanh": (("min_val", -1.0), ("max_val", 1.0)),
    "leaky_relu": (("negative_slope", 0.01),),
    "masked_fill": (("mask", _MISSING), ("value", _MISSING)),
    "prelu": (("weight", _MISSING),),
    "relu6": (),
    "rsub": (("other", _MISSING), ("alpha", 1)),
    "softplus": (("beta", 1.0), ("threshold", 20.0)),
    "softshrink": (("lambd", 0.5),),
    "sub": (("other", _MISSING), ("alpha", 1)),
    "threshold": (("threshold", _MISSING), ("value", _MISSING)),
    "where": (("self", _MISSING), ("other", _MISSING)),
}
_LINEAR = ("add", "sub", "rsub", "neg", "mul", "div")


def pointwise_name(node: Node) -> str | None:
    """The pointwise function that a node calls, in-place spellings included, or ``None``."""
    name = operation(node)
    name = _IN_PLACE_OPERATORS.get(name, name)
    if name.endswith("_") and not name.endswith("__") and name not in _SYNONYMS:
        name = name[:-1]
    name = _SYNONYMS.get(name, name)
    if name in ("max", "min") and tensor_of(argument(node, 1, "other")) is not None:
        return f"{name}imum"
    if name == "relu6" or name in _PLAIN or name in _PARAMETRIC:
        return name
    return None


def is_linear(name: str) -> bool:
    """Whether a function is linear in each of its operands: no activation by itself."""
    return name in _LINEAR


def pointwise_expression(node: Node, operand: Operand) -> Expression | None:
    """What a pointwise node computes, or ``None`` where this spelling has no expression.

    Args:
        node: a node for which :func:`pointwise_name` gives a name.
        operand: turns an argument (a node or a number) into its expression.
    """
    name = pointwise_name(node)
    if name is None:
        return None
    if name in _PLAIN:
        return _plain(node, name, operand)
    first = argument(node, 0, "condition" if name == "where" else "input", node.kwargs.get("self"))
    given = {
        parameter: _parameter(node, position, parameter, default)
        for position, (parameter, default) in enumerate(_PARAMETRIC[name], start=1)
    }
    if first is None or _MISSING in given.values():
        return None
    return _SPELLINGS[name](operand(first), given, operand)


def _parameter(node: Node, position: int, name: str, default: Any) -> Any:
    value = argument(node, position, name, default)
    # torch.nn.functional has the flag ``inplace`` where ATen has one more number (elu).
    return default if isinstance(value, bool) else value


def _plain(node: Node, name: str, operand: Operand) -> Expression | None:
    keywords = ("input", "exponent" if name == "pow" else "other")
    operands = [argument(node, position, keywords[position]) for position in range(_PLAIN[name])]
    if any(value is None for value in operands):
        return None
    if name == "div" and node.kwargs.get("rounding_mode") is not None:
        return None
    if name == "pow" and isinstance(operands[1], Node):
        return None
    return call(name, *map(operand, operands))


def _scaled(value: Expression, alpha: Any) -> Expression:
    return value if alpha == 1 else call("mul", Constant(float(alpha)), value)


def _clamped(x: Expression, given: dict[str, Any], operand: Operand) -> Expression | None:
    low, high = given.get("min"), given.get("max")
    if isinstance(low, Node) or isinstance(high, Node):
        return None
    return call(
        "clamp",
        x,
        operand(float("-inf") if low is None else low),
        operand(float("inf") if high is None else high),
    )


def _gelu(x: Expression, given: dict[str, Any], operand: Operand) -> Expression | None:
    names = {"none": "gelu", "tanh": "gelu_tanh"}
    name = names.get(given["approximate"])
    return None if name is None else call(name, x)


def _hardshrunk(x: Expression, given: dict[str, Any], operand: Operand) -> Expression:
    limit = operand(given["lambd"])
    inside = call("logical_and", call("ge", x, call("neg", limit)), call("le", x, limit))
    return call("where", inside, Constant(0.0), x)


def _softshrunk(x: Expression, given: dict[str, Any], operand: Operand) -> Expression:
    limit = operand(given["lambd"])
    low = call("neg", limit)
    below = call("where", call("lt", x, low), call("add", x, limit), call("mul", Constant(0.0), x))
    return call("where", call("gt", x, limit), call("sub", x, limit), below)


def _prelu(x: Expression, given: dict[str, Any], operand: Operand) -> Expression:
    return call("where", call("gt", x, Constant(0.0)), x, call("mul", operand(given["weight"]), x))


def _with_parameters(name: str) -> Callable[..., Expression]:
    return lambda x, given, operand: call(name, x, *map(operand, given.values()))


_SPELLINGS: Mapping[str, Callable[..., Expression | None]] = {
    "add": lambda x, given, operand: call(
        "add", x, _scaled(operand(given["other"]), given["alpha"])
    ),
    "celu": _with_parameters("celu"),
    "clamp": _clamped,
    "clamp_max": _clamped,
    "clamp_min": _clamped,
    "elu": _with_parameters("elu"),
    "gelu": _gelu,
    "hardshrink": _hardshrunk,
    "hardtanh": _with_parameters("hardtanh"),
    "leaky_relu": _with_parameters("leaky_relu"),
    "masked_fill": lambda x, given, operand: call(
        "where", operand(given["mask"]), operand(given["value"]), x
    ),
    "prelu": _prelu,
    "relu6": lambda x, given, operand: call("hardtanh", x, Constant(0.0), Constant(6.0)),
    "rsub": lambda x, given, operand: call(
        "sub", operand(given["other"]), _scaled(x, given["alpha"])
    ),
    "softplus": _with_parameters("softplus"),
    "softshrink": _softshrunk,
    "sub": lambda x, given, operand: call(
        "sub", x, _scaled(operand(given["other"]), given["alpha"])
    ),
    "threshold": _with_parameters("threshold"),
    "where": _with_parameters("where"),
}
