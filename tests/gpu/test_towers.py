"""Towers on a GPU: numbers in all dtypes, and what the backend makes of models that have some."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from chain_cases import eager_chain, random_towers
from fusion_backend import explain, profile
from fusion_backend.compat import triton_features
from fusion_backend.compat.tf32 import multiplying_in_tf32
from fusion_backend.kernels.chain.family import can_tower
from fusion_backend.kernels.chain.towers_launch import towers
from fusion_backend.mlp.weights import Tower
from kernel_cases import assert_exact

TOWERS = {
    "policy and value": ((348, 64, 64, 17), (348, 64, 64, 1)),
    "twin": ((393, 256, 256, 1),) * 2,
    "ensemble": ((64, 64, 64, 1),) * 5,
    "pairs": ((64, 64, 1), (64, 64, 4), (64, 64, 1)),
    "different": ((64, 64, 64, 1), (64, 200, 3), (64, 33, 100, 20, 65)),
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def check(cases) -> list[Tensor]:
    with triton_features.launching_directly():
        found = towers(cases[0].x, [Tower(*case[1:]) for case in cases])
    for result, case in zip(found, cases, strict=True):
        assert_exact(result, eager_chain(case), eager_chain(case.to(torch.float64)))
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("rows", [1, 17, 1000, 3000, 5000])
def test_each_is_as_exact_as_eager(rows, name, dtype):
    if not can_tower(TOWERS[name], rows, dtype):
        pytest.skip("not possible on this GPU")
    activations = ("tanh(x)", "gelu(x)", "silu(x)")
    check(random_towers(rows, TOWERS[name], activations, dtype=dtype, device="cuda"))


@pytest.mark.parametrize("name", ["policy and value", "ensemble"])
@pytest.mark.parametrize("rows", [17, 3000, 5000])
def test_in_tf32_each_is_as_exact_as_cublas(rows, name):
    with multiplying_in_tf32(True):
        check(random_towers(rows, TOWERS[name], ("relu(x)",), device="cuda"))


def test_they_are_the_same_every_time():
    cases = random_towers(3000, TOWERS["twin"], dtype=torch.bfloat16, device="cuda")
    first = check(cases)
    for _ in range(5):
        assert all(map(torch.equal, check(cases), first))


class Model(nn.Module):
    def __init__(self, all_widths) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(
                *itertools.chain.from_iterable(
                    (nn.Linear(inner, out), nn.Tanh()) for inner, out in itertools.pairwise(widths)
                )
            )[:-1]
            for widths in all_widths
        )
        self.cuda().bfloat16()

    def forward(self, x: Tensor) -> list[Tensor]:
        return [tower(x) for tower in self.towers]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["policy and value", "pairs"])
def test_a_compiled_model_computes_what_eager_does(name, dynamic):
    model = Model(TOWERS[name])
    x = torch.randn(1000, TOWERS[name][0][0], device="cuda").bfloat16()
    options = {"fusedmlp.policy": "always", "fusedmlp.strict": True}
    compiled = torch.compile(model, backend="fusedmlp", dynamic=dynamic, options=options)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), atol=0.02, rtol=0.02)
    parameters = tuple(model.parameters())
    found, right = (
        torch.autograd.grad([y.sum() for y in f(x)], parameters) for f in (compiled, model)
    )
    for mine, theirs in zip(found, right, strict=True):
        assert (mine - theirs).norm() <= 0.05 * theirs.norm()


def test_few_rows_are_one_kernel_by_default():
    model = Model(TOWERS["policy and value"])
    x = torch.randn(64, 348, device="cuda").bfloat16()
    with torch.no_grad():
        assert {site.call for site in explain(model, x).sites} == {1}
        comparison = profile(model, x)
    kernels = {row.backend: row.kernels for row in comparison.rows}
    assert kernels["fusedmlp"] == 1
    (launched,) = comparison.sites
    assert (launched.claimed, launched.launched) == (1, 1)
