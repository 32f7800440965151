"""Whether rewriting a site yields exactly the same program. Never asks whether it is faster.

One function a question; the first refusal is the site's reason. When in doubt a site is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.fx import Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from fusion_backend import reasons
from fusion_backend.dependence import Dependence, Write, storages_of
from fusion_backend.experts import has_experts
from fusion_backend.matching import Match
from fusion_backend.reasons import Refusal
from fusion_backend.shapes import result_shape
from fusion_backend.views import linear_view, operation, same_size, tensor_of

SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SUPPORTED_DEVICES = ("cpu", "cuda")
_HALF = (torch.bfloat16, torch.float16)


def refusal(match: Match, dependence: Dependence) -> Refusal | None:
    """The first reason for which a site must be left alone, or ``None`` where it may be fused."""
    for check in _CHECKS:
        found = check(match, dependence)
        if found is not None:
            return found
    return None


def _operands(match: Match) -> Iterator[tuple[Node, torch.Tensor]]:
    """What the fused operator reads: the input, every weight and every bias."""
    hidden = {source.linear.input for source in match.sources}
    parameters = [node for layer in match.layers for node in (layer.weight, layer.bias)]
    for node in (*hidden, *parameters):
        if node is not None and (tensor := tensor_of(node)) is not None:
            yield node, tensor


def _has_experts(match: Match, dependence: Dependence) -> Refusal | None:
    for layer in filter(has_experts, match.layers):
        return Refusal(reasons.EXPERTS, f"the layer {layer.node.name!r}")
    return None


def _has_low_rank_update(match: Match, dependence: Dependence) -> Refusal | None:
    """``W x + s · B (A x)``: a second layer reads what a narrow one makes of the same input."""
    layers = [source.linear for source in match.sources]
    for layer in layers:
        narrow = linear_view(layer.input)
        base = None if narrow is None else _undropped(narrow.input)
        for other in layers:
            if base is not None and other is not layer and other.input is base:
                return Refusal(reasons.LOW_RANK_UPDATE, f"the linear layer {other.node.name!r}")
    return None


def _undropped(node: Node) -> Node:
    """What the dropout reads that PEFT puts before a low-rank update."""
    source = node.args[0] if operation(node) == "dropout" and node.args else None
    return source if isinstance(source, Node) else node


def _walk_met_obstacles(match: Match, dependence: Dependence) -> Refusal | None:
    return match.obstacles[0] if match.obstacles else None


def _inputs_differ(match: Match, dependence: Dependence) -> Refusal | None:
    inputs = {source.linear.input for source in match.sources}
    return Refusal(reasons.DIFFERENT_INPUTS) if len(inputs) != 1 else None


def _runs_in_transform(match: Match, dependence: Dependence) -> Refusal | None:
    return Refusal(reasons.TRANSFORM) if dependence.in_transform else None


def _has_foreign_tensors(match: Match, dependence: Dependence) -> Refusal | None:
    for node, tensor in _operands(match):
        kind: type = type(tensor)
        if is_traceable_wrapper_subclass_type(kind):
            return Refusal(reasons.TENSOR_SUBCLASS, f"{node.name} ({kind.__name__})")
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
            return Refusal(reasons.LAYOUT, node.name)
    devices = {tensor.device for _, tensor in _operands(match)}
    if len(devices) != 1 or next(iter(devices)).type not in SUPPORTED_DEVICES:
        return Refusal(reasons.DEVICE, ", ".join(sorted(map(str, devices))))
    return None


def _bias_is_broadcast(match: Match, dependence: Dependence) -> Refusal | None:
    """``F.linear`` and ``addmm`` take a bias of one element for all features; kernels do not."""
    for layer in match.layers:
        bias = None if layer.bias is None else tensor_of(layer.bias)
        if bias is not None and not (
            bias.dim() == 1 and same_size(bias.shape[0], layer.out_features)
        ):
            return Refusal(reasons.SHAPES_DIFFER, f"the linear layer {layer.node.name!r}")
    return None


def _dtypes_differ(match: Match, dependence: Dependence) -> Refusal | None:
    """All layers work in one supported dtype: their operands', or the one autocast gives them."""
    results = {_dtype(layer.node) for layer in match.layers}
    operands = {tensor.dtype for _, tensor in _operands(match)}
    dtype = next(iter(results))
    under_autocast = dtype in _HALF and all(operand.is_floating_point for operand in operands)
    if len(results) != 1 or dtype not in SUPPORTED_DTYPES:
        return Refusal(reasons.DTYPE, _names(results))
    if operands != {dtype} and not under_autocast:
        return Refusal(reasons.DTYPE, _names(operands | results))
    return None


def _rounds_between(match: Match, dependence: Dependence) -> Refusal | None:
    """Calls between the layers keep at least their precision; kernels hold values in fp32."""
    dtype = _dtype(match.down.node)
    for node in match.calls:
        tensor = tensor_of(node)
        if tensor is None or not tensor.dtype.is_floating_point:
            continue
        if tensor.dtype == torch.float64:
            return Refusal(reasons.DTYPE, _names({tensor.dtype}))
        if torch.promote_types(tensor.dtype, dtype) != tensor.dtype:
            return Refusal(reasons.NARROWING_CAST, _names({tensor.dtype}))
    return None


def _is_empty(match: Match, dependence: Dependence) -> Refusal | None:
    widths = [width for layer in match.layers for width in (layer.in_features, layer.out_features)]
    return Refusal(reasons.EMPTY) if any(isinstance(w, int) and w == 0 for w in widths) else None


def _mode_changes(match: Match, dependence: Dependence) -> Refusal | None:
    first, last = dependence.span(match.nodes)
    if any(first < position < last for position in dependence.mode_changes):
        return Refusal(reasons.MODE_CHANGE)
    return None


def _is_written_to(match: Match, dependence: Dependence) -> Refusal | None:
    """No write between the layers changes what the fused operator reads at the end of the site.

    A write by a call of the site itself (``relu_``) is part of the activation, provided that
    nobody reads the old value's memory afterwards under its old name.
    """
    first, last = dependence.span(match.nodes)
    inner = match.nodes - {match.down.node}
    hidden = frozenset().union(*map(storages_of, inner))
    read = hidden.union(*(storages_of(node) for node, _ in _operands(match)))
    for write in dependence.writes:
        if not first < write.position < last or not write.storages & read:
            continue
        if write.node not in inner or not write.storages <= hidden:
            return Refusal(reasons.MUTATED, _written_name(write))
        if _is_read_under_old_name(write, dependence):
            return Refusal(reasons.MUTATED, _written_name(write))
    return None


def _is_read_under_old_name(write: Write, dependence: Dependence) -> bool:
    return any(
        dependence.position[operand] < write.position
        for reader in dependence.readers(write.storages, after=write.position)
        for operand in reader.all_input_nodes
        if storages_of(operand) & write.storages
    )


def _written_name(write: Write) -> str:
    return f"{write.node.all_input_nodes[0].name!r} (by {operation(write.node)})"


def _hidden_escapes(match: Match, dependence: Dependence) -> Refusal | None:
    inner = match.nodes - {match.down.node}
    for user in dependence.escapes(inner, match.down.node):
        use = "returned by the graph" if user.op == "output" else f"read by {user.name!r}"
        return Refusal(reasons.HIDDEN_ESCAPES, use)
    return None


def _is_not_convex(match: Match, dependence: Dependence) -> Refusal | None:
    for node in dependence.between(match.nodes):
        return Refusal(reasons.NOT_CONVEX, repr(node.name))
    return None


def _changes_leading_shape(match: Match, dependence: Dependence) -> Refusal | None:
    return Refusal(reasons.LEADING_SHAPE) if result_shape(match) is None else None


def _dtype(node: Node) -> torch.dtype:
    tensor = tensor_of(node)
    assert tensor is not None  # linear_view gives no view of an untraced node
    return tensor.dtype


def _names(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


_CHECKS: tuple[Callable[[Match, Dependence], Refusal | None], ...] = (
    _has_experts,
    _has_low_rank_update,
    _walk_met_obstacles,
    _inputs_differ,
    _runs_in_transform,
    _mode_changes,
    _has_foreign_tensors,
    _bias_is_broadcast,
    _dtypes_differ,
    _rounds_between,
    _is_empty,
    _is_written_to,
    _hidden_escapes,
    _is_not_convex,
    _changes_leading_shape,
)
