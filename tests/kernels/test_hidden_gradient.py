"""The hidden_gradient kernel's numbers, on Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fusion_backend.kernels import launch
from fusion_backend.kernels.host.configs import Config
from kernel_cases import (
    GATED,
    PLAIN,
    Case,
    assert_exact,
    eager_hidden_gradient,
    eager_preact,
    interpreted,
    random_case,
)
from repetition import each_once

pytestmark = interpreted

EVEN = (16, 32, 16)
ODD = (33, 65, 20)


def check(case: Case, grad_output: torch.Tensor, config: Config | None = None) -> None:
    gate, up = eager_preact(case)
    results = launch.hidden_gradient(
        grad_output, case.weight_down, gate, up, case.activation, config=config
    )
    eager = eager_hidden_gradient(case, grad_output, gate, up)
    exact = eager_hidden_gradient(
        case.to(torch.float64),
        grad_output.double(),
        gate if gate is None else gate.double(),
        up.double(),
    )
    for triple in zip(results, eager, exact, strict=True):
        assert_exact(*triple)


def gradient_for(case: Case) -> torch.Tensor:
    return torch.randn(case.x.shape[0], case.weight_down.shape[0]).to(case.x.dtype)


@pytest.mark.parametrize(
    ("size", "activation", "dtype"),
    each_once(
        [(1, EVEN), (17, ODD), (64, EVEN), (3, (1, 1, 1)), (40, (1, 33, 129))],
        [PLAIN, GATED],
        [torch.float32, torch.float16],
    ),
)
def test_it_is_as_exact_as_eager(size, activation, dtype):
    rows, widths = size
    case = random_case(rows, widths, activation, dtype=dtype)
    check(case, gradient_for(case))


@pytest.mark.parametrize(
    "activation", ["relu(x)", "square(relu(x))", "gelu_tanh(x)", "gelu(g) * u", "g * u", "u"]
)
def test_any_activation_can_be_differentiated(activation):
    case = random_case(9, EVEN, activation)
    check(case, gradient_for(case))


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_tiles_cut_into_parts_are_put_together_again(parts):
    case = random_case(20, (24, 72, 16), GATED)
    check(case, gradient_for(case), Config(16, 32, 16, parts=parts, num_stages=2))


def test_many_tiles_cover_the_result():
    case = random_case(70, (48, 80, 40), GATED)
    check(case, gradient_for(case), Config(16, 16, 16, group_m=2, num_stages=2))


@pytest.mark.parametrize("activation", [PLAIN, GATED])
def test_no_rows_give_no_rows(activation):
    case = random_case(0, EVEN, activation)
    gate, up = eager_preact(case)
    results = launch.hidden_gradient(case.x, case.weight_down, gate, up, case.activation)
    assert [r if r is None else tuple(r.shape) for r in results] == [
        None if gate is None else (0, 32),
        (0, 32),
        (0, 32),
    ]


def test_the_weight_may_be_transposed():
    case = random_case(17, ODD)
    case = case._replace(weight_down=case.weight_down.t().contiguous().t())
    check(case, gradient_for(case))


def test_the_gradient_of_a_sum_is_an_expanded_scalar():
    case = random_case(17, ODD)
    check(case, torch.ones(()).expand(17, 20))


def test_the_gradient_may_be_transposed():
    case = random_case(17, ODD)
    check(case, gradient_for(case).t().contiguous().t())
