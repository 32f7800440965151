"""The backward kernel of narrow MLPs: numbers on Triton's interpreter, and machine code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)
from fusion_backend.kernels.back_to_back.family import can_recompute, gradients_fit
from fusion_backend.kernels.back_to_back.launch import narrow_gradient, narrow_gradient_invocation
from fusion_backend.kernels.host import targets
from fusion_backend.kernels.host.configs import narrow_gradient_config
from fusion_backend.kernels.host.targets import target_of
from kernel_cases import (
    Case,
    assert_exact,
    compiled,
    eager_mlp,
    interpreted,
    loops_are_broken,
    random_case,
)
from kernel_compilation import ELSEWHERE, GPUS, compile_for, spilled_bytes
from repetition import each_once, slow_but

ROWS = 1000


def gradients(function, case: Case, grad: Tensor) -> list[Tensor]:
    asked = [t.requires_grad_() for t in case[:-1] if t is not None]
    return list(torch.autograd.grad(function(case), asked, grad))


def by_the_kernel(case: Case) -> Tensor:
    return torch.ops.fusedmlp.mlp(*case[:-1], [], str(case.activation), "back_to_back")


@interpreted
@loops_are_broken
@pytest.mark.parametrize(
    ("size", "bias", "activation", "dtype"),
    each_once(
        [
            *((1, (16, 32, 16)), (100, (16, 64, 16)), (37, (10, 24, 5))),
            *((3, (1, 1, 1)), (70, (40, 9, 33))),
        ],
        [True, False],
        ["gelu_tanh(x)", "square(relu(x))"],
        [torch.float16, torch.float32],
    ),
)
def test_it_is_as_exact_as_eager(size, bias, activation, dtype):
    rows, widths = size
    case = random_case(rows, widths, activation, dtype=dtype, bias=bias)
    grad = torch.randn(rows, widths[2]).to(dtype)
    wide = Case(*(t.detach() if isinstance(t, Tensor) else t for t in case.to(torch.float64)))
    exact = gradients(eager_mlp, wide, grad.double())
    eager = gradients(eager_mlp, case, grad)
    for triple in zip(gradients(by_the_kernel, case, grad), eager, exact, strict=True):
        assert_exact(*triple)


@interpreted
@loops_are_broken
@pytest.mark.parametrize("hidden", [32, 21])
def test_rows_and_features_beyond_the_last_are_in_no_sum(hidden):
    case = random_case(5, (16, hidden, 16), "log(abs(x))")._replace(bias_up=torch.zeros(hidden))
    grad = torch.randn(5, 16)
    assert all(found.isfinite().all() for found in gradients(by_the_kernel, case, grad))


@interpreted
@loops_are_broken
@pytest.mark.parametrize(("rows", "programs"), [(64, 1), (65, 2), (300, 5), (500, 6)])
def test_there_are_no_more_sums_than_tiles_of_rows_nor_than_programs_at_a_time(
    rows, programs, monkeypatch
):
    machine = target_of(torch.device("cpu"))._replace(multiprocessors=3)
    monkeypatch.setattr(targets, "target_of", lambda device: machine)
    case, grad = random_case(rows, (16, 32, 16)), torch.randn(rows, 16)
    _, sums = narrow_gradient(
        case.x, grad, case.weight_up, case.bias_up, case.weight_down, case.activation, False
    )
    assert sums.shape == (programs, 32 * (16 + 16 + 1) + 16)
    torch.testing.assert_close(sums.sum(0)[-16:], grad.sum(0))


@interpreted
@loops_are_broken
def test_a_bias_may_be_written_to_before_the_backward_pass():
    case = random_case(20, (16, 32, 16))
    grad = torch.randn(20, 16)
    expected = gradients(by_the_kernel, case, grad)
    asked = [t.requires_grad_() for t in case[:-1] if t is not None]
    y = by_the_kernel(case)
    with torch.no_grad():
        case.bias_up.zero_()
    for found, before in zip(torch.autograd.grad(y, asked, grad), expected, strict=True):
        torch.testing.assert_close(found, before)


@pytest.mark.parametrize(
    ("widths", "fits"),
    [
        ((64, 256, 64), True),
        ((128, 128, 128), True),
        ((128, 256, 128), False),
        ((64, 400, 10), False),
        ((256, 64, 256), True),
        ((192, 384, 192), False),
    ],
)
def test_x_is_enough_where_sums_of_gradients_or_two_programs_fit(widths, fits):
    assert gradients_fit(*widths) == fits
    fits = fits or max(widths[0], widths[2]) <= 128
    assert can_recompute(*widths, False, torch.bfloat16) == fits
    assert not can_recompute(*widths, True, torch.bfloat16)
    assert not can_recompute(*widths, False, torch.bfloat16, ["scalar"])


@pytest.mark.parametrize(
    ("widths", "exact", "rows", "warps", "programs"),
    [
        ((16, 64, 16), False, 64, 4, 2),
        ((32, 128, 32), False, 64, 4, 2),
        ((32, 128, 32), True, 64, 8, 1),
        ((64, 128, 64), False, 64, 8, 1),
        ((64, 256, 64), False, 32, 8, 1),
    ],
)
def test_two_programs_share_a_multiprocessor_where_registers_are_left(
    widths, exact, rows, warps, programs
):
    config = narrow_gradient_config(*widths, exact)
    assert (config.block_m, config.num_warps, max(config.programs, 1)) == (rows, warps, programs)


@compiled
@pytest.mark.parametrize(
    ("widths", "most"),
    # The second is a quarter faster by two programs that spill a little than by one that does not.
    slow_but(
        [((64, 256, 64), 16), ((16, 64, 16), 0)],
        [((64, 256, 64), 16), ((32, 128, 32), 256), ((128, 128, 128), 0), ((16, 64, 16), 0)],
    ),
)
def test_next_to_nothing_spills(widths, most):
    assert spilled_bytes(compiled_gradient("sm_90", widths)) <= most


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("gpu", ELSEWHERE)
@pytest.mark.parametrize("widths", [(64, 128, 64), (16, 64, 16)])
def test_it_compiles_and_fits_on_other_gpus(gpu, widths):
    assert compiled_gradient(gpu, widths).metadata.shared <= GPUS[gpu].target.shared_memory


def compiled_gradient(gpu, widths):
    inner, hidden, out = widths

    def matrix(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    width = hidden * (inner + out + 1) + out
    tensors = (matrix(ROWS, inner), matrix(ROWS, out), matrix(hidden, inner), matrix(hidden))
    results = (matrix(ROWS, inner), matrix(132, width, dtype=torch.float32))
    config = narrow_gradient_config(*widths)
    launch = narrow_gradient_invocation(*tensors, matrix(out, hidden), *results, config)
    return compile_for(gpu, launch, "gelu_tanh(x)")
