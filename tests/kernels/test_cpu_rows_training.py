"""The family ``rows`` in training: gradients of the C++ kernels for CPUs."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)
from cpu_rows_cases import WITH_COMPILER, choice_of
from expression_examples import ONE_VARIABLE, TWO_VARIABLES, points
from fusion_backend import explain
from fusion_backend.kernels import reference
from fusion_backend.kernels.cpu_rows import cutting, gradient_launch, gradient_source, support
from fusion_backend.mlp.expression import differentiate, evaluate, parse
from fusion_backend.mlp.weights import Weights
from repetition import slow_but

ops = torch.ops.fusedmlp

PLAIN, GATED = "gelu_tanh(x)", "silu(g) * u"
NARROW, WIDE = 48, 140  # input features: pre-activations are computed again, or kept

pytestmark = WITH_COMPILER


def tensors(activation, rows, widths, dtype=torch.float32, *, transposed=False, bias=True):
    """Input and parameters of an MLP, scaled as those of a trained model; all ask for gradients."""
    width, hidden, out = widths

    def leaf(tensor):
        return tensor.to(dtype).requires_grad_()

    def layer(out_features, in_features):
        weight = torch.randn(out_features, in_features) / in_features**0.5
        weight = weight.t().contiguous().t() if transposed else weight
        return leaf(weight), leaf(torch.randn(out_features)) if bias else None

    gate = layer(hidden, width) if activation == GATED else (None, None)
    return [leaf(torch.randn(rows, width)), *gate, *layer(hidden, width), *layer(out, hidden)]


def present(values):
    return [value for value in values if value is not None]


def asking(values):
    return [value for value in present(values) if value.requires_grad]


def of_double(values):
    return [
        None if value is None else value.detach().double().requires_grad_(value.requires_grad)
        for value in values
    ]


def composed(values, activation, operands=()):
    return reference.forward(values[0], Weights(*values[1:]), parse(activation), operands)


def gradients(y, values, dy):
    return torch.autograd.grad(y, asking(values), dy.to(y.dtype))


def assert_as_exact(found, theirs, exact):
    """That ours are no further from float64 than eager's, but for another order of sums.

    All tensors count together, by relative distance: how a few numbers are rounded is chance.
    """
    assert len(found) == len(theirs) == len(exact)
    distances = torch.zeros(2, dtype=torch.float64)
    for ours, eager, right in zip(found, theirs, exact, strict=True):
        assert (ours.dtype, ours.shape) == (eager.dtype, eager.shape)
        for i, each in enumerate((ours, eager)):
            distances[i] += ((each.double() - right).norm() / right.norm()).square()
    rounding = torch.finfo(found[0].dtype).eps
    assert distances[0].sqrt() <= max(1.25 * distances[1].sqrt(), rounding * len(found) ** 0.5)


def check(values, activation, dy):
    y = ops.mlp(*values, [], activation, "rows")
    exact, theirs = of_double(values), composed(values, activation)
    right = composed(exact, activation)
    assert_as_exact([y], [theirs], [right])
    found = gradients(y, values, dy)
    assert_as_exact(found, gradients(theirs, values, dy), gradients(right, exact, dy))
    return found


@pytest.mark.parametrize("rows", [2, 30, 700])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("activation", [PLAIN, GATED])
def test_gradients_are_as_exact_as_those_of_eager(rows, transposed, activation):
    for widths in ((NARROW, 90, 33), (WIDE, 500, 64), (256, 320, 256)):
        values = tensors(activation, rows, widths, transposed=transposed)
        found = check(values, activation, torch.randn(rows, widths[2]))
        for gradient, value in zip(found, present(values), strict=True):
            assert gradient.stride() == value.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_over_many_rows_are_as_exact_as_those_of_eager(dtype):
    values = tensors(PLAIN, 20000, (24, 40, 16), dtype)
    check(values, PLAIN, torch.randn(20000, 16).to(dtype))


@pytest.mark.parametrize(
    "dtype", slow_but([torch.bfloat16], [torch.bfloat16, torch.float16]), ids=str
)
@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_16_bits_are_summed_in_float32_and_rounded_once(dtype, width):
    values = tensors(PLAIN, 300, (width, 100, 40), dtype)
    check(values, PLAIN, torch.randn(300, 40).to(dtype))


WANTED = [*itertools.combinations(range(7), 1), (0, 1), (3, 6), (1, 2, 5), (5, 6), (2, 4)]


@pytest.mark.parametrize("wanted", WANTED, ids=str)
@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_any_gradients_can_be_asked_for(wanted, width):
    values = tensors(GATED, 60, (width, 90, 20))
    for i, value in enumerate(values):
        value.requires_grad_(i in wanted)
    check(values, GATED, torch.randn(60, 20))


def test_what_nobody_asks_for_is_neither_allocated_nor_computed(monkeypatch):
    seen = []
    compiled = gradient_launch.compiled

    def watched(kernel):
        function, library = compiled(kernel)

        def call(*arguments):
            names = gradient_source.arguments(kernel)
            seen.append(dict(zip(names, arguments, strict=True)))
            return function(*arguments)

        return call, library

    monkeypatch.setattr(gradient_launch, "compiled", watched)
    gradient_launch.caller.cache_clear()
    values = tensors(PLAIN, 60, (WIDE, 90, 20))
    values[0].requires_grad_(False)
    values[3].requires_grad_(False)
    values[4].requires_grad_(False)
    gradients(ops.mlp(*values, [], PLAIN, "rows"), values, torch.randn(60, 20))
    gradient_launch.caller.cache_clear()
    (call,) = seen
    assert not any(call[name] for name in ("dx", "to_up", "to_bias_up", "needs_preact"))
    assert call["to_down"]
    assert call["to_bias_down"]


def test_without_biases_there_are_no_sums_of_rows():
    values = tensors(GATED, 60, (WIDE, 90, 20), bias=False)
    assert len(check(values, GATED, torch.randn(60, 20))) == 4


@pytest.mark.parametrize("layout", ["expanded", "row", "transposed", "strided"])
def test_every_layout_of_the_incoming_gradient_is_read_right(layout):
    dy = {
        "expanded": torch.ones(()).expand(60, 20),
        "row": torch.randn(20).expand(60, 20),
        "transposed": torch.randn(20, 60).t(),
        "strided": torch.randn(60, 40)[:, ::2],
    }[layout]
    values = tensors(PLAIN, 60, (WIDE, 90, 20))
    check(values, PLAIN, dy)


def test_packed_weights_and_sliced_inputs_are_read_as_they_are():
    both = (torch.randn(180, WIDE) / WIDE**0.5).requires_grad_()
    bias = torch.randn(180).requires_grad_()
    down = (torch.randn(20, 90) / 10).requires_grad_()
    wide = torch.randn(60, 2 * WIDE).requires_grad_()
    leaves, dy = [wide, both, bias, down], torch.randn(60, 20)

    def of(plan, leaves):
        wide, both, bias, down = leaves
        (gate, up), (bias_gate, bias_up) = both.chunk(2), bias.chunk(2)
        values = (wide[:, WIDE:], gate, bias_gate, up, bias_up, down, None)
        return ops.mlp(*values, [], GATED, plan)

    found = gradients(of("rows", leaves), leaves, dy)
    exact = of_double(leaves)
    assert_as_exact(
        found,
        gradients(of("reference", leaves), leaves, dy),
        gradients(of("reference", exact), exact, dy),
    )


@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_operands_have_gradients_and_a_dropout_drops_the_same_again(width):
    activation = "dropout(silu(p0 * x + p1) * p2, p3, 0.3)"
    values = tensors(PLAIN, 60, (width, 72, 20))
    values[0] = torch.randn(2, 30, width).requires_grad_()
    operands = [
        torch.randn(()).requires_grad_(),
        torch.randn(72).requires_grad_(),
        torch.randn(2, 30, 72).requires_grad_(),
        torch.tensor(2**40 + 3),
    ]
    leaves, dy = [*values, *operands[:3]], torch.randn(2, 30, 20)
    found, expected = (
        gradients(ops.mlp(*values, operands, activation, plan), leaves, dy)
        for plan in ("rows", "reference")
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_projection_that_is_only_compared_adds_nothing_to_the_inputs_gradient():
    values = tensors(GATED, 60, (WIDE, 90, 20))
    activation = "where(g > 0.0, u, 0.1 * u)"
    dy = torch.randn(60, 20)
    y = ops.mlp(*values, [], activation, "rows")
    found = gradients(y, values, dy)
    expected = gradients(ops.mlp(*values, [], activation, "reference"), values, dy)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert not found[1].any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "texts",
    [
        pytest.param(ONE_VARIABLE, id="plain"),
        pytest.param(TWO_VARIABLES, id="gated", marks=pytest.mark.slow),
    ],
)
def test_every_functions_derivative_is_exact_to_rounding_in_float32(texts):
    gated = texts is TWO_VARIABLES
    texts = [text for text in texts if support.why_no_gradients(text, gated) is None]
    assert len(texts) > 5
    names = ("g", "u") if gated else ("x",)
    values = {name: points(torch.float32)[name] for name in names}
    finite = torch.stack([*values.values()]).abs().amax(0) < 30.0
    values = {name: value[finite] for name, value in values.items()}
    one = torch.ones(1, 1)
    x = torch.stack([*values.values()], 1)
    first = (None, None, one, None)
    if len(names) == 2:  # both projections of one input of two features
        first = (torch.tensor([[1.0, 0.0]]), None, torch.tensor([[0.0, 1.0]]), None)
    activation = choice_of(texts)
    for i, text in enumerate(texts):
        tensors = (x.requires_grad_(), *first, one, None, [torch.tensor(float(i))])
        (found,) = torch.autograd.grad(ops.mlp(*tensors, activation, "rows").sum(), x)
        exact = {name: value.double() for name, value in values.items()}
        for j, name in enumerate(names):
            right = evaluate(differentiate(parse(text), name), exact).expand(len(x))
            eager = evaluate(differentiate(parse(text), name), values).expand(len(x))
            known = right.isfinite() & eager.isfinite() & found.isfinite().all(1)
            distances = [
                (each[known].double() - right[known]).abs().max() for each in (found[:, j], eager)
            ]
            assert distances[0] <= 2.0 * distances[1] + 3e-6 * right[known].abs().max(), text


def test_infinite_gradients_are_not_hidden():
    values, dy = tensors(PLAIN, 60, (WIDE, 90, 20)), torch.randn(60, 20)
    dy[3, :2] = torch.tensor([torch.inf, torch.nan])
    found = gradients(ops.mlp(*values, [], PLAIN, "rows"), values, dy)
    expected = gradients(composed(values, PLAIN), values, dy)
    assert torch.equal(found[-1].isinf(), expected[-1].isinf())
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite())


@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_a_graph_that_is_retained_can_be_differentiated_again(width):
    values = tensors(PLAIN, 60, (width, 90, 20))
    y, dy = ops.mlp(*values, [], PLAIN, "rows"), torch.randn(60, 20)
    first = torch.autograd.grad(y, asking(values), dy, retain_graph=True)
    second = torch.autograd.grad(y, asking(values), dy)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_second_derivatives_are_those_of_the_composed_function(width):
    found, expected = [], []
    for plan, to in (("rows", found), ("reference", expected)):
        torch.manual_seed(1)
        values = tensors(GATED, 9, (width, 30, 8))
        y = ops.mlp(*values, [], GATED, plan)
        (first,) = torch.autograd.grad(y.square().sum(), values[0], create_graph=True)
        to += torch.autograd.grad(first.square().sum(), asking(values), allow_unused=True)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_biases_may_be_written_to_before_the_backward_pass(width):
    values, dy = tensors(GATED, 60, (width, 90, 20)), torch.randn(60, 20)
    expected = gradients(ops.mlp(*values, [], GATED, "rows"), values, dy)
    y = ops.mlp(*values, [], GATED, "rows")
    with torch.no_grad():
        for bias in values[2::2]:
            bias.zero_()
    assert all(map(torch.equal, gradients(y, values, dy), expected))


@pytest.mark.parametrize("shape", [(0, 5, 7, 3), (4, 0, 7, 3), (4, 5, 0, 3), (4, 5, 7, 0)])
def test_empty_tensors_are_no_exception(shape):
    rows, *widths = shape
    values, dy = tensors(PLAIN, rows, widths), torch.randn(rows, widths[2])
    found = gradients(ops.mlp(*values, [], PLAIN, "rows"), values, dy)
    expected = gradients(ops.mlp(*values, [], PLAIN, "reference"), values, dy)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("rows", [1, 40, 300])
def test_gradients_are_the_same_from_run_to_run(threads, rows):
    values, dy = tensors(PLAIN, rows, (WIDE, 300, 40)), torch.randn(rows, 40)
    expected = gradients(ops.mlp(*values, [], PLAIN, "reference"), values, dy)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = [gradients(ops.mlp(*values, [], PLAIN, "rows"), values, dy) for _ in range(3)]
    finally:
        torch.set_num_threads(before)
    for again in found[1:]:
        assert all(map(torch.equal, found[0], again))
    for ours, theirs in zip(found[0], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 100, 10**6])
@pytest.mark.parametrize("threads", [1, 8, 96])
@pytest.mark.parametrize("widths", [(64, 256, 64), (768, 3072, 768)], ids=str)
def test_a_cut_of_gradients_covers_the_work_once(rows, threads, widths):
    how = cutting.cut_gradients(rows, widths, False, threads)
    assert how.parts * how.shares <= threads
    assert (how.parts - 1) * how.part_rows < rows <= how.parts * how.part_rows
    assert how.chunk % cutting.PANEL == 0
    assert rows < 10**6 or cutting.floats_of_sums(how, rows, widths, False) < rows * widths[1]


class Gated(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.both, self.down = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


def plain(width, hidden):
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


@pytest.mark.parametrize(
    ("make", "width"),
    slow_but([(Gated, WIDE)], itertools.product([plain, Gated], [NARROW, WIDE])),
)
def test_compiled_code_calls_the_kernels_themselves(make, width):
    from torch._inductor.utils import run_and_get_code

    mlp, always = make(width, 128), {"fusedmlp.policy": "always"}
    compiled = torch.compile(mlp, backend="fusedmlp", dynamic=True, options=always)
    for leading in ((2, 5), (3, 90)):
        x = torch.randn(*leading, width, requires_grad=True)
        asked = [x, *mlp.parameters()]

        def step(function, x=x, asked=asked):
            return torch.autograd.grad(function(x).square().sum(), asked)

        found, codes = run_and_get_code(step, compiled)
        for ours, theirs in zip(found, step(mlp), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
        if leading == (2, 5):
            assert sum("= fusedmlp_rows_" in code for code in codes) == 2
            assert not any("torch.ops.fusedmlp.rows_gradients.default(" in code for code in codes)
            assert not any("torch.ops.fusedmlp.rows_saving.default(" in code for code in codes)
            assert not any("extern_kernels.mm" in code for code in codes)


def test_the_default_policy_trains_by_the_kernels_where_they_are_faster_and_says_so():
    (site,) = explain(plain(64, 256), torch.randn(8192, 64)).sites
    assert (site.fused, site.plan) == (True, "rows")
    assert "forward and backward" in site.detail
