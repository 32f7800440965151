"""Expressions that together use every function of the language, and where to evaluate them."""

from __future__ import annotations

import torch
from torch import Tensor

ONE_VARIABLE = (
    "x + 1.0",
    "2.0 - x",
    "3.0 * x",
    "x / 3.0",
    "1.0 / (x + 0.25)",
    "-x",
    "pow(x, 3.0)",
    "pow(x, -2.0)",
    "pow(x, 0.5)",
    "pow(x, 2.5)",
    "pow(x, 7.0)",
    "square(x)",
    "sqrt(x)",
    "rsqrt(x)",
    "reciprocal(x)",
    "exp(x)",
    "exp2(x)",
    "expm1(x)",
    "log(x)",
    "log1p(x)",
    "log2(x)",
    "sin(x)",
    "cos(x)",
    "tanh(x)",
    "erf(x)",
    "erfc(x)",
    "atan(x)",
    "sinh(x)",
    "cosh(x)",
    "sigmoid(x)",
    "abs(x)",
    "x * sign(x)",
    "gelu(x)",
    "gelu_tanh(x)",
    "silu(x)",
    "x * sigmoid(1.702 * x)",
    "mish(x)",
    "logsigmoid(x)",
    "softsign(x)",
    "tanhshrink(x)",
    "softplus(x, 2.0, 20.0)",
    "relu(x)",
    "square(relu(x))",
    "relu6(x)",
    "hardsigmoid(x)",
    "hardswish(x)",
    "hardtanh(x, -1.0, 3.0)",
    "clamp(x, -1.0, 3.0)",
    "clamp(x, -inf, 3.0)",
    "clamp(x, 0.5, inf)",
    "leaky_relu(x, 0.1)",
    "threshold(x, 0.5, 3.0)",
    "elu(x, 1.5, 2.0, 0.5)",
    "celu(x, 2.0)",
    "selu(x)",
    "x * (x > 0.0)",
    "where(x < 0.0, 0.1, 0.3) * x",
    "x * float(x > 1.0)",
    "prelu(x, 0.3)",
    "nan_to_num(x, 1.0, 5.0, -5.0, 50.0)",
    "addcdiv(x, x, 1.0 + square(x), 2.0)",
    "where(logical_or(x <= -1.0, logical_not(x != 3.0)), x, square(x))",
)
TWO_VARIABLES = (
    "silu(g) * u",
    "g * u",
    "g / u - u",
    "logaddexp(g, u)",
    "prelu(g, u)",
    "lerp(g, u, sigmoid(g))",
    "maximum(g, u)",
    "minimum(g, u)",
    "where(logical_and(g >= u, g == g), g, square(u))",
    "clamp(g, -inf, 7.0) * sigmoid(1.702 * clamp(g, -inf, 7.0)) * (clamp(u, -7.0, 7.0) + 1.0)",
)
EXAMPLES = ONE_VARIABLE + TWO_VARIABLES

_KINKS = (0.0, 0.5, 1.0, -1.0, 3.0, -3.0, 6.0, 7.0, -7.0, 10.0, 20.0)


def points(dtype: torch.dtype) -> dict[str, Tensor]:
    """512 values of each variable: a grid, every kink of the examples, ties of ``g`` and ``u``."""
    kinks = torch.tensor(_KINKS)
    special = torch.tensor([float("nan"), 1e4, -1e4, 100.0, -100.0, 1e-6, -1e-6])
    grid = torch.linspace(-12.0, 12.0, 512 - len(kinks) - len(special))
    x = torch.cat([kinks, special, grid])
    u = torch.cat([kinks, special, grid.flip(0) / 2.0])
    return {"x": x.to(dtype), "g": x.to(dtype), "u": u.to(dtype)}
