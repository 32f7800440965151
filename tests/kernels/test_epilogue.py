"""The epilogue kernel's numbers, on Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from fusion_backend.kernels import invocations, launch
from fusion_backend.kernels.host.configs import Config
from fusion_backend.mlp.expression import parse
from kernel_cases import (
    GATED,
    PLAIN,
    Case,
    assert_exact,
    eager_epilogue,
    interpreted,
    loops_are_broken,
    random_case,
    turned,
)
from repetition import each_once

pytestmark = interpreted

EVEN = (16, 32, 16)
ODD = (33, 65, 20)
# Several tiles in each direction, and bands of tiles that are not full.
SMALL_TILES = Config(16, 16, 16, group_m=2, num_stages=2)


def check(case: Case, save_preact: bool = False, config: Config | None = None) -> None:
    results = launch.epilogue(*case.first, case.activation, save_preact, config=config)
    eager, exact = eager_epilogue(case), eager_epilogue(case.to(torch.float64))
    if not save_preact:
        assert results[1:] == (None, None)
        eager, exact = (eager[0],), (exact[0],)
    for triple in zip(results, eager, exact, strict=False):
        assert_exact(*triple)


@pytest.mark.parametrize(
    ("size", "activation", "dtype"),
    each_once(
        [(1, EVEN), (17, ODD), (64, EVEN), (3, (1, 1, 1)), (40, (129, 33, 1))],
        [PLAIN, GATED],
        [torch.float32, torch.float16],
    ),
)
def test_it_is_as_exact_as_eager(size, activation, dtype):
    rows, widths = size
    check(random_case(rows, widths, activation, dtype=dtype))


@pytest.mark.parametrize("activation", [PLAIN, GATED])
def test_it_is_as_exact_as_eager_without_biases(activation):
    check(random_case(17, ODD, activation, bias=False))


@pytest.mark.parametrize("bias_of_gate", [True, False])
def test_one_of_a_pair_may_have_a_bias_and_the_other_none(bias_of_gate):
    case = random_case(5, EVEN, GATED)
    check(case._replace(bias_up=None) if bias_of_gate else case._replace(bias_gate=None))


@pytest.mark.parametrize("activation", [PLAIN, GATED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_preactivations_are_saved_in_the_operands_dtype(activation, dtype):
    check(random_case(17, ODD, activation, dtype=dtype), save_preact=True)


@pytest.mark.parametrize(
    "activation",
    [
        "relu(x)",
        "square(relu(x))",
        "gelu_tanh(x)",
        "silu(x)",
        "x * sigmoid(1.702 * x)",
        "tanh(x)",
        "gelu(g) * u",
        "relu(g) * u",
        "(clamp(u, -1.0, 1.0) + 1.0) * g * sigmoid(1.702 * g)",
    ],
)
def test_any_activation_can_be_the_epilogue(activation):
    check(random_case(9, EVEN, activation), save_preact=True)


def test_two_activations_do_not_share_a_kernel():
    case = random_case(9, EVEN)
    check(case._replace(activation=parse("relu(x)")))
    check(case._replace(activation=parse("silu(x)")))


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_tiles_cut_into_parts_are_put_together_again(parts):
    config = Config(16, 32, 16, parts=parts, num_stages=2)
    check(random_case(20, (24, 72, 16), GATED), save_preact=True, config=config)


@pytest.mark.parametrize("activation", [PLAIN, GATED])
def test_many_tiles_cover_the_result(activation):
    check(random_case(70, (48, 80, 16), activation), save_preact=True, config=SMALL_TILES)


@pytest.mark.parametrize("activation", [PLAIN, GATED])
def test_no_rows_give_no_rows(activation):
    case = random_case(0, EVEN, activation)
    postact, preact_gate, preact_up = launch.epilogue(*case.first, case.activation, True)
    assert postact.shape == preact_up.shape == (0, 32)
    assert preact_gate is None or preact_gate.shape == (0, 32)


ALIGNED = (24, 72, 16)
TMA = Config(16, 16, 16, group_m=2, num_stages=2, tma=True)


@loops_are_broken
@pytest.mark.parametrize("programs", [0, 3], ids=["a program per tile", "persistent"])
@pytest.mark.parametrize("activation", [PLAIN, GATED])
def test_tensor_descriptors_load_the_same_operands(activation, programs):
    case = random_case(70, ALIGNED, activation, dtype=torch.float16)
    check(case, save_preact=True, config=replace(TMA, programs=programs))
    if activation == PLAIN:
        check(case, save_preact=True, config=replace(TMA, programs=3, parts=2, flatten=True))


@loops_are_broken
def test_tensor_descriptors_load_weights_in_either_order_and_strided_rows():
    case = random_case(70, ALIGNED, GATED, dtype=torch.float16)
    case = case._replace(x=torch.cat([case.x, case.x], dim=1)[:, :24])
    check(turned(case, "weight_up"), config=replace(TMA, parts=2))


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(70, 25, dtype=torch.float16)[:, 1:],
        torch.zeros(70 * 24 + 1, dtype=torch.float16)[1:].view(70, 24),
        torch.zeros(24, 70, dtype=torch.float16).t(),
        torch.zeros(1, 24, dtype=torch.float16).expand(70, 24),
    ],
    ids=["odd stride", "odd start", "transposed", "expanded"],
)
def test_tensor_descriptors_are_refused_where_rows_are_not_laid_out_for_them(x):
    case = random_case(70, ALIGNED, GATED, dtype=torch.float16)._replace(x=x)
    check(case)
    with pytest.raises(ValueError, match="cannot run epilogue"):
        check(case, config=TMA)


def test_tensor_descriptors_are_refused_for_float32():
    with pytest.raises(ValueError, match="cannot run epilogue"):
        check(random_case(70, ALIGNED, GATED), config=TMA)


def test_weights_may_be_transposed():
    check(turned(random_case(17, ODD, GATED), "weight_gate", "weight_up"))


def test_weights_may_be_halves_of_one():
    case = random_case(17, ODD, GATED)
    gate, up = torch.cat([case.weight_gate, case.weight_up]).chunk(2)
    check(case._replace(weight_gate=gate, weight_up=up))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
        lambda x: torch.cat([x, x], dim=1).view(-1, x.shape[1])[::2],
        lambda x: x.t().contiguous().t(),
        lambda x: x[:1].expand(x.shape),
        lambda x: torch.stack([x, x], dim=2)[:, :, 0],
    ],
    ids=["columns", "every second row", "transposed", "expanded", "every second column"],
)
def test_rows_may_have_any_strides(view):
    case = random_case(17, ODD, PLAIN)
    check(case._replace(x=view(case.x)))


def test_biases_may_have_strides():
    case = random_case(17, ODD, PLAIN)
    check(case._replace(bias_up=torch.stack([case.bias_up] * 2, dim=1)[:, 0]))
    check(case._replace(bias_up=torch.ones(1).expand(ODD[1])))


@pytest.mark.parametrize("activation", [PLAIN, GATED])
def test_wide_offsets_address_the_same_elements(activation, monkeypatch):
    monkeypatch.setattr(invocations, "LARGEST_32_BIT", 0)
    check(random_case(70, ODD, activation), save_preact=True, config=SMALL_TILES)


def test_a_configuration_that_cannot_run_is_refused():
    case = random_case(17, ODD, PLAIN)
    with pytest.raises(ValueError, match="cannot run epilogue"):
        check(case, config=Config(1 << 16, 1 << 16))
