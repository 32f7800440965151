"""Norms and residuals within a chain: the kernel's numbers, on Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from chain_cases import (
    IN_BOTH_SHAPES,
    STREAMED,
    eager_steps,
    joining_chain,
    normed_chain,
    random_steps,
    residual_blocks,
    runs,
    skip_chain,
)
from fusion_backend.kernels.chain import launch as chain_launch
from fusion_backend.kernels.chain.family import can_chain
from fusion_backend.kernels.host.targets import H100
from fusion_backend.kernels.registry import CHAIN, ROWS
from fusion_backend.mlp.steps import Steps
from fusion_backend.planning.cases import Case
from fusion_backend.planning.gpus import gpu_named
from kernel_cases import assert_exact


def check(case, config=None):
    result = chain_launch.chain(*case[:4], config, *case[4:])
    assert result.dtype == case.x.dtype
    assert_exact(result, eager_steps(case), eager_steps(case.to(torch.float64)))


@runs
@IN_BOTH_SHAPES
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_a_norm_between_a_layer_and_its_activation_is_as_exact_as_eager(kind, dtype, config):
    check(normed_chain(20, (13, 40, 20, 3), kind, dtype=dtype), config)


@runs
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_a_norm_may_lack_its_parameters(kind):
    check(normed_chain(20, (13, 40, 20, 3), kind, with_parameters=False))


@runs
@IN_BOTH_SHAPES
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_residual_blocks_are_as_exact_as_eager(dtype, config):
    check(residual_blocks(37, 20, (40, 33), 3, dtype=dtype), config)


@runs
@IN_BOTH_SHAPES
def test_skips_behind_an_activation_are_as_exact_as_eager(config):
    check(skip_chain(20, 12, 3, 5), config)


BESIDE = pytest.mark.parametrize(
    "joins",
    [{1: "before"}, {2: "after"}, {3: "before"}, {1: "after", 2: "before", 4: "after"}],
    ids=lambda joins: "".join(map(str, joins)),
)


@runs
@BESIDE
@IN_BOTH_SHAPES
def test_layers_may_read_the_input_beside_another_value(joins, config):
    """Their values are in blocks before the layer, after it, or nowhere."""
    check(joining_chain(37, (13, 40, 33, 16, 20, 3), joins), config)


@runs
@BESIDE
def test_layers_may_read_an_input_as_wide_as_its_padding(joins):
    check(joining_chain(9, (16, 32, 48, 16, 64, 32), joins, dtype=torch.float16))


@runs
def test_an_input_that_is_read_again_may_be_too_wide_to_be_held():
    check(joining_chain(9, (300, 20, 24, 5), {1: "after", 2: "before"}), STREAMED)


@runs
@pytest.mark.parametrize("out", [20, 300])
def test_an_activation_may_follow_the_last_layer(out):
    """Of 300 features it is taken in blocks."""
    text = "linear; activation; linear(0, x); activation; linear; activation"
    activations = ["tanh(x)", "gelu(x)", "x * sigmoid(x) + 1.0"]
    case = random_steps(9, (13, 20, 33, out), text, activations, dtype=torch.float16)
    check(case, STREAMED)


@runs
def test_weights_of_layers_that_read_the_input_may_lie_transposed():
    case = joining_chain(9, (13, 40, 33, 3), {1: "before", 2: "after"})
    check(case._replace(weights=[weight.t().contiguous().t() for weight in case.weights]))


@runs
def test_a_layer_may_read_the_input_beside_a_normed_value():
    first = "rms_norm(1e-06); linear; layer_norm(1e-05); activation"
    text = f"{first}; linear(x, 0); activation; linear"
    check(random_steps(9, (13, 20, 33, 3), text, ["tanh(x)", "gelu(x)"]))


@runs
def test_a_large_weight_beside_the_input_is_multiplied_in_halves():
    text = "linear; layer_norm(1e-05); activation; linear(0, x); layer_norm(1e-05); linear"
    check(random_steps(17, (20, 250, 256, 5), text, ["tanh(x)"]), STREAMED)


@runs
def test_an_infinite_row_of_an_input_that_is_read_again_does_not_reach_others():
    case = joining_chain(5, (13, 20, 33, 3), {1: "before"})
    case.x[2] = float("inf")
    result = chain_launch.chain(*case[:4], STREAMED, *case[4:])
    assert not result[2].isfinite().all()
    assert result[[0, 1, 3, 4]].isfinite().all()


@runs
def test_the_result_may_be_a_sum_or_a_norm():
    text = "linear; activation; linear; activation(0); layer_norm(1e-05)"
    check(random_steps(9, (12, 20, 12), text, ["relu(x)", "x + p0"]))


@runs
def test_an_earlier_value_may_be_read_more_than_once():
    text = "linear; activation; linear; activation(2); linear; activation(2, 4); linear"
    check(
        random_steps(9, (5, 12, 12, 12, 3), text, ["tanh(x)", "x * p0", "relu(x) + p0 - 2.0 * p1"])
    )


@runs
@pytest.mark.parametrize("width", [300, 512])
def test_a_wide_input_may_come_before_a_norm(width):
    check(normed_chain(17, (width, 20, 33, 5)), STREAMED)


@runs
def test_a_large_weight_between_two_norms_is_multiplied_in_halves():
    check(normed_chain(17, (20, 250, 256, 5)), STREAMED)


@runs
def test_padding_does_not_count_in_mean_and_variance():
    """Values far from zero: a mean over padded features would be far off."""
    case = normed_chain(9, (7, 33, 9, 2))
    check(case._replace(biases=[100.0 + case.biases[0], *case.biases[1:]]))


@runs
def test_an_infinite_row_does_not_reach_others():
    case = residual_blocks(5, 20, (40,), 3)
    case.x[2] = float("inf")
    result = chain_launch.chain(*case[:4], STREAMED, *case[4:])
    assert result[2].isnan().all()
    assert result[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize(
    ("case", "possible"),
    [
        (normed_chain(1, (348, 256, 256, 17)), True),
        (normed_chain(1, (64, 512, 64, 17)), False),
        (residual_blocks(1, 256, (512, 512), 1), True),
        (residual_blocks(1, 512, (64, 64), 1), False),
        (skip_chain(1, 128, 6, 3), True),
        (joining_chain(1, (60, *(256,) * 8), {4: "before"}), True),
        (joining_chain(1, (60, *(256,) * 8), {4: "before", 5: "after"}), True),
        (joining_chain(1, (60, 256, 512, 256), {1: "before"}), False),
    ],
    ids=["norms", "a wide norm", "residuals", "a wide residual", "skips", "NeRF", "two", "wide"],
)
def test_values_that_a_step_needs_whole_must_be_narrow(case, possible):
    widths = (case.x.shape[1], *(weight.shape[0] for weight in case.weights))
    assert can_chain(widths, torch.bfloat16, H100, case.steps) is possible


@pytest.mark.parametrize("family", [CHAIN, ROWS], ids=lambda family: family.name)
def test_families_say_where_they_run_no_steps(family):
    on = {"device": torch.device("cuda"), "target": gpu_named("h100")}
    case = Case("relu(x)", 64, 64, 64, 64).setting(**on)
    text = "linear; layer_norm(1e-05); activation; linear; activation; linear"
    chain = replace(case, further_features=(64, 64), activations=case.activations * 2, steps=text)
    if family is CHAIN:
        assert family.why_not(chain, H100) is None
        why = family.why_not(replace(chain, training=True), H100)
        assert why == "norms, sums and concatenations between layers are computed in inference"
    else:
        chain = replace(chain, device=torch.device("cpu"), target=None)
        assert family.why_not(chain, None) == (
            "its kernels compute no norms, sums or concatenations between layers"
        )
        assert family.why_not(replace(chain, steps=""), None) is None


def test_plain_steps_are_none():
    assert Steps.of("linear; activation; linear", 2).is_plain
