"""The part of a fusible site that is left where the next site begins with its last layer."""

from __future__ import annotations

from fusion_backend import reasons
from fusion_backend.fusion.chains import Chain
from fusion_backend.fusion.context import PassContext
from fusion_backend.fusion.match import Match
from fusion_backend.fusion.partial import part_of
from fusion_backend.planning.planner import Plan, plan_of_first_layers
from fusion_backend.reasons import Refusal


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
