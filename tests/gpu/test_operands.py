"""Operands of activations and dropout on a GPU: kernels against the reference."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)
from fusion_backend.mlp.operands import kind_of
from kernel_cases import random_case

ops = torch.ops.fusedmlp

HIDDEN = 256
LEADING = (3, 77)
# Kinds of operands and activations, with the plans that take them.
ALL = ("epilogue", "back_to_back", "stream")
CASES = {
    "prelu": (("scalar",), "prelu(x, p0)", ALL),
    "snake": (("vector",), "x + square(sin(p0 * x)) / p0", ALL),
    "batch norm": (("vector",) * 4, "gelu((x - p0) * rsqrt(p1 + 1e-05) * p2 + p3)", ALL),
    "lora": (("elementwise",), "gelu(2.0 * p0 + x)", ALL),
    "dropout": (("seed",), "dropout(gelu(x), p0, 0.25)", ALL[:2]),
    "gated dropout": (("seed", "vector"), "dropout(p1 * silu(g) * u, p0, 0.1)", ALL[:2]),
    "all": (
        ("elementwise", "vector", "seed", "scalar"),
        "dropout(silu(p0 + g) * u * p1, p2, 0.5) + p3",
        ALL[:2],
    ),
}


def operands(kinds, dtype):
    shapes = {"scalar": (), "vector": (HIDDEN,), "elementwise": (*LEADING, HIDDEN)}
    return [
        torch.tensor(2**40 + position, device="cuda")
        if kind == "seed"
        else (torch.rand(shapes[kind], device="cuda") + 0.5).to(dtype).requires_grad_()
        for position, kind in enumerate(kinds)
    ]


def layers(form, dtype, leading=LEADING, hidden=HIDDEN):
    """The seven tensors of an MLP, asking for gradients."""
    rows = torch.Size(leading).numel()
    found = random_case(rows, (64, hidden, 72), form, dtype=dtype, device="cuda")[:7]
    values = [found[0].view(*leading, 64), *found[1:]]
    return [value if value is None else value.requires_grad_() for value in values]


def case(name, dtype):
    kinds, activation, _ = CASES[name]
    form = "silu(g) * u" if "g" in activation.replace("gelu", "") else "gelu_tanh(x)"
    return layers(form, dtype), operands(kinds, dtype), activation


def in_float64(values):
    """The same tensors in float64; seeds are what they are."""
    return [
        value
        if value is None or kind_of(value) == "seed"
        else value.detach().double().requires_grad_(value.requires_grad)
        for value in values
    ]


def asking(*groups):
    return [v for group in groups for v in group if v is not None and v.requires_grad]


def kernels(function):
    """Names of the kernels of a call, after calls that compile them."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        function()
        torch.cuda.synchronize()
    return [e.name for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]


def assert_as_exact(found, right, exact):
    def error(result):
        return (result.double() - exact).norm() / exact.norm()

    assert (found.shape, found.dtype) == (right.shape, right.dtype)
    assert error(found) <= 1.1 * error(right) + torch.finfo(found.dtype).eps / 4


@pytest.mark.parametrize(
    ("dtype", "compiled"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)]
)
@pytest.mark.parametrize(
    ("name", "plan"), [(name, plan) for name, (_, _, plans) in CASES.items() for plan in plans]
)
def test_inference_is_as_exact_as_the_reference(name, plan, dtype, compiled):
    if dtype == torch.float32 and plan != "epilogue":
        pytest.skip("made for 16 bits")
    values, extra, activation = case(name, dtype)

    def function(values, extra):
        return ops.mlp(*values, extra, activation, plan)

    with torch.no_grad():
        found = (torch.compile(function, fullgraph=True) if compiled else function)(values, extra)
        right = ops.mlp(*values, extra, activation, "reference")
        wide, wide_extra = in_float64(values), in_float64(extra)
        assert_as_exact(found, right, ops.mlp(*wide, wide_extra, activation, "reference"))


@pytest.mark.parametrize("of_operands", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_training_is_as_exact_as_the_reference(name, compiled, of_operands):
    values, extra, activation = case(name, torch.bfloat16)
    for value in extra:
        value.requires_grad_(of_operands and kind_of(value) != "seed")

    def function(values, extra):
        return ops.mlp(*values, extra, activation, "epilogue")

    y = (torch.compile(function, fullgraph=True) if compiled else function)(values, extra)
    right = ops.mlp(*values, extra, activation, "reference")
    wide, wide_extra = in_float64(values), in_float64(extra)
    exact = ops.mlp(*wide, wide_extra, activation, "reference")
    upstream = torch.randn_like(y)

    found = torch.autograd.grad(y, asking(values, extra), upstream)
    expected = torch.autograd.grad(right, asking(values, extra), upstream)
    truth = torch.autograd.grad(exact, asking(wide, wide_extra), upstream.double())
    for triple in zip((y, *found), (right, *expected), (exact, *truth), strict=True):
        assert_as_exact(*triple)


def test_a_kernels_mask_is_the_references_bit_for_bit():
    for dtype in (torch.bfloat16, torch.float32):
        values = layers("gelu_tanh(x)", dtype, leading=(1111,), hidden=HIDDEN + 2)
        values[3], values[4] = torch.zeros_like(values[3]), torch.ones_like(values[4])
        values[5] = torch.eye(HIDDEN + 2, device="cuda", dtype=dtype)
        values[6] = None
        seed = torch.tensor(-(2**50) - 3, device="cuda")
        for plan in ("epilogue", "reference"):
            y = ops.mlp(*values, [seed], "dropout(x, p0, 0.3)", plan)
            if plan == "epilogue":
                kept = y != 0
        assert kept.equal(y != 0)
        assert abs(kept.double().mean() - 0.7) < 0.005


@pytest.mark.parametrize("name", ["dropout", "lora"])
def test_dropout_and_sums_train_on_the_kernels(name):
    values, extra, activation = case(name, torch.bfloat16)
    compiled = torch.compile(lambda values, extra: ops.mlp(*values, extra, activation, "epilogue"))

    def step():
        y = compiled(values, extra)
        return torch.autograd.grad(y, asking(values, extra), torch.ones_like(y))

    names = kernels(step)
    for launch in ("fusedmlp_epilogue", "fusedmlp_hidden_gradient"):
        assert sum(name.startswith(launch) for name in names) == 1, names
