"""The back_to_back kernels' numbers, on Triton's interpreter, and the widths they are for."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fusion_backend.kernels import launch
from fusion_backend.kernels.back_to_back.family import can_back_to_back
from fusion_backend.kernels.host.configs import Config
from kernel_cases import (
    GATED,
    NORMS,
    PLAIN,
    Case,
    any_strides,
    assert_exact,
    eager_mlp,
    error,
    interpreted,
    loops_are_broken,
    normed,
    random_case,
    random_norm,
    turned,
)
from repetition import each_once

EVEN = (16, 32, 16)
ODD = (33, 65, 20)


def runs(test):
    return interpreted(loops_are_broken(test))


def check(case: Case, config: Config | None = None) -> None:
    result = launch.back_to_back(*case.mlp, config=config)
    assert_exact(result, eager_mlp(case), eager_mlp(case.to(torch.float64)))


@runs
@pytest.mark.parametrize(
    ("size", "activation", "dtype"),
    each_once(
        [(1, EVEN), (17, ODD), (64, EVEN), (3, (1, 1, 1)), (40, (100, 33, 5))],
        [PLAIN, GATED],
        [torch.float32, torch.float16],
    ),
)
def test_it_is_as_exact_as_eager(size, activation, dtype):
    rows, widths = size
    check(random_case(rows, widths, activation, dtype=dtype))


@runs
@pytest.mark.parametrize("activation", [PLAIN, GATED])
def test_it_is_as_exact_as_eager_without_biases(activation):
    check(random_case(17, ODD, activation, bias=False))


@runs
@pytest.mark.parametrize("activation", ["relu(x)", "gelu_tanh(x)", "gelu(g) * u"])
def test_any_activation_can_stand_between(activation):
    check(random_case(9, EVEN, activation))


@runs
@pytest.mark.parametrize("resident", [False, True])
def test_what_pads_hidden_values_does_not_count_where_the_activation_of_zero_is_infinite(resident):
    config = Config(16, 16, num_stages=1, programs=1, resident=resident)
    check(random_case(17, ODD, "log(abs(x))"), config)


@runs
@pytest.mark.parametrize(
    ("programs", "resident", "activation"), each_once([1, 3], [False, True], [PLAIN, GATED])
)
def test_persistent_programs_cover_all_rows(programs, resident, activation):
    config = Config(16, 16, num_stages=1, programs=programs, resident=resident)
    check(random_case(70, ODD, activation), config)


@runs
def test_a_program_per_tile_covers_all_rows():
    check(random_case(70, ODD), Config(16, 16, num_stages=1))


@runs
@pytest.mark.parametrize(
    ("resident", "widths", "activation", "dtype"),
    each_once([False, True], [ODD, (16, 32, 200)], [GATED, PLAIN], [torch.float16, torch.float32]),
)
def test_a_residual_is_added_before_rounding(resident, widths, activation, dtype):
    case = random_case(17, widths, activation, dtype=dtype)
    residual = 8.0 * torch.randn(17, widths[2]).to(dtype)
    config = Config(16, 16, num_stages=1, programs=1, resident=resident)
    result = launch.back_to_back(*case.mlp, config=config, residual=residual)
    exact = eager_mlp(case.to(torch.float64)) + residual
    assert_exact(result, eager_mlp(case) + residual, exact)
    assert error(result, exact) <= 1.01 * error(eager_mlp(case) + residual, exact)
    spread = residual.t().contiguous().t()  # another layout
    assert launch.back_to_back(*case.mlp, config=config, residual=spread).equal(result)


@runs
@pytest.mark.parametrize(
    ("norm", "widths", "activation", "dtype", "resident", "parameters"),
    each_once(
        NORMS,
        [EVEN, (96, 48, 40)],
        [PLAIN, GATED],
        [torch.float16, torch.float32],
        [False, True],
        [True, False],
    ),
)
def test_a_norm_before_is_as_exact_as_eager(parameters, norm, resident, widths, activation, dtype):
    case = random_case(17, widths, activation, dtype=dtype)
    case = case._replace(x=3.0 * case.x + 5.0)
    norm = random_norm(norm, case, parameters)
    config = Config(16, 16, num_stages=1, programs=1, resident=resident)
    result = launch.back_to_back(*case.mlp, config=config, norm=norm)
    exact = eager_mlp(normed(case.to(torch.float64), norm))
    assert_exact(result, eager_mlp(normed(case, norm)), exact)


@runs
def test_a_block_reads_its_input_as_residual_and_for_the_norm():
    case = random_case(17, (33, 65, 33))
    norm = random_norm("layer_norm(1e-05)", case)
    result = launch.back_to_back(*case.mlp, residual=case.x, norm=norm)
    exact = eager_mlp(normed(case.to(torch.float64), norm)) + case.x
    assert_exact(result, eager_mlp(normed(case, norm)) + case.x, exact)


@runs
def test_no_rows_give_no_rows():
    assert launch.back_to_back(*random_case(0, ODD).mlp).shape == (0, 20)


@runs
def test_weights_may_be_transposed():
    check(turned(random_case(17, ODD, GATED)))


@runs
@any_strides
def test_rows_may_have_any_strides(view):
    case = random_case(17, ODD)
    check(case._replace(x=view(case.x)))


@pytest.mark.parametrize(
    ("widths", "gated", "dtype", "possible"),
    [
        ((64, 256, 64), False, torch.bfloat16, True),
        ((256, 1024, 256), True, torch.float16, True),
        ((33, 100000, 7), True, torch.bfloat16, True),
        ((257, 1024, 256), False, torch.bfloat16, False),
        ((256, 1024, 257), False, torch.bfloat16, False),
        ((64, 256, 64), True, torch.float32, True),
    ],
)
def test_it_is_possible_for_narrow_layers_only(widths, gated, dtype, possible):
    assert can_back_to_back(*widths, gated, dtype) is possible


@interpreted
def test_layers_too_wide_are_refused():
    case = random_case(3, (300, 8, 300), dtype=torch.float16)
    with pytest.raises(ValueError, match="back_to_back has no configuration"):
        launch.back_to_back(*case.mlp)
