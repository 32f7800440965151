"""The plan ``onednn``: on the CPU, the activation as a post-operation of oneDNN's own product.

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

from fusion_backend.errors import PlanError
from fusion_backend.kernels import reference
from fusion_backend.mlp.expression import Call, Constant, Expression, Variable, parse, variables
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
    if not _is_available(dtype):
        return f"this build of torch, or this CPU, has no oneDNN for {dtype}"
    if _post_operation(activation) is not None:
        return None
    f = _applied(activation)
    if isinstance(f, Call) and _hides_nan(f):
        return f"oneDNN's {f.function} turns NaN into a number, which eager's does not"
    return f"oneDNN has no post-operation that computes {activation}"


def forward(x: Tensor, weights: Weights, activation: str) -> Tensor:
    """The MLP of ``x`` ``(rows, in)`` as ``(rows, out)``.

    Raises:
        PlanError: the device is not a CPU, this build or CPU has no oneDNN for the dtype, or oneDNN
            does not know the activation.
    """
    if not onednn_supports(activation, x.dtype, x.device.type):
        raise PlanError(
            f"plan 'onednn' has no {activation!r} in {x.dtype} on {x.device.type}; "
            "use plan 'reference'"
        )
    if weights.weight_up.numel() == 0 or weights.weight_down.numel() == 0:
        return reference.forward(x, weights, parse(activation))  # oneDNN has no empty sums
    f = _post_operation(activation)
    assert f is not None
    block = _rows_of_a_block(x, weights)
    if block is None:
        return _product(_hidden(x, weights, f), weights.weight_down, weights.bias_down, _IDENTITY)
    y = x.new_empty(x.shape[0], weights.weight_down.shape[0])
    for x_block, y_block in zip(x.split(block), y.split(block), strict=True):
        _write_product(_hidden(x_block, weights, f), weights, y_block)
    return y


def _hidden(x: Tensor, weights: Weights, f: PostOperation) -> Tensor:
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
_IN_CACHE = 2**24
_BLOCK = 2**21
_LEAST_ROWS = 1024


def _rows_of_a_block(x: Tensor, weights: Weights) -> int | None:
    """How many rows to compute at a time, ``None`` for all."""
    hidden = weights.weight_up.shape[0]
    layers = 1 if weights.weight_gate is None else 2
    if layers * x.shape[0] * hidden * x.element_size() <= _IN_CACHE:
        return None
    return max(_BLOCK // hidden, _LEAST_ROWS)


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


def onednn_is_faster(
    rows: int,
    in_features: int,
    hidden_features: int,
    out_features: int,
    gated: bool,
    dtype: torch.dtype,
    activation: str = "",
) -> bool:
    """Whether :func:`forward` was measured to beat what Inductor makes in its default mode.

    Measured on a Xeon with AVX-512 and AMX, 2 threads, torch 2.14.1, weights not frozen: Inductor's
    time over ours, as ratios of minima, interleaved; tanh, erf and leaky are the activations
    ``gelu_tanh(x)``, ``gelu(x)`` and ``leaky_relu(x, 0.01)``, the last as cheap as one can be:

        rows × in → hidden → out     float32             bfloat16            float16
                                     tanh  erf  leaky    tanh  erf  leaky    tanh  erf  leaky
            1 × 768 → 3072 → 768     0.71  0.71  0.70    0.99  0.90  0.91    0.55  0.57  0.53
           64 × 768 → 3072 → 768     1.06  1.03  1.02    1.26  0.97  0.88     -     -     -
          128 × 768 → 3072 → 768     1.08  0.98  0.96    1.18  1.01  1.09     -     -     -
          512 × 768 → 3072 → 768     1.04  1.01  0.99    1.38  1.01  1.02     -     -    1.00
         1576 × 768 → 3072 → 768     1.01  0.96  0.95    1.55   -     -       -     -     -
          512 × 2048 → 8192 → 2048   1.04  1.01  1.00     -     -     -      1.14  1.06  1.14
          256 × 64 → 256 → 64        0.89  0.64  0.68    1.08  0.97  0.92    0.97   -    0.89
         1024 × 64 → 256 → 64        1.24  0.89  0.85    1.36   -    1.02     -     -     -
         4096 × 64 → 256 → 64        1.58  1.17  1.07    1.45  1.28  1.15    1.56  1.16  1.07
        65536 × 64 → 256 → 64        1.65  1.49  1.21    1.91   -    1.40    1.44  1.76  1.44
         4096 × 128 → 512 → 128      1.37  1.15  1.46     -    1.22  1.11    1.85  1.23  1.09

    With a hidden layer beyond 16 MiB, since it is computed in blocks (float32, the same CPU):

                                     tanh  erf  gated
         4096 × 64 → 256 → 64        1.62  1.22  0.89    not in blocks
         8192 × 64 → 256 → 64                    1.37
        16384 × 64 → 256 → 64                    0.95    Inductor takes 6 or 15 ms, ours 6.4
        32768 × 64 → 256 → 64              2.24
        65536 × 64 → 256 → 64        3.15  2.26  2.15
        16384 × 128 → 512 → 128                  1.75
        65536 × 128 → 512 → 128            1.91  1.59
        65536 × 64 → 256 → 64              2.63  3.24    bfloat16
        16384 × 64 → 256 → 64                    1.03    bfloat16

    Other gated MLPs came out between 0.76 and 1.05 in float32 (128 × 768: 0.97) and at 0.95 to 1.04
    in bfloat16. Inductor spends its time on the tanh form of GELU; elsewhere only narrow layers,
    whose products are cheap beside the passes over the activation that we save, gain beyond doubt:
    at 512 × 768 → 3072 the two products alone are nine tenths of Inductor's time.

    On an EPYC with AVX2 only, in float32, just what is computed in blocks gains (512 × 768: 0.8):

                                     tanh  erf  leaky  SiLU  SwiGLU
        16384 × 64 → 256 → 64        1.00  1.16                0.93    not in blocks
        32768 × 64 → 256 → 64        1.06  1.48  1.25  1.16    1.39
        65536 × 64 → 256 → 64        1.15  1.62  1.54  1.43    1.69
       131072 × 64 → 256 → 64        1.05  1.53                1.56
        16384 × 128 → 512 → 128      0.89  1.09                1.20
        32768 × 128 → 512 → 128                  1.39  1.29
        65536 × 128 → 512 → 128      0.99  1.27  1.34  1.27    1.22

    Args:
        rows: number of rows.
        in_features: width of the input.
        hidden_features: width between the layers.
        out_features: width of the output.
        gated: whether there are two first layers.
        dtype: of all tensors.
        activation: the canonical text of the expression, if it is known.
    """
    hidden_elements = rows * hidden_features
    beyond_cache = hidden_elements * dtype.itemsize >= 2**25
    narrow = max(in_features, out_features) <= 128
    is_tanh = activation == "gelu_tanh(x)"
    if not _was_measured(dtype):
        return _was_measured_in_blocks(dtype) and narrow and beyond_cache and not is_tanh
    if gated:
        return beyond_cache and narrow and dtype != torch.float16
    if is_tanh:
        return hidden_elements >= 2**18
    return hidden_elements >= 2**20 and narrow


def _was_measured(dtype: torch.dtype) -> bool:
    """Whether this CPU is like the Xeon that was measured, as far as ``dtype`` is concerned."""
    needed = {torch.float32: "avx512_f", torch.float16: "avx512_fp16", torch.bfloat16: "amx_bf16"}
    return dtype in needed and _has(needed[dtype])


def _was_measured_in_blocks(dtype: torch.dtype) -> bool:
    """Whether it is like the EPYC, of which only what is computed in blocks is known to gain."""
    return dtype == torch.float32 and _has("avx2")


@functools.cache
def _has(instructions: str) -> bool:
    return bool(torch.cpu.get_capabilities().get(instructions, False))


@functools.cache
def _is_available(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops, "mkldnn"):
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


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
