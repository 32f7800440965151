"""What is fused is compared with the graph's own calls before it is used."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from capture import only_site, record, sites_of
from expression_examples import EXAMPLES
from fusion_backend.mlp.expression import canonical, canonicalize, parse, variables
from fusion_backend.mlp.expression.agreement import difference
from fusion_backend.mlp.expression.ordering import ordered
from fusion_backend.mlp.expression.programs import of_expressions
from models import MLP, Gated, X
from repetition import walked


def differs(written: str, used: str) -> str | None:
    expression = parse(written)
    found = difference(of_expressions((expression,), variables(expression)), parse(used))
    return None if found is None else found.what


@pytest.mark.parametrize("text", EXAMPLES)
def test_the_canonical_form_and_every_derivative_agree_with_autograd(text: str) -> None:
    if "prelu" in text:
        return  # computed by a where, whose gradient is NaN where one slope is infinite
    expression = parse(text)
    program = of_expressions((expression,), variables(expression))
    assert difference(program, canonicalize(expression)) is None


@pytest.mark.parametrize(
    ("written", "used"),
    [
        ("log(sigmoid(x) + 1e-07)", "logsigmoid(x)"),
        ("sigmoid(x) * log(sigmoid(x) + 1e-08)", "sigmoid(x) * logsigmoid(x)"),
        ("x / (sigmoid(x) + 1e-08)", "x / sigmoid(x)"),
        ("rsqrt((maximum(x, -x) - x) + 1e-08)", "rsqrt(maximum(x, -x) + 1e-08 - x)"),
        ("(x + 12582912.0) - 12582912.0", "x"),
        ("(x + 1e8) - 1e8", "x"),
        ("1.0 / (x + 1e-30)", "1.0 / x"),
        ("x / x", "1.0 + 0.0 * x"),
        ("x - x", "0.0 * relu(x)"),
        ("relu(x) / relu(x)", "float(x > 0.0)"),
        ("where(x < inf, 1.0, 0.0)", "1.0 + 0.0 * where(x < inf, x, 0.0)"),
        ("1.0 / (x + 0.0)", "1.0 / x"),
        ("exp(x) / (1.0 + exp(x))", "sigmoid(x)"),
        ("float(x > 0.0) + float(x > 1.0)", "float((x > 0.0) + (x > 1.0))"),
        ("relu(x)", "x * (x > 0.0)"),
        ("leaky_relu(x, 0.01)", "leaky_relu(x, 0.0101)"),
        ("g * u", "g * relu(u)"),
        ("g / u * u", "g"),
        ("silu(g) * u", "silu(g) * u + 1e-3"),
    ],
)
def test_a_wrong_rule_is_found(written: str, used: str) -> None:
    assert differs(written, used) == "value"


@pytest.mark.parametrize(
    ("written", "used"),
    [
        ("maximum(x, 0.0)", "relu(x)"),
        ("x / (1.0 + exp(-x))", "silu(x)"),
    ],
)
def test_a_wrong_slope_is_found(written: str, used: str) -> None:
    assert differs(written, used) == "x"


@pytest.mark.parametrize(
    ("written", "used"),
    [
        ("0.5 * x * (1.0 + tanh(0.79788456 * x * (1.0 + 0.044715 * x * x)))", "gelu_tanh(x)"),
        ("0.5 * x * (1.0 + erf(x / 1.4142135))", "gelu(x)"),
        ("x * (x * x)", "pow(x, 3.0)"),
        ("2.0 * (x * 3.0)", "6.0 * x"),
    ],
)
def test_a_rounding_is_no_difference(written: str, used: str) -> None:
    assert differs(written, used) is None


@pytest.mark.parametrize(
    "activation",
    [
        lambda h: F.relu((h + 12582912.0) - 12582912.0),
        lambda h: torch.log(torch.sigmoid(h) + 1e-7),
    ],
)
def test_a_wrong_rule_costs_the_site_and_not_the_result(activation, monkeypatch) -> None:
    def wrongly_ordered(expression):
        match expression.function, expression.arguments:
            case "sub", (a, b) if str(b) in str(a):
                return a.arguments[0]
            case "add", (a, b) if str(b) == "1e-07":
                return a
        return ordered(expression)

    monkeypatch.setattr(canonical, "ordered", wrongly_ordered)
    canonicalize.cache_clear()
    model = MLP(activation)
    try:
        with pytest.warns(UserWarning, match="please report it"), torch.no_grad():
            recorder, result = record(model, X)
    finally:
        canonicalize.cache_clear()
    (site,) = recorder.sites
    assert (site.rewritten, site.reason) == (False, "unverified")
    with torch.no_grad():
        torch.testing.assert_close(result, model(X))


@pytest.mark.parametrize("activation", [nn.ReLU6(), nn.Hardswish(), nn.Hardtanh()], ids=str)
def test_what_a_clamp_makes_of_nan_decides_nothing(activation: nn.Module) -> None:
    """A variance below zero makes it, and PyTorch's clamps have a slope of one there."""
    layers = nn.Linear(8, 32), nn.BatchNorm1d(32), activation, nn.Linear(32, 8)
    recorder, _ = record(nn.Sequential(*layers).eval(), torch.randn(5, 8))
    assert [site.rewritten for site in recorder.sites] == [True]


GUARDED = {
    "log": lambda h: torch.log(torch.sigmoid(h) + 1e-7),
    "entropy": lambda h: -torch.sigmoid(h) * torch.log(torch.sigmoid(h) + 1e-8),
    "quotient": lambda h: h / (torch.sigmoid(h) + 1e-8),
    "root": lambda h: torch.rsqrt((torch.maximum(h, -h) - h) + 1e-8),
    "rounding": lambda h: (h + 12582912.0) - 12582912.0 + F.relu(h),
    "a large number": lambda h: torch.exp(h + 1e6 - 1e6),
    "a quotient of exponentials": lambda h: torch.exp(h) / (torch.exp(h) + 1.0),
    "infinity minus infinity": lambda h: torch.exp(h) - torch.exp(h),
    "zero by zero": lambda h: F.relu(h) / F.relu(h),
    "compared with infinity": lambda h: torch.where(h < math.inf, F.gelu(h), 0.0),
    "a sign of zero": lambda h: torch.reciprocal(F.relu(h) * -1.0 + 0.0),
    "factors of all sizes": lambda h: F.relu(h) * 1e-30 * 1e-30 * 1e30 * 1e30,
}
EXTREME = [
    0.0,
    -0.0,
    0.5,
    -2.0,
    30.0,
    -30.0,
    120.0,
    -120.0,
    1e-30,
    1e30,
    math.inf,
    -math.inf,
    math.nan,
]


@pytest.mark.parametrize("name", GUARDED)
def test_programs_with_guards_and_extremes_are_as_in_eager(name) -> None:
    """Layers of one feature hand every value to the activation as it is."""
    layers = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for layer in layers:
        nn.init.ones_(layer.weight)
    model = nn.Sequential(layers[0], Function(GUARDED[name]), layers[1])
    x = torch.tensor(EXTREME).unsqueeze(1).requires_grad_()
    recorder, result = record(model, x)
    (site,) = recorder.sites
    assert site.rewritten, site.detail
    expected = model(x)
    torch.testing.assert_close(result, expected, equal_nan=True)
    (found,), (right,) = (torch.autograd.grad(y.sum(), x) for y in (result, expected))
    known = ~x.isnan()
    torch.testing.assert_close(found[known], right[known], equal_nan=True)


class Function(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def test_an_activation_is_compared_once() -> None:
    difference.cache_clear()
    only_site(MLP(F.mish), X)
    before = difference.cache_info()
    only_site(MLP(F.mish), X)
    after = difference.cache_info()
    assert (after.misses, after.hits) == (before.misses, before.hits + 1)


def test_the_check_leaves_no_trace() -> None:
    difference.cache_clear()
    model = MLP(lambda h: F.softplus(h, 1.5))
    before = torch.get_rng_state(), torch.get_default_dtype(), torch.is_grad_enabled()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        sites_of(model, X)
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_grad_enabled()
    assert torch.equal(before[0], torch.get_rng_state())
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == before[1:]


@pytest.mark.parametrize("mode", ["fake", "no_grad", "inference", "autocast", "default dtype"])
def test_the_check_is_the_same_under_every_mode(mode: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    modes = {
        "fake": FakeTensorMode,
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    }
    expression = parse("0.5 * x * (1.0 + erf(x / 1.4142135623730951))")
    program = of_expressions((expression,), ("x",))
    difference.cache_clear()
    if mode == "default dtype":
        torch.set_default_dtype(torch.float64)
        try:
            assert difference(program, parse("gelu(x)")) is None
        finally:
            torch.set_default_dtype(torch.float32)
        return
    with modes[mode]():
        assert difference(program, parse("gelu(x)")) is None
        assert difference(program, parse("gelu_tanh(x)")) is not None


def test_the_check_saves_nothing_by_the_hooks_of_the_caller() -> None:
    seen: list[torch.Tensor] = []
    difference.cache_clear()
    hooks = torch.autograd.graph.saved_tensors_hooks(seen.append, lambda _: torch.zeros(()))
    with torch.no_grad(), hooks:
        sites = sites_of(MLP(lambda h: F.softplus(h, 1.25)), X)
    assert [site.rewritten for site in sites] == [True]
    assert not seen


def test_nothing_is_said_of_what_is_right() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sites = sites_of(Gated(lambda g, u: F.silu(g) * u), X)
    assert [site.rewritten for site in sites] == [True]


COMMON = {
    "relu": F.relu,
    "squared relu": lambda h: F.relu(h).square(),
    "gelu": F.gelu,
    "gelu tanh": lambda h: F.gelu(h, approximate="tanh"),
    "gelu by hand": lambda h: h * 0.5 * (1.0 + torch.erf(h / math.sqrt(2.0))),
    "gelu of GPT-2": lambda h: (
        0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * h**3.0)))
    ),
    "quick gelu": lambda h: h * torch.sigmoid(1.702 * h),
    "silu": F.silu,
    "silu by hand": lambda h: h / (1 + torch.exp(-h)),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "mish": F.mish,
    "softplus": F.softplus,
    "elu": F.elu,
    "hardswish": F.hardswish,
    "leaky relu": F.leaky_relu,
    "tanhshrink": F.tanhshrink,
    "sine": lambda h: torch.sin(30.0 * h),
}


@pytest.mark.parametrize(
    ("name", "dtype"), walked(COMMON, [torch.float32, torch.bfloat16, torch.float16])
)
def test_a_common_activation_is_verified_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    """Eager rounds what is small, and overflows, where kernels hold float32: no wrong rule."""
    function = COMMON[name]
    models = [MLP(function)]
    if name != "tanhshrink":  # its gradient cancels in eager
        models.append(Gated(lambda g, u: function(g) * u))
    for model in models:
        site = only_site(model.to(dtype), X.to(dtype))
        assert site.legal, site.detail
