"""Norms over the last dimension, in every spelling that is a call of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from fusion_backend.fusion.views.node import argument, operation, tensor_of
from fusion_backend.mlp.norms import Norm

_PARAMETERS = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
}
_EPS = {"layer_norm": 1e-5, "rms_norm": None}


class NormView(NamedTuple):
    """A call that computes a norm over the features.

    Attributes:
        node: the call.
        input: what it reads, ``(..., features)``.
        weight: ``(features,)`` or ``None``.
        bias: ``(features,)`` or ``None``.
        text: the norm as the operators take it.
    """

    node: Node
    input: Node
    weight: Node | None
    bias: Node | None
    text: str

    @property
    def parameters(self) -> Iterator[Node]:
        """Those that there are."""
        return (node for node in (self.weight, self.bias) if node is not None)


def norm_view(node: Node) -> NormView | None:
    """The norm over the last dimension that a call computes, with numbers known now."""
    names = _PARAMETERS.get(kind := operation(node))
    if names is None or len(node.args) > len(names) or not set(node.kwargs).issubset(names):
        return None

    def given(name: str, default: Any = None) -> Any:
        return argument(node, names.index(name), name, default)

    source, shape, eps = given("input"), given("normalized_shape"), given("eps", _EPS[kind])
    weight, bias = given("weight"), given("bias") if kind == "layer_norm" else None
    if eps is None:  # in 16 bits as well: they are computed in float32
        eps = torch.finfo(torch.float32).eps
    if not isinstance(shape, (list, tuple)) or len(shape) != 1:
        return None
    if not isinstance(eps, (int, float)) or not math.isfinite(eps):
        return None
    if any(tensor_of(each) is None for each in (node, source)):
        return None
    if any(each is not None and tensor_of(each) is None for each in (weight, bias)):
        return None
    return NormView(node, source, weight, bias, Norm(kind, float(eps)).text)
