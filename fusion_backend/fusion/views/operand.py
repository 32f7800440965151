"""What enters an activation beside the projections of the MLP's input.

    a parameter      one number, or one number a feature: PReLU, StarReLU, IA3
    another layer    a linear layer of another input, element by element: LoRA, two streams
    a dropout        its seed, drawn where the dropout stood

Each becomes an operand of the fused operator, and a variable ``p0``, ``p1``, ... of the activation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fusion_backend.fusion.views.linear import is_weight
from fusion_backend.fusion.views.node import same_size, tensor_of
from fusion_backend.fusion.views.slices import SliceView
from fusion_backend.mlp.expression import Expression, Variable, substitute, variables
from fusion_backend.mlp.expression.canonical import canonicalize
from fusion_backend.mlp.expression.operand_names import index_of, name_of
from fusion_backend.mlp.operands import Kind

_MOST_ROUNDS = 4


@dataclass(frozen=True)
class Entering:
    """One such value.

    Attributes:
        node: the node whose result it is; of a seed, the dropout.
        kind: ``scalar``, ``vector``, ``elementwise`` or ``seed``.
        part: the features of the node that enter, where not all do.
    """

    node: Node
    kind: Kind
    part: SliceView | None = None


def parameter(node: Node, feature_dim: int) -> Entering | None:
    """The parameter that a node is: given to the graph, or made of such by a few calls.

    It is floating, and all of its dimensions have size 1, but at most for the last or the one of
    the features, ``feature_dim``, counted from the last.
    """
    tensor = tensor_of(node)
    if tensor is None or not tensor.dtype.is_floating_point or not is_weight(node):
        return None
    longer = _longer(tensor)
    if not longer:
        return Entering(node, "scalar")
    return Entering(node, "vector") if longer in ([-1], [feature_dim]) else None


def _longer(tensor: torch.Tensor) -> list[int]:
    """The dimensions of other sizes than 1, counted from the last, which is -1."""
    return [i - tensor.dim() for i, size in enumerate(tensor.shape) if not _is_one(size)]


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def fits_features(vector: Node, result: Node, hidden: Any, feature_dim: int) -> bool:
    """Whether a vector has one number for each of the ``hidden`` features of a result.

    ``feature_dim`` tells which dimension of the result they are, counted from the last.
    """
    one, all_ = tensor_of(vector), tensor_of(result)
    if one is None or all_ is None or one.dim() > all_.dim() or _longer(one) != [feature_dim]:
        return False
    return all(same_size(tensor.shape[feature_dim], hidden) for tensor in (one, all_))


def in_order(expression: Expression, names: Iterable[str]) -> tuple[Expression, Sequence[str]]:
    """The canonical expression in which ``p0`` appears before ``p1`` and so on.

    Args:
        expression: any expression.
        names: the variables of it that are to become operands.

    Returns:
        The expression, and of each of its operands the variable that it was.
    """
    order = list(names)
    result = expression
    for _ in range(_MOST_ROUNDS):  # what is canonical depends on the names
        renamed = {old: Variable(name_of(i)) for i, old in enumerate(order)}
        result = canonicalize(substitute(expression, renamed))
        appearing = [i for name in variables(result) if (i := index_of(name)) is not None]
        if appearing == list(range(len(order))):
            break
        order = [order[i] for i in appearing]
    return result, order
