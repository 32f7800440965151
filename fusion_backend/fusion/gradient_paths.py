"""Which tensors of a site autograd finds a way to, from the hidden value back.

Eager PyTorch makes no gradient, not even zeros, for what is only compared: an optimizer leaves such
a parameter alone, weight decay included. So the ways are looked for in the graph itself. An
expression would not tell: it has no place for a variable that cancels, such as that of
``where(g > 0, u, u)``.

Truth values, integers and newly made constants stop a gradient. Functions that are flat, such as
``sign``, pass one on: it is zero.
"""

from __future__ import annotations

from torch.fx import Node

from fusion_backend.fusion.match import Match
from fusion_backend.fusion.sources import sum_of_parts
from fusion_backend.fusion.views.constants import constant_of
from fusion_backend.fusion.views.node import tensor_of, value_of


def with_gradients(match: Match) -> frozenset[Node]:
    """The nodes that a gradient of the hidden value reaches, up to projections and operands.

    Args:
        match: a legal site of two layers, or the part of one, and no chain.
    """
    operands = {operand.node for operand in match.operands if operand.kind != "seed"}
    ends = operands | {source.node for source in match.sources}
    reached: set[Node] = set()
    pending = [match.down.input if match.part is None else match.part.hidden]
    while pending:
        node = pending.pop()
        if node in reached or not _is_differentiable(node):
            continue
        reached.add(node)
        if (whole := sum_of_parts(node)) is not None:  # a slice of it is one of each layer
            pending.extend(source.linear.node for source in whole.sources.values())
        elif node not in ends and node in match.calls:
            pending.extend(node.all_input_nodes)
    return frozenset(reached)


def _is_differentiable(node: Node) -> bool:
    tensor = tensor_of(node)
    if tensor is None:
        return isinstance(value_of(node), (tuple, list))  # a call with several results
    return tensor.dtype.is_floating_point and constant_of(node) is None
