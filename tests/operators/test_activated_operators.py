"""torch.ops.fusedmlp.activated_linear: what it computes, and how compilers see it."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)
from fusion_backend.errors import PlanError
from operator_calls import GATED, PLAIN, compiled_calls
from repetition import slow_but, walked

ops = torch.ops.fusedmlp
activated = ops.activated_linear

IN, HIDDEN = 6, 5


def tensors(activation, *, leading=(2, 3), dtype=torch.float32, grad=False):
    """Input, gate and up layer; no gate where the activation asks for none."""
    shapes = [(*leading, IN), (HIDDEN, IN), (HIDDEN,), (HIDDEN, IN), (HIDDEN,)]
    values = [torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes]
    return values if activation == GATED else [values[0], None, None, *values[3:]]


def eager(x, weight_gate, bias_gate, weight_up, bias_up):
    up = F.linear(x, weight_up, bias_up)
    if weight_gate is None:
        return F.gelu(up, approximate="tanh")
    return F.silu(F.linear(x, weight_gate, bias_gate)) * up


def operator(activation, plan="reference"):
    return lambda *values: activated(*values, [], activation, plan)


BOTH = (operator(GATED), eager)


def present(values):
    return [value for value in values if value is not None]


def gradients(hidden, values):
    return torch.autograd.grad(hidden.square().sum(), present(values))


@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (2, 0, 3)])
@pytest.mark.parametrize("activation", [PLAIN, GATED])
def test_it_is_the_activation_of_the_first_layers(activation, leading):
    values = tensors(activation, leading=leading)
    hidden = operator(activation)(*values)
    assert hidden.is_contiguous()
    torch.testing.assert_close(hidden, eager(*values))


@pytest.mark.parametrize(("activation", "grad"), walked([PLAIN, GATED], [False, True]))
def test_it_and_its_parts_are_well_behaved_operators(activation, grad):
    opcheck(activated, (*tensors(activation, grad=grad), [], activation, "reference"))
    values, rest = tensors(activation, grad=False), ([], activation, "reference")
    opcheck(ops.activated_linear_forward, (*values, *rest))
    x, gate, _, up, _ = values
    hidden, *preacts = ops.activated_linear_forward(*values, *rest)
    needs = [True, gate is not None, gate is not None, True, True]
    opcheck(ops.activated_linear_backward, (hidden, x, gate, up, *preacts, *rest, needs))


def test_an_operands_gradient_is_no_alias_of_that_which_arrives():
    x, up, added = torch.randn(3, IN), torch.randn(HIDDEN, IN), torch.randn(3, HIDDEN)
    rest = ([added], "relu(x) + p0", "reference")
    hidden, *preacts = ops.activated_linear_forward(x, None, None, up, None, *rest)
    needs = [False] * 5 + [True]
    *_, found = ops.activated_linear_backward(hidden, x, None, up, *preacts, *rest, needs)
    torch.testing.assert_close(found, hidden)
    assert found.data_ptr() != hidden.data_ptr()


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
@pytest.mark.parametrize("activation", [PLAIN, GATED])
def test_derivatives_are_those_of_finite_differences(activation, check):
    values = tensors(activation, dtype=torch.float64, grad=True)

    def function(*given):
        given = iter(given)
        return operator(activation)(*(None if v is None else next(given) for v in values))

    assert check(function, present(values))


@pytest.mark.parametrize("asked", range(5))
def test_any_one_gradient_can_be_asked_for(asked):
    values = tensors(GATED)
    values[asked].requires_grad_()
    (found,) = torch.autograd.grad(operator(GATED)(*values).sum(), values[asked])
    (right,) = torch.autograd.grad(eager(*values).sum(), values[asked])
    torch.testing.assert_close(found, right)


def test_an_operand_of_the_activation_has_its_gradient():
    values, scale = tensors(PLAIN), torch.randn(HIDDEN, requires_grad=True)
    hidden = activated(*values, [scale], "gelu_tanh(x) * p0", "reference")
    torch.testing.assert_close(hidden, eager(*values) * scale)
    (found,) = torch.autograd.grad(hidden.sum(), scale)
    torch.testing.assert_close(found, eager(*values).sum((0, 1)))


@pytest.mark.parametrize("transform", ["vmap", "jvp"])
def test_transforms_see_aten_operators(transform):
    values = tensors(GATED)
    if transform == "vmap":
        found, right = (torch.func.vmap(f, in_dims=(0, *4 * [None]))(*values) for f in BOTH)
    else:
        found, right = (torch.func.jvp(f, tuple(values), tuple(values))[1] for f in BOTH)
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_once_and_gradients_stay_float32(dtype):
    values = tensors(GATED, grad=True)
    with torch.autocast("cpu", dtype=dtype):
        hidden, right = operator(GATED)(*values), eager(*values)
    assert hidden.dtype == dtype
    torch.testing.assert_close(hidden, right, atol=0.05, rtol=0.05)
    assert {gradient.dtype for gradient in gradients(hidden, values)} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_at_least_as_exact_as_eager(dtype):
    values = tensors(GATED, leading=(500,), dtype=dtype)
    exact = eager(*(value.double() for value in values))
    ours, theirs = ((f(*values).double() - exact).norm() for f in BOTH)
    assert ours <= 1.05 * theirs


def test_ahead_of_time_autograd_takes_it_apart():
    names = " ".join(compiled_calls(operator(PLAIN), *tensors(PLAIN)))
    assert "fusedmlp" not in names
    assert "addmm" in names


@pytest.mark.parametrize(
    ("backend", "dynamic"),
    slow_but(
        [("aot_eager", False), ("aot_eager", True)],  # tests/fusion compiles it by Inductor
        itertools.product(["aot_eager", "inductor"], [False, True]),
    ),
)
def test_compiled_training_is_that_of_eager(backend, dynamic):
    values = tensors(GATED, grad=True)
    compiled = torch.compile(operator(GATED), backend=backend, fullgraph=True, dynamic=dynamic)
    hidden, right = compiled(*values), eager(*values)
    torch.testing.assert_close(hidden, right)
    torch.testing.assert_close(gradients(hidden, values), gradients(right, values))


@pytest.mark.parametrize("plan", ["stream", "fastest"])
def test_a_plan_that_ends_at_the_last_layer_is_refused(plan):
    message = f"must be one of epilogue, library, reference, got '{plan}'"
    with pytest.raises(PlanError, match=message):
        operator(PLAIN, plan)(*tensors(PLAIN))


def test_the_library_is_refused_where_there_is_none():
    with pytest.raises(PlanError, match="needs a CUDA device, got cpu"):
        operator(PLAIN, "library")(*tensors(PLAIN))


def test_shapes_that_do_not_fit_are_refused():
    values = tensors(PLAIN)
    values[4] = torch.randn(HIDDEN + 1)
    with pytest.raises(ValueError, match="bias_up must have shape"):
        operator(PLAIN)(*values)


def test_the_part_that_saves_cannot_be_differentiated():
    hidden, *_ = ops.activated_linear_forward(*tensors(PLAIN, grad=True), [], PLAIN, "reference")
    part, whole = "fusedmlp::activated_linear_forward", "fusedmlp::activated_linear"
    message = f"{part} has no derivative: call {whole}, which is differentiable"
    with pytest.raises(NotImplementedError, match=message):
        hidden.sum().backward()
