"""Computing activation expressions with PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fusion_backend.errors import ExpressionError
from fusion_backend.mlp.expression.functions import FUNCTIONS, NumberKind
from fusion_backend.mlp.expression.nodes import Call, Constant, Expression, Variable, variables


def evaluate(expression: Expression, values: Mapping[str, Tensor]) -> Tensor:
    """Computes the expression with PyTorch, differentiably.

    Args:
        expression: what to compute.
        values: a tensor for each variable: all of one floating dtype and device, shapes that
            broadcast; the first must not be a seed, which is int64.

    Returns:
        A tensor of that dtype and the broadcast shape.

    Raises:
        ExpressionError: a variable has no value.
    """
    missing = [name for name in variables(expression) if name not in values]
    if missing or not values:
        raise ExpressionError(f"values are needed for {', '.join(missing) or 'a variable'}")
    known: dict[Expression, Tensor] = {Variable(name): value for name, value in values.items()}
    like = next(iter(values.values()))
    shape = torch.broadcast_shapes(*(value.shape for value in values.values()))
    result = _as_tensor(_computed(expression, known, like, shape), expression.kind, like)
    result = result.to(like.dtype)
    return result if result.shape == shape else result.expand(shape)


def _computed(
    expression: Expression, known: dict[Expression, Tensor], like: Tensor, shape: torch.Size
) -> Tensor | float:
    """The value of an expression; a call that was computed before is looked up in ``known``."""
    if isinstance(expression, Constant):
        return expression.value
    if expression not in known:
        assert isinstance(expression, Call)
        function = FUNCTIONS[expression.function]
        arguments = [
            _of_kind(_computed(argument, known, like, shape), kind, argument, like)
            for argument, kind in zip(expression.arguments, expression.operand_kinds, strict=True)
        ]
        split = len(arguments) - function.constants
        variable, constant = arguments[:split], arguments[split:]
        branches = variable[1:] if expression.function == "where" else variable
        values = branches[:1] if function.placed else branches  # a seed is none
        if not any(isinstance(a, Tensor) for a in values):
            # Functions of numbers only, and choices between numbers, need to be told the dtype.
            kinds = expression.operand_kinds
            variable = [_as_tensor(a, k, like) for a, k in zip(variable, kinds, strict=False)]
        place = {"shape": shape} if function.placed else {}
        known[expression] = function.evaluate(*variable, *constant, **place)
    return known[expression]


def _of_kind(
    value: Tensor | float, kind: NumberKind, expression: Expression, like: Tensor
) -> Tensor | float:
    """The value of an expression as one of this kind; a seed and a number stay as they are."""
    if expression.kind == kind or not isinstance(value, Tensor):
        return value
    return value.to(_dtype(kind, like))


def _as_tensor(value: Tensor | float, kind: NumberKind, like: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.full((), value, dtype=_dtype(kind, like), device=like.device)


def _dtype(kind: NumberKind, like: Tensor) -> torch.dtype:
    whole = torch.bool if kind == "bool" else torch.int64
    return like.dtype if kind == "float" else whole
