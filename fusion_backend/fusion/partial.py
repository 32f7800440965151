"""The part of a refused site that can be fused: its first layers and the activation.

So where the hidden value must be there because a norm, which needs whole rows of it, stands before
the last layer; because something else reads it; or because the last layer is another site's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch.fx import Node

from fusion_backend import reasons
from fusion_backend.fusion.forms import UNWANTED, Forms
from fusion_backend.fusion.legality import refusal
from fusion_backend.fusion.match import Match, Part
from fusion_backend.fusion.matching import match_up_to
from fusion_backend.fusion.shapes import is_contiguous
from fusion_backend.fusion.views.batch_norms import batch_norm_view
from fusion_backend.fusion.views.dependence import Dependence
from fusion_backend.fusion.views.node import same_size, tensor_of
from fusion_backend.fusion.views.obstacles import identity_source
from fusion_backend.fusion.views.reshape import copy_source, reshape_source
from fusion_backend.patterns import ACTIVATED
from fusion_backend.reasons import Refusal

# The parameters of a norm are no obstacle: it stays as it is.
_OF_NORMS = (reasons.NORM_BETWEEN, reasons.PARAMETER)


def part_of(match: Match, refused: Refusal, dependence: Dependence, forms: Forms) -> Match | None:
    """A legal match of the first layers and the activation, or ``None`` where there is none.

    There is none either where the user wants none to be fused.

    Args:
        match: a site that is not fused as a whole.
        refused: for which reason.
        dependence: of its graph.
        forms: those that the first layers can be of.
    """
    if ACTIVATED.name in forms.off or refused.reason in UNWANTED:
        return None
    for hidden in _hidden_values(match, refused):
        found = match_up_to(hidden, match, forms.tried)
        if found is None or found.expression is None or not _is_as_computed(hidden, found):
            continue
        part = replace(found, form=ACTIVATED, down=match.down, part=Part(hidden, refused))
        if refusal(part, dependence) is None:
            return part
    return None


def _is_as_computed(hidden: Node, match: Match) -> bool:
    """Whether it is laid out as the operator's result is, which others see.

    The features of convolutions are not its last dimension. Nor are those of a batch norm of more
    than two dimensions, and its kernels do not keep to the strides that a traced graph shows.
    """
    tensor = tensor_of(hidden)
    if tensor is None or match.down.positions or any(map(_moves_features, match.calls)):
        return False
    return same_size(tensor.shape[-1], match.down.in_features) and is_contiguous(tensor)


def _moves_features(node: Node) -> bool:
    norm = batch_norm_view(node)
    source = None if norm is None else tensor_of(norm.source)
    return source is not None and source.dim() > 2


def _hidden_values(match: Match, refused: Refusal) -> Iterator[Node]:
    """The nodes at which the activation may end, last first."""
    met = [obstacle.reason for obstacle in match.obstacles]
    if refused.reason in (reasons.HIDDEN_ESCAPES, reasons.OVERLAPS):
        yield from _unchanged(match.down.input)
    elif reasons.NORM_BETWEEN in met and set(met).issubset(_OF_NORMS):
        yield from _on_every_way(match)


def _unchanged(node: Node | None) -> Iterator[Node]:
    """What the last layer reads, and what that is a reshape or a cast of."""
    while node is not None:
        yield node
        node = identity_source(node) or copy_source(node) or reshape_source(node)


def _on_every_way(match: Match) -> Iterator[Node]:
    """The calls that lie on every way from the first layers to the last one."""
    first = {source.node for source in match.sources}
    for node in sorted(match.calls, reverse=True):
        if tensor_of(node) is not None and not _leads_around(match, first, node):
            yield node


def _leads_around(match: Match, first: set[Node], avoided: Node) -> bool:
    seen, behind = {avoided}, [match.down.input]
    while behind:
        node = behind.pop()
        if node in seen:
            continue
        if node in first:
            return True
        seen.add(node)
        behind.extend(source for source in node.all_input_nodes if source in match.calls | first)
    return False
