"""The hidden gradient of narrow MLPs from x: numbers on Triton's interpreter, and machine code."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)
from fusion_backend.kernels.back_to_back import hidden_gradient_launch
from fusion_backend.kernels.back_to_back.family import gradients_fit
from fusion_backend.kernels.back_to_back.hidden_gradient_launch import (
    Found,
    Wanted,
    narrow_hidden_gradient,
    narrow_hidden_gradient_invocation,
)
from fusion_backend.kernels.host.configs import Config, narrow_hidden_gradient_config
from fusion_backend.kernels.host.problems import MANY_ROWS, Problem
from fusion_backend.mlp.weights import Weights
from kernel_cases import (
    Case,
    assert_exact,
    compiled,
    eager_mlp,
    interpreted,
    loops_are_broken,
    random_case,
    turned,
)
from kernel_compilation import ELSEWHERE, GPUS, compile_for, spilled_bytes
from repetition import slow_but

ROWS = 1000
# Too many sums for the registers of a program: odd widths, a narrow result, and one block of rows.
SIZES = [(70, (100, 300, 60)), (37, (20, 700, 17)), (1, (128, 256, 128)), (100, (70, 600, 1))]
SMALL = (20, (100, 300, 60))


def needed(case: Case, *frozen: str) -> tuple[Case, list[Tensor]]:
    """The case with leaves, and those that are not frozen."""
    leaves = {
        name: tensor.detach().requires_grad_(name not in frozen)
        for name, tensor in case._asdict().items()
        if isinstance(tensor, Tensor)
    }
    return case._replace(**leaves), [leaf for leaf in leaves.values() if leaf.requires_grad]


def gradients(function, case: Case, grad: Tensor, *frozen: str) -> list[Tensor]:
    case, asked = needed(case, *frozen)
    return list(torch.autograd.grad(function(case), asked, grad))


def by_the_kernel(case: Case) -> Tensor:
    return torch.ops.fusedmlp.mlp(*case[:-1], [], str(case.activation), "back_to_back")


def check(case: Case, grad: Tensor, *frozen: str) -> list[Tensor]:
    exact = gradients(eager_mlp, case.to(torch.float64), grad.double(), *frozen)
    eager = gradients(eager_mlp, case, grad, *frozen)
    found = gradients(by_the_kernel, case, grad, *frozen)
    for own, *others in zip(found, eager, exact, strict=True):
        assert own.stride() == others[0].stride()
        assert_exact(own.contiguous(), *others)
    return found


@pytest.mark.parametrize(("rows", "widths"), [*SIZES, SMALL])
def test_sizes_of_these_tests_do_not_fit_in_registers(rows, widths):
    assert not gradients_fit(*widths)


@interpreted
@loops_are_broken
@pytest.mark.parametrize(
    ("size", "bias", "activation", "dtype"),
    slow_but(
        [
            (SIZES[0], True, "gelu_tanh(x)", torch.float16),
            (SIZES[1], False, "square(relu(x))", torch.float32),
            (SIZES[3], False, "gelu_tanh(x)", torch.float32),
        ],
        itertools.product(
            SIZES,
            [True, False],
            ["gelu_tanh(x)", "square(relu(x))"],
            [torch.float16, torch.float32],
        ),
    ),
)
def test_it_is_as_exact_as_eager(size, bias, activation, dtype):
    rows, widths = size
    case = random_case(rows, widths, activation, dtype=dtype, bias=bias)
    check(case, torch.randn(rows, widths[2]).to(dtype))


@interpreted
@loops_are_broken
@pytest.mark.parametrize("names", [(), ("weight_up",), ("weight_down",)])
def test_weights_may_be_transposed_and_their_gradients_are_laid_out_as_they_are(names):
    rows, widths = SMALL
    case = turned(random_case(rows, widths, "gelu_tanh(x)"), *names)
    check(case, torch.randn(rows, widths[2]))


@interpreted
@loops_are_broken
@pytest.mark.parametrize("expanded", [True, False], ids=["expanded", "columns"])
def test_rows_may_lie_anywhere(expanded):
    rows, widths = SMALL
    case = random_case(rows, widths)
    grad = torch.ones(()).expand(rows, widths[2])
    if not expanded:
        grad = torch.randn(widths[2], rows).t()
        case = case._replace(x=torch.cat([case.x, case.x], 1)[:, : widths[0]])
    check(case, grad)


@interpreted
@loops_are_broken
def test_nothing_is_computed_but_what_is_asked_for_beside_the_first_weights_gradient(monkeypatch):
    rows, widths = SMALL
    case, grad = random_case(rows, widths), torch.randn(rows, widths[2])
    asked, run = [], narrow_hidden_gradient

    def recorded(*arguments):
        asked.append(arguments[-1])
        return run(*arguments)

    monkeypatch.setattr(hidden_gradient_launch, "narrow_hidden_gradient", recorded)
    names = [name for name, value in case._asdict().items() if isinstance(value, Tensor)]
    for name in names:
        wanted = {name, "weight_up"}
        assert len(check(case, grad, *(set(names) - wanted))) == len(wanted)
    of_up = Wanted(x=False, preact=True, postact=False, sums=False)
    assert asked == [
        of_up._replace(x=True),
        of_up,
        of_up._replace(sums=True),
        of_up._replace(postact=True),
        of_up._replace(sums=True),
    ]
    check(case, grad, "weight_up")  # a first layer that is frozen keeps pre-activations instead
    assert len(asked) == len(names)


@interpreted
@loops_are_broken
@pytest.mark.parametrize("hidden", [320, 301])
def test_rows_and_features_beyond_the_last_are_in_no_sum(hidden):
    case = random_case(5, (100, hidden, 60), "log(abs(x))")
    case = case._replace(bias_up=torch.zeros(hidden))
    grad = torch.randn(5, 60)
    assert all(found.isfinite().all() for found in gradients(by_the_kernel, case, grad))


@interpreted
@loops_are_broken
def test_an_infinite_row_reaches_no_other():
    rows, widths = SMALL
    case, grad = random_case(rows, widths, "square(relu(x))"), torch.randn(rows, widths[2])
    expected, *_ = gradients(by_the_kernel, case, grad)
    grad[3] = torch.inf
    found, *_ = gradients(by_the_kernel, case, grad)
    others = torch.arange(rows) != 3
    assert found[others].equal(expected[others])
    assert not found[3].isfinite().any()


@interpreted
@pytest.mark.parametrize(("rows", "programs"), [(0, 1), (1, 1), (16, 1), (17, 2), (100, 7)])
def test_each_block_of_rows_has_its_sums(rows, programs):
    case, (_, widths) = random_case(rows, SMALL[1]), SMALL
    grad = torch.randn(rows, widths[2])
    config = Config(16, 32, num_stages=1)
    weights = Weights(*case[1:7])
    found = narrow_hidden_gradient(case.x, grad, weights, case.activation, Wanted(), config)
    assert found.sums.shape == (programs, widths[1] + widths[2])
    torch.testing.assert_close(found.sums.sum(0)[widths[1] :], grad.sum(0))
    torch.testing.assert_close(found.sums.sum(0)[: widths[1]], found.preact.sum(0))


@interpreted
@loops_are_broken
def test_training_keeps_x_and_parameters_alone_and_does_not_vary():
    rows, widths = SMALL
    case, grad = random_case(rows, widths), torch.randn(rows, widths[2])
    case, asked = needed(case)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = by_the_kernel(case)
    assert sum(t.numel() for t in kept) <= sum(t.numel() for t in asked)
    first, again = (torch.autograd.grad(y, asked, grad, retain_graph=True) for _ in range(2))
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))


WIDTHS = [(64, 512, 64), (128, 512, 128), (100, 400, 100)]


@compiled
@pytest.mark.parametrize(
    ("widths", "rows"),
    slow_but([((64, 512, 64), MANY_ROWS)], itertools.product(WIDTHS, [1024, MANY_ROWS])),
)
@pytest.mark.parametrize("sums", [True, False])
def test_nothing_spills(widths, rows, sums):
    kernel = compiled_gradient("sm_90", widths, rows, sums)
    assert spilled_bytes(kernel) <= (48 if sums else 0)  # faster than blocks half as wide
    assert kernel.metadata.shared <= GPUS["sm_90"].target.shared_memory


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("gpu", ELSEWHERE)
@pytest.mark.parametrize("widths", WIDTHS[1:])
def test_it_compiles_and_fits_on_other_gpus(gpu, widths):
    for rows in (1024, MANY_ROWS):
        kernel = compiled_gradient(gpu, widths, rows)
        assert kernel.metadata.shared <= GPUS[gpu].target.shared_memory
        assert spilled_bytes(kernel) == 0


def compiled_gradient(gpu, widths, rows, has_sums=True):
    inner, hidden, out = widths

    def matrix(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    weights = Weights(None, None, matrix(hidden, inner), matrix(hidden), matrix(out, hidden), None)
    results = (matrix(ROWS, inner), matrix(ROWS, hidden), matrix(ROWS, hidden))
    sums = matrix(ROWS, hidden + out, dtype=torch.float32) if has_sums else None
    problem = Problem(rows, *widths, False, torch.bfloat16)
    config = narrow_hidden_gradient_config(problem, GPUS[gpu].target, has_sums)
    tensors = (matrix(ROWS, inner), matrix(ROWS, out), weights, Found(*results, sums))
    return compile_for(gpu, narrow_hidden_gradient_invocation(*tensors, config), "gelu_tanh(x)")
