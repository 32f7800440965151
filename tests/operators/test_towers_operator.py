"""torch.ops.fusedmlp.towers: what it computes, its gradients, and how compilers see it."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from fusion_backend.errors import PlanError
from operator_calls import compiled_calls
from repetition import slow_but

ops = torch.ops.fusedmlp

ACTIVATIONS = ["gelu_tanh(x)", "silu(x)", "tanh(x)"]
LAYERS = [3, 2]
COUNT = 8


def tensors(*, leading=(2, 3), dtype=torch.float64, grad=True):
    """x; three weights of a tower and two of another; two biases of the one, none of the other."""
    shapes = [(*leading, 6), (5, 6), (7, 5), (4, 7), (3, 6), (1, 3), (5,), (4,)]
    return [torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes]


def arguments(values, plan="reference"):
    x, *weights, first, last = values
    return (x, weights, [first, None, last, None, None], ACTIVATIONS, LAYERS, plan)


def towers(*values, plan="reference"):
    return tuple(ops.towers(*arguments(values, plan)))


def eager(*values):
    x, w_0, w_1, w_2, v_0, v_1, first, last = values
    hidden = F.gelu(F.linear(x, w_0, first), approximate="tanh")
    policy = F.linear(F.silu(F.linear(hidden, w_1)), w_2, last)
    return policy, F.linear(F.tanh(F.linear(x, v_0)), v_1)


def gradients(function, values):
    found = function(*values)
    asking = [value for value in values if value.requires_grad]
    loss = sum((1 + i) * (y * y).sum() for i, y in enumerate(found))
    return torch.autograd.grad(loss, asking)


@pytest.mark.parametrize("leading", [(), (3,), (2, 5), (2, 0, 3)])
def test_any_leading_dimensions_are_rows(leading):
    values = tensors(leading=leading)
    torch.testing.assert_close(towers(*values), eager(*values))


@pytest.mark.parametrize("grad", slow_but([True], [False, True]))
def test_towers_is_a_well_behaved_operator(grad):
    opcheck(ops.towers, arguments(tensors(dtype=torch.float32, grad=grad)))


def test_gradients_are_those_of_finite_differences():
    assert gradcheck(towers, tensors(leading=(2,)))


def test_second_derivatives_are_right():
    assert gradgradcheck(towers, tensors(leading=(2,)))


@pytest.mark.parametrize("wanted", range(COUNT))
def test_a_single_gradient_is_right(wanted):
    values = tensors()
    for position, value in enumerate(values):
        value.requires_grad_(position == wanted)
    (found,), (right,) = (gradients(f, values) for f in (towers, eager))
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("used", [0, 1])
def test_a_tower_that_nothing_is_made_of_has_no_gradients(used, create_graph):
    values = tensors()

    def found(function):
        y = function(*values)[used].sum()
        return torch.autograd.grad(y, values, create_graph=create_graph, allow_unused=True)

    torch.testing.assert_close(found(towers), found(eager))


def test_gradients_of_the_input_are_added_as_autograd_does():
    """Of the last tower first, each rounded: sums of three may differ otherwise."""
    x, *weights = (
        torch.randn(shape).bfloat16().requires_grad_() for shape in [(64, 32)] + 3 * [(32, 32)] * 2
    )

    def joined(x, *weights):
        return ops.towers(x, list(weights), [None] * 6, ["relu(x)"] * 3, [2, 2, 2], "reference")

    def apart(x, *weights):
        pairs = zip(weights[::2], weights[1::2], strict=True)
        return [F.linear(F.relu(F.linear(x, a)), b) for a, b in pairs]

    found, right = (
        torch.autograd.grad([y.sum() for y in f(x, *weights)], x) for f in (joined, apart)
    )
    assert torch.equal(found[0], right[0])


# Inductor gets ATen's operators, as it does from any model.
@pytest.mark.parametrize(
    ("backend", "dynamic"),
    slow_but(
        [("aot_eager", True)],
        itertools.product(["aot_eager", "inductor"], [False, True]),
    ),
)
def test_compiled_gradients_are_those_of_eager(backend, dynamic):
    values = tensors()
    compiled = torch.compile(towers, backend=backend, fullgraph=True, dynamic=dynamic)
    torch.testing.assert_close(gradients(compiled, values), gradients(eager, values))


def test_a_result_may_be_written_to_in_place():
    values = tensors(dtype=torch.float32)

    def changed(function):
        policy, value = function(*values)
        policy.mul_(2.0)
        return policy, value.add_(1.0)

    compiled = torch.compile(lambda: changed(towers), backend="aot_eager", fullgraph=True)
    right = changed(eager)
    torch.testing.assert_close(changed(towers), right)
    torch.testing.assert_close(compiled(), right)


def test_ahead_of_time_autograd_takes_it_apart():
    found = compiled_calls(towers, *tensors(grad=False))
    assert any("mm" in name for name in found)
    assert not any("fusedmlp" in name for name in found)


def test_an_exported_program_keeps_it_whole():
    class Model(torch.nn.Module):
        def forward(self, *values):
            return towers(*values)

    program = torch.export.export(Model(), tuple(tensors(grad=False))).run_decompositions()
    assert "fusedmlp.towers" in str(program.graph)
    values = tensors(grad=False)
    torch.testing.assert_close(program.module()(*values), eager(*values))


def test_autocast_casts_every_operand_once():
    values = tensors(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, right = towers(*values), eager(*values)
    assert {y.dtype for y in found} == {torch.bfloat16}
    torch.testing.assert_close(found, right, atol=0.1, rtol=0.05)


def test_floating_point_operations_are_those_of_its_products():
    values = tensors(grad=False)
    counts = []
    for function in (towers, eager):
        with FlopCounterMode(display=False) as counter:
            function(*values)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


TRANSFORMS = {
    "grad": lambda f, values: torch.func.grad(
        lambda *given: sum(y.sum() for y in f(*given)), argnums=tuple(range(COUNT))
    )(*values),
    "vmap": lambda f, values: torch.func.vmap(f)(*(torch.stack([v, -v]) for v in values)),
    "jvp": lambda f, values: torch.func.jvp(f, values, values),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_torch_func_are_right(transform):
    values = tuple(tensors(grad=False))
    found, right = (TRANSFORMS[transform](f, values) for f in (towers, eager))
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": [3, 1]}, r"at least two layers each, .* got \[3, 1\] layers"),
        ({"layers": [3, 3]}, r"got \[3, 3\] layers, 5 weights"),
        ({"layers": []}, r"got \[\] layers"),
        ({"activations": ["relu(x)"]}, "1 activations"),
        ({"x": torch.ones(2, 5)}, r"weights\[0\] must have shape \(5, 5\)"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change, message):
    names = ("x", "weights", "biases", "activations", "layers", "plan")
    given = dict(zip(names, arguments(tensors(dtype=torch.float32, grad=False)), strict=True))
    with pytest.raises(ValueError, match=message):
        ops.towers(*(given | change).values())


@pytest.mark.parametrize(
    ("plan", "message"),
    [("rows", "of towers must be one of chain, reference"), ("chain", "needs a CUDA device")],
)
def test_plans_that_cannot_run_are_refused(plan, message):
    with pytest.raises(PlanError, match=message):
        ops.towers(*arguments(tensors(grad=False), plan))
