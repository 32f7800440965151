"""A site as matching finds it: linear layers, and what stands between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.fx import Node

from fusion_backend.fusion.sources import Source
from fusion_backend.fusion.views.linear import LinearView
from fusion_backend.fusion.views.operand import Entering
from fusion_backend.mlp.expression import Expression
from fusion_backend.mlp.record import in_one_text
from fusion_backend.patterns.form import Form
from fusion_backend.reasons import Refusal


class Part(NamedTuple):
    """That a site is fused up to its hidden value: at which node that is, and why not beyond."""

    hidden: Node
    outside: Refusal


@dataclass(frozen=True)
class Match:
    """A site: linear layers, the calls between them, and what stands in the way.

    Attributes:
        form: the declared form, or ``None`` where the site has none of them.
        down: the last linear layer.
        sources: the projections, one a variable of ``expression``, in the form's order.
        calls: every node between the first linear layers and the last one.
        expression: the activation, canonical; ``None`` where it could not be written.
        obstacles: what the walk met that no fused kernel can do.
        operands: what else enters the expression, as its variables ``p0``, ``p1``, ...
        part: where only the first layers and the activation are fused, and ``calls`` ends there.
        variables: what the expression calls the sources.
    """

    form: Form | None
    down: LinearView
    sources: tuple[Source, ...]
    calls: frozenset[Node]
    expression: Expression | None
    obstacles: tuple[Refusal, ...]
    operands: tuple[Entering, ...] = ()
    part: Part | None = None
    variables: tuple[str, ...] = ()

    @property
    def layers(self) -> tuple[LinearView, ...]:
        """The linear layers that are fused."""
        first = tuple(source.linear for source in self.sources)
        return first if self.part is not None else (*first, self.down)

    @property
    def hidden_features(self) -> tuple[Any, ...]:
        """The width of each value between two layers."""
        return (self.down.in_features,)

    @property
    def result(self) -> Node:
        """The node that the fused operator takes the place of."""
        return self.down.node if self.part is None else self.part.hidden

    @property
    def nodes(self) -> frozenset[Node]:
        """All nodes of the site."""
        return self.calls.union(*(layer.nodes for layer in self.layers))

    @property
    def expressions(self) -> tuple[Expression, ...]:
        """The activation after each layer but the last, as far as it could be written."""
        return () if self.expression is None else (self.expression,)

    @property
    def steps(self) -> str:
        """What a chain computes beside its layers and an activation between each two."""
        return ""

    @property
    def parameters(self) -> tuple[Node, ...]:
        """Those of norms within."""
        return ()

    @property
    def read_again(self) -> tuple[Node, ...]:
        """Values within, or the input, that are kept until they are read again."""
        return ()

    @property
    def activation(self) -> str:
        """The activations as they are reported."""
        return in_one_text(self.expressions)
