"""Chains on a GPU: numbers in all dtypes, and what the backend makes of a model of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

import itertools

from chain_cases import ChainCase, eager_chain, random_chain
from fusion_backend import profile
from fusion_backend.compat import triton_features
from fusion_backend.compat.tf32 import multiplying_in_tf32
from fusion_backend.kernels.chain import launch as chain_launch
from fusion_backend.kernels.chain.family import can_chain
from fusion_backend.kernels.host.configs import Config
from kernel_cases import assert_exact

CHAINS = [(64,) * 4, (64, 128, 128, 1), (13, 512, 256, 64), (33, 100, 20, 7, 65), (64,) * 9]
WIDE = [(348, 64, 64, 17), (479, 256, 128, 1), (64, 64, 64, 1024), (319, 256, 256, 256, 256)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def check(case: ChainCase, config: Config | None = None) -> Tensor:
    with triton_features.launching_directly():
        result = chain_launch.chain(*case, config=config)
    assert_exact(result, eager_chain(case), eager_chain(case.to(torch.float64)))
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("widths", [*CHAINS, *WIDE], ids=str)
@pytest.mark.parametrize("rows", [1, 17, 1000, 3000, 5000])
def test_it_is_as_exact_as_eager(rows, widths, dtype):
    if not can_chain(widths, dtype):
        pytest.skip("not possible on this GPU")
    activations = ("gelu(x)", "relu(x)", "silu(x)")
    check(random_chain(rows, widths, activations, dtype=dtype, device="cuda"))


@pytest.mark.parametrize("widths", [(348, 64, 64, 17), (13, 512, 256, 64), (128,) * 5], ids=str)
@pytest.mark.parametrize("rows", [17, 3000, 5000])
def test_in_tf32_it_is_as_exact_as_cublas(rows, widths):
    """cuBLAS takes float32 for a single row, and for some sizes that nobody can foresee."""
    with multiplying_in_tf32(True):
        check(random_chain(rows, widths, ("relu(x)",), device="cuda"))


def test_in_tf32_a_last_layer_of_one_column_is_multiplied_exactly():
    case = random_chain(1000, (64, 128, 128, 1), ("relu(x)",), device="cuda")
    # Hidden values are biases then, and the last layer alone can round them.
    zeros = [torch.zeros_like(weight) for weight in case.weights[:-1]]
    case = case._replace(weights=[*zeros, case.weights[-1]])
    with multiplying_in_tf32(True), triton_features.launching_directly():
        result = chain_launch.chain(*case)
    right = eager_chain(case.to(torch.float64))
    assert (result.double() - right).norm() <= 1e-5 * right.norm()  # TF32's: 2e-4


@pytest.mark.parametrize("widths", [(128,) * 5, (256,) * 5], ids=str)
def test_it_is_the_same_every_time(widths):
    case = random_chain(3000, widths, dtype=torch.bfloat16, biases=(True, False), device="cuda")
    first = check(case)
    assert all(torch.equal(check(case), first) for _ in range(5))


def test_weights_may_be_transposed():
    case = random_chain(300, (64, 40, 72, 24), dtype=torch.bfloat16, device="cuda")
    check(case._replace(weights=[weight.t().contiguous().t() for weight in case.weights]))


def model_of(widths) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inner, out in itertools.pairwise(widths):
        layers += [nn.Linear(inner, out), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).cuda().bfloat16()


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_model_computes_what_eager_does(dynamic):
    model, x = model_of((64, 64, 64, 16)), torch.randn(1000, 64, device="cuda").bfloat16()
    options = {"fusedmlp.policy": "always", "fusedmlp.strict": True}
    compiled = torch.compile(model, backend="fusedmlp", dynamic=dynamic, options=options)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), atol=0.02, rtol=0.02)
    parameters = tuple(model.parameters())
    found, right = (torch.autograd.grad(f(x).sum(), parameters) for f in (compiled, model))
    for mine, theirs in zip(found, right, strict=True):
        assert (mine - theirs).norm() <= 0.05 * theirs.norm()


def test_a_chain_is_one_kernel():
    model, x = model_of((64, 64, 64, 16)), torch.randn(5000, 64, device="cuda").bfloat16()
    with torch.no_grad():
        comparison = profile(model, x, options={"fusedmlp.policy": "always"})
    kernels = {row.backend: row.kernels for row in comparison.rows}
    assert kernels["fusedmlp"] == 1
