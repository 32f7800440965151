"""torch.ops.fusedmlp.chain: what it computes, its gradients, and how compilers see it."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.library import opcheck

from fusion_backend.errors import PlanError
from fusion_backend.operators import CHAIN
from operator_calls import compiled_calls
from repetition import slow_but

ops = torch.ops.fusedmlp

WIDTHS = (6, 5, 7, 4)
ACTIVATIONS = ["gelu_tanh(x)", "silu(x)"]


def tensors(*, leading=(2, 3), dtype=torch.float64, widths=WIDTHS, grad=True):
    """x, three weights and two biases; the layer in the middle has none."""
    shapes = [(*leading, widths[0])]
    shapes += [(out, inner) for inner, out in itertools.pairwise(widths)]
    shapes += [(widths[1],), (widths[3],)]
    return [torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes]


def chain(*values, plan="reference"):
    x, *weights, first, last = values
    return ops.chain(x, weights, [first, None, last], ACTIVATIONS, plan)


def eager(*values):
    x, w_0, w_1, w_2, first, last = values
    hidden = F.gelu(F.linear(x, w_0, first), approximate="tanh")
    return F.linear(F.silu(F.linear(hidden, w_1)), w_2, last)


def gradients(function, values):
    y = function(*values)
    asking = [value for value in values if value.requires_grad]
    return torch.autograd.grad(y, asking, torch.ones_like(y))


@pytest.mark.parametrize("leading", [(), (3,), (2, 5), (2, 0, 3)])
def test_any_leading_dimensions_are_rows(leading):
    values = tensors(leading=leading)
    torch.testing.assert_close(chain(*values), eager(*values))


@pytest.mark.parametrize("grad", slow_but([True], [False, True]))
def test_chain_is_a_well_behaved_operator(grad):
    x, *weights, first, last = tensors(dtype=torch.float32, grad=grad)
    opcheck(ops.chain, (x, weights, [first, None, last], ACTIVATIONS, "reference"))


@pytest.mark.parametrize("needs", [[True] * 4 + [True, False, True], [False] * 7])
def test_its_backward_pass_is_a_well_behaved_operator(needs):
    x, *weights, first, last = tensors(dtype=torch.float32, grad=False)
    operands = (x, weights, [first, None, last], ACTIVATIONS, "reference")
    opcheck(ops.chain_backward, (torch.randn(2, 3, WIDTHS[-1]), *operands, needs))


def test_gradients_are_those_of_finite_differences():
    assert gradcheck(chain, tensors())


def test_second_derivatives_are_right():
    assert gradgradcheck(chain, tensors(leading=(2,), widths=(3, 2, 2, 2)))


@pytest.mark.parametrize("wanted", range(6))
def test_a_single_gradient_is_right(wanted):
    values = tensors()
    for position, value in enumerate(values):
        value.requires_grad_(position == wanted)
    (found,), (right,) = (gradients(f, values) for f in (chain, eager))
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        (0, 2 + 3),  # both hidden values, and the gradients on the way down to x
        (3, 2 + 1),  # dW of the last layer
        (5, 2),  # db of the last layer
    ],
)
def test_only_the_products_behind_the_wanted_gradients_run(wanted, count):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            self.count += operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            return operator(*args, **(kwargs or {}))

    x, *weights, first, last = tensors(grad=False)
    needs = [False] * 7
    needs[wanted if wanted < 5 else 6] = True
    given = (x, weights, [first, None, last], ACTIVATIONS, "reference")
    grad_output = torch.randn(2, 3, WIDTHS[-1], dtype=torch.float64)
    with Counter() as counter:
        CHAIN.differentiate(CHAIN.read_backward(grad_output, *given, needs))
    assert counter.count == count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_about_as_exact_as_those_of_eager(dtype):
    values = tensors(leading=(200,), widths=(64, 48, 64, 32), dtype=dtype)
    exact = gradients(eager, [value.detach().double().requires_grad_() for value in values])
    ours, theirs = (gradients(f, values) for f in (chain, eager))
    for mine, other, truth in zip(ours, theirs, exact, strict=True):
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        assert (mine.double() - truth).norm() <= 1.1 * (other.double() - truth).norm()


def test_a_weights_gradient_has_the_layout_of_the_weight():
    values = tensors()
    values[1] = values[1].detach().t().contiguous().t().requires_grad_()
    found, right = gradients(chain, values), gradients(eager, values)
    assert found[1].stride() == values[1].stride()
    torch.testing.assert_close(found, right)


def test_a_tied_weight_gets_the_sum():
    x, weight, bias = torch.randn(3, 4), torch.randn(4, 4), torch.randn(4)
    weight.requires_grad_()
    (found,) = torch.autograd.grad(chain(x, *[weight] * 3, bias, bias).sum(), [weight])
    (right,) = torch.autograd.grad(eager(x, *[weight] * 3, bias, bias).sum(), [weight])
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize(
    ("backend", "dynamic"),
    slow_but(
        [("aot_eager", True)],  # tests/fusion compiles it by Inductor
        itertools.product(["aot_eager", "inductor"], [False, True]),
    ),
)
def test_compiled_gradients_are_those_of_eager(backend, dynamic):
    values = tensors(dtype=torch.float32)
    compiled = torch.compile(chain, backend=backend, fullgraph=True, dynamic=dynamic)
    torch.testing.assert_close(gradients(compiled, values), gradients(eager, values))


def test_ahead_of_time_autograd_takes_it_apart():
    found = compiled_calls(chain, *tensors(grad=False))
    assert any("addmm" in name for name in found)
    assert not any("fusedmlp" in name for name in found)


def test_an_exported_program_keeps_it_whole():
    class Model(torch.nn.Module):
        def forward(self, *values):
            return chain(*values)

    program = torch.export.export(Model(), tuple(tensors(grad=False))).run_decompositions()
    assert "fusedmlp.chain" in str(program.graph)


def test_autocast_casts_every_operand_once():
    values = tensors(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, right = chain(*values), eager(*values)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, right, atol=0.1, rtol=0.05)
    found = torch.autograd.grad(y.sum(), values)
    assert {gradient.dtype for gradient in found} == {torch.float32}


def test_nothing_is_recorded_where_gradients_are_off():
    with torch.no_grad():
        assert not chain(*tensors()).requires_grad


def test_its_backward_pass_refuses_to_be_differentiated():
    x, *weights, first, last = tensors()
    operands = (x, weights, [first, None, last], ACTIVATIONS, "reference", [True] * 7)
    found = ops.chain_backward(torch.randn(2, 3, WIDTHS[-1], dtype=torch.float64), *operands)
    message = "fusedmlp::chain_backward has no derivative: call fusedmlp::chain, which is diff"
    with pytest.raises(NotImplementedError, match=message):
        found[0].sum().backward()


def total(function):
    return lambda *values: function(*values).sum()


TRANSFORMS = {
    "grad": lambda f, values: torch.func.grad(total(f), argnums=tuple(range(6)))(*values),
    "vmap": lambda f, values: torch.func.vmap(f)(*(torch.stack([v, -v]) for v in values)),
    "jvp": lambda f, values: torch.func.jvp(f, values, values),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_torch_func_are_right(transform):
    values = tuple(tensors(grad=False))
    found, right = (TRANSFORMS[transform](f, values) for f in (chain, eager))
    torch.testing.assert_close(found, right)


def test_dual_numbers_carry_their_tangents_through():
    x, *rest = tensors(grad=False)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        found, right = (forward_ad.unpack_dual(f(dual, *rest)).tangent for f in (chain, eager))
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": []}, "at least two weights"),
        ({"activations": ["relu(x)"]}, "1 activations"),
        ({"biases": [None, None, torch.ones(3)]}, r"biases\[2\] must have shape \(4,\)"),
        ({"x": torch.ones(2, 5)}, r"weights\[0\] must have shape \(5, 5\)"),
        ({"x": torch.ones(2, 6).half()}, r"weights\[0\] must be torch.float16"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change, message):
    x, *weights, first, last = tensors(dtype=torch.float32, grad=False)
    operands = {
        "x": x,
        "weights": weights,
        "biases": [first, None, last],
        "activations": ACTIVATIONS,
    }
    with pytest.raises(ValueError, match=message):
        ops.chain(*(operands | change).values(), "reference")


@pytest.mark.parametrize(
    ("activations", "plan", "message"),
    [
        (ACTIVATIONS, "epilogue", "must be one of chain, rows, reference"),
        (ACTIVATIONS, "chain", "needs a CUDA device"),
        (["relu(x)", "silu(g) * u"], "reference", "must be an expression of x"),
    ],
)
def test_plans_that_cannot_run_are_refused(activations, plan, message):
    x, *weights, first, last = tensors(grad=False)
    with pytest.raises(PlanError, match=message):
        ops.chain(x, weights, [first, None, last], activations, plan)
