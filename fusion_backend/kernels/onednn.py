"""The family ``onednn``: on the CPU, the activation as a post-operation of oneDNN's own product.

    postact = f(x W_upᵀ + b_up)                                    one product
    postact = f(x W_gateᵀ + b_gate) · (x W_upᵀ + b_up)             two products, where gated
    y       = postact W_downᵀ + b_down

Weights are taken as they are, not packed beforehand, so this serves inference without freezing.

A hidden layer that would not stay in cache is computed and used some rows at a time: it is then
written to memory never, and its pages are not mapped anew in every call (beyond 32 MiB, glibc maps
them for one allocation only).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from fusion_backend.compat.packed_linear import multiplies_natively
from fusion_backend.errors import PlanError
from fusion_backend.kernels import reference
from fusion_backend.kernels.family import Family, Operands, why_not_on_cpu
from fusion_backend.kernels.host.targets import Target
from fusion_backend.mlp.expression import Call, Constant, Expression, Variable, parse, variables
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.record import MLP
from fusion_backend.mlp.weights import Weights

# Functions that oneDNN computes as exactly as eager does.
_POST_OPERATIONS = {
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
    "sigmoid": ("sigmoid", ""),
    "tanh": ("tanh", ""),
    "hardswish": ("hardswish", ""),
    "leaky_relu": ("leaky_relu", ""),
}
# Functions that it has, but that turn NaN into a number, and so would hide that a model has
# diverged. One more is leaky_relu with the slope 0, which oneDNN takes for ReLU; relu6 and clamp
# are its hardtanh.
_HIDING_NAN = ("relu", "relu6", "hardtanh", "clamp", "hardsigmoid")


class PostOperation(NamedTuple):
    """An activation in oneDNN's terms.

    Attributes:
        variable: of the projection that the function applies to: ``x``, ``g`` or ``u``.
        name: of the function; ``"none"`` for the identity.
        scalars: its parameters.
        algorithm: which variant of it.
    """

    variable: str
    name: str
    scalars: tuple[float, ...]
    algorithm: str


def onednn_supports(activation: str, dtype: torch.dtype, device_type: str = "cpu") -> bool:
    """Whether :func:`forward` computes an MLP as exactly as eager does; for inference only.

    Args:
        activation: the canonical text of the expression; one of ``g`` and ``u`` must be a product
            ``f(g) * u``.
        dtype: of all tensors of the MLP.
        device_type: such as ``"cpu"``.
    """
    return device_type == "cpu" and why_not(activation, dtype) is None


def why_not(activation: str, dtype: torch.dtype) -> str | None:
    """Why :func:`forward` does not run an MLP on a CPU, or ``None`` where it does.

    Args:
        activation: as for :func:`onednn_supports`.
        dtype: of all tensors of the MLP.
    """
    if not is_available(dtype):
        return f"this build of torch, or this CPU, has no oneDNN for {dtype}"
    if _post_operation(activation) is not None:
        return None
    f = _applied(activation)
    if isinstance(f, Call) and _hides_nan(f):
        return f"oneDNN's {f.function} turns NaN into a number, which eager's does not"
    return f"oneDNN has no post-operation that computes {activation}"


class OneDnn(Family):
    """For inference on CPUs."""

    name = "onednn"
    mlps = "oneDNN applies the activation within its products"
    mark = r"fusedmlp::mlp"
    stays_one_call = True  # its products cannot be lowered unless their weights are constants

    def is_for(self, device_type: str) -> bool:
        """CPUs."""
        return device_type == "cpu"

    def why_not(self, mlp: MLP, target: Target | None) -> str | None:
        """Whole MLPs in inference whose activation is one of oneDNN's post-operations."""
        cannot = why_not_on_cpu(mlp)
        if cannot is None and mlp.training:
            cannot = "oneDNN runs inference only, and gradients are recorded here"
        if cannot is None and mlp.operands:
            cannot = f"oneDNN reads no operands ({mlp.kinds})"
        return cannot or why_not(mlp.activation, mlp.dtype)

    def run(
        self,
        x: Tensor,
        weights: Weights,
        activation: Expression,
        operands: Operands,
        residual: Tensor | None = None,
        norm: Norm | None = None,
    ) -> Tensor:
        """As :meth:`Family.run`."""
        return forward(x, weights, str(activation))


def forward(x: Tensor, weights: Weights, activation: str) -> Tensor:
    """The MLP of ``x`` ``(rows, in)`` as ``(rows, out)``.

    Raises:
        PlanError: the device is not a CPU, this build or CPU has no oneDNN for the dtype, or oneDNN
            does not know the activation.
    """
    if not onednn_supports(activation, x.dtype, x.device.type):
        raise PlanError(
            f"plan {OneDnn.name!r} has no {activation!r} in {x.dtype} on {x.device.type}; "
            f"use plan {reference.NAME!r}"
        )
    if weights.weight_up.numel() == 0 or weights.weight_down.numel() == 0:
        return reference.forward(x, weights, parse(activation))  # oneDNN has no empty sums
    f = _post_operation(activation)
    assert f is not None
    block = rows_of_a_block(x, weights)
    if block is None:
        return _product(
            hidden_values(x, weights, f), weights.weight_down, weights.bias_down, _IDENTITY
        )
    y = x.new_empty(x.shape[0], weights.weight_down.shape[0])
    for x_block, y_block in zip(x.split(block), y.split(block), strict=True):
        _write_product(hidden_values(x_block, weights, f), weights, y_block)
    return y


def hidden_values(x: Tensor, weights: Weights, f: PostOperation) -> Tensor:
    """The hidden activation ``(rows, hidden)``."""
    gate = (weights.weight_gate, weights.bias_gate)
    up = (weights.weight_up, weights.bias_up)
    if weights.weight_gate is None:
        return _product(x, *up, f)
    activated, linear = (up, gate) if f.variable == "u" else (gate, up)
    result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
        x, _product(x, *activated, f), linear[0], _readable(linear[1]), "mul"
    )
    return result


# Bytes of hidden layers up to which all rows are computed at once, and elements of one block: from
# 2**18 to 2**21 were measured to be within a tenth of each other. Each block costs its barriers,
# which are dear where other programs compete for the cores, so the largest of them is taken.
IN_CACHE = 2**24
BLOCK = 2**21
LEAST_ROWS = 1024


def rows_of_a_block(x: Tensor, weights: Weights) -> int | None:
    """How many rows to compute at a time, ``None`` for all."""
    hidden = weights.weight_up.shape[0]
    layers = 1 if weights.weight_gate is None else 2
    if layers * x.shape[0] * hidden * x.element_size() <= IN_CACHE:
        return None
    return max(BLOCK // hidden, LEAST_ROWS)


def _write_product(postact: Tensor, weights: Weights, out: Tensor) -> None:
    """The second layer, into memory that is there already, which oneDNN's operator cannot."""
    if weights.bias_down is None:
        torch.mm(postact, weights.weight_down.t(), out=out)
    else:
        torch.addmm(weights.bias_down, postact, weights.weight_down.t(), out=out)


_IDENTITY = PostOperation("x", "none", (), "")


def _product(x: Tensor, weight: Tensor | None, bias: Tensor | None, f: PostOperation) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise.default(
        x, weight, _readable(bias), f.name, list(f.scalars), f.algorithm
    )
    return result


def _readable(bias: Tensor | None) -> Tensor | None:
    """The bias without gaps: oneDNN ignores its stride and would read beyond its end."""
    return None if bias is None else bias.contiguous()


@functools.cache
def is_available(dtype: torch.dtype) -> bool:
    """Whether PyTorch has oneDNN here, and oneDNN computes in a dtype on this CPU."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops, "mkldnn"):
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype == torch.float32 or multiplies_natively(dtype)


@functools.cache
def _post_operation(activation: str) -> PostOperation | None:
    f = _applied(activation)
    if isinstance(f, Variable):
        return PostOperation(f.name, "none", (), "")
    if f is None or _hides_nan(f) or f.function not in _POST_OPERATIONS:
        return None
    scalars = tuple(c.value for c in f.arguments[1:] if isinstance(c, Constant))
    name, algorithm = _POST_OPERATIONS[f.function]
    return PostOperation(str(f.arguments[0]), name, scalars, algorithm)


def _applied(activation: str) -> Call | Variable | None:
    """The function f of an activation ``f(x)`` or ``f(g) * u``, of one projection and constants."""
    expression = parse(activation)
    if not isinstance(expression, Call) or expression.function != "mul":
        f = _of_one_variable(expression)
        return f if "x" in variables(expression) else None
    for factor, other in (expression.arguments, expression.arguments[::-1]):
        f = _of_one_variable(factor)
        both = {*variables(factor), *variables(other)}
        if f is not None and isinstance(other, Variable) and both == {"g", "u"}:
            return f
    return None


def _of_one_variable(expression: Expression) -> Call | Variable | None:
    if isinstance(expression, Variable):
        return expression
    if not isinstance(expression, Call):
        return None
    first, *others = expression.arguments
    constant = all(isinstance(each, Constant) for each in others)
    return expression if constant and isinstance(first, Variable) else None


def _hides_nan(f: Call) -> bool:
    is_relu = f.function == "leaky_relu" and f.arguments[1] == Constant(0.0)
    return is_relu or f.function in _HIDING_NAN
