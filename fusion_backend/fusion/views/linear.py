"""Linear layers in every spelling, and the biases that are added after them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from fusion_backend.fusion.views.node import (
    _sizes,
    argument,
    operation,
    same_shape,
    same_size,
    tensor_of,
    value_of,
)


@dataclass(frozen=True)
class LinearView:
    """A node that computes ``input @ weight.T + bias``.

    Attributes:
        node: the node itself.
        input: node of the input, ``(..., in_features)``; where ``positions`` is not 0,
            ``(N, in_features, *positions)``.
        weight: node of the weight as the call has it.
        bias: node of the bias, ``(out_features,)``, or ``None``.
        transposed: the weight is stored ``(in_features, out_features)``, as Conv1D has it.
        product: the call before ``node`` where the bias is added by a call of its own.
        positions: how many dimensions stand after the features: those of a 1×1 convolution.
    """

    node: Node
    input: Node
    weight: Node
    bias: Node | None
    transposed: bool
    product: Node | None = None
    positions: int = 0

    @property
    def in_features(self) -> Any:
        return _sizes(self.weight)[(-2 if self.transposed else -1) - self.positions]

    @property
    def out_features(self) -> Any:
        return _sizes(self.weight)[(-1 if self.transposed else -2) - self.positions]

    @property
    def feature_dim(self) -> int:
        """Which dimension of input and result the features are, counted from the last."""
        return -1 - self.positions

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The calls that compute the layer."""
        return (self.node,) if self.product is None else (self.product, self.node)

    def operands(self) -> Iterator[Node]:
        """The nodes that this layer reads."""
        yield self.input
        yield self.weight
        if self.bias is not None:
            yield self.bias


def linear_view(node: Any) -> LinearView | None:
    """The linear layer that a node computes, or ``None``."""
    if not isinstance(node, Node) or tensor_of(node) is None:
        return None
    match operation(node):
        case "linear":
            view = _view_of_linear(node)
        case "addmm":
            view = _view_of_addmm(node)
        case "mm" | "matmul":
            view = _view_of_matmul(node)
        case "einsum":
            view = _view_of_einsum(node)
        case "add" | "add_" | "iadd":
            return _view_of_added_bias(node)
        case _:
            return None
    if view is None or not isinstance(view.input, Node) or not isinstance(view.weight, Node):
        return None
    weight, source = tensor_of(view.weight), tensor_of(view.input)
    if weight is None or source is None or weight.dim() != 2 or source.dim() < 1:
        return None
    return view


def _view_of_linear(node: Node) -> LinearView | None:
    bias = argument(node, 2, "bias")
    return LinearView(
        node, argument(node, 0, "input"), argument(node, 1, "weight"), bias, transposed=False
    )


def _view_of_addmm(node: Node) -> LinearView | None:
    if argument(node, 3, "beta", 1) != 1 or argument(node, 4, "alpha", 1) != 1:
        return None
    bias, source, weight = (argument(node, i, n) for i, n in enumerate(("input", "mat1", "mat2")))
    vector = tensor_of(bias)
    if vector is None or vector.dim() != 1:
        return None
    return _with_plain_weight(LinearView(node, source, weight, bias, transposed=True))


def _view_of_matmul(node: Node) -> LinearView | None:
    source, weight = argument(node, 0, "input"), argument(node, 1, "mat2", node.kwargs.get("other"))
    if not is_weight(weight):
        return None  # a product of two activations is no linear layer
    return _with_plain_weight(LinearView(node, source, weight, None, transposed=True))


# input,weight->output: the last letter of the input is summed over, all before it are kept.
_LINEAR_EQUATION = re.compile(
    r"((?:\.\.\.)?[a-zA-Z]*)([a-zA-Z]),([a-zA-Z])([a-zA-Z])->\1([a-zA-Z])"
)


def _view_of_einsum(node: Node) -> LinearView | None:
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    found = _LINEAR_EQUATION.fullmatch(str(equation).replace(" ", ""))
    if found is None or len(operands) != 2 or not is_weight(operands[1]):
        return None
    leading, summed, first, second, kept = found.groups()
    letters = [*leading.replace(".", ""), summed, kept]
    if {first, second} != {summed, kept} or len(set(letters)) != len(letters):
        return None
    source, weight = operands
    view = LinearView(node, source, weight, None, transposed=first == summed)  # type: ignore[arg-type]
    given = tensor_of(source)
    if given is None or not same_size(given.shape[-1], view.in_features):
        return None  # one of them has size 1 and is broadcast
    return view


def _view_of_added_bias(node: Node) -> LinearView | None:
    """``x @ w + bias``: a vector of one number a feature is added by a call of its own."""
    if argument(node, 2, "alpha", 1) != 1:
        return None
    result = tensor_of(node)
    operands = argument(node, 0, "input"), argument(node, 1, "other")
    for product, bias in (operands, operands[::-1]):
        vector, before = tensor_of(bias), tensor_of(product)
        if result is None or before is None or vector is None or vector.dim() != 1:
            continue
        if operation(product) in ("add", "add_", "iadd") or len(product.users) != 1:
            continue
        if result.dim() < 2 or {before.dtype, vector.dtype} != {result.dtype}:
            continue  # a bias of a wider dtype widens the hidden value: that is another program
        layer = linear_view(product)
        if layer is None or layer.bias is not None or not same_shape(before, result):
            continue
        if same_size(vector.shape[0], layer.out_features):
            return replace(layer, node=node, bias=bias, product=product)
    return None


_PRODUCTS = (
    *("addmm", "baddbmm", "bmm", "einsum", "linear", "matmul", "mm"),
    *("conv1d", "conv2d", "conv3d", "grouped_mm", "_grouped_mm", "grouped_mm_fallback"),
)


_MAX_WEIGHT_CALLS = 6


def is_product(node: Node) -> bool:
    """Whether a node is a product of matrices, or a convolution."""
    return operation(node).rsplit(".", 1)[-1] in _PRODUCTS


def is_weight(node: Any) -> bool:
    """Whether a tensor is an input of the graph, or is made of such by few calls and no product.

    A weight may be scaled, transposed, cast or normalised on its way to the layer. Positions and
    token ids (int64) are no weights, nor is what is made of them, such as angles and embeddings.
    """
    if tensor_of(node) is None:
        return False
    calls, behind = 0, [node]
    while behind:
        node = behind.pop()
        tensor = tensor_of(node)
        if tensor is not None and tensor.dtype == torch.int64:
            return False
        several = isinstance(value_of(node), (tuple, list))  # as of a split
        if node.op in ("placeholder", "get_attr") or (tensor is None and not several):
            continue
        calls += 1
        if calls > _MAX_WEIGHT_CALLS or is_product(node):
            return False
        taken = operation(node) in ("getitem", "index_select")  # wherever the index comes from
        behind.extend(node.all_input_nodes[:1] if taken else node.all_input_nodes)
    return True


def _with_plain_weight(view: LinearView) -> LinearView:
    """See through ``weight.t()``: a transpose of a transpose is the layout of ``nn.Linear``."""
    weight = _untransposed(view.weight)
    if weight is None:
        return view
    return LinearView(view.node, view.input, weight, view.bias, transposed=False)


def _untransposed(node: Any) -> Node | None:
    if not isinstance(node, Node) or tensor_of(node) is None:
        return None
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or tensor_of(source) is None or len(_sizes(source)) != 2:
        return None
    if operation(node) in ("t", "T", "mT", "numpy_T"):
        return source
    if operation(node) == "getattr" and node.args[1] in ("T", "mT"):
        return source
    if operation(node) == "transpose" and {int(d) % 2 for d in node.args[1:3]} == {0, 1}:  # type: ignore[arg-type]
        return source
    return None
