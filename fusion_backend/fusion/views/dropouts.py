"""Dropout that is active: a call, what it reads, and its probability."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.fx import Node

from fusion_backend.fusion.views.node import argument, operation, tensor_of, value_of

# Their masks are one an element, drawn for all elements alike.
_ELEMENTWISE = ("dropout", "dropout_", "native_dropout")


class DropoutView(NamedTuple):
    """A node that drops elements of its source with probability ``p``, a number or its node."""

    node: Node
    source: Node
    p: Any


def dropout_view(node: Node) -> DropoutView | None:
    """The active dropout that a node is, or ``None`` where it is none or may be switched off."""
    call = _call_of(node)
    if call is None or operation(call) not in _ELEMENTWISE:
        return None
    source, p = argument(call, 0, "input"), argument(call, 1, "p", 0.5)
    training = argument(call, 2, "training", argument(call, 2, "train", True))
    number = value_of(p)
    if not isinstance(source, Node) or tensor_of(source) is None or training is not True:
        return None
    if isinstance(number, (int, float)) and not 0 <= number <= 1:
        return None
    return DropoutView(call, source, p)


def _call_of(node: Node) -> Node | None:
    """The call itself, also where it has two results, of which the first is the value."""
    if operation(node) != "getitem":
        return node
    call, index = node.args
    opens = isinstance(call, Node) and operation(call) == "native_dropout" and index == 0
    return call if opens and isinstance(call, Node) else None
