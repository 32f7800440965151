"""The operators on Triton's interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

pytest.importorskip("triton")

import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)
from fusion_backend.errors import PlanError
from kernel_cases import interpreted, loops_are_broken
from repetition import slow_but, walked

ops = torch.ops.fusedmlp

pytestmark = interpreted

PLANS = ["epilogue", "stream", pytest.param("back_to_back", marks=loops_are_broken)]
ACTIVATIONS = {
    "gelu(x)": F.gelu,
    "square(relu(x))": lambda x: F.relu(x).square(),
    "silu(g) * u": lambda g, u: F.silu(g) * u,
}


def arguments(activation, *, leading=(2, 5), grad=False, dtype=torch.float32):
    shapes = [(*leading, 16), (32, 16), (32,), (32, 16), (32,), (24, 32), (24,)]
    values = [torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes]
    if activation != "silu(g) * u":
        values[1] = values[2] = None
    return values


def eager(values, activation):
    x, weight_gate, bias_gate, weight_up, bias_up, weight_down, bias_down = values
    preacts = [F.linear(x, weight_up, bias_up)]
    if weight_gate is not None:
        preacts.insert(0, F.linear(x, weight_gate, bias_gate))
    return F.linear(ACTIVATIONS[activation](*preacts), weight_down, bias_down)


def gradients(y, values):
    return torch.autograd.grad(y.square().sum(), [value for value in values if value is not None])


@pytest.mark.parametrize(
    ("leading", "activation"), walked([(), (3,), (2, 5), (2, 0, 3)], ACTIVATIONS)
)
@pytest.mark.parametrize("plan", PLANS)
def test_inference_is_right(plan, activation, leading):
    values = arguments(activation, leading=leading)
    y = ops.mlp(*values, [], activation, plan)
    torch.testing.assert_close(y, eager(values, activation), atol=1e-4, rtol=1e-4)
    residual = torch.randn_like(y)
    total = ops.mlp(*values, [], activation, plan, residual=residual)
    torch.testing.assert_close(total, y + residual)


@pytest.mark.parametrize("norm", ["layer_norm(1e-05)", "rms_norm(0.001)"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_norm_comes_before(plan, norm):
    values = arguments("silu(g) * u")
    values[0] = values[0].mT.contiguous().mT
    weight = torch.randn(16)
    y = ops.mlp(*values, [], "silu(g) * u", plan, norm=norm, norm_weight=weight)
    x, function = values[0], F.layer_norm if norm.startswith("layer") else F.rms_norm
    normed = function(x, (16,), weight, eps=float(norm.partition("(")[2][:-1]))
    torch.testing.assert_close(y, eager([normed, *values[1:]], "silu(g) * u"), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("plan", PLANS)
def test_gradients_go_through_a_residual(plan, activation):
    values = arguments(activation, grad=True)
    residual = torch.randn(2, 5, 24, requires_grad=True)
    y = ops.mlp(*values, [], activation, plan, residual=residual)
    right = eager(values, activation) + residual
    everything = [*values, residual]
    for found, expected in zip(gradients(y, everything), gradients(right, everything), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("plan", PLANS)
def test_training_is_right(plan, activation):
    values = arguments(activation, grad=True)
    y, right = ops.mlp(*values, [], activation, plan), eager(values, activation)
    torch.testing.assert_close(y, right, atol=1e-4, rtol=1e-4)
    for found, expected in zip(gradients(y, values), gradients(right, values), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


# Kinds of operands, an activation and the plans that take them: one gradient by the kernel, since
# the operand is added to a projection, and one composed of ATen operators.
OPERANDS = {
    "gelu(p0 + x)": [(2, 5, 32)],
    "p0 * silu(g) * u": [(32,)],
    "dropout(p0 * silu(x), p1, 0.25)": [(), None],
}


def operands_of(activation):
    return [
        torch.tensor(7) if shape is None else torch.randn(shape, requires_grad=True)
        for shape in OPERANDS[activation]
    ]


@pytest.mark.parametrize("activation", OPERANDS)
@pytest.mark.parametrize("plan", PLANS)
def test_operands_are_taken_in_inference_and_training(plan, activation):
    values = arguments("silu(g) * u" if "g)" in activation else "gelu(x)", grad=True)
    extra = operands_of(activation)
    y, right = (ops.mlp(*values, extra, activation, how) for how in (plan, "reference"))
    torch.testing.assert_close(y, right, atol=1e-4, rtol=1e-4)
    tensors = [*values, *(value for value in extra if value.requires_grad)]
    for found, expected in zip(gradients(y, tensors), gradients(right, tensors), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    if plan == "stream" and "dropout" in activation:
        with torch.no_grad(), pytest.raises(PlanError, match="cannot take the seed p1"):
            ops.mlp(*values, extra, activation, plan)
        return
    with torch.no_grad():
        found = ops.mlp(*values, extra, activation, plan)
    torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)


def test_kernels_have_room_for_four_operands():
    values, extra = arguments("gelu(x)"), [torch.randn(()) for _ in range(5)]
    activation = "p0 * x + p1 + p2 + p3 + p4"
    with pytest.raises(PlanError, match="cannot take the scalar p4"):
        ops.mlp(*values, extra, activation, "epilogue")
    found = ops.mlp(*values, extra[:4], "p0 * x + p1 + p2 + p3", "epilogue")
    right = ops.mlp(*values, extra[:4], "p0 * x + p1 + p2 + p3", "reference")
    torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("backend", "dynamic"),
    slow_but([("aot_eager", True)], itertools.product(["aot_eager", "inductor"], [False, True])),
)
def test_compiled_graphs_keep_the_operators_whole(backend, dynamic):
    values = arguments("silu(g) * u", grad=True)

    def mlp(*values):
        return ops.mlp(*values, [], "silu(g) * u", "epilogue")

    y = torch.compile(mlp, backend=backend, fullgraph=True, dynamic=dynamic)(*values)
    right = eager(values, "silu(g) * u")
    torch.testing.assert_close(y, right, atol=1e-4, rtol=1e-4)
    for found, expected in zip(gradients(y, values), gradients(right, values), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("plan", "activation"),
    slow_but(
        [("epilogue", "silu(g) * u")],
        itertools.product(["epilogue", "stream"], ["silu(g) * u", "gelu(x)"]),
    ),
)
def test_operators_are_well_behaved(plan, activation):
    values = arguments(activation)
    opcheck(ops.mlp, (*values, [], activation, plan))
    opcheck(ops.mlp, (*values, [], activation, plan), {"residual": torch.randn(2, 5, 24)})
    opcheck(ops.mlp, (*values, [], activation, plan), {"norm": "layer_norm(1e-05)"})
    opcheck(ops.mlp_forward, (*values, [], activation, plan))
    y, preact_gate, preact_up = ops.mlp_forward(*values, [], activation, plan)
    x, weight_gate, _, weight_up, _, weight_down, _ = values
    saved = (x, weight_gate, weight_up, weight_down, preact_gate, preact_up, [], activation, plan)
    gated = weight_gate is not None
    opcheck(ops.mlp_backward, (torch.randn_like(y), *saved, [True, gated, gated] + 4 * [True]))


def test_autocast_to_float16_runs_kernels_in_float16():
    values = arguments("silu(g) * u", grad=True)
    with torch.autocast("cpu", dtype=torch.float16):
        y = ops.mlp(*values, [], "silu(g) * u", "epilogue")
        right = eager(values, "silu(g) * u")
    assert y.dtype == torch.float16
    torch.testing.assert_close(y, right, atol=0.05, rtol=0.02)
    found = torch.autograd.grad(y.sum(), values)
    assert {gradient.dtype for gradient in found} == {torch.float32}


def first_layers(activation, grad):
    values = arguments(activation, grad=grad)[:5]

    def right():
        preacts = [F.linear(values[0], *values[3:])]
        if values[1] is not None:
            preacts.insert(0, F.linear(values[0], *values[1:3]))
        return ACTIVATIONS[activation](*preacts)

    return values, right()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_first_layers_alone_are_right_forward_and_backward(activation):
    values, right = first_layers(activation, grad=True)
    hidden = ops.activated_linear(*values, [], activation, "epilogue")
    torch.testing.assert_close(hidden, right, atol=1e-4, rtol=1e-4)
    for found, expected in zip(gradients(hidden, values), gradients(right, values), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_compiled_graphs_keep_the_first_layers_whole():
    values, right = first_layers("silu(g) * u", grad=False)

    def activated(*values):
        return ops.activated_linear(*values, [], "silu(g) * u", "epilogue")

    hidden = torch.compile(activated, backend="inductor", fullgraph=True)(*values)
    torch.testing.assert_close(hidden, right, atol=1e-4, rtol=1e-4)
    opcheck(ops.activated_linear, (*values, [], "silu(g) * u", "epilogue"))
