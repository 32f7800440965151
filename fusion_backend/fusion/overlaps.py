"""Which of several sites that share a linear layer are fused: the ones with most to save."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

Site = TypeVar("Site", bound=Hashable)


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
