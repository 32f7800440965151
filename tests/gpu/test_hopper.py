"""The Gluon kernel on a GPU: numbers, layouts, and how Inductor calls it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton")

from torch._inductor.utils import run_and_get_code

from fusion_backend.kernels.back_to_back import launch_sm90 as hopper
from fusion_backend.kernels.host import called
from fusion_backend.mlp.norms import Norm
from kernel_cases import (
    NORMS,
    assert_exact,
    eager_mlp,
    error,
    gluon_on_gpu,
    normed,
    random_case,
    random_norm,
)

pytestmark = gluon_on_gpu

WIDTHS = pytest.mark.parametrize(("width", "hidden"), [(64, 128), (64, 192), (256, 576)])


def run(case, residual: Tensor | None = None, norm: Norm | None = None) -> Tensor:
    parameters = (case.weight_up, case.weight_down, case.bias_up, case.bias_down, residual)
    of_norm = (None, None, "") if norm is None else (norm.weight, norm.bias, norm.text)
    tensors = (*parameters, *of_norm[:2])
    assert called.suits(case.x, *tensors)
    return hopper.back_to_back(case.x, *tensors, str(case.activation), of_norm[2])


def check(case) -> None:
    assert_exact(run(case), eager_mlp(case), eager_mlp(case.to(torch.float64)))


@WIDTHS
@pytest.mark.parametrize("rows", [1, 63, 5000])
@pytest.mark.parametrize("activation", ["gelu(x)", "clamp(x, -1.0, 2.0)"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_it_is_as_exact_as_eager(rows, width, hidden, activation, dtype):
    check(random_case(rows, (width, hidden, width), activation, dtype=dtype, device="cuda"))


@WIDTHS
@pytest.mark.parametrize("missing", ["bias_up", "bias_down"])
def test_biases_may_be_missing(width, hidden, missing):
    case = random_case(300, (width, hidden, width), dtype=torch.bfloat16, device="cuda")
    check(case._replace(**{missing: None}))


@WIDTHS
def test_rows_may_lie_apart_and_results_do_not_vary(width, hidden):
    case = random_case(5000, (width, hidden, width), dtype=torch.bfloat16, device="cuda")
    case = case._replace(x=F.pad(case.x, (0, 8))[:, :width])
    first = run(case)
    check(case)
    assert all(run(case).equal(first) for _ in range(20))


@WIDTHS
@pytest.mark.parametrize("rows", [1, 63, 5000, 70000])
@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_a_residual_is_added_before_rounding(rows, width, hidden, scale, dtype):
    case = random_case(rows, (width, hidden, width), "gelu(x)", dtype=dtype, device="cuda")
    residual = (scale * torch.randn(rows, width, device="cuda")).to(dtype)
    exact = eager_mlp(case.to(torch.float64)) + residual
    result = run(case, residual)
    assert_exact(result, eager_mlp(case) + residual, exact)
    assert error(result, exact) <= 1.01 * error(eager_mlp(case) + residual, exact)
    assert all(run(case, residual).equal(result) for _ in range(20))
    itself = run(case, case.x)
    assert_exact(itself, eager_mlp(case) + case.x, exact - residual + case.x)


@pytest.mark.parametrize("options", [{}, {"triton.cudagraphs": True}], ids=["plain", "cudagraphs"])
@pytest.mark.parametrize("unaligned", [False, True])
@pytest.mark.parametrize("hidden", [512, 1024], ids=["for any GPU", "for Hopper"])
def test_compiled_code_adds_a_residual(options, unaligned, hidden):
    mlp = nn.Sequential(nn.Linear(256, hidden), nn.GELU(), nn.Linear(hidden, 256))
    mlp = mlp.to("cuda", torch.bfloat16)

    def block(x: Tensor, residual: Tensor) -> Tensor:
        return residual + mlp(x)

    options = {"fusedmlp.policy": "always", **options}
    compiled = torch.compile(block, backend="fusedmlp", options=options)
    x, given = torch.randn(2, 5000, 256, device="cuda", dtype=torch.bfloat16)
    residual = F.pad(given.flatten(), (1, 0))[1:].view(given.shape) if unaligned else given
    with torch.no_grad():
        _, codes = run_and_get_code(compiled, x, residual)
        for _ in range(4):
            got = compiled(x, residual).clone()
        eager = block(x, residual)
        exact = mlp.double()(x.double()) + residual
    assert_exact(got, eager, exact)
    assert not any("triton_poi" in code for code in codes)


@WIDTHS
@pytest.mark.parametrize("rows", [1, 63, 5000, 70000])
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_before_is_as_exact_as_eager(rows, width, hidden, norm):
    case = random_case(rows, (width, hidden, width), dtype=torch.bfloat16, device="cuda")
    case = case._replace(x=3.0 * case.x + 2.0)
    norm = random_norm(norm, case, parameters=hidden != 192)
    eager, exact = eager_mlp(normed(case, norm)), eager_mlp(normed(case.to(torch.float64), norm))
    residuals = (None, torch.randn_like(case.x), case.x, case.x.clone())
    results = [run(case, residual, norm) for residual in residuals]
    for result, residual in zip(results, residuals, strict=True):
        added = 0.0 if residual is None else residual
        assert_exact(result, eager + added, exact + added)
        assert all(run(case, residual, norm).equal(result) for _ in range(20))
    assert results[2].equal(results[3])


@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("of", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("options", [{}, {"triton.cudagraphs": True}], ids=["plain", "cudagraphs"])
def test_compiled_code_of_a_block_is_one_kernel(width, of, options):
    mlp = nn.Sequential(of(width), nn.Linear(width, 512 * width // 256), nn.GELU())
    mlp.append(nn.Linear(mlp[1].out_features, width))
    mlp = mlp.to("cuda", torch.bfloat16)

    def block(x: Tensor) -> Tensor:
        return x + mlp(x)

    options = {"fusedmlp.policy": "always", **options}
    compiled = torch.compile(block, backend="fusedmlp", options=options)
    x = torch.randn(4, 70000, width, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        _, codes = run_and_get_code(compiled, x)
        for _ in range(4):
            got = compiled(x).clone()
        eager = block(x)
        exact = mlp.double()(x.double()) + x
    assert_exact(got, eager, exact)
    assert any("= fusedmlp_back_to_back_" in code for code in codes)
    assert not any("triton_" in code for code in codes)


def test_no_rows_give_no_rows():
    case = random_case(1, (64, 256, 64), dtype=torch.bfloat16, device="cuda")
    assert run(case._replace(x=case.x[:0])).shape == (0, 64)


@pytest.mark.parametrize("options", [{}, {"triton.cudagraphs": True}], ids=["plain", "cudagraphs"])
def test_compiled_code_calls_it(options):
    mlp = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    mlp = mlp.to("cuda", torch.bfloat16)
    compiled = torch.compile(
        mlp, backend="fusedmlp", options={"fusedmlp.policy": "always", **options}
    )
    x = torch.randn(5000, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        got, codes = run_and_get_code(compiled, x)
        for _ in range(4):
            got = compiled(x).clone()
        exact = mlp.double()(x.double())
        assert_exact(got, mlp.bfloat16()(x), exact)
    assert any("= fusedmlp_back_to_back_" in code for code in codes)
