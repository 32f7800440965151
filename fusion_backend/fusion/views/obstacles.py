"""What may stand between two linear layers: calls that change nothing, and calls that forbid."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.fx import Node

from fusion_backend import reasons
from fusion_backend.compat.operators import OpOverloadPacket
from fusion_backend.fusion.views.node import argument, operation, tensor_of, value_of
from fusion_backend.fusion.views.permutations import REORDERING
from fusion_backend.fusion.views.sharding import conversion, placed, placements_of
from fusion_backend.reasons import Refusal

CASTS = (
    *("to", "_to_copy", "type_as", "type", "float", "bfloat16", "half", "double"),
    *("bool", "byte", "char", "int", "long", "short"),
)
_DROPOUTS = (
    *("dropout", "dropout_", "native_dropout", "alpha_dropout", "feature_dropout"),
    *("dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"),
)
NORMS = (
    *("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "normalize"),
    *("native_layer_norm", "native_group_norm", "_fused_rms_norm", "native_batch_norm"),
    *("_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
)
_OVER_FEATURES = ("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "sort", "glu")
_OVER_ROWS = (
    *(f"{kind}{n}d" for kind in ("conv", "conv_transpose") for n in (1, 2, 3)),
    *(f"{kind}_pool{n}d" for kind in ("max", "avg", "adaptive_avg") for n in (1, 2, 3)),
    "scaled_dot_product_attention",
)
_SELECTING = (
    *("getitem", "slice", "select", "narrow", "index_select", "gather", "tril", "triu", "roll"),
    *("flip", "unbind", "chunk", "split", "split_with_sizes"),
)
# Over the features they are part of a norm that is written by hand.
STATISTICS = ("mean", "var", "std", "var_mean", "norm", "vector_norm", "linalg_vector_norm")
_REDUCTIONS = ("mean", "sum", "amax", "amin", "max", "min")
_JOINING = ("cat", "concat", "stack", "expand", "repeat", "repeat_interleave", "pad")
_MIXING = (*_OVER_FEATURES, *_OVER_ROWS, *REORDERING, *_SELECTING, *_JOINING)
_DETACHES = ("detach", "detach_", "stop_gradient")
_UNTAGGED_POINTWISE = ("masked_fill", "rrelu", "floordiv", "mod")


def identity_source(node: Node) -> Node | None:
    """The operand of a call that leaves every element as it is: inactive dropout, casts."""
    name = operation(node)
    source = _first_tensor(node)
    if source is None:
        return None
    if name in _DROPOUTS and not _is_active(node):
        return source
    if name in CASTS and _cast_is_value_preserving(source, node):
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
        return Refusal(reasons.ACTIVE_DROPOUT, f"{name} with p = {argument(node, 1, 'p', 0.5)}")
    if name in NORMS:
        return Refusal(reasons.NORM_BETWEEN, name)
    if name in CASTS:
        return Refusal(reasons.NON_POINTWISE, f"a conversion ({name})")
    if name in _DETACHES:
        return Refusal(reasons.STOPS_GRADIENT, name)
    if conversion(node):
        sharded = [each for each in (node, *node.all_input_nodes) if placements_of(each)]
        return Refusal(reasons.SHARDING, f"{sharded[0].name} is {placed(sharded[0])}")
    if short == "register_hook":
        return Refusal(reasons.HOOK)
    if short == "autograd_function_apply":
        return Refusal(reasons.CUSTOM_AUTOGRAD)
    if name in _MIXING or (name in _REDUCTIONS and _pools_rows(node)):
        return Refusal(reasons.NON_POINTWISE, name)
    if is_pointwise_operator(name):
        return Refusal(reasons.UNKNOWN_FUNCTION, name)
    return None


def _pools_rows(node: Node) -> bool:
    """Whether a reduction joins rows. Over the features, it is part of a norm or an attention."""
    before, dims = tensor_of(_first_tensor(node)), argument(node, 1, "dim")
    dims = dims if isinstance(dims, (tuple, list)) else (dims,)
    if before is None or any(not isinstance(dim, int) or isinstance(dim, bool) for dim in dims):
        return False
    return all(dim % before.dim() != before.dim() - 1 for dim in dims)


@functools.cache
def is_pointwise_operator(name: str) -> bool:
    """Whether ATen declares the operator of this name to be pointwise."""
    if name in _UNTAGGED_POINTWISE:
        return True
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if not isinstance(packet, OpOverloadPacket):  # such as a method that all objects have
        return False
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)


def _first_tensor(node: Node) -> Node | None:
    return next((item for item in node.all_input_nodes if tensor_of(item) is not None), None)


def _is_active(node: Node) -> bool:
    default = operation(node) != "native_dropout"  # nn.functional.dropout trains by default
    training = argument(node, 2, "training", argument(node, 2, "train", default))
    return training is not False and not _is_zero(value_of(argument(node, 1, "p", 0.5)))


def _is_zero(probability: Any) -> bool:
    if isinstance(probability, torch.SymFloat):
        # A float of the model that Dynamo turned into an input: this guards on its value, if 0.
        return bool(probability.node.hint == 0) and float(probability) == 0
    return isinstance(probability, (int, float)) and probability == 0


def _cast_is_value_preserving(source: Node, node: Node) -> bool:
    """Whether a cast stays on its device and among floats, which a kernel holds in fp32.

    Rounding to a narrower dtype is judged later, where the dtype of the layers is known.
    """
    before, after = tensor_of(source), tensor_of(node)
    if before is None or after is None or before.device != after.device:
        return False
    return before.dtype.is_floating_point and after.dtype.is_floating_point
