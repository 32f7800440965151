"""What is decided for each site of a graph: a plan, or the reason to leave it alone.

Sites that are links of a chain are decided together, and so is what remains of a site that is
refused: its first layers and the activation.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from torch.fx import Node

from fusion_backend import reasons
from fusion_backend.fusion.chains import Chain, formed, links_of, runs_of
from fusion_backend.fusion.context import PassContext
from fusion_backend.fusion.forms import left_out
from fusion_backend.fusion.legality import refusal
from fusion_backend.fusion.match import Match
from fusion_backend.fusion.matching import find_matches
from fusion_backend.fusion.overlapped_parts import part_before
from fusion_backend.fusion.overlaps import shares_layer
from fusion_backend.fusion.partial import part_of
from fusion_backend.planning.planner import Plan, plan
from fusion_backend.reasons import Refusal


def decisions(context: PassContext) -> dict[Match, Plan | Refusal]:
    """Every site in program order, with what is decided for it; chains before their links."""
    attempt, dependence, forms = context.failures.attempt, context.dependence, context.forms
    refused: dict[Match, Refusal | None] = {
        match: left_out(match, forms, context.options) or attempt(refusal, match, dependence)
        for match in find_matches(context.graph, forms.tried, context.failures.refusal)
    }

    declined: dict[Node, Refusal] = {}

    def plan_legal(chain: Chain, is_longest: bool) -> Plan | None:
        if (
            left_out(chain, forms, context.options)
            or attempt(refusal, chain, dependence) is not None
        ):
            return None
        # Of the many parts of a long chain none is timed.
        choice = _planned(context if is_longest else context.without_measuring(), chain)
        if isinstance(choice, Refusal) and choice.reason is reasons.NOT_FASTER:
            for link in chain.links:
                declined.setdefault(link.down.node, choice)
        if not isinstance(choice, Plan) or (chain.steps and choice.refusal is not None):
            return None  # what no kernel runs must not take the place of pairs that some do
        return choice

    links = attempt(links_of, context.graph, refused, context.takes_steps)
    runs = runs_of(() if isinstance(links, Refusal) else links)
    chains = {
        chain: choice
        for links in runs
        for chain, choice in formed(links, plan_legal, context.most_layers(links[0].before.node))
    }
    ends = {chain.down.node: chain for chain in chains}
    within = {link.down.node for chain in chains for link in chain.links}
    taken = {layer.node for chain in chains for layer in chain.layers}
    decided: dict[Match, Plan | Refusal] = {}
    for match, reason in refused.items():
        if (chain := ends.pop(match.down.node, None)) is not None:
            decided[chain] = chains[chain]
        elif match.down.node in within:
            continue
        elif reason is not None:
            part = attempt(part_of, match, reason, dependence, forms)
            choice = _planned(context, part) if isinstance(part, Match) else None
            if isinstance(part, Refusal):
                decided[match] = part
            elif part is None or not isinstance(choice, Plan) or shares_layer(part, taken):
                # What stands in the way of a site need not stand in that of a chain.
                decided[match] = declined.get(match.down.node, reason)
            else:
                decided[part] = choice
        elif shares_layer(match, taken):
            found = _part_before_chain(context, match, taken)
            fused, choice = found or (match, Refusal(reasons.OVERLAPS))
            decided[fused] = choice
        else:
            decided[match] = _planned(context, match)
    decided |= {chain: chains[chain] for chain in ends.values()}  # their last layers end no site
    return dict(sorted(decided.items(), key=lambda item: item[0].down.node))


def _part_before_chain(
    context: PassContext, match: Match, taken: AbstractSet[Node]
) -> tuple[Match, Plan] | None:
    """A site up to its hidden value, where a chain begins with its last layer, and its plan."""
    if any(source.linear.node in taken for source in match.sources):
        return None
    choice = _planned(context, match)
    return part_before(context, match, choice) if isinstance(choice, Plan) else None


def _planned(context: PassContext, match: Match) -> Plan | Refusal:
    outside = "" if match.part is None else match.part.outside.detail
    return context.failures.attempt(lambda: plan(context.setting(match), context.options, outside))
