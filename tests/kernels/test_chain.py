"""The chain kernel's numbers, on Triton's interpreter, and the chains it is for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from chain_cases import (
    IN_BOTH_SHAPES,
    RESIDENT,
    STREAMED,
    ChainCase,
    eager_chain,
    random_chain,
    runs,
)
from fusion_backend.compat.tf32 import multiplying_in_tf32
from fusion_backend.kernels.chain import launch as chain_launch
from fusion_backend.kernels.chain.config import Widest, middle
from fusion_backend.kernels.chain.family import can_chain
from fusion_backend.kernels.host.configs import Config
from fusion_backend.kernels.host.targets import H100
from fusion_backend.kernels.registry import CHAIN
from fusion_backend.planning.cases import Case
from fusion_backend.planning.gpus import gpu_named
from kernel_cases import any_strides, assert_exact, interpreted
from repetition import each_once

EVEN = (16, 32, 16, 32)
ODD = (13, 40, 65, 9, 1)


def check(case: ChainCase, config: Config | None = None) -> None:
    result = chain_launch.chain(*case, config=config)
    assert_exact(result, eager_chain(case), eager_chain(case.to(torch.float64)))


@runs
@pytest.mark.parametrize(
    ("size", "config", "dtype"),
    each_once(
        [
            *((1, EVEN), (37, ODD), (20, (8, 20, 4)), (3, (1, 1, 1, 1))),
            (17, (5, 100, 30, 70, 16, 16, 3)),
        ],
        [RESIDENT, STREAMED, None],
        [torch.float16, torch.float32],
    ),
)
def test_it_is_as_exact_as_eager(size, config, dtype):
    check(random_chain(*size, dtype=dtype), config)


@runs
@pytest.mark.parametrize(
    "widths", [(300, 20, 33, 5), (9, 20, 33, 290), (512, 16, 8, 16, 300)], ids=str
)
def test_input_and_output_may_be_wider_than_what_is_held(widths):
    check(random_chain(17, widths, biases=(True, False)), STREAMED)


@runs
def test_a_wide_input_may_have_any_strides():
    case = random_chain(17, (300, 20, 33, 5))
    check(case._replace(x=case.x.t().contiguous().t()), STREAMED)


@runs
def test_a_wide_input_of_infinities_does_not_reach_other_rows():
    case = random_chain(5, (300, 20, 33, 5))
    case.x[2] = float("inf")
    result = chain_launch.chain(*case, config=STREAMED)
    assert result[2].isnan().all()
    assert result[[0, 1, 3, 4]].isfinite().all()


@runs
@IN_BOTH_SHAPES
@pytest.mark.parametrize("biases", [(False,) * 4, (True, False, True, False)])
def test_any_layer_may_lack_a_bias(biases, config):
    check(random_chain(17, ODD, biases=biases), config)


@runs
def test_a_configuration_is_chosen_for_any_chain():
    check(random_chain(20, ODD))


@runs
@IN_BOTH_SHAPES
def test_each_activation_is_its_own(config):
    activations = ("relu(x)", "silu(x)", "tanh(x)")
    check(random_chain(17, ODD, activations), config)


@runs
@IN_BOTH_SHAPES
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_padding_stays_zero_whatever_the_activation_makes_of_zero(config):
    case = random_chain(9, (3, 5, 7, 2), ("reciprocal(x)", "cos(x)"))
    check(case, config)


@runs
@IN_BOTH_SHAPES
@pytest.mark.parametrize("programs", [0, 1, 3])
def test_programs_cover_all_rows(programs, config):
    config = Config(16, 16, num_stages=1, programs=programs, resident=config.resident)
    check(random_chain(70, ODD), config)


@runs
def test_no_rows_give_no_rows():
    assert chain_launch.chain(*random_chain(0, ODD)).shape == (0, 1)


@runs
@IN_BOTH_SHAPES
def test_weights_may_be_transposed(config):
    case = random_chain(17, ODD)
    turned = [weight.t().contiguous().t() for weight in case.weights]
    check(case._replace(weights=turned), config)


@runs
@any_strides
def test_rows_may_have_any_strides(view):
    case = random_chain(17, ODD)
    check(case._replace(x=view(case.x)))


@pytest.mark.parametrize(
    ("widths", "dtype", "possible"),
    [
        ((64, 64, 64, 16), torch.bfloat16, True),
        ((13, 512, 256, 64), torch.bfloat16, True),
        ((64, *[64] * 8), torch.float16, True),
        ((256, 256, 256, 256, 256), torch.bfloat16, True),
        ((64, 4096, 64, 4096, 64), torch.bfloat16, True),
        ((348, 64, 64, 17), torch.bfloat16, True),
        ((1024, 256, 64, 5000), torch.float16, True),
        ((319, 256, 256, 256, 256), torch.bfloat16, True),
        ((512, 512, 64, 64), torch.bfloat16, False),
        ((64, 64, 512, 512), torch.bfloat16, False),
        ((512, 256, 256, 512), torch.bfloat16, False),
        ((64, 512, 512, 64), torch.bfloat16, False),
        ((64, 64, 64, 64), torch.float32, True),
        ((348, 64, 64, 17), torch.float32, True),
        ((64, 128, 128, 64), torch.float32, False),
    ],
)
def test_it_is_possible_for_narrow_layers_only(widths, dtype, possible):
    assert can_chain(widths, dtype) is possible


def test_float32_may_be_as_wide_as_16_bits_where_tf32_is_allowed():
    with multiplying_in_tf32(True):
        assert can_chain((64, 128, 128, 64), torch.float32)
        assert can_chain((479, 256, 128, 1), torch.float32)


@pytest.mark.parametrize(
    ("allowed", "rows", "runs"), [(True, 1, False), (True, 2, True), (False, 1, True)]
)
def test_a_single_row_is_not_rounded_to_tf32(allowed, rows, runs):
    """cuBLAS multiplies it as a vector, exactly."""
    case = Case("relu(x)", rows, 64, 64, 64).setting(torch.device("cuda"), gpu_named("h100"))
    chain = replace(
        case, dtype=torch.float32, further_features=(64, 64), activations=case.activations * 2
    )
    with multiplying_in_tf32(allowed):
        assert (CHAIN.why_not(chain, H100) is None) is runs


@pytest.mark.parametrize(
    ("widths", "largest", "positions"),
    [
        ((8, 16, 16, 8), 999, {1}),
        ((8, 16, 32, 8), 999, {2}),
        ((32, 16, 16, 16, 16), 999, {1, 3}),
        ((99, 16, 16, 16, 16), 999, {0, 2}),
        ((16, 16, 16, 99), 999, {1, 3}),
        ((16, 32, 32, 32, 32), 999, {1, 3}),
        ((32, 32, 32, 32, 32, 32), 999, {0, 2, 4}),
        ((99, 32, 32, 32, 32), 999, {0, 2, 4}),
    ],
)
def test_values_between_two_layers_and_wide_ends_are_taken_in_blocks(widths, largest, positions):
    """Above 64 a width is too large to be held, and above ``largest`` a weight of padded sides."""
    assert middle(widths, Widest(64, 64), largest) == positions


@interpreted
def test_layers_too_wide_are_refused():
    with pytest.raises(ValueError, match="chain has no configuration"):
        chain_launch.chain(*random_chain(3, (8, 300, 300, 8), dtype=torch.float16))
