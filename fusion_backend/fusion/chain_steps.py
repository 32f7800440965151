"""What stands between two layers of a chain, call by call: norms, activations, values read again.

    h = W_1 norm(x) …,  x + W_2 f(h),  f(norm(W h)),  f(W h) + h

It is found backwards from a layer's input, up to the layer before. A step is a norm, an activation
of one value, or a pointwise call of two, of which the later one goes on and the other is read
again; whether that one is a value of the same chain is for :mod:`chains` to say. What a layer
reads may be two values side by side, ``W cat([x, h])``: :func:`joined_at`. Whatever else stands
there ends the chain.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch.fx import Node

from fusion_backend.errors import ExpressionError, FusionError
from fusion_backend.fusion.region import region_between
from fusion_backend.fusion.views.concatenations import concatenated_features
from fusion_backend.fusion.views.constants import constant_of
from fusion_backend.fusion.views.linear import linear_view
from fusion_backend.fusion.views.node import same_shape, tensor_of
from fusion_backend.fusion.views.norms import NormView, norm_view
from fusion_backend.fusion.views.obstacles import identity_source
from fusion_backend.fusion.views.pointwise import pointwise_expression, pointwise_name
from fusion_backend.fusion.views.reshape import copy_source
from fusion_backend.mlp.expression import Constant, Expression, Variable, variables
from fusion_backend.mlp.expression.agreement import difference
from fusion_backend.mlp.expression.canonical import canonicalize
from fusion_backend.mlp.expression.operand_names import name_of

# Beyond so many calls it is no activation, and beyond so many steps no way from layer to layer.
_MOST_CALLS = 32
_MOST_STEPS = 6


class FoundStep(NamedTuple):
    """One step.

    Attributes:
        node: the call that computes its value.
        source: the value that it is of, as :func:`origin` has it.
        calls: all calls that it is made of.
        norm: the norm that it is, or ``None``.
        expression: the activation that it is otherwise, of ``x`` and perhaps of ``p0``.
        earlier: what ``p0`` is, as :func:`origin` has it.
    """

    node: Node
    source: Node
    calls: frozenset[Node]
    norm: NormView | None = None
    expression: Expression | None = None
    earlier: Node | None = None


class Joined(NamedTuple):
    """That a layer reads two values side by side.

    Attributes:
        value: the one that is computed later, which goes on.
        beside: the other one.
        where: whether its features stand ``before`` or ``after`` those of the first.
        calls: the concatenation, and what leaves it as it is.
    """

    value: Node
    beside: Node
    where: str
    calls: frozenset[Node]


def joined_at(node: Node) -> Joined | None:
    """The two values of which a layer's input is the concatenation, along its features."""
    start = origin(node)
    parts = concatenated_features(start)
    if len(parts) != 2:
        return None
    value = max(parts)
    (beside,) = (part for part in parts if part is not value)
    where = "before" if parts[0] is beside else "after"
    return Joined(value, beside, where, frozenset({start, *_passed(node, start)}))


def origin(node: Node) -> Node:
    """The value itself where a call only converts, copies or drops nothing."""
    while (passed := identity_source(node) or copy_source(node)) is not None:
        node = passed
    return node


def is_copied(node: Node) -> bool:
    """Whether a copy stands between a value and its origin, which may be written to after it."""
    return any(copy_source(each) is not None for each in _passed(node, origin(node)))


def steps_before(node: Node) -> tuple[Node, tuple[FoundStep, ...]]:
    """The steps to what a layer reads, in their order, and the value that they begin with."""
    found: list[FoundStep] = []
    while len(found) < _MOST_STEPS:
        if linear_view(origin(node)) is not None:
            break
        step = step_at(node)
        if step is None:
            break
        found.append(step)
        node = step.source
    return origin(node), tuple(reversed(found))


def step_at(node: Node) -> FoundStep | None:
    """The step that computes a value, behind calls that leave it as it is."""
    start = origin(node)
    passed = frozenset(_passed(node, start))
    step = _norm(start) or _activation(start) or _of_two(start)
    return None if step is None else step._replace(calls=step.calls | passed)


def _passed(node: Node, start: Node) -> Iterator[Node]:
    while node is not start:
        yield node
        source = identity_source(node) or copy_source(node)
        assert source is not None  # start is its origin
        node = source


def _norm(node: Node) -> FoundStep | None:
    view = norm_view(node)
    if view is None:
        return None
    source = origin(view.input)
    return FoundStep(node, source, frozenset({node, *_passed(view.input, source)}), norm=view)


def _activation(node: Node) -> FoundStep | None:
    """The fewest pointwise calls up to one value that are of one value alone."""
    calls: set[Node] = set()
    frontier = {node}
    while not calls or len(frontier) > 1:
        latest = max(frontier)
        if len(calls) > _MOST_CALLS or not _is_pointwise(latest):
            return None
        frontier.remove(latest)
        calls.add(latest)
        frontier.update(_operands(latest))
        if not frontier:
            return None
    (source,) = frontier
    return _verified(node, {source: "x"}, frozenset(calls))


def _of_two(node: Node) -> FoundStep | None:
    """A pointwise call of two values: the one that is computed later goes on."""
    operands = sorted(_operands(node)) if _is_pointwise(node) else []
    if len(operands) != 2:
        return None
    earlier, source = operands
    return _verified(node, {source: "x", earlier: name_of(0)}, frozenset({node}))


def _is_pointwise(node: Node) -> bool:
    if linear_view(node) is not None or constant_of(node) is not None:
        return False
    return pointwise_name(node) is not None or origin(node) is not node


def _operands(node: Node) -> set[Node]:
    """The tensors that a pointwise call is of, numbers apart."""
    tensors = (each for each in node.all_input_nodes if tensor_of(each) is not None)
    return {each for each in tensors if constant_of(each) is None}


def _verified(node: Node, ends: Mapping[Node, str], calls: frozenset[Node]) -> FoundStep | None:
    """The step of some calls, where an expression of it is what they compute."""
    if not all(_is_like(each, node) for each in (*ends, *calls)):
        return None
    expression = _expression(node, ends)
    if expression is None or set(variables(expression)) != set(ends.values()):
        return None
    expression = canonicalize(expression)
    like = tensor_of(node)
    assert like is not None
    try:
        found = difference(region_between(ends, node), expression, dtype=like.dtype)
    except (FusionError, RuntimeError, TypeError, ValueError):
        return None
    if found is not None:
        warnings.warn(
            f"fusedmlp leaves a chain alone as its activation {expression} is not what the graph "
            f"computes ({found}); please report it",
            stacklevel=2,
        )
        return None
    values = {name: origin(value) for value, name in ends.items()}
    passed = (call for value in ends for call in _passed(value, origin(value)))
    calls |= frozenset(passed)
    return FoundStep(
        node, values["x"], calls, expression=expression, earlier=values.get(name_of(0))
    )


def _is_like(node: Node, result: Node) -> bool:
    """Whether a value has an element for each of the result."""
    value, like = tensor_of(node), tensor_of(result)
    return value is not None and like is not None and same_shape(value, like)


def _expression(node: Any, ends: Mapping[Node, str]) -> Expression | None:
    """What pointwise calls compute of some values."""

    def operand(argument: Any) -> Expression:
        if isinstance(argument, Node) and argument in ends:
            return Variable(ends[argument])
        number = argument if not isinstance(argument, Node) else constant_of(argument)
        if isinstance(number, (bool, int, float)):
            return Constant(number)
        if not isinstance(argument, Node) or number is not None:
            raise ExpressionError(f"a number of an activation must be known, got {argument}")
        passed = identity_source(argument) or copy_source(argument)
        found = operand(passed) if passed is not None else pointwise_expression(argument, operand)
        if found is None:
            raise ExpressionError(f"no expression is known of {argument}")
        return found

    try:
        return operand(node)
    except ExpressionError:
        return None
