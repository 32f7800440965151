"""The sites that share a call, because one launch for all is faster than a launch each.

Which sites may share one is for ``towers`` to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fusion_backend import reasons
from fusion_backend.fusion.chains import Chain, Link, can_be_link, runs_of
from fusion_backend.fusion.context import PassContext
from fusion_backend.fusion.legality import refusal
from fusion_backend.fusion.match import Match
from fusion_backend.fusion.neighbours import Chosen
from fusion_backend.fusion.overlaps import shares_layer
from fusion_backend.fusion.towers import can_be_tower, formed
from fusion_backend.patterns import CHAIN, TOWERS
from fusion_backend.planning.planner import Plan, plan_together
from fusion_backend.reasons import Refusal


def with_shared_calls(context: PassContext, chosen: list[Chosen]) -> list[Chosen]:
    """The sites, with one plan for those that are to share a call."""
    if TOWERS.name in context.forms.off:
        return chosen
    found = context.failures.attempt(_towers, context, chosen)
    return chosen if isinstance(found, Refusal) else found


def _towers(context: PassContext, chosen: list[Chosen]) -> list[Chosen]:
    decisions = {site.match: site.decision for site in chosen}
    legal = [site for site in chosen if _is_legal(context, site)]
    chains = {} if CHAIN.name in context.forms.off else _chains_of_pairs(context, legal)
    pairs = {link for links in chains.values() for link in links}
    alone = [match for match in _without_neighbours(legal) if match not in pairs]

    def decide(matches: Sequence[Match]) -> Plan | None:
        choices = [decisions.get(match, Refusal(reasons.NOT_FASTER)) for match in matches]
        return plan_together([*map(context.setting, matches)], choices, context.options)

    candidates = [match for match in (*alone, *chains) if can_be_tower(match)]
    groups = [*formed(candidates, context.dependence, decide)]
    joined: dict[Match, Chosen] = {}  # a chain in the place of its last link
    for number, (matches, choice) in enumerate(groups, 1):
        for match in matches:
            place = chains[match][-1] if match in chains else match
            joined[place] = Chosen(match, _shared(choice, decisions.get(match)), call=number)
    links = {link for chain in chains if chains[chain][-1] in joined for link in chains[chain]}
    return [
        joined.get(site.match, site)
        for site in chosen
        if site.match in joined or site.match not in links
    ]


def _is_legal(context: PassContext, site: Chosen) -> bool:
    """Whether a site is fused, or might be: one of a chain that is not faster need not be legal."""
    if isinstance(site.decision, Plan):
        return True
    if site.decision.reason not in (reasons.NOT_FASTER, reasons.OVERLAPS):
        return False
    return context.failures.attempt(refusal, site.match, context.dependence) is None


def _chains_of_pairs(
    context: PassContext, chosen: Sequence[Chosen]
) -> dict[Match, tuple[Match, ...]]:
    """Chains that are not one kernel alone but may be with what reads the same; their links."""
    found: dict[Match, tuple[Match, ...]] = {}
    for run_of_links in runs_of([Link.of(site.match) for site in chosen if _may_be_a_link(site)]):
        links = tuple(link.match for link in run_of_links if link.match is not None)
        chain, others = Chain.of(run_of_links), [s for s in chosen if s.match not in links]
        if chain is None:
            continue
        x = chain.sources[0].linear.input
        has_others = any(s.linear.input is x for site in others for s in site.match.sources)
        fused = (site.match for site in others if isinstance(site.decision, Plan))
        taken = {layer.node for match in fused for layer in match.layers}
        if not has_others or shares_layer(chain, taken):
            continue
        if context.failures.attempt(refusal, chain, context.dependence) is None:
            found[chain] = links
    return found


def _may_be_a_link(site: Chosen) -> bool:
    """Whether a legal site of two layers has nothing beside, fused or not."""
    if isinstance(site.match, Chain) or site.match.part is not None:
        return False
    if not can_be_link(site.match):
        return False
    if isinstance(site.decision, Plan):
        return site.decision.refusal is None and site.residual is None and site.prenorm is None
    return site.decision.reason in (reasons.NOT_FASTER, reasons.OVERLAPS)


def _without_neighbours(sites: Sequence[Chosen]) -> Iterator[Match]:
    """Sites that run by themselves, with nothing beside: fused, or legal and not faster so."""
    slow = [site for site in sites if _is_slow(site.decision)]
    fused = [site for site in sites if isinstance(site.decision, Plan)]
    uses = Counter(layer.node for site in (*fused, *slow) for layer in site.match.layers)
    for site in sites:
        if isinstance(site.decision, Plan):
            if site.residual is None and site.prenorm is None:
                yield site.match
        elif _is_slow(site.decision) and all(uses[n.node] == 1 for n in site.match.layers):
            yield site.match


def _is_slow(decision: Plan | Refusal) -> bool:
    return isinstance(decision, Refusal) and decision.reason is reasons.NOT_FASTER


def _shared(plan: Plan, alone: Plan | Refusal | None) -> Plan:
    """The plan that sites share, for one of them: so much faster than the plan that it had."""
    if plan.refusal is not None:  # no kernels run it, together or alone
        assert isinstance(alone, Plan)
        return alone
    before = alone.expected_speedup if isinstance(alone, Plan) else 1.0
    if before is None or plan.expected_speedup is None:
        return replace(plan, expected_speedup=None)
    return replace(plan, expected_speedup=before * plan.expected_speedup)
