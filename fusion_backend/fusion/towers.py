"""Towers: plain MLPs and chains of one input, side by side, that become one call.

Each is a legal site of its own. The call stands where the first of them ends, so whatever another
one reads must be there by then, and stay as it is until that one would have read it. No tower reads
what another one computes then, by way of its parameters either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from torch.fx import Node

from fusion_backend.fusion.chains import Chain
from fusion_backend.fusion.gradient_paths import with_gradients
from fusion_backend.fusion.match import Match
from fusion_backend.fusion.shapes import result_shape
from fusion_backend.fusion.views.dependence import Dependence
from fusion_backend.fusion.views.node import tensor_of

Decision = TypeVar("Decision")


def can_be_tower(match: Match) -> bool:
    """Whether a legal site is linear layers of features, and activations of nothing else between.

    Gradients reach all layers, as those of the call do.
    """
    if match.form is None or match.part is not None or match.operands or match.down.positions:
        return False
    if len(match.sources) != 1 or match.sources[0].part is not None:
        return False
    sites: Sequence[Match | None] = (match,)
    if isinstance(match, Chain):
        sites = () if match.steps else [link.match for link in match.links]
    if not sites or any(s is None or s.sources[0].node not in with_gradients(s) for s in sites):
        return False
    return result_shape(match) not in (None, "flatten")


def can_join(first: Match, other: Match, dependence: Dependence) -> bool:
    """Whether a tower may be computed where the first one ends, which ends before it does."""
    if first.sources[0].linear.input is not other.sources[0].linear.input:
        return False
    if not _are_alike(first.result, other.result):
        return False
    start, end = dependence.position[first.result], dependence.position[other.result]
    begin, last = dependence.span(first.nodes | other.nodes)
    if any(begin < position < last for position in dependence.mode_changes):
        return False
    parameters = [*parameters_of(other)]
    if any(dependence.position[node] >= start for node in parameters if _is_computed(node)):
        return False
    read = (other.sources[0].linear.input, *parameters)
    storages = frozenset[int]().union(*map(dependence.storages, read))
    return not any(dependence.writes_to(storages, start, end))


def parameters_of(match: Match) -> Iterator[Node]:
    """Every weight and bias of a site."""
    for layer in match.layers:
        yield layer.weight
        if layer.bias is not None:
            yield layer.bias


def _is_computed(node: Node) -> bool:
    """A parameter that a graph fetches where it is used is there before."""
    return node.op != "get_attr"


def _are_alike(one: Node, other: Node) -> bool:
    """Whether results are of one dtype and device, and both have gradients or neither has."""
    first, second = tensor_of(one), tensor_of(other)
    if first is None or second is None:
        return False
    if (first.dtype, first.device) != (second.dtype, second.device):
        return False
    return first.requires_grad == second.requires_grad


def formed(
    towers: Iterable[Match],
    dependence: Dependence,
    decide: Callable[[Sequence[Match]], Decision | None],
) -> Iterator[tuple[tuple[Match, ...], Decision]]:
    """The towers that share a call, each with the first others that take it.

    Args:
        towers: sites of which :func:`can_be_tower` holds.
        dependence: of their graph.
        decide: what is decided for some that may share a call, of which the last is new among them;
            ``None`` where it is not to share it.
    """
    groups: list[tuple[list[Match], Decision | None]] = []
    for tower in sorted(towers, key=lambda match: match.result):
        for i, (group, _) in enumerate(groups):
            joins = can_join(group[0], tower, dependence)
            decision = decide([*group, tower]) if joins else None
            if decision is not None:
                groups[i] = ([*group, tower], decision)
                break
        else:
            groups.append(([tower], None))
    for group, decision in groups:
        if decision is not None:
            yield tuple(group), decision
