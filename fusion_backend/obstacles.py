"""What may stand between two linear layers: calls that change nothing, and calls that forbid."""

from __future__ import annotations

import functools

import torch
from torch.fx import Node

from fusion_backend import reasons
from fusion_backend.reasons import Refusal
from fusion_backend.views import argument, operation, tensor_of, value_of

_CASTS = ("to", "_to_copy", "type_as", "float", "bfloat16", "half", "double", "type")
_DROPOUTS = ("dropout", "dropout_", "native_dropout", "alpha_dropout", "feature_dropout")
_NORMS = ("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "normalize")
_OVER_FEATURES = ("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "sort", "glu")
_OVER_ROWS = ("conv1d", "conv2d", "conv3d", "max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d")
_REORDERING = ("transpose", "permute", "t", "T", "mT", "movedim", "swapaxes", "roll", "flip")
_SELECTING = ("getitem", "slice", "select", "narrow", "index_select", "gather", "tril", "triu")
_JOINING = ("cat", "concat", "stack", "expand", "repeat", "repeat_interleave", "pad")
_MIXING = (*_OVER_FEATURES, *_OVER_ROWS, *_REORDERING, *_SELECTING, *_JOINING)
_DETACHES = ("detach", "detach_", "stop_gradient")
_UNTAGGED_POINTWISE = ("prelu", "masked_fill", "rrelu", "floordiv", "mod")
_RESHAPES = ("view", "reshape", "flatten", "unflatten", "_unsafe_view", "squeeze", "unsqueeze")


def identity_source(node: Node) -> Node | None:
    """The operand of a call that leaves every element as it is: inactive dropout, casts."""
    name = operation(node)
    source = _first_tensor(node)
    if source is None:
        return None
    if name in _DROPOUTS and not _is_active(node):
        return source
    if name in _CASTS and _cast_is_value_preserving(source, node):
        return source
    return None


def obstacle(node: Node) -> Refusal | None:
    """Why a call forbids fusion of what it reads; ``None`` for a call of unknown kind.

    An unknown call (a product, attention, a reduction) is where an MLP ends, so what is behind it
    is none of this site's business.
    """
    name = operation(node)
    short = name.rsplit(".", 1)[-1]
    if name in _DROPOUTS:
        return Refusal(reasons.ACTIVE_DROPOUT, f"{argument(node, 1, 'p', 0.5)}")
    if name in _NORMS:
        return Refusal(reasons.NORM_BETWEEN, name)
    if name in _CASTS:
        return Refusal(reasons.NON_POINTWISE, f"a conversion ({name})")
    if name in _DETACHES:
        return Refusal(reasons.STOPS_GRADIENT, name)
    if short == "register_hook":
        return Refusal(reasons.HOOK)
    if short == "autograd_function_apply":
        return Refusal(reasons.CUSTOM_AUTOGRAD)
    if name in _RESHAPES:
        return Refusal(reasons.ROW_MIXING_VIEW, name)
    if name in _MIXING:
        return Refusal(reasons.NON_POINTWISE, name)
    if is_pointwise_operator(name):
        return Refusal(reasons.UNKNOWN_FUNCTION, name)
    return None


@functools.cache
def is_pointwise_operator(name: str) -> bool:
    """Whether ATen declares the operator of this name to be pointwise."""
    if name in _UNTAGGED_POINTWISE:
        return True
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if packet is None:
        return False
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)


def _first_tensor(node: Node) -> Node | None:
    return next((item for item in node.all_input_nodes if tensor_of(item) is not None), None)


def _is_active(node: Node) -> bool:
    default = operation(node) != "native_dropout"  # nn.functional.dropout trains by default
    training = argument(node, 2, "training", argument(node, 2, "train", default))
    probability = value_of(argument(node, 1, "p", 0.5))
    return training is not False and not (
        isinstance(probability, (int, float)) and probability == 0
    )


def _cast_is_value_preserving(source: Node, node: Node) -> bool:
    """Whether a cast stays on its device and among numbers that a kernel holds in fp32.

    Rounding to a narrower dtype is judged later, where the dtype of the layers is known.
    """
    before, after = tensor_of(source), tensor_of(node)
    if before is None or after is None or before.device != after.device:
        return False
    from_number = before.dtype.is_floating_point or before.dtype == torch.bool
    return from_number and after.dtype.is_floating_point
