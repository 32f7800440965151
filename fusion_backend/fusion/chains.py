"""Chains: plain sites of which the last layer of each is the first of the next, as one site.

    linear, f_0, linear, f_1, linear, …

Each link is a legal site of its own; see ``legality`` for what must hold of them together. Which of
the chains that a graph has room for are formed is for the caller to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fusion_backend.fusion.matching import Match
from fusion_backend.fusion.views.linear import LinearView
from fusion_backend.mlp.expression import Expression
from fusion_backend.patterns import CHAIN

Decision = TypeVar("Decision")


@dataclass(frozen=True)
class Chain(Match):
    """A site of three and more linear layers.

    Attributes:
        links: the sites that it consists of, at least two, in program order.
    """

    links: tuple[Match, ...] = ()

    @classmethod
    def of(cls, links: Sequence[Match]) -> Chain:
        """The chain of some links, each of which begins with the layer that the one before ends."""
        first, last = links[0], links[-1]
        ends = {*first.sources[0].linear.nodes, *last.down.nodes}
        calls = frozenset().union(*(link.nodes for link in links)) - ends
        return cls(CHAIN, last.down, first.sources, calls, None, (), links=tuple(links))

    @property
    def layers(self) -> tuple[LinearView, ...]:
        return (self.sources[0].linear, *(link.down for link in self.links))

    @property
    def expressions(self) -> tuple[Expression, ...]:
        return tuple(f for link in self.links for f in link.expressions)


def runs_of(legal: Sequence[Match]) -> Iterator[tuple[Match, ...]]:
    """The longest chains of two and more links among the legal sites of a graph."""
    plain = [match for match in legal if _can_be_a_link(match)]
    following = {match.sources[0].linear.node: match for match in plain}
    ends = {match.down.node for match in plain}
    for match in plain:
        if match.sources[0].linear.node in ends:
            continue  # it continues another
        run = [match]
        while (successor := following.get(run[-1].down.node)) is not None:
            run.append(successor)
        if len(run) > 1:
            yield tuple(run)


def _can_be_a_link(match: Match) -> bool:
    """Whether a site is linear layers of features and an activation of nothing else."""
    if match.form is None or not match.form.links:
        return False
    return not match.operands and not match.down.positions


def formed(
    run: Sequence[Match], decide: Callable[[Chain], Decision | None]
) -> Iterator[tuple[Chain, Decision]]:
    """The chains to form of one run: the longest that ``decide`` takes, then beside it.

    Args:
        run: links in program order.
        decide: what is decided for a chain, ``None`` where it is not to be formed.
    """
    for length in range(len(run), 1, -1):
        for start in range(len(run) - length + 1):
            chain = Chain.of(run[start : start + length])
            decision = decide(chain)
            if decision is not None:
                yield from formed(run[: max(start - 1, 0)], decide)
                yield chain, decision
                yield from formed(run[start + length + 1 :], decide)
                return
