"""The norm before an MLP, ``mlp(norm(x))``, where the MLP's own kernel can compute it.

A kernel that holds whole rows of its input takes their norm on the chip, which saves writing and
reading them once. The fused operator then reads what the norm reads, and that at the MLP's last
layer. When in doubt the norm stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from fusion_backend.compat.tracing import is_traceable_wrapper_subclass_type
from fusion_backend.fusion.chains import Chain
from fusion_backend.fusion.match import Match
from fusion_backend.fusion.views.dependence import Dependence
from fusion_backend.fusion.views.linear import is_product
from fusion_backend.fusion.views.node import same_size, tensor_of
from fusion_backend.fusion.views.norms import NormView, norm_view
from fusion_backend.fusion.views.reshape import reshape_source


class Prenorm(NormView):
    """The norm of an MLP's input."""

    @property
    def read(self) -> Iterator[Node]:
        """What the fused operator reads instead of the norm's result."""
        return (node for node in (self.input, self.weight, self.bias) if node is not None)

    @property
    def arguments(self) -> dict[str, Node | str | None]:
        """Those of the fused operator."""
        return {"norm_weight": self.weight, "norm_bias": self.bias, "norm": self.text}

    @property
    def saves_a_pass(self) -> bool:
        """Whether without the norm there is one pass over the rows less.

        Inductor computes a norm in the kernel that makes its input. If nothing else reads that,
        the norm is free: something must be written in any case, input or result.
        """
        source = self.input
        while _readers(source) == 1 and (behind := reshape_source(source)) is not None:
            source = behind
        given = source.op in ("placeholder", "get_attr")
        return given or is_product(source) or _readers(source) > 1


def prenorm_of(match: Match, dependence: Dependence, grad_mode: bool) -> Prenorm | None:
    """The norm that a legal site, in inference, may compute itself; ``None`` where it stays.

    Args:
        match: the site.
        dependence: of the graph.
        grad_mode: whether gradients are recorded where the site runs.
    """
    if isinstance(match, Chain) or match.part is not None:
        return None  # their operators take none
    view = norm_view(match.sources[0].linear.input)
    found = None if view is None else Prenorm(*view)
    first = frozenset[Node]().union(*(source.linear.nodes for source in match.sources))
    if found is None or match.down.positions or not first.issuperset(found.node.users):
        return None
    if grad_mode and any(_tensor(node).requires_grad for node in found.read):
        return None
    fits = _fits(match, found)
    return found if fits and _is_there(match, found, dependence) else None


def _fits(match: Match, prenorm: Prenorm) -> bool:
    """Whether all is computed in one dtype, on one device, by dense tensors."""
    result, width = _tensor(match.result), match.sources[0].linear.in_features
    weights = (layer.weight for layer in match.layers)
    tensors = [_tensor(node) for node in (prenorm.node, *prenorm.read, *weights)]
    return all(
        not is_traceable_wrapper_subclass_type(type(tensor))
        and tensor.layout == torch.strided
        and not tensor.is_nested
        and (tensor.dtype, tensor.device) == (result.dtype, result.device)
        for tensor in tensors
    ) and all(
        _tensor(vector).dim() == 1 and same_size(_tensor(vector).shape[0], width)
        for vector in (prenorm.weight, prenorm.bias)
        if vector is not None
    )


def _is_there(match: Match, prenorm: Prenorm, dependence: Dependence) -> bool:
    """Whether what the norm reads is the same until the site ends, and calls run in one mode."""
    start, end = dependence.span((prenorm.node, match.result))
    if any(start < position < end for position in dependence.mode_changes):
        return False
    storages = frozenset[int]().union(*map(dependence.storages, prenorm.read))
    return not any(dependence.writes_to(storages, start, end))


def _readers(node: Node) -> int:
    """How many calls read the elements of a tensor: sizes are known without."""
    return sum(user.op == "output" or tensor_of(user) is not None for user in node.users)


def _tensor(node: Node) -> torch.Tensor:
    tensor = tensor_of(node)
    assert tensor is not None  # a legal site, and the view of a norm, have traced nodes only
    return tensor
