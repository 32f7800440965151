"""The sum that follows an MLP, ``residual + mlp(x)``, where the MLP's own kernel can add it.

A kernel that stores the MLP's result adds the residual before it does, which saves passes over the
result. The fused operator then takes the place of the sum, and reads the residual where it reads
all else: at the MLP's last layer. When in doubt the sum stays where it is; so does one that a
compiler never stores, because it adds within the norm or the pointwise call that follows.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from fusion_backend.compat.tracing import is_traceable_wrapper_subclass_type
from fusion_backend.fusion.chains import Chain
from fusion_backend.fusion.match import Match
from fusion_backend.fusion.shapes import is_contiguous, result_shape
from fusion_backend.fusion.views.dependence import Dependence
from fusion_backend.fusion.views.node import argument, operation, same_shape, tensor_of
from fusion_backend.fusion.views.obstacles import NORMS, identity_source, is_pointwise_operator
from fusion_backend.fusion.views.reshape import reshape_source

_SUMS = ("add", "add_", "iadd")
_ARGUMENTS = frozenset({"input", "other", "alpha"})


class Residual(NamedTuple):
    """What is added to the result of an MLP.

    Attributes:
        node: the other summand.
        sum: the call that adds it.
        calls: what stands between the last layer and the sum, and changes nothing.
    """

    node: Node
    sum: Node
    calls: tuple[Node, ...]

    @property
    def nodes(self) -> frozenset[Node]:
        """The calls that the fused operator makes superfluous."""
        return frozenset((self.sum, *self.calls))


def residual_of(
    match: Match, dependence: Dependence, grad_mode: bool, fused: AbstractSet[Node]
) -> Residual | None:
    """What a legal site may add to its result; ``None`` where that stays outside.

    Only ``fusedmlp::mlp`` takes a residual: no chain does, nor a part of an MLP. A sum that is not
    stored anyway is none.

    Args:
        match: the site.
        dependence: of the graph.
        grad_mode: whether gradients are recorded where the site runs.
        fused: the nodes of all sites that are to be fused.
    """
    if isinstance(match, Chain) or match.part is not None:
        return None
    found = _sum_after(match.result)
    if found is None or found.sum in fused or result_shape(match) != "same":
        return None
    if not _is_stored(found.sum):
        return None
    fits = _fits(match.result, found) and not (grad_mode and _requires_grad(found.node))
    return found if fits and _is_there(match.result, found, dependence) else None


def _sum_after(result: Node) -> Residual | None:
    """The sum that alone reads a result, directly or behind calls that change nothing."""
    calls: list[Node] = []
    node = result
    while len(node.users) == 1:
        (user,) = node.users
        other = _other_summand(user, node)
        if other is not None:
            return Residual(other, user, tuple(calls))
        if identity_source(user) is not node:
            return None
        calls.append(user)
        node = user
    return None


def _other_summand(node: Node, summand: Node) -> Node | None:
    """What a sum adds to ``summand``, each as it is."""
    if operation(node) not in _SUMS or not _ARGUMENTS.issuperset(node.kwargs):
        return None
    alpha: Any = argument(node, 2, "alpha", 1)
    first, second = argument(node, 0, "input"), argument(node, 1, "other")
    if isinstance(alpha, Node) or alpha != 1:
        return None
    other = second if first is summand else first
    return other if isinstance(other, Node) else None


def _is_stored(node: Node) -> bool:
    """Whether a compiler stores a sum, as it does not for one norm or pointwise call after it."""
    while len(node.users) == 1:
        (reader,) = node.users
        if operation(reader) in NORMS or is_pointwise_operator(operation(reader)):
            return False
        before, after = tensor_of(node), tensor_of(reader)
        passed = identity_source(reader) or reshape_source(reader)
        if passed is not node or before is None or after is None:
            return True
        if before.dtype != after.dtype:
            return False
        node = reader
    return True


def _fits(result: Node, residual: Residual) -> bool:
    """Whether all are tensors like the result: nothing is broadcast, cast or laid out anew."""
    like = tensor_of(result)
    if like is None:
        return False
    tensors = map(tensor_of, (residual.node, residual.sum, *residual.calls))
    return all(tensor is not None and _is_like(tensor, like) for tensor in tensors)


def _is_like(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    kind: type = type(tensor)
    return (
        not is_traceable_wrapper_subclass_type(kind)
        and tensor.layout == torch.strided
        and not tensor.is_nested
        and (tensor.dtype, tensor.device) == (like.dtype, like.device)
        and same_shape(tensor, like)
        and is_contiguous(tensor)
    )


def _is_there(result: Node, residual: Residual, dependence: Dependence) -> bool:
    """Whether the residual is there at the last layer, and is the same until it is added."""
    start, end = dependence.position[result], dependence.position[residual.sum]
    if dependence.position[residual.node] >= start:
        return False
    if any(start < position < end for position in dependence.mode_changes):
        return False
    # The sum's own write is one too: in place it must be to the result.
    return not any(dependence.writes_to(dependence.storages(residual.node), start, end))


def _requires_grad(node: Node) -> bool:
    tensor = tensor_of(node)
    return tensor is not None and tensor.requires_grad
