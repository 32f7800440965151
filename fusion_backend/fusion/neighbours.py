"""The norm before a fused site and the sum after it, where the site's own kernel computes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from torch.fx import Node

from fusion_backend.fusion.context import PassContext
from fusion_backend.fusion.match import Match
from fusion_backend.fusion.prenorms import Prenorm, prenorm_of
from fusion_backend.fusion.residuals import Residual, residual_of
from fusion_backend.fusion.settings import records_gradients
from fusion_backend.planning.planner import (
    Plan,
    may_take_norm,
    may_take_residual,
    takes_norm,
    takes_residual,
)
from fusion_backend.reasons import Refusal


class Chosen(NamedTuple):
    """A site with what was decided for it, and with what is computed within beside it.

    ``call`` numbers the calls that several sites of the graph share; 0 is a call of its own.
    """

    match: Match
    decision: Plan | Refusal
    residual: Residual | None = None
    prenorm: Prenorm | None = None
    call: int = 0


def with_neighbours(
    context: PassContext, decided: Mapping[Match, Plan | Refusal], ending: AbstractSet[Node]
) -> Iterator[Chosen]:
    """Sites with the norms and sums that they compute themselves.

    The norm that ends an encoder layer, one of ``ending``, goes where the layer is put back.
    """
    fused = [match for match, choice in decided.items() if isinstance(choice, Plan)]
    nodes = frozenset[Node]().union(*(match.nodes for match in fused))
    for match, choice in decided.items():
        if isinstance(choice, Refusal):
            yield Chosen(match, choice)
            continue
        norm = context.failures.attempt(_prenorm, context, match, choice)
        residual = context.failures.attempt(_residual, context, match, choice, nodes)
        if isinstance(norm, Refusal) or isinstance(residual, Refusal):
            failed = norm if isinstance(norm, Refusal) else residual
            assert isinstance(failed, Refusal)
            yield Chosen(match, failed)
        else:
            norm = None if norm is None or norm.node in ending else norm
            yield Chosen(match, choice, residual, norm)


def _prenorm(context: PassContext, match: Match, choice: Plan) -> Prenorm | None:
    """The norm that a fused site computes before its first layers."""
    if not may_take_norm(choice):
        return None
    norm = prenorm_of(match, context.dependence, records_gradients(match))
    if norm is None or not takes_norm(context.setting(match), norm.saves_a_pass, context.options):
        return None
    return norm


def _residual(
    context: PassContext, match: Match, choice: Plan, fused: AbstractSet[Node]
) -> Residual | None:
    """What a fused site adds to its result."""
    if not may_take_residual(choice):
        return None
    found = residual_of(match, context.dependence, records_gradients(match), fused)
    taken = found is not None and takes_residual(context.setting(match), choice, context.options)
    return found if taken else None
