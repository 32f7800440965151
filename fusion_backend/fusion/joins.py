"""Linear layers that are joined by something that no activation is: a softmax, an opaque call.

Such a pair can never be fused, and is reported with that reason. Looked for is what stands where an
activation would: calls that leave every feature in its place, and among them one that is not linear
in what it reads (a softmax, a maximum over rows), a nested body, or an operator of others. Three
things are no such join. Attention is none: its products read several layers, and an operator for it
reads heads. A norm or a sum of residuals is none by itself. A statistic of a row's features, such
as its length, is part of a norm.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.fx import Node

from fusion_backend import reasons
from fusion_backend.compat.operators import HigherOrderOperator
from fusion_backend.fusion.sources import layer_view
from fusion_backend.fusion.views.dropouts import dropout_view
from fusion_backend.fusion.views.linear import LinearView, is_weight
from fusion_backend.fusion.views.node import operation, producer, same_size, tensor_of
from fusion_backend.fusion.views.nonlinearity import is_nonlinear
from fusion_backend.fusion.views.obstacles import NORMS, identity_source, is_pointwise_operator
from fusion_backend.fusion.views.permutations import permutation
from fusion_backend.fusion.views.pointwise import pointwise_name
from fusion_backend.fusion.views.reshape import copy_source, reshape_source
from fusion_backend.reasons import Refusal

# As few as an activation has; a longer way follows residuals through the model.
_MAX_CALLS = 32


class Join(NamedTuple):
    """Linear layers that feed another one, and what stands between, nearest to it first."""

    layers: tuple[LinearView, ...]
    refusals: tuple[Refusal, ...]


def join_of(down: LinearView) -> Join | None:
    """The layers that feed ``down`` by way of something that cannot be fused, if there are such."""
    join = _Walk(down).join(down.input)
    return join if join is not None and join.refusals else None


class _Walk:
    def __init__(self, down: LinearView) -> None:
        self.down = down
        self.known: dict[Node, Join | None] = {}

    def join(self, node: Node) -> Join | None:
        """What feeds a node; ``None`` where no linear layer does."""
        layer = layer_view(node)
        if layer is not None:
            return Join((layer,), ())
        if node not in self.known:
            if len(self.known) >= _MAX_CALLS or tensor_of(node) is None or is_weight(node):
                return None
            self.known[node] = None
            self.known[node] = self._through(node)
        return self.known[node]

    def _through(self, node: Node) -> Join | None:
        call = producer(node)
        name = operation(call)
        read = {operand: self.join(operand) for operand in call.all_input_nodes}
        found = {operand: join for operand, join in read.items() if join is not None}
        refusals = tuple(dict.fromkeys(each for join in found.values() for each in join.refusals))
        layers = tuple(dict.fromkeys(each for join in found.values() for each in join.layers))
        if not layers:
            return None
        if _keeps_places(node):
            return Join(layers, refusals)
        if _is_opaque(call):
            whole = all(map(self._is_whole, [node] * len(found), found, found.values()))
            refusal = Refusal(reasons.UNKNOWN_FUNCTION, f"the result of {name}")
            return Join(layers, (refusal, *refusals)) if whole and len(layers) <= 2 else None
        if not self._is_of_norm(node, call) and is_nonlinear(call):
            return Join(layers, (Refusal(reasons.NON_POINTWISE, name), *refusals))
        return None

    def _is_of_norm(self, result: Node, call: Node) -> bool:
        """Whether a call is a norm, or gives one number for all features of a row."""
        value, dim = tensor_of(result), self.down.feature_dim
        if value is None or operation(call) in NORMS:
            return True
        return value.dim() < -dim or same_size(value.shape[dim], 1)

    def _is_whole(self, result: Node, operand: Node, join: Join) -> bool:
        """Whether a call reads whole features, and returns as many, or half of packed ones."""
        before, after = tensor_of(operand), tensor_of(result)
        if before is None or after is None:
            return False
        dim = self.down.feature_dim
        if min(before.dim(), after.dim()) < -dim:
            return False
        read, made = before.shape[dim], after.shape[dim]
        uncut = all(same_size(read, layer.out_features) for layer in join.layers)
        return uncut and (same_size(read, made) or same_size(read, 2 * made))


def _keeps_places(node: Node) -> bool:
    sources: tuple[Any, ...] = (identity_source(node), copy_source(node), reshape_source(node))
    if any(source is not None for source in sources) or permutation(node) is not None:
        return True
    if dropout_view(node) is not None:
        return True
    return pointwise_name(node) is not None or is_pointwise_operator(operation(node))


def _is_opaque(call: Node) -> bool:
    """Whether a call is of an operator of others, a nested body, or fake quantization."""
    name = operation(call)
    if call.op != "call_function" or name.startswith("fusedmlp."):
        return False
    if isinstance(call.target, HigherOrderOperator) or name.startswith("fake_quantize"):
        return "attention" not in name
    return "." in name and not name.startswith("torch.")
