"""``nn.TransformerEncoderLayer``'s fast path, taken apart so that its MLP can be seen.

In evaluation without gradients the layer is one operator of torch. Its parts, from
``aten/src/ATen/native/transformers/transformer.cpp``:

    attention = _native_multi_head_attention(src)
    y         = LayerNorm(src + attention);  LayerNorm(y + MLP(y))                norm_first=False
    y         = src + attention(LayerNorm(src));  y + MLP(LayerNorm(y))           norm_first=True

The MLP's products are ``_addmm_activation``, whose GELU is the tanh form on CUDA and the erf form
elsewhere. Where the MLP is not fused in the end, the operator is put back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from operator import getitem
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from fusion_backend.compat.operators import native_multi_head_attention
from fusion_backend.compat.tracing import FakeTensor
from fusion_backend.fusion.transaction import transaction
from fusion_backend.fusion.views.node import operation, tensor_of, value_of

OPERATOR = "_transformer_encoder_layer_fwd"
_PARAMETERS = (
    *("src", "embed_dim", "num_heads", "qkv_weight", "qkv_bias", "proj_weight", "proj_bias"),
    *("use_gelu", "norm_first", "eps", "norm_weight_1", "norm_bias_1"),
    *("norm_weight_2", "norm_bias_2", "ffn_weight_1", "ffn_bias_1", "ffn_weight_2", "ffn_bias_2"),
    *("mask", "mask_type"),
)
_KNOWN = frozenset(_PARAMETERS)
_DEFAULTS = {"mask": None, "mask_type": None}


@dataclass(frozen=True)
class TakenApart:
    """An encoder layer and the calls that take its place; ``down`` is the MLP's last layer."""

    operator: Node
    parts: tuple[Node, ...]
    down: Node

    def put_back(self) -> None:
        """Undo it."""
        self.parts[-1].replace_all_uses_with(self.operator)
        for node in reversed(self.parts):
            self.operator.graph.erase_node(node)

    def finish(self) -> None:
        """Make it final."""
        self.operator.graph.erase_node(self.operator)


def is_encoder_layer(node: Node) -> bool:
    """Whether a node is the fast path of an encoder layer."""
    return operation(node).rsplit(".", 1)[-1] == OPERATOR


def take_apart(node: Node) -> TakenApart | None:
    """Put the parts of an encoder layer in its place; ``None`` where they would not be the same.

    Nested tensors stay in the operator, and so do empty ones, for which it computes nothing.
    """
    given = dict(zip(_PARAMETERS, node.args, strict=False)) | dict(node.kwargs)
    source = tensor_of(given.get("src"))
    if source is None or source.is_nested or source.dim() != 3 or not set(given) <= _KNOWN:
        return None
    if any(isinstance(size, int) and size == 0 for size in source.shape):
        return None
    parts = _Parts(node)
    with transaction(node.graph), node.graph.inserting_before(node):
        down, result = _encoder_layer(parts, SimpleNamespace(**_DEFAULTS | given))
    node.replace_all_uses_with(result)
    return TakenApart(node, tuple(parts.nodes), down)


def _encoder_layer(call: _Parts, layer: SimpleNamespace) -> tuple[Node, Node]:
    """Calls the parts; the MLP's last layer, and the result."""
    src, features = layer.src, (layer.embed_dim,)
    norm_1 = (features, layer.norm_weight_1, layer.norm_bias_1, layer.eps)
    norm_2 = (features, layer.norm_weight_2, layer.norm_bias_2, layer.eps)
    if layer.norm_first:
        normed = call(F.layer_norm, src, *norm_1)
        y = call(torch.add, _attention(call, layer, normed), src)
        down = _mlp(call, layer, call(F.layer_norm, y, *norm_2))
        return down, call(torch.add, down, y)
    y = call(torch.add, _attention(call, layer, src), src)
    y = call(F.layer_norm, y, *norm_1)
    down = _mlp(call, layer, y)
    return down, call(F.layer_norm, call(torch.add, down, y), *norm_2)


def _attention(call: _Parts, layer: SimpleNamespace, x: Node) -> Node:
    results = call(
        native_multi_head_attention,
        *(x, x, x, layer.embed_dim, layer.num_heads),
        *(layer.qkv_weight, layer.qkv_bias, layer.proj_weight, layer.proj_bias, layer.mask),
        *(False, True, layer.mask_type),  # no attention weights in the result
    )
    return call(getitem, results, 0)


def _mlp(call: _Parts, layer: SimpleNamespace, x: Node) -> Node:
    hidden = call(F.linear, x, layer.ffn_weight_1, layer.ffn_bias_1)
    if layer.use_gelu:
        source = tensor_of(layer.src)
        form = "tanh" if source is not None and source.is_cuda else "none"
        postact = call(F.gelu, hidden, approximate=form)
    else:
        postact = call(torch.relu, hidden)
    return call(F.linear, postact, layer.ffn_weight_2, layer.ffn_bias_2)


class _Parts:
    """Makes calls in a graph, with their example values, that report the layer as their origin."""

    def __init__(self, layer: Node) -> None:
        self._layer = layer
        self.nodes: list[Node] = []

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        node = self._layer.graph.call_function(target, args, kwargs)
        node.meta = dict(self._layer.meta)
        example = tensor_of(self._layer)
        values = [value_of(argument) for argument in args]
        mode = example.fake_mode if isinstance(example, FakeTensor) else nullcontext()
        with mode, torch.no_grad():
            value = target(*values, **kwargs)
        node.meta["example_value" if "example_value" in node.meta else "val"] = value
        self.nodes.append(node)
        return node
