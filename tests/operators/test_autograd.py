"""Gradients of torch.ops.fusedmlp.mlp."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from fusion_backend.operators import MLP
from operator_calls import products
from repetition import slow_but

ops = torch.ops.fusedmlp

NAMES = ("x", "weight_gate", "bias_gate", "weight_up", "bias_up", "weight_down", "bias_down")
PLAIN, GATED = "gelu_tanh(x)", "silu(g) * u"
ACTIVATIONS = [
    "gelu(x)",
    "gelu_tanh(x)",
    "relu(x)",
    "silu(x)",
    "square(relu(x))",
    "x * sigmoid(1.702 * x)",
    "mish(x)",
    "leaky_relu(x, 0.01)",
    "silu(g) * u",
    "gelu(g) * u",
    "relu(g) * u",
    "clamp(u, -7.0, 7.0) * g * sigmoid(1.702 * g)",
]


def tensors(gated, *, leading=(2, 3), dtype=torch.float64, width=6, hidden=5, out=4):
    """The seven tensors of ``mlp``, all asking for gradients; no gate where not gated."""

    def tensor(*shape):
        return torch.randn(*shape).to(dtype).requires_grad_()

    gate = (tensor(hidden, width), tensor(hidden)) if gated else (None, None)
    up, down = (tensor(hidden, width), tensor(hidden)), (tensor(out, hidden), tensor(out))
    return (tensor(*leading, width), *gate, *up, *down)


def mlp(activation, plan="reference"):
    return lambda *values: ops.mlp(*values, [], activation, plan)


def eager(x, weight_gate, bias_gate, weight_up, bias_up, weight_down, bias_down):
    """What the activations ``PLAIN`` and ``GATED`` mean."""
    up = F.linear(x, weight_up, bias_up)
    if weight_gate is None:
        postact = F.gelu(up, approximate="tanh")
    else:
        postact = F.silu(F.linear(x, weight_gate, bias_gate)) * up
    return F.linear(postact, weight_down, bias_down)


def present(values):
    return [value for value in values if value is not None]


def gradients(function, values, upstream=None):
    """Gradients of all tensors that ask for one."""
    y = function(*values)
    upstream = torch.ones_like(y) if upstream is None else upstream.to(y.dtype)
    asking = [value for value in present(values) if value.requires_grad]
    return torch.autograd.grad(y, asking, upstream)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_those_of_finite_differences(activation):
    values = tensors("g" in activation.replace("gelu", "").replace("sigmoid", ""))
    present_values = present(values)

    def function(*given):
        given = iter(given)
        return mlp(activation)(*(None if v is None else next(given) for v in values))

    assert gradcheck(function, present_values)


@pytest.mark.parametrize(
    ("activation", "backend", "dynamic"),
    slow_but(
        [(GATED, "aot_eager", True)],
        itertools.product([PLAIN, GATED], ["aot_eager", "inductor"], [False, True]),
    ),
)
def test_compiled_gradients_are_those_of_eager(backend, dynamic, activation):
    values = tensors(activation == GATED, dtype=torch.float32)
    compiled = torch.compile(mlp(activation), backend=backend, fullgraph=True, dynamic=dynamic)
    expected = gradients(eager, values)
    for found, right in zip(gradients(compiled, values), expected, strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("plan", ["onednn", "library"])
def test_plans_without_a_backward_pass_train_on_the_reference(plan):
    values = tensors(False, dtype=torch.float32)
    expected = gradients(eager, values)
    for found, right in zip(gradients(mlp("gelu_tanh(x)", plan), values), expected, strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", [PLAIN, GATED])
def test_half_precision_gradients_are_about_as_exact_as_those_of_eager(activation, dtype):
    gated = activation == GATED
    values = tensors(gated, leading=(200,), width=64, hidden=128, out=64, dtype=dtype)
    upstream = torch.randn(200, 64)
    exact_values = [None if v is None else v.detach().double().requires_grad_() for v in values]
    exact = gradients(eager, exact_values, upstream.to(dtype))
    ours, theirs = (gradients(f, values, upstream) for f in (mlp(activation), eager))
    for mine, other, truth in zip(ours, theirs, exact, strict=True):
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        assert (mine.double() - truth).norm() <= 1.1 * (other.double() - truth).norm()


@pytest.mark.parametrize(
    ("activation", "wanted"),
    [(GATED, name) for name in NAMES] + [(PLAIN, name) for name in NAMES if "gate" not in name],
)
def test_a_single_gradient_is_right(activation, wanted):
    values = tensors(activation == GATED)
    for name, value in zip(NAMES, values, strict=True):
        if value is not None:
            value.requires_grad_(name == wanted)
    (found,), (right,) = (gradients(f, values) for f in (mlp(activation), eager))
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        (["x"], 2),  # d_hidden, dx
        (["weight_up"], 2),  # d_hidden, dW_up
        (["bias_up"], 1),  # d_hidden
        (["weight_down"], 1),  # dW_down
        (["bias_down"], 0),
        (["x", "weight_up", "bias_up", "weight_down", "bias_down"], 4),
    ],
)
def test_only_the_products_behind_the_wanted_gradients_run(wanted, count):
    x, _, _, weight_up, _, weight_down, _ = tensors(False)
    preact = F.linear(x, weight_up).detach()
    grad_output = F.linear(preact, weight_down).detach()
    weights = (None, weight_up.detach(), weight_down.detach())
    needs = [name in wanted for name in NAMES]
    how = ([], "gelu(x)", "reference", needs)
    call = MLP.read_backward(grad_output, x.detach(), *weights, x.new_empty(0), preact, *how)
    found = []
    assert products(lambda: found.extend(MLP.differentiate(call))) == count
    assert [gradient is not None for gradient in found] == needs


def test_a_weights_gradient_has_the_layout_of_the_weight():
    values = list(tensors(False, dtype=torch.float32))
    transposed = values[3].detach().t().contiguous().t().requires_grad_()
    values[3] = transposed
    found = gradients(mlp(PLAIN), values)
    assert found[1].stride() == transposed.stride()
    assert found[3].stride() == values[5].stride()
    torch.testing.assert_close(found[1], gradients(eager, values)[1])


def test_a_tied_weight_gets_the_sum():
    x, gate, bias, _, _, down, bias_down = tensors(True)
    values = (x, gate, bias, gate, bias, down, bias_down)
    (found,), (right,) = (
        torch.autograd.grad(f(*values).sum(), [gate]) for f in (mlp(GATED), eager)
    )
    torch.testing.assert_close(found, right)


def test_no_rows_give_zero_gradients():
    values = tensors(True, leading=(0,))
    assert all(not gradient.any() for gradient in gradients(mlp(GATED), values))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_nothing_is_recorded_where_gradients_are_off(context):
    values = tensors(True)
    with context():
        y = mlp(GATED)(*values)
    assert not y.requires_grad
    torch.testing.assert_close(y, eager(*values).detach())


@pytest.mark.parametrize("activation", ["gelu(x)", "silu(g) * u"])
def test_second_derivatives_are_right(activation):
    values = tensors("u" in activation.replace("gelu", ""), leading=(2,), width=3, hidden=2, out=2)

    def function(*given):
        given = iter(given)
        return mlp(activation)(*(None if v is None else next(given) for v in values))

    assert gradgradcheck(function, present(values))


@pytest.mark.parametrize("half", ["mlp_forward", "mlp_backward"])
def test_the_halves_of_training_refuse_to_be_differentiated(half):
    values = tensors(False, dtype=torch.float32)
    y, preact_gate, preact_up = ops.mlp_forward(*values, [], PLAIN, "reference")
    if half == "mlp_backward":
        x, _, _, weight_up, _, weight_down, _ = values
        saved = (x, None, weight_up, weight_down, preact_gate.detach(), preact_up.detach())
        needs = [True] + [False] * 6
        y = ops.mlp_backward(torch.ones_like(y), *saved, [], PLAIN, "reference", needs)[0]
    message = f"fusedmlp::{half} has no derivative: call fusedmlp::mlp, which is differentiable"
    with pytest.raises(NotImplementedError, match=message):
        y.sum().backward()


def total(function):
    return lambda *values: function(*values).sum()


TRANSFORMS = {
    "grad": lambda f, values: torch.func.grad(total(f), argnums=tuple(range(7)))(*values),
    "vmap": lambda f, values: torch.func.vmap(f)(*(torch.stack([v, -v]) for v in values)),
    "ensemble": lambda f, values: torch.func.vmap(torch.func.grad(total(f), argnums=(0, 1, 6)))(
        *(torch.stack([v, -v]) for v in values)
    ),
    "jvp": lambda f, values: torch.func.jvp(f, values, values),
    "hessian": lambda f, values: torch.func.hessian(total(f))(*values),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_torch_func_are_right(transform):
    values = tuple(value.detach() for value in tensors(True))
    found, right = (TRANSFORMS[transform](f, values) for f in (mlp(GATED), eager))
    torch.testing.assert_close(found, right)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("transform", ["vmap", "jvp", "hessian"])
def test_transforms_of_torch_func_go_through_a_residual(transform):
    values = tuple(value.detach() for value in tensors(True))
    values = (*values, torch.randn_like(eager(*values)))
    found, right = (
        TRANSFORMS[transform](f, values)
        for f in (
            lambda *v: ops.mlp(*v[:7], [], GATED, "reference", residual=v[7]),
            lambda *v: eager(*v[:7]) + v[7],
        )
    )
    torch.testing.assert_close(found, right)


def test_dual_numbers_carry_their_tangents_through():
    values = [value.detach() for value in tensors(True)]
    with forward_ad.dual_level():
        x = forward_ad.make_dual(values[0], torch.ones_like(values[0]))
        found, right = (
            forward_ad.unpack_dual(f(x, *values[1:])).tangent for f in (mlp(GATED), eager)
        )
    torch.testing.assert_close(found, right)


def test_checkpointed_gradients_are_right():
    from torch.utils.checkpoint import checkpoint

    values = tensors(True)
    found = gradients(lambda *v: checkpoint(mlp(GATED), *v, use_reentrant=False), values)
    torch.testing.assert_close(found, gradients(eager, values))


def _in_place_after(operator, count):
    """The result of an operator whose biases are written to afterwards, and its arguments."""
    x, bias = torch.randn(4, 8), torch.randn(16)
    weights = [torch.randn(16, 8, requires_grad=True), torch.randn(8, 16, requires_grad=True)]
    operands = (x, None, None, weights[0], bias, weights[1], torch.randn(8))[:count]
    y = operator(*operands, [], "gelu(x)", "reference")
    for written in operands[4::2]:
        written.add_(1.0)
    return y, weights[: count // 3]


OPERATORS = {"mlp": (ops.mlp, 7), "activated_linear": (ops.activated_linear, 5)}


@pytest.mark.parametrize("name", OPERATORS)
def test_biases_may_be_written_to_before_the_backward_pass(name):
    torch.manual_seed(0)
    y, weights = _in_place_after(*OPERATORS[name])
    found = torch.autograd.grad(y.sum(), weights)
    torch.manual_seed(0)
    x, bias = torch.randn(4, 8), torch.randn(16)
    up, down = torch.randn(16, 8, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    hidden = F.gelu(F.linear(x, up, bias))
    right = hidden if name == "activated_linear" else F.linear(hidden, down)
    expected = torch.autograd.grad(right.sum(), (up, down)[: len(weights)])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", OPERATORS)
def test_second_derivatives_refuse_biases_that_were_written_to(name):
    y, weights = _in_place_after(*OPERATORS[name])
    with pytest.raises(RuntimeError, match="must not be written to in place"):
        torch.autograd.grad(y.sum(), weights, create_graph=True)


@pytest.mark.parametrize("name", OPERATORS)
def test_an_input_of_frozen_first_layers_is_not_kept(name):
    operator, count = OPERATORS[name]
    with torch.inference_mode():
        x = torch.randn(4, 8)
    operands = [x, None, None, torch.randn(16, 8), torch.randn(16, requires_grad=True)]
    operands = [*operands, torch.randn(8, 16), torch.randn(8)][:count]
    y = operator(*operands, [], "gelu(x)", "reference")
    (found,) = torch.autograd.grad(y.sum(), operands[4])
    hidden = F.gelu(F.linear(x, *operands[3:5]))
    right = hidden if name == "activated_linear" else F.linear(hidden, *operands[5:])
    torch.testing.assert_close(found, torch.autograd.grad(right.sum(), operands[4])[0])


def test_weights_that_no_gradient_reads_may_be_written_to():
    x, up, down = torch.randn(4, 8), torch.randn(16, 8), torch.randn(8, 16)
    up.requires_grad_()
    y = ops.mlp(x, None, None, up, None, down, None, [], "relu(x)", "reference")
    expected = torch.autograd.grad((torch.relu(x @ up.t()) @ down.t()).sum(), up)
    with torch.no_grad():
        up.mul_(2.0)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), up), expected)


@pytest.mark.parametrize("shape", [(4, 8), (2, 3, 8)])
def test_a_result_may_be_written_to_in_place_under_autograd(shape):
    x = torch.randn(shape)
    up, down = torch.randn(16, 8, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    operands = (x, None, None, up, None, down, None)
    y = torch.ops.fusedmlp.mlp(*operands, [], "relu(x)", "reference").add_(x)
    y.sum().backward()
    expected = torch.autograd.grad((torch.relu(x @ up.t()) @ down.t() + x).sum(), (up, down))
    torch.testing.assert_close((up.grad, down.grad), expected)


@pytest.mark.parametrize("name", ["mlp", "activated_linear", "chain"])
def test_a_compiled_backward_pass_of_eager_code_sees_calls(name):
    x, up, down = torch.randn(4, 8), torch.randn(16, 8), torch.randn(8, 16)
    tensors = [
        tensor.requires_grad_() for tensor in (x, up, down)[: 2 + (name != "activated_linear")]
    ]
    calls = {
        "mlp": lambda: ops.mlp(x, None, None, up, None, down, None, [], "gelu(x)", "reference"),
        "activated_linear": lambda: ops.activated_linear(
            x, None, None, up, None, [], "gelu(x)", "reference"
        ),
        "chain": lambda: ops.chain(x, [up, down], [None, None], ["gelu(x)"], "reference"),
    }
    right = torch.autograd.grad(calls[name]().square().sum(), tensors)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    with compiled_autograd._enable(torch.compile(backend=counter)):
        calls[name]().square().sum().backward()
    torch.testing.assert_close([tensor.grad for tensor in tensors], [*right])
    called = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert f"fusedmlp.{name}_backward" in " ".join(called)
