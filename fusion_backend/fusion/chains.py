"""Chains: sites of which the last layer of each is the first of the next, as one site.

    linear, f_0, linear, f_1, linear, …

Each link is what stands between two layers: the activation of a legal site, or steps such as a
norm and a residual (see :mod:`chain_steps`), which no site of two layers has. A layer may also read
the chain's input beside the value before it. A chain may begin with a norm of its input and end
with a sum or, where it has such steps, with an activation. See ``legality`` for what must hold of
all together. Which of the chains that a graph has room for are formed is for the caller to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch.fx import Graph, Node

from fusion_backend.fusion.chain_steps import (
    FoundStep,
    Joined,
    is_copied,
    joined_at,
    origin,
    step_at,
    steps_before,
)
from fusion_backend.fusion.forms import UNWANTED
from fusion_backend.fusion.match import Match
from fusion_backend.fusion.shapes import is_contiguous
from fusion_backend.fusion.sources import Source, is_product_of_layer
from fusion_backend.fusion.views.linear import LinearView, linear_view
from fusion_backend.fusion.views.node import same_shape, tensor_of
from fusion_backend.fusion.views.norms import NormView
from fusion_backend.mlp.expression import Expression
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.steps import ACTIVATION, LINEAR, Step, Steps
from fusion_backend.patterns import CHAIN
from fusion_backend.reasons import Refusal

Decision = TypeVar("Decision")


@dataclass(frozen=True)
class Link:
    """Two layers of a chain, and what stands between them.

    Attributes:
        before: the first of them.
        down: the second.
        steps: at least one.
        match: the legal site that these layers are, if they are one.
        joined: what the second layer reads beside the value that the steps compute, if it does.
    """

    before: LinearView
    down: LinearView
    steps: tuple[FoundStep, ...]
    match: Match | None = None
    joined: Joined | None = None

    @classmethod
    def of(cls, match: Match) -> Link:
        """That of a legal site."""
        before, down = match.sources[0].linear, match.down
        step = FoundStep(origin(down.input), before.node, match.calls, expression=match.expression)
        return cls(before, down, (step,), match)

    @property
    def calls(self) -> frozenset[Node]:
        """Those between the layers."""
        joined = frozenset[Node]() if self.joined is None else self.joined.calls
        return joined.union(*(step.calls for step in self.steps))


@dataclass(frozen=True)
class Chain(Match):
    """A site of three and more linear layers.

    Attributes:
        links: that it consists of, at least two, in program order.
        all_steps: its steps in their order; ``None`` for a layer.
        inner: the steps as data.
    """

    links: tuple[Link, ...] = ()
    all_steps: tuple[FoundStep | None, ...] = ()
    inner: Steps | None = None

    @classmethod
    def of(
        cls,
        links: Sequence[Link],
        before: tuple[FoundStep, ...] = (),
        after: tuple[FoundStep, ...] = (),
    ) -> Chain | None:
        """The chain of some links, with steps before its first and after its last layer.

        ``None`` where a step reads a value that is none of the chain's, or a layer one beside
        another that is not the chain's input.
        """
        first, down = links[0].before, links[-1].down
        if before:
            first = replace(first, input=before[0].source)
        found: list[FoundStep | None] = [*before, None]
        for link in links:
            found += [*link.steps, None]
        found += after
        joins = [link.joined for link in links]
        # The very node: a copy of it might be taken before it is written to, or after.
        if any(joined is not None and joined.beside is not first.input for joined in joins):
            return None
        start = origin(first.input)
        if is_copied(first.input) and any(_reads_past(step, start, first.input) for step in found):
            return None
        beside = ("", *("" if joined is None else joined.where for joined in joins))
        layers = (first, *(link.down for link in links))
        steps = _as_data(start, tuple(zip(layers, beside, strict=True)), found)
        if steps is None:
            return None
        calls = frozenset().union(*(step.calls for step in found if step is not None))
        calls = calls.union(*(joined.calls for joined in joins if joined is not None))
        between = (node for link in links for node in (*link.before.nodes, *link.down.nodes))
        calls |= frozenset(between) - {*first.nodes, *down.nodes}
        inner = None if steps.is_plain else steps
        sources = (Source(first),)
        return cls(
            CHAIN, down, sources, calls, None, (), links=tuple(links), all_steps=tuple(found),
            inner=inner,
        )  # fmt: skip

    @property
    def layers(self) -> tuple[LinearView, ...]:
        return (self.sources[0].linear, *(link.down for link in self.links))

    @property
    def hidden_features(self) -> tuple[Any, ...]:
        return tuple(layer.out_features for layer in self.layers[:-1])

    @property
    def result(self) -> Node:
        last = self.all_steps[-1]
        return self.down.node if last is None else last.node

    @property
    def expressions(self) -> tuple[Expression, ...]:
        found = (step.expression for step in self.all_steps if step is not None)
        return tuple(expression for expression in found if expression is not None)

    @property
    def norms(self) -> tuple[NormView, ...]:
        """Those of its steps, in their order."""
        found = (step.norm for step in self.all_steps if step is not None)
        return tuple(norm for norm in found if norm is not None)

    @property
    def parameters(self) -> tuple[Node, ...]:
        return tuple(node for norm in self.norms for node in norm.parameters)

    @property
    def steps(self) -> str:
        return "" if self.inner is None else self.inner.text

    @property
    def read_again(self) -> tuple[Node, ...]:
        """The values that steps read again."""
        found = (step.earlier for step in self.all_steps if step is not None)
        return tuple(node for node in found if node is not None)


def _reads_past(step: FoundStep | None, start: Node, copy: Node) -> bool:
    """Whether a step reads the origin of a chain's input, but not by way of the chain's copy."""
    return step is not None and step.earlier is start and copy not in step.calls


def _as_data(
    start: Node, layers: Sequence[tuple[LinearView, str]], found: Sequence[FoundStep | None]
) -> Steps | None:
    """Steps as data; ``None`` where one reads a value that is not there.

    ``layers``: each with where the input stands beside what it reads, if it does.
    """
    values, steps, left = {start: 0}, [], iter(layers)
    for index, step in enumerate(found):
        if step is None:
            layer, beside = next(left)
            steps.append(Step(LINEAR, beside=beside))
            values[layer.node] = index + 1
            continue
        if step.norm is not None:
            norm = Norm.of(step.norm.text)
            assert norm is not None  # it is the text of one
            steps.append(Step(norm.kind, eps=norm.eps))
        elif step.earlier is None:
            steps.append(Step(ACTIVATION))
        elif step.earlier in values:
            steps.append(Step(ACTIVATION, (values[step.earlier],)))
        else:
            return None
        values[step.node] = index + 1
    return Steps(tuple(steps))


def links_of(
    graph: Graph,
    found: Mapping[Match, Refusal | None],
    takes_steps: Callable[[Node], bool],
) -> tuple[Link, ...]:
    """What can be a link in a graph: legal sites, and layers that other steps join.

    Args:
        graph: its nodes carry example values.
        found: the sites in it, and why they must be left alone.
        takes_steps: whether a chain that computes a node may have other steps at all.
    """
    known: dict[Node, tuple[Node, tuple[FoundStep, ...]]] = {}

    def link_before(node: Node) -> Link | None:
        down = linear_view(node)
        if down is None or is_product_of_layer(node) or not takes_steps(node):
            return None
        joined = joined_at(down.input)
        value = down.input if joined is None else joined.value
        if value not in known:  # several layers may read it
            known[value] = steps_before(value)
        return _link(down, joined, *known[value])

    legal = {m.down.node: m for m, reason in found.items() if reason is None and can_be_link(m)}
    unwanted = {
        m.down.node for m, why in found.items() if why is not None and why.reason in UNWANTED
    }
    links = (
        Link.of(legal[node]) if node in legal else link_before(node)
        for node in graph.nodes
        if node not in unwanted
    )
    return tuple(link for link in links if link is not None)


def _link(
    down: LinearView, joined: Joined | None, start: Node, steps: tuple[FoundStep, ...]
) -> Link | None:
    """The link that ends in a layer, if steps lead to it from another one."""
    before = linear_view(start)
    value = down.input if joined is None else joined.value
    if before is None or not steps or not _has_features_of(steps[-1].node, value):
        return None
    return Link(before, down, steps, joined=joined)


def _has_features_of(node: Node, operand: Node) -> bool:
    value, given = tensor_of(node), tensor_of(operand)
    return value is not None and given is not None and same_shape(value, given)


def runs_of(links: Sequence[Link]) -> Iterator[tuple[Link, ...]]:
    """The longest chains of two and more links."""
    following = {link.before.node: link for link in links}
    ends = {link.down.node for link in links}
    for link in links:
        if link.before.node in ends:
            continue  # it continues another
        run = [link]
        while (successor := following.get(run[-1].down.node)) is not None:
            run.append(successor)
        if len(run) > 1:
            yield tuple(run)


def can_be_link(match: Match) -> bool:
    """Whether a site is linear layers of features and an activation of nothing else."""
    if match.form is None or not match.form.links:
        return False
    return not match.operands and not match.down.positions


def formed(
    run: Sequence[Link],
    decide: Callable[[Chain, bool], Decision | None],
    most_layers: float = math.inf,
) -> Iterator[tuple[Chain, Decision]]:
    """The chains to form of one run: the longest that ``decide`` takes, then beside it.

    Args:
        run: links in program order.
        decide: what is decided for a chain, ``None`` where it is not to be formed; it is told
            whether the chain is as long as the run.
        most_layers: of a part of the run. A long run has many parts, and to make and decide one
            takes milliseconds.
    """
    for length in range(len(run), 1, -1):
        if most_layers <= length < len(run):  # a link is of two layers
            continue
        for start in range(len(run) - length + 1):
            for chain in _with_ends(run[start : start + length]):
                decision = decide(chain, length == len(run))
                if decision is not None:
                    yield from formed(run[: max(start - 1, 0)], decide, most_layers)
                    yield chain, decision
                    yield from formed(run[start + length + 1 :], decide, most_layers)
                    return


def _with_ends(links: Sequence[Link]) -> Iterator[Chain]:
    """Chains of some links: with the norm before and the step after them, and with less.

    An activation at the end is taken where there are other steps, too: without any the chain can be
    one of several towers, and be trained.
    """
    norm, last = step_at(links[0].before.input), _step_after(links[-1].down)
    before = [(norm,)] if norm is not None and norm.norm is not None else []
    for first in [*before, ()]:
        without = Chain.of(links, first)
        has_steps = without is not None and without.inner is not None
        if last is not None and (last.earlier is not None or has_steps):
            chain = Chain.of(links, first, (last,))
            if chain is not None:
                yield chain
        if without is not None:
            yield without


def _step_after(layer: LinearView) -> FoundStep | None:
    """The pointwise call of a layer's result, if nothing else reads that.

    It may be of an earlier value, too.
    """
    node = layer.node
    while len(node.users) == 1:
        (user,) = node.users
        step = step_at(user)
        if step is None or step.node is not user:
            if origin(user) is not layer.node:
                return None
            node = user  # a call that leaves it as it is
            continue
        result = tensor_of(user)
        is_next = step.norm is None and step.source is layer.node
        return step if is_next and result is not None and is_contiguous(result) else None
    return None
