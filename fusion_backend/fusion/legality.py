"""Whether rewriting a site yields exactly the same program. Never asks whether it is faster.

One function a question; the first refusal is the site's reason. When in doubt a site is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.fx import Node

from fusion_backend import reasons
from fusion_backend.compat import inductor
from fusion_backend.compat.sharding import is_sharded
from fusion_backend.compat.tracing import is_traceable_wrapper_subclass_type
from fusion_backend.fusion.match import Match
from fusion_backend.fusion.shapes import is_contiguous, operand_shape, result_shape
from fusion_backend.fusion.verification import unverified
from fusion_backend.fusion.views.dependence import Dependence
from fusion_backend.fusion.views.experts import has_experts
from fusion_backend.fusion.views.linear import LinearView, linear_view
from fusion_backend.fusion.views.memory import Write
from fusion_backend.fusion.views.node import operation, same_size, tensor_of
from fusion_backend.fusion.views.sharding import placed
from fusion_backend.reasons import Refusal

SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SUPPORTED_DEVICES = ("cpu", "cuda", "meta")  # the last to plan for another, not to run
_HALF = (torch.bfloat16, torch.float16)


def refusal(match: Match, dependence: Dependence) -> Refusal | None:
    """The first reason for which a site must be left alone, or ``None`` where it may be fused."""
    for check in CHECKS:
        found = check(match, dependence)
        if found is not None:
            return found
    return None


def _read(match: Match) -> Iterator[tuple[Node, torch.Tensor]]:
    """What the fused operator reads, which is all there when the site ends."""
    yield from _read_by_layers(match)
    for operand in match.operands:
        tensor = tensor_of(operand.node)
        if operand.kind != "seed" and tensor is not None:
            yield operand.node, tensor
    for node in match.parameters:
        if (tensor := tensor_of(node)) is not None:
            yield node, tensor


def _read_by_layers(match: Match) -> Iterator[tuple[Node, torch.Tensor]]:
    """The input, every weight and every bias."""
    hidden = {source.linear.input for source in match.sources}
    parameters = [node for layer in match.layers for node in (layer.weight, layer.bias)]
    for node in (*hidden, *parameters):
        if node is not None and (tensor := tensor_of(node)) is not None:
            yield node, tensor


def _has_experts(match: Match, dependence: Dependence) -> Refusal | None:
    for layer in filter(has_experts, match.layers):
        return Refusal(reasons.EXPERTS, f"the layer {layer.node.name!r}")
    return None


def _walk_met_obstacles(match: Match, dependence: Dependence) -> Refusal | None:
    return match.obstacles[0] if match.obstacles else None


def _draws_other_numbers(match: Match, dependence: Dependence) -> Refusal | None:
    seeds = [operand for operand in match.operands if operand.kind == "seed"]
    if seeds and inductor.draws_as_eager():
        why = "it must draw eager's numbers (Inductor's option fallback_random)"
        return Refusal(reasons.ACTIVE_DROPOUT, why)
    return None


def _runs_in_transform(match: Match, dependence: Dependence) -> Refusal | None:
    return Refusal(reasons.TRANSFORM) if dependence.in_transform else None


def _has_foreign_tensors(match: Match, dependence: Dependence) -> Refusal | None:
    for node, tensor in _read(match):
        kind: type = type(tensor)
        if is_sharded(tensor):
            return Refusal(reasons.SHARDING, f"{node.name} is {placed(node)}")
        if is_traceable_wrapper_subclass_type(kind):
            return Refusal(reasons.TENSOR_SUBCLASS, f"{node.name} ({kind.__name__})")
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
            return Refusal(reasons.LAYOUT, node.name)
    devices = {tensor.device for _, tensor in _read(match)}
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
    """All layers work in one supported dtype: that of what they read, or the one of autocast.

    What enters the activation may have another one: kernels compute it in float32.
    """
    results = {_dtype(layer.node) for layer in match.layers}
    operands = {tensor.dtype for _, tensor in _read_by_layers(match)}
    dtype = next(iter(results))
    under_autocast = dtype in _HALF and all(operand.is_floating_point for operand in operands)
    if len(results) != 1 or dtype not in SUPPORTED_DTYPES:
        return Refusal(reasons.DTYPE, _names(results))
    if operands != {dtype} and not under_autocast:
        return Refusal(reasons.DTYPE, _names(operands | results))
    entering = {tensor.dtype for _, tensor in _read(match)} - operands
    if not entering.issubset(SUPPORTED_DTYPES):
        return Refusal(reasons.DTYPE, _names(operands | entering))
    return None


def rounds_between(match: Match, dependence: Dependence) -> Refusal | None:
    """Calls between the layers keep at least their precision; kernels hold values in fp32."""
    dtype = _dtype(match.layers[0].node)
    for node in match.calls:
        tensor = tensor_of(node)
        if tensor is None or not tensor.dtype.is_floating_point:
            continue
        if tensor.dtype == torch.float64:
            return Refusal(reasons.DTYPE, _names({tensor.dtype}))
        if not _holds(tensor.dtype, dtype):
            return Refusal(reasons.NARROWING_CAST, _names({tensor.dtype}))
    return None


def _keeps_wider_values(match: Match, dependence: Dependence) -> Refusal | None:
    """Kernels keep what is read again, and return the result, in the dtype of the layers."""
    dtype = _dtype(match.layers[0].node)
    kept = {_dtype(node) for node in (*match.read_again, match.result) if match.steps}
    return Refusal(reasons.DTYPE, _names(kept | {dtype})) if kept - {dtype} else None


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

    A write by a call of the site itself (``relu_``) is part of the activation, provided that it is
    to memory that the site made, and that nobody reads that afterwards under its old name.
    """
    first, last = dependence.span(match.nodes)
    made = frozenset[int]().union(*map(dependence.storages, match.nodes))
    outer = frozenset[int]().union(*(dependence.storages(node) for node, _ in _read(match)))
    for write in dependence.writes_to(made | outer, first, last):
        own = write.node in match.nodes and write.storages.isdisjoint(outer)
        if not own or not all(dependence.makes(match.nodes, each) for each in write.storages):
            return _overwritten(write, match)
        if _is_read_under_old_name(write, dependence):
            return _overwritten(write, match)
    return None


def _overwritten(write: Write, match: Match) -> Refusal:
    if write.node in match.nodes and write.node.kwargs.get("out") is not None:
        return Refusal(reasons.OUT_ARGUMENT, repr(write.node.name))
    return Refusal(reasons.MUTATED, _written_name(write))


def _is_written_to_before_the_backward_pass(match: Match, dependence: Dependence) -> Refusal | None:
    """The fused operator keeps all that it reads for its backward pass, eager only some of it.

    A write to the rest is no error in eager, but autograd refuses it to what the operator keeps. A
    write by way of ``x.data`` is no error for either, and changes what kernels compute once more.
    """
    result = tensor_of(match.result)
    if result is None or not result.requires_grad:
        return None
    _, last = dependence.span(match.nodes)
    kept_as_well = frozenset(_kept_by_eager(match))
    read = [node for node, _ in _read(match)]
    storages = frozenset[int]().union(*map(dependence.storages, read))
    more = (node for node in read if node not in kept_as_well)
    unnoticed = frozenset[int]().union(*map(dependence.storages, more))
    for write in dependence.writes_to(storages, last + 1):
        if write.storages & unnoticed or _is_to_data(write, dependence):
            return Refusal(reasons.MUTATED, _written_name(write))
    return None


def _is_to_data(write: Write, dependence: Dependence) -> bool:
    """Whether a call writes by way of ``x.data``, of which autograd is not told."""
    pending, seen = [write.node], {write.node}
    while pending:
        for source in pending.pop().all_input_nodes:
            if operation(source).endswith("_get_data_attr"):
                return True
            if source not in seen and dependence.storages(source) & write.storages:
                seen.add(source)
                pending.append(source)
    return False


def _kept_by_eager(match: Match) -> Iterator[Node]:
    """A product keeps either factor if the other one needs a gradient; autocast keeps a copy."""
    for layer in match.layers:
        source, weight = tensor_of(layer.input), tensor_of(layer.weight)
        if source is None or weight is None or {source.dtype, weight.dtype} != {_dtype(layer.node)}:
            continue
        if weight.requires_grad and (source.dim() <= 2 or is_contiguous(source)):
            yield layer.input  # rows that do not lie one after the other are copied
        if source.requires_grad:
            yield layer.weight


def _is_read_under_old_name(write: Write, dependence: Dependence) -> bool:
    return any(
        dependence.position[operand] < write.position
        for reader in dependence.readers(write.storages, after=write.position)
        for operand in reader.all_input_nodes
        if dependence.storages(operand) & write.storages
    )


def _written_name(write: Write) -> str:
    return f"{write.node.all_input_nodes[0].name!r} (by {operation(write.node)})"


def _hidden_escapes(match: Match, dependence: Dependence) -> Refusal | None:
    inner = match.nodes - {match.result}
    for user in dependence.escapes(inner, match.result):
        use = "returned by the graph" if user.op == "output" else f"read by {user.name!r}"
        if _is_low_rank_update(user, match.down):
            use += ", a low-rank update (LoRA) of the last linear layer"
        return Refusal(reasons.HIDDEN_ESCAPES, use)
    return None


def _is_low_rank_update(node: Node, down: LinearView) -> bool:
    """Whether a node is the narrow one of two layers that are added to the last layer."""
    narrow = linear_view(node)
    wide = [view for user in node.users if (view := linear_view(user)) is not None]
    return narrow is not None and any(same_size(v.out_features, down.out_features) for v in wide)


def _is_not_convex(match: Match, dependence: Dependence) -> Refusal | None:
    for node in dependence.between(match.nodes):
        return Refusal(reasons.NOT_CONVEX, repr(node.name))
    return None


def _changes_leading_shape(match: Match, dependence: Dependence) -> Refusal | None:
    if match.down.positions and result_shape(match) is None:
        return Refusal(reasons.CHANNELS_FIRST, f"the convolution {match.down.node.name!r}")
    elementwise = [operand for operand in match.operands if operand.kind == "elementwise"]
    shapes = [result_shape(match), *(operand_shape(match, operand) for operand in elementwise)]
    return Refusal(reasons.LEADING_SHAPE) if None in shapes else None


def _keeps_another_value(match: Match, dependence: Dependence) -> Refusal | None:
    """A hidden value that stays in the graph is laid out and rounded there as the operator does."""
    hidden = None if match.part is None else tensor_of(match.part.hidden)
    if hidden is None:
        return None
    if hidden.dtype != _dtype(match.layers[0].node):
        return Refusal(reasons.DTYPE, _names({hidden.dtype, _dtype(match.layers[0].node)}))
    return None if is_contiguous(hidden) else Refusal(reasons.LAYOUT, match.result.name)


def _holds(wide: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether every number of a floating dtype is one of another; float8 has no promotion rule."""
    one, other = torch.finfo(wide), torch.finfo(dtype)
    return one.max >= other.max and one.eps <= other.eps and one.tiny <= other.tiny


def _is_unverified(match: Match, dependence: Dependence) -> Refusal | None:
    return unverified(match)


def _dtype(node: Node) -> torch.dtype:
    tensor = tensor_of(node)
    assert tensor is not None  # linear_view gives no view of an untraced node
    return tensor.dtype


def _names(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


CHECKS: tuple[Callable[[Match, Dependence], Refusal | None], ...] = (
    _has_experts,
    _walk_met_obstacles,
    _draws_other_numbers,
    _runs_in_transform,
    _mode_changes,
    _has_foreign_tensors,
    _bias_is_broadcast,
    _dtypes_differ,
    rounds_between,
    _keeps_wider_values,
    _is_empty,
    _is_written_to,
    _is_written_to_before_the_backward_pass,
    _hidden_escapes,
    _is_not_convex,
    _changes_leading_shape,
    _keeps_another_value,
    _is_unverified,  # last, as it takes the longest
)
