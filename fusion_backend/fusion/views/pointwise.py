"""Pointwise calls as expressions: what each spelling of each function means.

One table from the canonical name of a call (see
:func:`fusion_backend.fusion.views.node.operation`) to the expression of its operands. Whatever is
not in it is no pointwise function to the matcher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from fusion_backend.errors import ExpressionError
from fusion_backend.fusion.views.node import argument, operation, tensor_of
from fusion_backend.fusion.views.obstacles import CASTS
from fusion_backend.mlp.expression import Constant, Expression, call
from fusion_backend.mlp.expression.functions import NumberKind
from fusion_backend.mlp.expression.nodes import bounds
from fusion_backend.mlp.expression.simplification import as_kind

Operand = Callable[[Any], Expression]

_MISSING = object()
_CONVERSION = "to"

_SYNONYMS = {
    "__and__": "bitwise_and",
    "__or__": "bitwise_or",
    "__xor__": "bitwise_xor",
    "absolute": "abs",
    "and_": "bitwise_and",
    "arctan": "atan",
    "clip": "clamp",
    "divide": "div",
    "greater": "gt",
    "greater_equal": "ge",
    "invert": "bitwise_not",
    "less": "lt",
    "less_equal": "le",
    "log_sigmoid": "logsigmoid",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "or_": "bitwise_or",
    "sgn": "sign",
    "special_erf": "erf",
    "special_erfc": "erfc",
    "special_exp2": "exp2",
    "special_expit": "sigmoid",
    "special_expm1": "expm1",
    "special_log1p": "log1p",
    "subtract": "sub",
    "true_divide": "div",
    "truediv": "div",
    "xor": "bitwise_xor",
}
_IN_PLACE_OPERATORS = {
    "iand": "bitwise_and",
    "ior": "bitwise_or",
    "ixor": "bitwise_xor",
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
    **dict.fromkeys(("atan", "cosh", "erfc", "log2", "sinh"), 1),
    **dict.fromkeys(("logsigmoid", "mish", "neg", "reciprocal", "relu", "rsqrt", "selu"), 1),
    **dict.fromkeys(("sigmoid", "sign", "silu", "sin", "softsign", "sqrt", "square", "tanh"), 1),
    **dict.fromkeys(("tanhshrink", "logical_not", "bitwise_not"), 1),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor", "logical_xor"), 2),
    **dict.fromkeys(("eq", "ge", "gt", "le", "lt", "ne", "logical_and", "logical_or"), 2),
    **dict.fromkeys(("logaddexp", "maximum", "minimum", "mul", "pow", "div"), 2),
}
# Of truth values, bit by bit is the same as by their truth.
_OF_TRUTH_VALUES = {
    "bitwise_and": "logical_and",
    "bitwise_not": "logical_not",
    "bitwise_or": "logical_or",
    "bitwise_xor": "ne",
}
# Functions with parameters after the first operand: their names and PyTorch's defaults.
_PARAMETRIC: Mapping[str, tuple[tuple[str, Any], ...]] = {
    "add": (("other", _MISSING), ("alpha", 1)),
    "addcdiv": (("tensor1", _MISSING), ("tensor2", _MISSING), ("value", 1)),
    "addcmul": (("tensor1", _MISSING), ("tensor2", _MISSING), ("value", 1)),
    "celu": (("alpha", 1.0),),
    "clamp": (("min", None), ("max", None)),
    "clamp_max": (("max", _MISSING),),
    "clamp_min": (("min", _MISSING),),
    "elu": (("alpha", 1.0), ("scale", 1.0), ("input_scale", 1.0)),
    "gelu": (("approximate", "none"),),
    "hardshrink": (("lambd", 0.5),),
    "hardtanh": (("min_val", -1.0), ("max_val", 1.0)),
    "leaky_relu": (("negative_slope", 0.01),),
    "lerp": (("end", _MISSING), ("weight", _MISSING)),
    "masked_fill": (("mask", _MISSING), ("value", _MISSING)),
    "nan_to_num": (("nan", 0.0), ("posinf", None), ("neginf", None)),
    "prelu": (("weight", _MISSING),),
    "relu6": (),
    "rrelu": (("lower", 1.0 / 8), ("upper", 1.0 / 3)),
    "rsub": (("other", _MISSING), ("alpha", 1)),
    "softplus": (("beta", 1.0), ("threshold", 20.0)),
    "softshrink": (("lambd", 0.5),),
    "sub": (("other", _MISSING), ("alpha", 1)),
    "threshold": (("threshold", _MISSING), ("value", _MISSING)),
    "where": (("self", _MISSING), ("other", _MISSING)),
}
# Linear in each operand; of two that depend on the input, some of them make a product.
_LINEAR = ("add", "sub", "rsub", "neg", "mul", "div", "addcmul", "addcdiv", "lerp")
_MULTIPLYING = ("mul", "div", "addcmul", "addcdiv", "lerp")


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
    return _CONVERSION if operation(node) in CASTS and _converts(node) else None


def _converts(node: Node) -> bool:
    """Whether a cast changes the kind of number, or the width of integers, on one device."""
    before = tensor_of(next(iter(node.all_input_nodes), None))
    after = tensor_of(node)
    if before is None or after is None or before.device != after.device:
        return False
    return not (before.dtype.is_floating_point and after.dtype.is_floating_point)


def is_linear(name: str) -> bool:
    """Whether a function is linear in each of its operands: no activation by itself."""
    return name in _LINEAR


def multiplies(name: str) -> bool:
    """Whether a function that is linear in each operand may be a product of two of them."""
    return name in _MULTIPLYING


def pointwise_expression(node: Node, operand: Operand) -> Expression | None:
    """What a pointwise node computes, or ``None`` where this spelling has no expression.

    Args:
        node: a node for which :func:`pointwise_name` gives a name.
        operand: turns an argument (a node or a number) into its expression.
    """
    try:
        expression = _expression(node, operand)
    except ExpressionError:  # a tensor where a number is needed, a float where an integer is
        return None
    return expression if expression is None or _is_of_its_kind(expression, node) else None


def _is_of_its_kind(expression: Expression, node: Node) -> bool:
    """Whether an expression is the kind of number that the node is, and no integer overflows."""
    result = tensor_of(node)
    if result is None or expression.kind != kind_of(result.dtype):
        return result is None
    if expression.kind != "int":
        return True
    least, greatest = bounds(expression)
    limits = [torch.iinfo(result.dtype), torch.iinfo(torch.int32)]  # which kernels compute in
    return all(limit.min <= least and greatest <= limit.max for limit in limits)


def kind_of(dtype: torch.dtype) -> NumberKind | None:
    """The kind of number of a dtype; ``None`` where it is complex."""
    if dtype.is_floating_point:
        return "float"
    if dtype.is_complex:
        return None
    return "bool" if dtype == torch.bool else "int"


def _expression(node: Node, operand: Operand) -> Expression | None:
    name, result = pointwise_name(node), tensor_of(node)
    if name is None:
        return None
    if name == _CONVERSION:
        kind = None if result is None else kind_of(result.dtype)
        return None if kind is None else as_kind(operand(node.all_input_nodes[0]), kind)
    if name in _PLAIN:
        return _plain(node, name, operand)
    first = argument(node, 0, "condition" if name == "where" else "input", node.kwargs.get("self"))
    given = {
        parameter: _parameter(node, position, parameter, default)
        for position, (parameter, default) in enumerate(_PARAMETRIC[name], start=1)
    }
    if first is None or _MISSING in given.values():
        return None
    if name == "nan_to_num":
        return _finite(operand(first), given, operand, tensor_of(node))
    if name == "rrelu" and _draws_slopes(node, given):
        return None
    return _SPELLINGS[name](operand(first), given, operand)


def _draws_slopes(node: Node, given: Mapping[str, Any]) -> bool:
    bounds_are_symbols = any(isinstance(bound, Node) for bound in given.values())
    return bounds_are_symbols or argument(node, 3, "training", False) is not False


def _parameter(node: Node, position: int, name: str, default: Any) -> Any:
    value = argument(node, position, name, default)
    # torch.nn.functional.elu has the flag ``inplace`` where ATen has one more number.
    return default if name == "scale" and isinstance(value, bool) else value


def _plain(node: Node, name: str, operand: Operand) -> Expression | None:
    keywords = ("input", "exponent" if name == "pow" else "other")
    operands = [argument(node, position, keywords[position]) for position in range(_PLAIN[name])]
    if any(value is None for value in operands):
        return None
    if name == "div" and node.kwargs.get("rounding_mode") is not None:
        return None
    if name == "pow" and isinstance(operands[1], Node):
        return None
    values = [*map(operand, operands)]
    if name == "logical_xor":
        return call("ne", *(as_kind(value, "bool") for value in values))
    if name in _OF_TRUTH_VALUES and all(value.kind == "bool" for value in values):
        name = _OF_TRUTH_VALUES[name]
    return call(name, *values)


def _scaled(value: Expression, alpha: Any, operand: Operand) -> Expression | None:
    """A multiple; the factor is an integer or a float as the value is."""
    if tensor_of(alpha) is not None:
        return None  # eager takes its value, and gives it no gradient
    if not isinstance(alpha, Node) and alpha == 1:
        return value
    return call("mul", operand(alpha), value)


def _sum(
    function: str, a: Expression, b: Expression, given: dict[str, Any], operand: Operand
) -> Expression | None:
    """``a + alpha · b``, or the difference."""
    scaled = _scaled(b, given["alpha"], operand)
    return None if scaled is None else call(function, a, scaled)


def _clamped(x: Expression, given: dict[str, Any], operand: Operand) -> Expression | None:
    low, high = given.get("min"), given.get("max")
    if tensor_of(low) is not None or tensor_of(high) is not None:
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
    inside = call("logical_and", call("ge", x, low), call("le", x, limit))
    beyond = call("where", call("gt", x, limit), call("sub", x, limit), call("add", x, limit))
    return call("where", inside, Constant(0.0), beyond)


def _lerped(x: Expression, given: dict[str, Any], operand: Operand) -> Expression:
    """Counted from the nearer end, as ATen does."""
    weight = operand(given["weight"])
    if not isinstance(weight, Constant):
        return call("lerp", x, operand(given["end"]), weight)
    way = call("sub", operand(given["end"]), x)
    from_start = call("add", x, call("mul", weight, way))
    from_end = call("sub", operand(given["end"]), call("mul", call("sub", 1.0, weight), way))
    return from_start if abs(weight.value) < 0.5 else from_end


def _finite(
    x: Expression, given: dict[str, Any], operand: Operand, result: torch.Tensor | None
) -> Expression | None:
    if result is None or not result.dtype.is_floating_point or given["nan"] is None:
        return None
    if any(isinstance(number, Node) for number in given.values()):
        return None
    if any(number != number for number in given.values()):
        return None
    info = torch.finfo(result.dtype)
    # A kernel sees values before they are rounded: those that will round to infinity count as it.
    beyond = info.max / (2.0 - info.eps) * (2.0 - info.eps / 2.0)
    limit = float("inf") if info.bits > 16 else beyond
    high = info.max if given["posinf"] is None else given["posinf"]
    low = info.min if given["neginf"] is None else given["neginf"]
    return call("nan_to_num", x, float(given["nan"]), float(high), float(low), limit)


def _prelu(x: Expression, given: dict[str, Any], operand: Operand) -> Expression:
    return call("prelu", x, operand(given["weight"]))


def _with_parameters(name: str) -> Callable[..., Expression]:
    return lambda x, given, operand: call(name, x, *map(operand, given.values()))


def _addcmul(x: Expression, given: dict[str, Any], operand: Operand) -> Expression | None:
    if tensor_of(given["value"]) is not None:
        return None  # an older order of the arguments
    scaled = call("mul", operand(given["value"]), operand(given["tensor1"]))
    return call("add", x, call("mul", scaled, operand(given["tensor2"])))


def _addcdiv(x: Expression, given: dict[str, Any], operand: Operand) -> Expression | None:
    if tensor_of(given["value"]) is not None:
        return None
    return call("addcdiv", x, *(operand(given[name]) for name in ("tensor1", "tensor2", "value")))


_SPELLINGS: Mapping[str, Callable[..., Expression | None]] = {
    "addcdiv": _addcdiv,
    "addcmul": _addcmul,
    "add": lambda x, given, operand: _sum("add", x, operand(given["other"]), given, operand),
    "celu": _with_parameters("celu"),
    "clamp": _clamped,
    "clamp_max": _clamped,
    "clamp_min": _clamped,
    "elu": _with_parameters("elu"),
    "gelu": _gelu,
    "hardshrink": _hardshrunk,
    "hardtanh": _with_parameters("hardtanh"),
    "leaky_relu": _with_parameters("leaky_relu"),
    "lerp": _lerped,
    "masked_fill": lambda x, given, operand: call(
        "where", operand(given["mask"]), operand(given["value"]), x
    ),
    "prelu": _prelu,
    "relu6": lambda x, given, operand: call("hardtanh", x, Constant(0.0), Constant(6.0)),
    "rrelu": lambda x, given, operand: call(
        "leaky_relu",
        x,
        call("div", call("add", operand(given["lower"]), operand(given["upper"])), 2.0),
    ),
    "rsub": lambda x, given, operand: _sum("sub", operand(given["other"]), x, given, operand),
    "softplus": _with_parameters("softplus"),
    "softshrink": _softshrunk,
    "sub": lambda x, given, operand: _sum("sub", x, operand(given["other"]), given, operand),
    "threshold": _with_parameters("threshold"),
    "where": _with_parameters("where"),
}
