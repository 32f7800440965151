"""Partial derivatives of activation expressions, by reverse accumulation as in autograd."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from fusion_backend.mlp.expression.functions import FUNCTIONS
from fusion_backend.mlp.expression.nodes import Call, Constant, Expression, Variable
from fusion_backend.mlp.expression.simplification import bind, call

_ZERO, _ONE = Constant(0.0), Constant(1.0)


@functools.cache
def differentiate(expression: Expression, variable: str) -> Expression:
    """The derivative of ``expression`` by ``variable``, with autograd's conventions at kinks.

    It repeats sub-expressions of the function and of itself on purpose: whoever emits code shares
    equal sub-expressions, and then ``silu`` and its derivative need one exponential.

    As in autograd, what has a mask of its own (``relu``) selects gradients and gives zero even of
    an infinite one. A ``where`` passes zero on to the branch that is not taken: NaN comes of it
    where that branch has an infinite slope. Truth values and integers pass no gradient. Quotients
    are taken as in autograd, too: a slope of 1 / x may be infinite where its multiple is not.
    """
    gradients: dict[Expression, Expression] = {expression: _ONE}
    for node in reversed(list(dict.fromkeys(_operands_first(expression)))):
        if isinstance(node, Call) and node in gradients:
            for argument, gradient in _backward(node, gradients[node]):
                known = gradients.get(argument)
                gradients[argument] = gradient if known is None else _sum(known, gradient)
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
    if node.kind != "float":
        return
    if node.function == "where":
        condition, a, b = node.arguments
        partials = (
            call("where", condition, gradient, _ZERO),
            call("where", condition, _ZERO, gradient),
        )
        for branch, partial in zip((a, b), partials, strict=True):
            if _passes(branch):
                yield branch, partial
        return
    for argument, text in zip(node.arguments, FUNCTIONS[node.function].derivatives, strict=False):
        if _passes(argument):
            yield argument, _product(gradient, bind(text, node))


def _passes(argument: Expression) -> bool:
    return argument.kind == "float" and not isinstance(argument, Constant)


def _sum(a: Expression, b: Expression) -> Expression:
    match a, b:
        case Call("where", (condition, x, y)), Call("where", (same, z, w)) if condition == same:
            return call("where", condition, _sum(x, z), _sum(y, w))
    return b if a == _ZERO else a if b == _ZERO else call("add", a, b)


def _product(gradient: Expression, partial: Expression) -> Expression:
    """``gradient * partial``; a derivative that is zero in places selects, as masks do."""
    if partial == _ZERO:
        return _ZERO
    match partial:
        case Call("div", (Constant(1.0), divisor)):
            return call("div", gradient, divisor)
        case Call("where", (condition, x, y)) if _selects(partial):
            return call("where", condition, _product(gradient, x), _product(gradient, y))
    return call("mul", gradient, partial)


def _selects(partial: Expression) -> bool:
    """Whether a derivative is a choice of which one, perhaps after more choices, is zero."""
    match partial:
        case Call("where", (_, x, y)):
            return _ZERO in (x, y) or _selects(x) or _selects(y)
    return False
