"""Which of several sites that share a linear layer are fused: the ones with most to save.

In a deep MLP the last layer of each site is the first one of the next. Where a site's kernels are
its first layers with the activation, and then a library's product, they save as much without that
product. Such a site is fused up to its hidden value, and the next one as well.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeVar

from torch.fx import Node

from fusion_backend import reasons
from fusion_backend.fusion.chains import Chain
from fusion_backend.fusion.context import PassContext
from fusion_backend.fusion.match import Match
from fusion_backend.fusion.partial import part_of
from fusion_backend.planning.planner import Plan, plan_of_first_layers
from fusion_backend.reasons import Refusal

Site = TypeVar("Site", bound=Hashable)


Decided = Mapping[Match, Plan | Refusal]


def without_overlaps(context: PassContext, decided: Decided) -> dict[Match, Plan | Refusal]:
    """What is decided, so that no two sites share a layer: those that save most are fused.

    A site that is fused up to its hidden value takes the place of the whole.
    """
    fused = {match: choice for match, choice in decided.items() if isinstance(choice, Plan)}
    by_result = {match.result: match for match in reversed(fused)}  # two may have it in common
    last = {result: by_result[result] for result in sorted(by_result)}
    first = _first_layers(last.values())
    parts = {
        match: part_before(context, match, fused[match])
        for match in last.values()
        if match.down.node in first
    }
    shared = {
        match: tuple(
            {
                s.linear.node: last[s.linear.node]
                for s in match.sources
                if s.linear.node in last and parts[last[s.linear.node]] is None
            }.values()
        )
        for match in last.values()
    }
    widths = {match: match.down.in_features for match in last.values()}
    weights = {match: float(w) if isinstance(w, int) else 1.0 for match, w in widths.items()}
    chosen = heaviest_independent(weights, shared)
    first = _first_layers(chosen)
    found: dict[Match, Plan | Refusal] = {}
    for match, choice in decided.items():
        part = parts.get(match)
        if match in fused and match not in chosen:
            found[match] = Refusal(reasons.OVERLAPS)
        elif part is not None and match.down.node in first:
            found |= [part]
        else:
            found[match] = choice
    return found


def _first_layers(matches: Iterable[Match]) -> set[Node]:
    return {source.linear.node for match in matches for source in match.sources}


def part_before(context: PassContext, match: Match, choice: Plan) -> tuple[Match, Plan] | None:
    """The part of a site up to its hidden value and its plan, where it saves as much as the whole.

    Args:
        context: of the graph.
        match: a legal site, whose last layer is the first one of another.
        choice: its plan.
    """
    if isinstance(match, Chain) or match.part is not None:
        return None
    shared = Refusal(reasons.OVERLAPS)
    part = context.failures.attempt(part_of, match, shared, context.dependence, context.forms)
    if not isinstance(part, Match):
        return None
    plan = plan_of_first_layers(context.setting(part), choice)
    return None if plan is None else (part, plan)


def shares_layer(match: Match, taken: AbstractSet[Node]) -> bool:
    """Whether a linear layer of a site is among those that are taken."""
    return any(layer.node in taken for layer in match.layers)


def heaviest_independent(
    weights: Mapping[Site, float], shared: Mapping[Site, Sequence[Site]]
) -> set[Site]:
    """The sites with the largest total weight among which no two share a layer.

    The last layer of a legal site is the first of at most one other, as its hidden value may not
    have other users. So sites that share layers form trees, and one pass over them is exact.

    Args:
        weights: what fusing each site saves, in program order.
        shared: the earlier sites whose last layer is one of a site's first layers.
    """
    taken, left = dict[Site, float](), dict[Site, float]()
    for site, weight in weights.items():
        before = shared.get(site, ())
        taken[site] = weight + math.fsum(left[child] for child in before)
        left[site] = math.fsum(max(taken[child], left[child]) for child in before)
    chosen: set[Site] = set()
    excluded: set[Site] = set()
    for site in reversed(tuple(weights)):
        if site not in excluded and taken[site] > left[site]:
            chosen.add(site)
            excluded.update(shared.get(site, ()))
    return chosen
