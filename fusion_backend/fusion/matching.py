"""Finding MLPs: linear layers, and an activation of theirs that another linear layer reads.

A walk back from each linear layer tells which layers feed it, by which activation, and what stands
in the way. Those that feed it are then told apart as the variables of a form. This module decides
nothing; see ``legality``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations

from torch.fx import Graph, Node

from fusion_backend import reasons
from fusion_backend.fusion.joins import join_of
from fusion_backend.fusion.match import Match
from fusion_backend.fusion.sources import Source, is_product_of_layer, layer_view
from fusion_backend.fusion.views.linear import LinearView
from fusion_backend.fusion.views.node import same_shape, same_size, tensor_of
from fusion_backend.fusion.views.operand import Entering, in_order
from fusion_backend.fusion.views.permutations import REORDERING
from fusion_backend.fusion.walk import TooFar, Walk
from fusion_backend.mlp.expression import (
    Expression,
    Variable,
    substitute,
    variables,
)
from fusion_backend.mlp.expression.canonical import canonicalize
from fusion_backend.mlp.expression.differentiation import differentiate
from fusion_backend.patterns.form import Form, PackedProjection, Projection
from fusion_backend.reasons import Refusal


def _raise(error: Exception) -> Refusal:
    raise error


def find_matches(
    graph: Graph, forms: tuple[Form, ...], failed: Callable[[Exception], Refusal] = _raise
) -> Iterator[Match]:
    """Every place in a graph where an activation joins two linear layers, in program order.

    Args:
        graph: its nodes carry example values.
        forms: the forms that there are.
        failed: given what was raised at a layer, the reason for which its site is left alone.
    """
    for node in graph.nodes:
        walk = None
        try:
            down = layer_view(node)
            if down is None or is_product_of_layer(node):
                continue
            walk = Walk(down)
            match = _match_of(walk, forms)
        except Exception as error:
            refused = failed(error)
            match = None if walk is None else _left_alone(walk, refused)
        if match is not None:
            yield match


def match_up_to(hidden: Node, match: Match, forms: tuple[Form, ...]) -> Match | None:
    """The match of a site's layers before one of its calls, as if the last layer read that."""
    return _match_of(Walk(replace(match.down, input=hidden)), forms)


def _left_alone(walk: Walk, refused: Refusal) -> Match:
    """The site of a walk that failed, as far as it is known."""
    first = walk.sources[0] if walk.sources else Source(walk.down)
    return Match(None, walk.down, (first,), frozenset(), None, (refused,))


def _match_of(walk: Walk, forms: tuple[Form, ...]) -> Match | None:
    down = walk.down
    try:
        activation = walk.value(down.input)
    except TooFar:
        return _unmatched(down)
    if not (activation.reaches and activation.bends):
        return _unmatched(down)
    if activation.moved is not None:
        walk.obstacles.append(activation.moved.refusal)
    chosen = _projections(walk.sources)
    form = _form_of(chosen, forms)
    obstacles = _most_telling_first(walk.obstacles)
    if not obstacles and form is None:
        obstacles = (Refusal(reasons.UNKNOWN_FORM, _describe(chosen)),)
    if not obstacles and not all(_keeps_rows(source, down) for source in walk.sources):
        obstacles = (Refusal(reasons.ROW_MIXING_VIEW, "a reshape"),)
    calls = frozenset(walk.slicing.union(walk.calls) - walk.parameters.keys())
    if form is None or obstacles:
        return Match(form, down, tuple(chosen), calls, None, obstacles)
    entering = dict(walk.operands)
    for index, source in enumerate(walk.sources):
        if source not in chosen:
            entering[f"v{index}"] = Entering(source.linear.node, "elementwise", source.part)
    sources, expression = _named(walk.sources, chosen, form, activation.expression)
    expression, order = in_order(expression, entering)
    operands = tuple(entering[name] for name in order)
    names = tuple(variable.name for variable in form.hidden)
    return Match(form, down, sources, calls, expression, (), operands, variables=names)


def _unmatched(down: LinearView) -> Match | None:
    """Layers that something joins which no activation is: only to be reported."""
    join = join_of(down)
    if join is None:
        return None
    return Match(None, down, tuple(map(Source, join.layers)), frozenset(), None, join.refusals)


def _projections(sources: list[Source]) -> list[Source]:
    """The sources that read the MLP's input: that of the widest layer, the first of equals."""
    widths = [source.linear.in_features for source in sources]
    known = [width if isinstance(width, int) else 0 for width in widths]
    widest = sources[known.index(max(known))]
    return [source for source in sources if source.linear.input is widest.linear.input]


def _keeps_rows(source: Source, down: LinearView) -> bool:
    """Whether the last layer reads each row of a projection as a row, whatever came between."""
    if source.linear.positions != down.positions:
        return False
    if not down.positions:
        return same_size(source.features, down.in_features)
    before, after = tensor_of(source.node), tensor_of(down.input)
    return before is not None and after is not None and same_shape(before, after)


def _most_telling_first(obstacles: list[Refusal]) -> tuple[Refusal, ...]:
    """A transpose before and after a convolution says less than the convolution does."""
    once = dict.fromkeys(obstacles)
    return tuple(sorted(once, key=lambda refusal: refusal.particulars in REORDERING))


def _form_of(sources: list[Source], forms: tuple[Form, ...]) -> Form | None:
    return next((form for form in forms if any(_assignments(sources, form))), None)


def _assignments(sources: list[Source], form: Form) -> Iterator[tuple[Source, ...]]:
    """The ways in which sources are the variables of a form, the one in program order first."""
    if len(sources) != len(form.hidden):
        return
    for order in permutations(sorted(sources, key=lambda source: source.node)):
        kinds = [Projection if source.part is None else PackedProjection for source in order]
        if all(map(isinstance, form.hidden, kinds)):
            yield order


def _describe(sources: list[Source]) -> str:
    whole = sum(source.part is None for source in sources)
    parts = len(sources) - whole
    return f"{whole} linear layers and {parts} slices of linear layers"


def _named(
    sources: list[Source], chosen: list[Source], form: Form, expression: Expression
) -> tuple[tuple[Source, ...], Expression]:
    """The projections as variables of the form, of which some are to enter linearly."""
    index = {id(source): f"v{index}" for index, source in enumerate(sources)}
    linear = [variable.name for variable in form.hidden if variable.linear]
    named = []
    for order in _assignments(chosen, form):
        pairs = zip(order, form.hidden, strict=True)
        names = {index[id(source)]: Variable(variable.name) for source, variable in pairs}
        candidate = canonicalize(substitute(expression, names))
        named.append((order, candidate))
        if all(name not in variables(differentiate(candidate, name)) for name in linear):
            return named[-1]
    return named[0]
