"""Which of several sites that share a linear layer are fused: the ones with most to save."""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeVar

from torch.fx import Node

from fusion_backend import reasons
from fusion_backend.fusion.match import Match
from fusion_backend.planning.planner import Plan
from fusion_backend.reasons import Refusal

Site = TypeVar("Site", bound=Hashable)


def overlapping(decided: Mapping[Match, Plan | Refusal]) -> dict[Match, Refusal]:
    """The sites with a plan that are not fused: each shares a layer with one that saves more."""
    fused = [match for match, choice in decided.items() if isinstance(choice, Plan)]
    chosen = independent(fused)
    return {match: Refusal(reasons.OVERLAPS) for match in fused if match not in chosen}


def independent(matches: Iterable[Match], free: Container[Match] = ()) -> set[Match]:
    """Those of some sites that save most, and of which no two share a layer.

    ``free``: sites that may share their last layer, because they can do without it.
    """
    by_result = {match.result: match for match in reversed([*matches])}  # two may have it in common
    last = {result: by_result[result] for result in sorted(by_result)}
    before = {result: match for result, match in last.items() if match not in free}
    shared = {
        match: tuple(
            {
                s.linear.node: before[s.linear.node]
                for s in match.sources
                if s.linear.node in before
            }.values()
        )
        for match in last.values()
    }
    widths = {match: match.down.in_features for match in last.values()}
    weights = {match: float(w) if isinstance(w, int) else 1.0 for match, w in widths.items()}
    return heaviest_independent(weights, shared)


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
