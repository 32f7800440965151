"""Sites of a deep MLP, the last layer of each of which is the first one of the next.

Where a site's kernels are its first layers with the activation, and then a library's product, they
save as much without that product. Such a site is fused up to its hidden value, and the next one is
fused as well, so that no activation is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch.fx import Node

from fusion_backend import reasons
from fusion_backend.fusion.context import PassContext
from fusion_backend.fusion.match import Match
from fusion_backend.fusion.neighbours import Chosen
from fusion_backend.fusion.overlapped_parts import part_before
from fusion_backend.fusion.overlaps import independent, shares_layer
from fusion_backend.planning.planner import Plan
from fusion_backend.reasons import Refusal


def with_parts(
    context: PassContext, decided: Mapping[Match, Plan | Refusal], chosen: Sequence[Chosen]
) -> list[Chosen]:
    """The sites, with parts of those that a next one begins in.

    Args:
        context: of the graph.
        decided: for each site by itself.
        chosen: the sites, of which no two that are fused share a layer.
    """
    shared = {layer.node for site in chosen if site.call for layer in site.match.layers}
    plans = {
        site.match: plan
        for site in chosen
        if not site.call and isinstance(plan := decided.get(site.match), Plan)
        if isinstance(site.decision, Plan) or not shares_layer(site.match, shared)
    }
    first = _first_layers(plans)
    parts = {
        site.match: part
        for site in chosen
        if site.match in plans and site.match.down.node in first
        if site.residual is None and site.prenorm is None
        if (part := part_before(context, site.match, plans[site.match])) is not None
    }
    if not parts:
        return [*chosen]
    fused = independent(plans, parts)
    first, found = _first_layers(fused), []
    for site in chosen:
        if site.match not in plans:
            found.append(site)
        elif site.match not in fused:
            found.append(Chosen(site.match, Refusal(reasons.OVERLAPS)))
        elif site.match in parts and site.match.down.node in first:
            found.append(Chosen(*parts[site.match]))
        else:
            whole = Chosen(site.match, plans[site.match])
            found.append(site if isinstance(site.decision, Plan) else whole)
    return found


def _first_layers(matches: Iterable[Match]) -> set[Node]:
    return {source.linear.node for match in matches for source in match.sources}
