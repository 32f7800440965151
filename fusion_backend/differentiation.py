"""Partial derivatives of activation expressions, by reverse accumulation as in autograd."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from fusion_backend.functions import FUNCTIONS
from fusion_backend.nodes import Call, Constant, Expression, Variable
from fusion_backend.simplification import bind, call

_ZERO, _ONE = Constant(0.0), Constant(1.0)


@functools.cache
def differentiate(expression: Expression, variable: str) -> Expression:
    """The derivative of ``expression`` by ``variable``, with autograd's conventions at kinks.

    It repeats sub-expressions of the function and of itself on purpose: whoever emits code shares
    equal sub-expressions, and then ``silu`` and its derivative need one exponential.

    As in autograd, a masked gradient is zero even if what it masks is infinite. Unlike autograd,
    the branch of a ``where`` that is not taken adds nothing even if its slope is infinite there.
    """
    gradients: dict[Expression, Expression] = {expression: _ONE}
    for node in reversed(list(dict.fromkeys(_operands_first(expression)))):
        if isinstance(node, Call):
            for argument, gradient in _backward(node, gradients[node]):
                gradients[argument] = _sum(gradients.get(argument, _ZERO), gradient)
    return gradients.get(Variable(variable), _ZERO)


def passing_gradients(expression: Expression) -> frozenset[str]:
    """The variables that autograd finds a way to: none leads through a comparison."""
    if isinstance(expression, Variable):
        return frozenset({expression.name})
    if not isinstance(expression, Call) or FUNCTIONS[expression.function].boolean:
        return frozenset()
    return frozenset().union(*map(passing_gradients, expression.arguments))


def _operands_first(expression: Expression) -> Iterator[Expression]:
    if isinstance(expression, Call):
        for argument in expression.arguments:
            yield from _operands_first(argument)
    yield expression


def _backward(node: Call, gradient: Expression) -> Iterator[tuple[Expression, Expression]]:
    """Each argument of ``node`` with what it gets of the gradient of the result."""
    if node.function == "where":
        condition, a, b = node.arguments
        yield condition, _ZERO
        yield a, call("where", condition, gradient, _ZERO)
        yield b, call("where", condition, _ZERO, gradient)
        return
    partials = FUNCTIONS[node.function].derivatives
    for argument, partial in zip(node.arguments, partials, strict=False):
        if not isinstance(argument, Constant):
            yield argument, _product(gradient, bind(partial, node))


def _sum(a: Expression, b: Expression) -> Expression:
    match a, b:
        case Call("where", (condition, x, y)), Call("where", (same, z, w)) if condition == same:
            return call("where", condition, _sum(x, z), _sum(y, w))
    return call("add", a, b)


def _product(a: Expression, b: Expression) -> Expression:
    """``a * b``, where a factor that is zero in places selects instead of multiplying."""
    if _ZERO in (a, b):
        return _ZERO
    for mask, other in ((a, b), (b, a)):
        match mask:
            case Call("where", (condition, x, y)) if _ZERO in (x, y):
                return call("where", condition, _product(x, other), _product(y, other))
    return call("mul", a, b)
