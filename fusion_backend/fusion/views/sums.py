"""Sums of linear layers of which features are taken: LoRA on a packed projection.

A part of a sum is the sum of the parts. So each layer of ``(W x + s · B (A x)).chunk(2, -1)`` is a
packed projection, or a packed operand, of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.fx import Node

from fusion_backend.fusion.views.constants import constant_of
from fusion_backend.fusion.views.linear import LinearView
from fusion_backend.fusion.views.node import same_shape, tensor_of
from fusion_backend.fusion.views.obstacles import identity_source
from fusion_backend.fusion.views.pointwise import is_linear, pointwise_expression, pointwise_name
from fusion_backend.fusion.views.reshape import row_reshape_source
from fusion_backend.mlp.expression import Constant, Expression, Variable


class LayerSum(NamedTuple):
    """A sum of multiples of linear layers.

    Attributes:
        expression: the sum, of the layers' results ``l0``, ``l1``, ...
        layers: those layers.
        calls: the calls that add and scale them.
    """

    expression: Expression
    layers: tuple[LinearView, ...]
    calls: frozenset[Node]


def layer_sum(node: Node, view: Callable[[Node], LinearView | None]) -> LayerSum | None:
    """The sum of linear layers that a node is, or ``None``.

    Args:
        node: any node.
        view: tells the linear layer that a node computes.
    """
    layers: list[LinearView] = []
    calls: set[Node] = set()

    def read(item: Any) -> Expression:
        if isinstance(item, (int, float)):
            return Constant(float(item))
        if tensor_of(item) is None:
            raise _NoSum
        number = constant_of(item)
        if isinstance(number, (int, float)):
            return Constant(float(number))
        layer = view(item)
        if layer is not None:
            if layer.positions:
                raise _NoSum  # its features are not the last dimension
            if layer not in layers:
                layers.append(layer)
            return Variable(f"l{layers.index(layer)}")
        calls.add(item)
        passed = identity_source(item) or row_reshape_source(item)
        return read(passed) if passed is not None else _combined(item, read)

    try:
        expression = read(node)
    except _NoSum:
        return None
    return LayerSum(expression, tuple(layers), frozenset(calls)) if layers and calls else None


class _NoSum(Exception):
    """There is something else in it."""


def _combined(node: Node, read: Callable[[Any], Expression]) -> Expression:
    result, name = tensor_of(node), pointwise_name(node)
    tensors = [value for item in node.all_input_nodes if (value := tensor_of(item)) is not None]
    alike = result is not None and all(v.dim() == 0 or same_shape(v, result) for v in tensors)
    if name is None or not is_linear(name) or not alike:
        raise _NoSum
    expression = pointwise_expression(node, read)
    if expression is None:
        raise _NoSum
    return expression
