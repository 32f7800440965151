"""Small views on FX nodes: what a node computes, whatever the spelling.

A view never changes the graph. It reads the graph that Dynamo hands to a backend (torch-level
calls), that ``torch.export`` produces (ATen calls) and that ``symbolic_trace`` produces alike.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

_TORCH_MODULES = (
    "torch",
    "torch._C",
    "torch._C._nn",
    "torch._C._special",
    "torch.nn.functional",
    "torch.functional",
    "_operator",
    "builtins",
)


def value_of(node: Any) -> Any:
    """The example value that tracing left on a node: a fake tensor, a symbol, or ``None``."""
    if not isinstance(node, Node):
        return node
    return node.meta.get("example_value", node.meta.get("val"))


def tensor_of(node: Any) -> torch.Tensor | None:
    """The example tensor of a node, or ``None`` where it is no tensor or was never traced."""
    value = value_of(node)
    return value if isinstance(node, Node) and isinstance(value, torch.Tensor) else None


def operation(node: Node) -> str:
    """The canonical name of what a node calls: ``gelu`` for every spelling of GELU.

    Methods, functions of ``torch`` and ``operator``, and ATen overloads share one namespace, since
    they share their meaning; anything else keeps its qualified name and matches nothing.
    """
    target = node.target
    if node.op == "call_method":
        return str(target)
    if node.op != "call_function":
        return node.op
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        namespace, name = _qualified_name(target).split("::")
        return name if namespace == "aten" else f"{namespace}.{name}"
    name = getattr(target, "__name__", str(target))
    module = getattr(target, "__module__", None)
    if module in _TORCH_MODULES or (module is None and inspect.isroutine(target)):
        return name
    return f"{module}.{name}"


def _qualified_name(target: torch._ops.OpOverload | torch._ops.OpOverloadPacket) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    return target._qualified_op_name


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call, by position or by name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def same_size(left: Any, right: Any) -> bool:
    """Whether two sizes are known to be equal, without adding a guard."""
    return statically_known_true(left == right)


def same_shape(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two shapes are known to be equal, without adding a guard."""
    return left.dim() == right.dim() and all(map(same_size, left.shape, right.shape))


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


def _sizes(node: Node) -> torch.Size:
    tensor = tensor_of(node)
    if tensor is None:
        raise TypeError(f"{node.name} carries no example tensor")
    return tensor.shape


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


_RESHAPES = (
    "view",
    "reshape",
    "_unsafe_view",
    "flatten",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "view_as",
    "reshape_as",
)
_COPIES = ("contiguous", "clone")


def reshape_source(node: Node) -> Node | None:
    """What a node reshapes or copies: the same elements in the same order. Else ``None``."""
    if operation(node) not in (*_RESHAPES, *_COPIES):
        return None
    source = node.args[0] if node.args else node.kwargs.get("input")
    before, after = tensor_of(source), tensor_of(node)
    if before is None or after is None or before.dtype != after.dtype:
        return None  # a view as another dtype
    return source if isinstance(source, Node) else None


def copy_source(node: Node) -> Node | None:
    """What a node copies, whatever the layout of the copy. Else ``None``."""
    return reshape_source(node) if operation(node) in _COPIES else None


def row_reshape_source(node: Node) -> Node | None:
    """What a node reshapes without mixing rows: the last dimension stays as it is."""
    source = reshape_source(node)
    before, after = tensor_of(source), tensor_of(node)
    if before is None or after is None or before.dim() < 1 or after.dim() < 1:
        return None
    return source if same_size(before.shape[-1], after.shape[-1]) else None
