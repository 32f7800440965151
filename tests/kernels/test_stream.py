"""The stream kernels' numbers, on Triton's interpreter, and how the work is divided."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fusion_backend.kernels import launch
from fusion_backend.kernels.host.configs import Config
from fusion_backend.kernels.host.problems import stream_problems
from fusion_backend.kernels.host.targets import H100
from fusion_backend.kernels.invocations import How
from fusion_backend.kernels.preferences import chosen
from fusion_backend.kernels.registry import STREAM
from fusion_backend.kernels.stream.launch import stream_hidden_invocation, stream_out_invocation
from fusion_backend.mlp.record import MLP
from fusion_backend.mlp.weights import FirstLayer
from kernel_cases import (
    GATED,
    PLAIN,
    Case,
    any_strides,
    assert_exact,
    compiled,
    eager_mlp,
    interpreted,
    random_case,
    turned,
)
from repetition import each_once

EVEN = (16, 32, 16)
ODD = (33, 65, 20)


def check(case: Case, configs: tuple[Config, Config] | None = None) -> None:
    result = launch.stream(*case.mlp, configs=configs)
    assert_exact(result, eager_mlp(case), eager_mlp(case.to(torch.float64)))


@interpreted
@pytest.mark.parametrize(
    ("size", "activation", "dtype"),
    each_once(
        [(1, EVEN), (1, ODD), (17, ODD), (64, EVEN), (3, (1, 1, 1)), (130, (40, 300, 33))],
        [PLAIN, GATED],
        [torch.float16, torch.float32],
    ),
)
def test_it_is_as_exact_as_eager(size, activation, dtype):
    check(random_case(*size, activation, dtype=dtype))


@interpreted
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("activation", [PLAIN, GATED])
def test_it_is_as_exact_as_eager_without_biases(activation, rows):
    check(random_case(rows, ODD, activation, bias=False))


@interpreted
@pytest.mark.parametrize("activation", ["relu(x)", "gelu_tanh(x)", "gelu(g) * u"])
def test_any_activation_can_stand_between(activation):
    check(random_case(9, EVEN, activation))


@interpreted
@pytest.mark.parametrize("block_m", [1, 16])
def test_shares_that_are_no_power_of_two_cover_all_features(block_m):
    config = Config(block_m, 16, 32, num_stages=1, programs=5)
    check(random_case(block_m, (40, 65, 33), GATED), (config, config))


@interpreted
def test_more_rows_than_one_block_are_right():
    config = Config(16, 16, 32, num_stages=1, programs=1)
    check(random_case(50, ODD), (config, config))


@interpreted
def test_no_rows_give_no_rows():
    assert launch.stream(*random_case(0, ODD).mlp).shape == (0, 20)


@interpreted
@pytest.mark.parametrize("rows", [1, 7])
def test_weights_may_be_transposed(rows):
    check(turned(random_case(rows, ODD, GATED)))


@interpreted
@any_strides
def test_rows_may_have_any_strides(view):
    case = random_case(17, ODD)
    check(case._replace(x=view(case.x)))


def invocations(rows: int, width: int, hidden: int):
    def matrix(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    x, up, down = matrix(rows, width), matrix(hidden, width), matrix(width, hidden)
    first, second = stream_problems(x, None, up, down, H100)
    postact = matrix(rows, hidden)
    how = How("ieee", chosen("stream_hidden", first, H100), H100)
    yield stream_hidden_invocation(x, FirstLayer(None, None, up, None), postact, how)
    how = How("ieee", chosen("stream_out", second, H100), H100)
    yield stream_out_invocation(postact, down, None, matrix(rows, width), how)


@compiled
@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize(("width", "hidden"), [(768, 3072), (2048, 8192), (4096, 14336)])
def test_the_programs_of_few_rows_run_all_at_one_time_and_have_equally_much_to_do(
    rows, width, hidden
):
    for invocation, features in zip(invocations(rows, width, hidden), (hidden, width), strict=True):
        (programs,) = invocation.grid
        assert programs <= invocation.config.programs * H100.multiprocessors
        share = invocation.arguments["SHARE"]
        assert share - 1 < features / programs <= share


@compiled
@pytest.mark.parametrize(
    ("dtype", "possible"),
    [(torch.bfloat16, True), (torch.float16, True), (torch.float32, False)],
)
def test_it_is_for_16_bits(dtype, possible):
    layers = ("relu(x)", False, 1, 64, 256, 64)
    mlp = MLP(*layers, dtype, torch.device("cuda"), True, True, False)
    assert (STREAM.why_not(mlp, H100) is None) is possible
