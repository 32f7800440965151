"""Layers whose tensors are spread over ranks (DTensor): what each rank does of them.

A layer is local where each rank computes its part of the result from its parts of the operands:

    x           weight (out, in)   bias    result
    replicated  replicated         as it   replicated
    rows        replicated         as it   rows
    replicated  split by out       split   split by features    ColwiseParallel
    features    split by in        as it   partial sums         RowwiseParallel
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from fusion_backend.compat.sharding import is_sharded, name_of, options_of
from fusion_backend.fusion.views.linear import LinearView
from fusion_backend.fusion.views.node import operation, same_shape, tensor_of, value_of

_CONVERSIONS = ("from_local", "to_local", "redistribute")
_WITHOUT_MEANING = ("async_op", "placements", "device_mesh")
_IN_PLACE = tuple(f"i{name}" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow"))


def placements_of(node: Node | None) -> tuple[Any, ...] | None:
    """How a node's tensor lies on each dimension of its mesh; ``None`` for other tensors."""
    value: Any = value_of(node)
    return tuple(value.placements) if node is not None and is_sharded(value) else None


def placed(node: Node) -> str:
    """How a node's tensor lies on its mesh, for a person: ``(Shard(dim=0), Replicate())``."""
    return str(placements_of(node))


def conversion(node: Node) -> str:
    """Which call between sharded and local tensors, or between placements, a node is, if any."""
    name = name_of(node.target)
    if node.op not in ("call_method", "call_function") or name not in _CONVERSIONS:
        return ""
    values = [value_of(each) for each in (node, *node.all_input_nodes)]
    return name if any(map(is_sharded, values)) else ""


def is_plain(node: Node) -> bool:
    """Whether a conversion does no more than what placements before and after tell."""
    options = options_of(node.target, node.kwargs)
    if len(node.args) > (1 if conversion(node) == "to_local" else 3):
        return False
    return not any(value for name, value in options.items() if name not in _WITHOUT_MEANING)


def keeps_placements(node: Node) -> bool:
    """Whether a node redistributes a tensor to where it is already."""
    if conversion(node) != "redistribute" or not is_plain(node):
        return False
    source = node.args[0]
    return isinstance(source, Node) and placements_of(source) == placements_of(node)


def writes_in_place(node: Node) -> bool:
    """Whether a call is spelled as one that writes to what it is given."""
    name = operation(node).rsplit(".", 1)[-1]
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE


@dataclass(frozen=True)
class LocalLayer:
    """How each rank computes its part of a sharded layer.

    Attributes:
        input_gradient: placements of the gradient of the input's part.
        parameter_gradients: of the weight's part, and of the bias's.
        shares: among how many ranks the bias is divided, as each adds it to a partial sum.
    """

    input_gradient: tuple[Any, ...]
    parameter_gradients: tuple[tuple[Any, ...], tuple[Any, ...]]
    shares: int


def local_layer(layer: LinearView) -> LocalLayer | None:
    """How a sharded layer is computed, or ``None`` where ranks need more than their parts."""
    from torch.distributed.tensor import Replicate

    nodes = (layer.node, layer.input, layer.weight)
    placed = [placements_of(node) for node in nodes]
    if operation(layer.node) != "linear" or any(each is None for each in placed):
        return None
    bias = placements_of(layer.bias)
    if layer.bias is not None and bias is None:
        return None
    mesh: Any = value_of(layer.weight).device_mesh
    if any(value_of(node).device_mesh != mesh for node in nodes):
        return None
    result, x, weight = (each or () for each in placed)
    bias = bias or (None,) * len(x)
    features = len(value_of(layer.input).shape) - 1
    found = [_gradients(*each, features) for each in zip(result, x, weight, bias, strict=True)]
    if any(each is None for each in found) or not _is_even(layer.node):
        return None
    of_x, of_weight, of_bias = zip(*(each for each in found if each), strict=True)
    partial = [dim for dim, each in enumerate(result) if each.is_partial()]
    shares = 1
    for dim in partial:
        shares *= mesh.size(dim)
    of_bias = tuple(Replicate() if each is None else each for each in of_bias)
    return LocalLayer(of_x, (of_weight, of_bias), shares)


def _gradients(
    result: Any, x: Any, weight: Any, bias: Any, features: int
) -> tuple[Any, Any, Any] | None:
    """Placements of the gradients of a layer's parts on one dimension of the mesh, if it is local.

    Args:
        result: its placement there.
        x: of the input.
        weight: of the weight.
        bias: of the bias, ``None`` without one.
        features: which dimension of the input they are.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    whole, split, by_features = Replicate(), Shard(0), Shard(features)
    bias_is_whole = bias in (None, whole)
    if (x, weight) == (whole, split) and bias in (None, split):
        return (Partial(), split, bias) if result == by_features else None
    if (x, weight) == (by_features, Shard(1)) and bias_is_whole:
        return (x, weight, bias) if result == Partial() else None
    if weight != whole or not bias_is_whole or result != x:
        return None
    if x == whole:
        return whole, whole, bias
    if type(x) is Shard and x.dim < features:
        return x, Partial(), Partial()
    return None


def _is_even(node: Node) -> bool:
    """Whether the parts of a result are of one size on all ranks."""
    from torch.distributed.tensor import DTensor

    value: Any = value_of(node)
    placed: Sequence[Any] = value.placements
    made = DTensor.from_local(value.to_local(), value.device_mesh, placed, run_check=False)
    return same_shape(made, value)


def is_sharded_call(node: Node) -> bool:
    """Whether a call gives a sharded tensor."""
    return node.op in ("call_function", "call_method") and placements_of(node) is not None


def is_elementwise_on_parts(node: Node) -> bool:
    """Whether each rank computes its part of a pointwise result from parts that lie alike."""
    from torch.distributed.tensor import Replicate, Shard

    placed, result = placements_of(node), tensor_of(node)
    if placed is None or result is None or writes_in_place(node):
        return False
    if not all(type(each) in (Shard, Replicate) for each in placed):
        return False
    for source in node.all_input_nodes:
        tensor = tensor_of(source)
        if tensor is None or placements_of(source) != placed or not same_shape(tensor, result):
            return False
    return True
