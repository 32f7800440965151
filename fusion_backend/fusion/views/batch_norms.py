"""Batch norm in evaluation: pointwise arithmetic with four numbers a feature.

y = (x - mean) * rsqrt(variance + eps) * weight + bias
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.fx import Node

from fusion_backend.fusion.views.linear import is_weight
from fusion_backend.fusion.views.node import argument, operation, same_shape, same_size, tensor_of
from fusion_backend.fusion.views.pointwise import Operand
from fusion_backend.mlp.expression import Expression, call

# What follows the input in F.batch_norm, and what does in torch.batch_norm and in ATen.
_FUNCTIONAL = ("running_mean", "running_var", "weight", "bias")
_ATEN = ("weight", "bias", "running_mean", "running_var")
# With several results, of which the first is the value; one has no flag ``training``.
_NEVER_TRAINS = "_native_batch_norm_legit_no_training"
_SEVERAL_RESULTS = ("native_batch_norm", _NEVER_TRAINS)


class BatchNormView(NamedTuple):
    """A batch norm that only reads its statistics.

    Attributes:
        node: the call.
        source: what is normalised, ``(N, features, ...)``.
        mean: one number a feature, as all others; nodes of tensors ``(features,)``.
        variance: running, as the mean is.
        weight: node, or ``None``.
        bias: node, or ``None``.
        eps: number, or the node of one.
    """

    node: Node
    source: Node
    mean: Node
    variance: Node
    weight: Node | None
    bias: Node | None
    eps: Any

    @property
    def vectors(self) -> tuple[Node, ...]:
        """All that have one number a feature."""
        given = (self.mean, self.variance, self.weight, self.bias)
        return tuple(node for node in given if node is not None)

    def is_of_features(
        self, hidden: torch.Tensor, feature_dim: int, order: tuple[int, ...] | None
    ) -> bool:
        """Whether it treats each hidden feature by itself, known without adding a guard.

        Args:
            hidden: what the last layer reads.
            feature_dim: which of its dimensions the features are, counted from the last.
            order: where the dimensions of ``source`` stood before they were moved, if they were.
        """
        value = tensor_of(self.source)
        second = 1 if order is None else order[1]
        if value is None or second - value.dim() != feature_dim:
            return False
        if feature_dim != -1 and not same_shape(value, hidden):
            return False
        sizes = [
            tensor.shape[0] for node in self.vectors if (tensor := tensor_of(node)) is not None
        ]
        return all(same_size(size, hidden.shape[feature_dim]) for size in sizes)

    def expression(self, x: Expression, operand: Operand) -> Expression:
        """What is computed of ``x``; ``operand`` turns nodes and numbers into expressions."""
        variance = call("add", operand(self.variance), operand(self.eps))
        y = call("mul", call("sub", x, operand(self.mean)), call("rsqrt", variance))
        if self.weight is not None:
            y = call("mul", y, operand(self.weight))
        return y if self.bias is None else call("add", y, operand(self.bias))


def batch_norm_view(node: Node) -> BatchNormView | None:
    """The batch norm of a node, or ``None`` where it is none or may take statistics of its input.

    Of a call with several results the node is the first of them.
    """
    norm = _call_of(node)
    if norm is None or not _only_reads_statistics(norm):
        return None
    names = _FUNCTIONAL if norm.target is F.batch_norm else _ATEN
    given = {name: argument(norm, i, name) for i, name in enumerate(names, start=1)}
    source, mean, variance = argument(norm, 0, "input"), given["running_mean"], given["running_var"]
    if mean is None or variance is None:
        return None
    eps = argument(norm, 6 if operation(norm) == _NEVER_TRAINS else 7, "eps", 1e-5)
    view = BatchNormView(norm, source, mean, variance, given["weight"], given["bias"], eps)
    return view if _takes_vectors(view) else None


def _call_of(node: Node) -> Node | None:
    """The call itself, also where it has several results."""
    if operation(node) == "batch_norm":
        return node
    if operation(node) != "getitem":
        return None
    call, index = node.args
    opens = isinstance(call, Node) and operation(call) in _SEVERAL_RESULTS and index == 0
    return call if opens and isinstance(call, Node) else None


def _only_reads_statistics(norm: Node) -> bool:
    return operation(norm) == _NEVER_TRAINS or argument(norm, 5, "training", False) is False


def _takes_vectors(view: BatchNormView) -> bool:
    """Whether all it has a feature can be operands: of one dtype, that of the source or float32."""
    source = tensor_of(view.source)
    vectors = [tensor_of(node) for node in view.vectors]
    if source is None or not all(map(is_weight, view.vectors)):
        return False
    dtypes = {vector.dtype for vector in vectors if vector is not None}
    if dtypes not in ({source.dtype}, {torch.float32}):
        return False
    return all(vector is not None and vector.dim() == 1 for vector in vectors)
