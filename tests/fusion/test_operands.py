"""Operands of the activation: what they may be, and their gradients, on the reference."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)
from fusion_backend.errors import ExpressionError, PlanError
from fusion_backend.kernels import registry
from fusion_backend.mlp.expression import parse, philox
from fusion_backend.operators import MLP
from operator_calls import products
from repetition import slow_but

ops = torch.ops.fusedmlp

LEADING, IN, HIDDEN, OUT = (2, 3), 6, 8, 4
SEED = torch.tensor(1234567890123)
DROPOUT = "dropout(gelu(x), p0, 0.25)"


def mask(seed=SEED, p=0.25, shape=(*LEADING, HIDDEN), dtype=torch.float64):
    return philox.kept(seed, p, torch.Size(shape)).to(dtype) / (1.0 - p)


def operand(kind, dtype=torch.float64):
    shapes = {"scalar": (), "one": (1,), "vector": (HIDDEN,), "elementwise": (*LEADING, HIDDEN)}
    return torch.randn(shapes[kind]).to(dtype).requires_grad_()


def mlp_tensors(gated, dtype=torch.float64, leading=LEADING):
    def tensor(*shape):
        return torch.randn(*shape).to(dtype).requires_grad_()

    gate = (tensor(HIDDEN, IN), tensor(HIDDEN)) if gated else (None, None)
    up, down = (tensor(HIDDEN, IN), tensor(HIDDEN)), (tensor(OUT, HIDDEN), tensor(OUT))
    return [tensor(*leading, IN), *gate, *up, *down]


# Kinds of operands, the activation, and the same by PyTorch. In some, operands are added to a
# pre-activation, which the backward pass makes use of.
CASES = {
    "prelu": (("scalar",), "prelu(x, p0)", lambda x, p: F.prelu(x, p.view(1))),
    "one element": (("one",), "p0 * silu(x)", lambda x, p: p * F.silu(x)),
    "snake": (
        ("vector",),
        "x + square(sin(p0 * x)) / p0",
        lambda x, p: x + torch.sin(p * x).square() / p,
    ),
    "star": (
        ("scalar", "scalar"),
        "p0 * square(relu(x)) + p1",
        lambda x, p, q: p * F.relu(x).square() + q,
    ),
    "lora": (("elementwise",), "gelu(2.0 * p0 + x)", lambda x, p: F.gelu(x + 2.0 * p)),
    "sum": (("elementwise", "vector"), "silu(p0 + p1 + x)", lambda x, p, q: F.silu(x + p + q)),
    "difference": (("scalar",), "tanh(x - p0)", lambda x, p: torch.tanh(x - p)),
    "twice": (("elementwise",) * 2, "silu(p0 + p1 + x)", lambda x, p, q: F.silu(x + p + q)),
    "gated": (("elementwise",), "silu(p0 + g) * u", lambda g, u, p: F.silu(g + p) * u),
    "both": (
        ("elementwise", "elementwise"),
        "silu(p0 + g) * (p1 + u)",
        lambda g, u, p, q: F.silu(g + p) * (u + q),
    ),
    "scaled": (("vector",), "p0 * silu(g) * u", lambda g, u, p: p * F.silu(g) * u),
    "unused": (("vector",), "silu(x)", lambda x, p: F.silu(x) + 0.0 * p),
}
every_case = pytest.mark.parametrize("name", CASES)


def case(name, dtype=torch.float64):
    kinds, activation, function = CASES[name]
    values = mlp_tensors("g" in activation.replace("gelu", ""), dtype)
    return values, [operand(kind, dtype) for kind in kinds], activation, function


def eager(values, operands, function):
    x, weight_gate, bias_gate, weight_up, bias_up, weight_down, bias_down = values
    preacts = [F.linear(x, weight_up, bias_up)]
    if weight_gate is not None:
        preacts.insert(0, F.linear(x, weight_gate, bias_gate))
    return F.linear(function(*preacts, *operands), weight_down, bias_down)


def gradients(y, values, operands):
    asked = [value for value in (*values, *operands) if value is not None and value.requires_grad]
    return torch.autograd.grad(y, asked, torch.ones_like(y), allow_unused=True)


@every_case
def test_values_and_gradients_are_those_of_pytorch(name):
    values, operands, activation, function = case(name)
    y, right = (
        ops.mlp(*values, operands, activation, "reference"),
        eager(values, operands, function),
    )
    torch.testing.assert_close(y, right)
    found = gradients(y, values, operands)
    for got, expected in zip(found, gradients(right, values, operands), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", slow_but(["prelu", "snake"], ["prelu", "snake", "lora", "scaled"]))
def test_first_and_second_derivatives_are_those_of_finite_differences(name):
    values, operands, activation, _ = case(name)
    present = [value for value in values if value is not None]

    def function(*given):
        rest = iter(given)
        own = [None if value is None else next(rest) for value in values]
        return ops.mlp(*own, [*rest], activation, "reference")

    assert gradcheck(function, (*present, *operands))
    assert gradgradcheck(function, (*present, *operands))


@pytest.mark.parametrize(
    ("name", "dynamic"),
    slow_but([("prelu", False), ("both", True)], itertools.product(CASES, [False, True])),
)
def test_compiled_gradients_are_those_of_pytorch(name, dynamic):
    values, operands, activation, function = case(name, torch.float32)

    def call(values, operands):
        return ops.mlp(*values, operands, activation, "reference")

    torch._dynamo.reset()
    y = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)(values, operands)
    right = eager(values, operands, function)
    found = gradients(y, values, operands)
    for got, expected in zip(found, gradients(right, values, operands), strict=True):
        torch.testing.assert_close(got, expected)


# The bits of a mask take Inductor seconds to write; the backward pass draws the same once more.
@pytest.mark.parametrize("training", slow_but([False], [False, True]))
def test_inductor_computes_with_operands_and_draws_the_same_mask(training):
    values, (added,), _, _ = case("lora", torch.float32)

    def call(values, operands):
        return ops.mlp(*values, operands, "dropout(gelu(p0 + x), p1, 0.25)", "reference")

    torch._dynamo.reset()
    with torch.set_grad_enabled(training):
        y = torch.compile(call, fullgraph=True)(values, [added, SEED])
    right = eager(values, [added], lambda x, p: F.gelu(x + p) * mask(dtype=torch.float32))
    torch.testing.assert_close(y, right)
    if not training:
        return
    found = gradients(y, values, [added])
    for got, expected in zip(found, gradients(right, values, [added]), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", slow_but(["both"], ["prelu", "both"]))
def test_operators_with_operands_are_well_behaved(name):
    values, operands, activation, _ = case(name, torch.float32)
    opcheck(ops.mlp, (*values, operands, activation, "reference"))
    values = [None if value is None else value.detach() for value in values]
    operands = [value.detach() for value in operands]
    arguments = (*values, operands, activation, "reference")
    opcheck(ops.mlp_forward, arguments)
    y, preact_gate, preact_up = ops.mlp_forward(*arguments)
    x, weight_gate, _, weight_up, _, weight_down, _ = values
    saved = (x, weight_gate, weight_up, weight_down, preact_gate, preact_up, operands)
    gated = weight_gate is not None
    for needs in ([True, gated, gated] + [True] * (4 + len(operands)), [False] * 8):
        needs = needs[: 7 + len(operands)] + [False] * (7 + len(operands) - len(needs))
        opcheck(ops.mlp_backward, (torch.randn_like(y), *saved, activation, "reference", needs))


def test_operands_alone_make_the_halves_of_training_refuse_to_be_differentiated():
    values, operands, activation, _ = case("prelu")
    values = [None if value is None else value.detach() for value in values]
    y = ops.mlp_forward(*values, operands, activation, "reference")[0]
    with pytest.raises(NotImplementedError, match="mlp_forward has no derivative"):
        y.sum().backward()


def test_operands_alone_make_a_result_differentiable():
    values, (slope,), activation, function = case("prelu")
    values = [None if value is None else value.detach() for value in values]
    y, right = ops.mlp(*values, [slope], activation, "reference"), eager(values, [slope], function)
    for got, expected in zip(
        gradients(y, values, [slope]), gradients(right, values, [slope]), strict=True
    ):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("kind", ["scalar", "vector", "elementwise"])
def test_float32_operands_of_bfloat16_layers_keep_their_dtype(kind):
    values, parameter = mlp_tensors(False, torch.bfloat16), operand(kind, torch.float32)
    y = ops.mlp(*values, [parameter], "p0 * silu(x)", "reference")
    right = eager(values, [parameter], lambda x, p: (p * F.silu(x.float())).bfloat16())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, right)
    got, expected = (torch.autograd.grad(result.sum(), parameter)[0] for result in (y, right))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("leading", [(), (5,), (2, 0, 3)])
def test_any_leading_dimensions_are_rows(leading):
    values = mlp_tensors(False, torch.float32, leading)
    added = torch.randn(*leading, HIDDEN)
    y = ops.mlp(*values, [added], "gelu(p0 + x)", "reference")
    torch.testing.assert_close(y, eager(values, [added], lambda x, p: F.gelu(x + p)))


@pytest.mark.parametrize(
    ("activation", "count"),
    [
        ("gelu(p0 + x)", 2),  # one product for d_hidden, one for dx
        ("p0 * gelu(x)", 2),
    ],
)
def test_no_product_runs_twice_for_operands(activation, count):
    x, _, _, weight_up, _, weight_down, _ = (
        None if v is None else v.detach() for v in mlp_tensors(False, leading=(3,))
    )
    preact, operands = F.linear(x, weight_up), (torch.randn(3, HIDDEN).double(),)
    tensors = (x, None, weight_up, weight_down, x.new_empty(0), preact, operands)
    how = (activation, "reference", [True, *[False] * 6, True])
    call = MLP.read_backward(F.linear(preact, weight_down), *tensors, *how)
    assert products(lambda: MLP.differentiate(call)) == count


def test_autocast_leaves_operands_as_they_are():
    values, parameter = mlp_tensors(False, torch.float32), operand("vector", torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ops.mlp(*values, [parameter, SEED], "dropout(p0 * silu(x), p1, 0.5)", "reference")
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert parameter.grad.dtype == torch.float32


@pytest.mark.parametrize("transform", [torch.func.jvp, torch.func.vjp])
def test_transforms_of_torch_func_are_right(transform):
    values, operands, activation, function = case("lora")
    x, added = values[0].detach(), operands[0].detach()

    def ours(x, p):
        return ops.mlp(x, *values[1:], [p, SEED], f"dropout({activation}, p1, 0.25)", "reference")

    def right(x, p):
        return eager([x, *values[1:]], [p], lambda *v: function(*v) * mask())

    if transform is torch.func.jvp:
        got, expected = (transform(f, (x, added), (x, added)) for f in (ours, right))
    else:
        got, expected = (transform(f, x, added)[1](right(x, added)) for f in (ours, right))
    torch.testing.assert_close(got, expected)


def test_exported_programs_name_operands():
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(IN, HIDDEN), torch.nn.Linear(HIDDEN, OUT)
            self.slope = torch.nn.Parameter(torch.rand(HIDDEN))

        def forward(self, x):
            up, down = self.up, self.down
            layers = (None, None, up.weight, up.bias, down.weight, down.bias)
            return ops.mlp(x, *layers, [self.slope], "prelu(x, p0)", "reference")

    module, x = Module(), torch.randn(3, IN)
    program = torch.export.export(module, (x,))
    assert any(node.target is ops.mlp.default for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(x), module(x))


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ([torch.zeros(HIDDEN + 1)], r"operands\[0\] must be a scalar, a vector \(8,\) or"),
        ([torch.zeros(()), torch.zeros(3, 2, HIDDEN)], r"operands\[1\] must be .* \(2, 3, 8\)"),
        ([torch.zeros(3, dtype=torch.int64)], r"operands\[0\] is a seed and must have no dim"),
        ([torch.zeros((), dtype=torch.int32)], "must be floating or an int64 seed"),
        ([torch.zeros((), device="meta")], "must be on cpu as x is, got meta"),
    ],
)
def test_operands_that_do_not_fit_are_refused(operands, message):
    values = mlp_tensors(False, torch.float32)
    with pytest.raises(ValueError, match=message):
        ops.mlp(*values, operands, "p0 * x", "reference")


@pytest.mark.parametrize(
    ("operands", "activation", "message"),
    [
        ([], "p0 * x", "needs operands up to p0, got 0"),
        ([SEED], "p0 * x", "p0 of p0 \\* x must be a floating value"),
        ([torch.zeros(())], DROPOUT, "p0 of .* must be the int64 seed of a dropout"),
        ([SEED], "dropout(x, x, 0.5)", "seed of a dropout must be an operand, got x"),
        ([SEED], "dropout(p0 * x, p0, 0.5)", "seed of a dropout must not be a value"),
        ([SEED], "dropout(x, p0, 1.5)", r"dropout needs a p in \[0, 1\], got 1.5"),
    ],
)
def test_activations_that_misuse_operands_are_refused(operands, activation, message):
    values = mlp_tensors(False, torch.float32)
    with pytest.raises(ExpressionError, match=message):
        ops.mlp(*values, operands, activation, "reference")


def test_other_variables_are_refused():
    with pytest.raises(PlanError, match="plain MLP must be an expression of x"):
        ops.mlp(*mlp_tensors(False), [torch.zeros(()).double()], "p0 * g", "reference")


@pytest.mark.parametrize("plan", ["library", "onednn"])
def test_libraries_refuse_operands_in_inference_and_train_on_the_reference(plan):
    values, operands, activation, function = case("prelu", torch.float32)
    assert registry.named(plan).untaken(["scalar"], training=True) is None
    assert registry.named(plan).untaken(["scalar"], training=False) == 0
    with (
        torch.no_grad(),
        pytest.raises(PlanError, match=f"plan '{plan}' cannot take the scalar p0"),
    ):
        ops.mlp(*values, operands, activation, plan)
    y = ops.mlp(*values, operands, activation, plan)
    torch.testing.assert_close(y, eager(values, operands, function))


def philox_by_the_book(key, counter):
    """Philox-4x32-10 in Python's integers."""
    for _ in range(10):
        products = [0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]]
        (high_a, low_a), (high_b, low_b) = (divmod(product, 2**32) for product in products)
        counter = [high_b ^ counter[1] ^ key[0], low_b, high_a ^ counter[3] ^ key[1], low_a]
        key = [(k + s) % 2**32 for k, s in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)]
    return counter


def test_philox_gives_the_words_of_its_authors():
    """The known answers that come with their library, Random123."""
    assert philox_by_the_book([0, 0], [0] * 4) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = [2**32 - 1] * 6
    known = [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert philox_by_the_book(ones[:2], ones[2:]) == known


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 5, -1, 2**63 - 1, -(2**63)])
def test_masks_are_drawn_by_philox(seed):
    key = [seed % 2**32, (seed >> 32) % 2**32]
    expected = [
        [philox_by_the_book(key, [column // 4, row, 0, 0])[column % 4] for column in range(10)]
        for row in range(7)
    ]
    kept = philox.kept(torch.tensor(seed), 0.375, torch.Size((7, 10)))
    assert kept.tolist() == [[word >= 0.375 * 2**32 for word in row] for row in expected]


def test_dropout_and_its_gradient_are_one_mask():
    values = mlp_tensors(False)
    y = ops.mlp(*values, [SEED], DROPOUT, "reference")
    right = eager(values, [], lambda x: F.gelu(x) * mask())
    torch.testing.assert_close(y, right)
    for got, expected in zip(gradients(y, values, []), gradients(right, values, []), strict=True):
        torch.testing.assert_close(got, expected)


def test_dropouts_of_several_seeds_are_independent_of_one_another():
    values, other = mlp_tensors(False), torch.tensor(99)
    activation = "dropout(gelu(dropout(x, p0, 0.25)), p1, 0.5)"
    y = ops.mlp(*values, [SEED, other], activation, "reference")
    right = eager(values, [], lambda x: F.gelu(x * mask()) * mask(other, 0.5))
    torch.testing.assert_close(y, right)
    for got, expected in zip(gradients(y, values, []), gradients(right, values, []), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("p", "kept"), [(0.0, 1.0), (1.0, 0.0)])
def test_nothing_or_all_may_be_dropped(p, kept):
    values = mlp_tensors(False)
    y = ops.mlp(*values, [SEED], f"dropout(gelu(x), p0, {p})", "reference")
    torch.testing.assert_close(y, eager(values, [], lambda x: F.gelu(x) * kept))


ROWS, COLUMNS = 1000, 1001


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_of_what_is_kept_is_as_asked_for(p):
    kept = philox.kept(SEED, p, torch.Size((ROWS, COLUMNS))).double()
    deviation = math.sqrt(p * (1.0 - p))
    assert abs(kept.mean() - (1.0 - p)) < 5 * deviation / math.sqrt(ROWS * COLUMNS)
    for dimension, count in ((0, ROWS), (1, COLUMNS)):
        shares = kept.mean(dimension)
        assert (shares - (1.0 - p)).abs().max() < 6 * deviation / math.sqrt(count)


@pytest.mark.parametrize("shift", [(0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1)])
def test_neighbours_are_independent(shift):
    p = 0.3
    kept = philox.kept(SEED, p, torch.Size((ROWS, COLUMNS))).double() - (1.0 - p)
    down, right = shift
    pairs = kept[down:, right:] * kept[: ROWS - down, : COLUMNS - right]
    assert abs(pairs.mean()) < 5 * p * (1.0 - p) / math.sqrt(pairs.numel())


def test_equal_seeds_draw_equal_masks_and_neighbouring_seeds_independent_ones():
    shape, p = torch.Size((ROWS, COLUMNS)), 0.5
    first = philox.kept(SEED, p, shape)
    assert first.equal(philox.kept(SEED.clone(), p, shape))
    agreeing = (first == philox.kept(SEED + 1, p, shape)).double().mean()
    assert abs(agreeing - 0.5) < 5 * 0.5 / math.sqrt(ROWS * COLUMNS)


def test_a_dropout_that_drops_nothing_is_simplified_away():
    from fusion_backend.mlp.expression import canonicalize

    assert str(canonicalize(parse("dropout(x * sigmoid(x), p0, 0.0)"))) == "silu(x)"
    assert (
        str(canonicalize(parse("dropout(x * sigmoid(x), p0, 0.5)"))) == "dropout(silu(x), p0, 0.5)"
    )
