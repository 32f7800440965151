"""Every spelling of a pointwise function: its expression computes the same, its gradient too."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from capture import only_site, sites_of
from expression_examples import points
from fusion_backend.mlp.expression import differentiate, evaluate, parse
from models import MLP, Gated, X

PLAIN = {
    "atan": torch.atan,
    "arctan": torch.arctan,
    "atan in place": lambda x: x.atan_(),
    "log2": lambda x: torch.log2(x.abs() + 1.0),
    "exp2": lambda x: torch.exp2(-x.abs()),
    "special exp2": lambda x: torch.special.exp2(-x.abs()),
    "log1p": lambda x: torch.log1p(x.abs()),
    "expm1": lambda x: torch.expm1(-x.abs()),
    "sinh": lambda x: torch.sinh(x.clamp(-3, 3)),
    "cosh": lambda x: x.clamp(-3, 3).cosh(),
    "erfc": lambda x: x * torch.erfc(-x / math.sqrt(2)),
    "special erfc": lambda x: torch.special.erfc(x),
    "sgn": lambda x: torch.sgn(x) * x,
    "softplus by logaddexp": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "addcmul": lambda x: torch.addcmul(x, x, torch.sigmoid(x), value=0.5),
    "addcmul of numbers": lambda x: torch.addcmul(torch.tensor(1.0), F.relu(x), torch.tensor(2.0)),
    "addcmul in place": lambda x: (x * 2.0).addcmul_(x, x.sigmoid()),
    "addcdiv": lambda x: torch.addcdiv(x, x, 1.0 + x.abs(), value=-2),
    "lerp": lambda x: torch.lerp(x, F.relu(x), 0.3),
    "lerp from the end": lambda x: torch.lerp(x, F.relu(x), 0.7),
    "lerp by a tensor": lambda x: torch.lerp(x, F.relu(x), torch.sigmoid(x)),
    "nan_to_num": torch.nan_to_num,
    "nan_to_num with numbers": lambda x: x.nan_to_num(nan=1.0, posinf=2.0, neginf=-3.0),
    "nan_to_num in place": lambda x: (x * 2.0).nan_to_num_(0.5) ** 2,
    "softsign": F.softsign,
    "hard shrink": nn.Hardshrink(0.5),
    "soft shrink": nn.Softshrink(0.5),
    "tanh shrink": nn.Tanhshrink(),
    "threshold": nn.Threshold(0.5, 3.0),
    "relu6": nn.ReLU6(),
    "hard tanh": nn.Hardtanh(-0.5, 3.0),
    "log-sigmoid": nn.LogSigmoid(),
    "mish": nn.Mish(),
    "rrelu in evaluation": nn.RReLU().eval(),
    "rrelu with bounds": lambda x: F.rrelu(x, 0.1, 0.2, training=False),
    "elu": nn.ELU(0.5),
    "celu": nn.CELU(2.0),
    "selu": nn.SELU(),
    "hard swish": nn.Hardswish(),
    "hard sigmoid": nn.Hardsigmoid(),
    "softplus": nn.Softplus(2.0, 10.0),
}
TWO = {
    "addcmul": lambda g, u: torch.addcmul(g, torch.tanh(g), u, value=2.0),
    "addcdiv": lambda g, u: torch.addcdiv(g, u, 1.0 + g * g),
    "lerp": lambda g, u: torch.lerp(g, u, torch.sigmoid(g)),
    "lerp by a number": lambda g, u: F.silu(torch.lerp(g, u, 0.25)),
    "logaddexp": torch.logaddexp,
}


def finite_points():
    values = points(torch.float32)
    at = values["g"].isfinite() & values["u"].isfinite() & (values["g"].abs() < 1e3)
    return {name: value[at] for name, value in values.items()}


def compare(function, activation, names):
    """Value and derivatives of a function against its expression, also at kinks."""
    expression = parse(activation)
    values = [finite_points()[name].requires_grad_() for name in names]
    copies = [value.clone() for value in values]  # some functions write to their operand
    result = function(*copies)
    expected = torch.autograd.grad(result.sum(), values, allow_unused=True, materialize_grads=True)
    scope = {name: value.detach() for name, value in zip(names, values, strict=True)}
    torch.testing.assert_close(evaluate(expression, scope), result.detach(), rtol=2e-5, atol=2e-5)
    for name, gradient in zip(names, expected, strict=True):
        mine = evaluate(differentiate(expression, name), scope)
        torch.testing.assert_close(mine, gradient, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", PLAIN)
def test_a_spelling_means_its_function(name):
    with torch.no_grad():
        site = only_site(MLP(PLAIN[name]), X)
    assert (site.rewritten, site.form) == (True, "plain")
    compare(PLAIN[name], site.activation, ["x"])


@pytest.mark.parametrize("name", TWO)
def test_a_spelling_of_two_projections_means_its_function(name):
    site = only_site(Gated(TWO[name]), X)
    assert (site.rewritten, site.form) == (True, "gated")
    compare(TWO[name], site.activation, ["g", "u"])


LARGE = [math.nan, math.inf, -math.inf, 0.0, 1.5, 65504.0, -65504.0, 3.3895e38, -3.3895e38]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "function",
    [
        torch.nan_to_num,
        lambda x: torch.nan_to_num(x, 2.0, posinf=7.0),
        lambda x: torch.nan_to_num(x, 2.0, 3.0, -math.inf),
    ],
)
def test_nan_to_num_bounds_what_its_dtype_cannot_hold(function, dtype):
    with torch.no_grad():
        site = only_site(MLP(function).to(dtype), X.to(dtype))
    wide = torch.tensor([*LARGE, 65510.0, 65519.0, 65521.0], requires_grad=True)
    x = wide.detach().to(dtype).requires_grad_()
    expected = function(x)
    (gradient,) = torch.autograd.grad(expected.sum(), x)
    expression, values = parse(site.activation), {"x": wide.detach()}
    # What a kernel does: float32 up to the rounding of the result.
    assert torch.equal(evaluate(expression, values).to(dtype), expected.detach())
    assert torch.equal(evaluate(differentiate(expression, "x"), values).to(dtype), gradient)


UNKNOWN = {
    "rrelu in training": nn.RReLU().train(),
    "nan_to_num of nan": lambda x: torch.nan_to_num(x, math.nan),
    "rounding": torch.frac,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_has_no_expression_is_named(name):
    site = only_site(MLP(UNKNOWN[name]), X)
    assert (site.fused, site.reason) == (False, "unknown-function")


def test_an_affine_function_between_linear_layers_is_no_activation():
    def forward(x):
        h = model.up(x)
        h = torch.addcmul(torch.tensor(1.0), torch.tensor(2.0), h)
        return model.down(torch.lerp(h, torch.ones_like(h), 0.1))

    model = MLP(F.gelu)
    assert sites_of(forward, X) == []
