"""Norms and residuals within a chain on a GPU: numbers, and what the backend makes of a model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

import fusion_backend
from chain_cases import (
    eager_steps,
    joining_chain,
    normed_chain,
    residual_blocks,
    skip_chain,
)
from fusion_backend.compat import triton_features
from fusion_backend.compat.tf32 import multiplying_in_tf32
from fusion_backend.kernels.chain import launch as chain_launch
from fusion_backend.kernels.chain.family import can_chain
from fusion_backend.planning import while_compiling
from fusion_backend.planning.gpus import gpu_of
from fusion_backend.planning.user_table import UserTable
from kernel_cases import assert_exact

CASES = {
    "policy": lambda rows, **how: normed_chain(rows, (348, 256, 256, 17), **how),
    "narrow policy": lambda rows, **how: normed_chain(rows, (13, 40, 64, 3), "rms_norm", **how),
    "residual 64": lambda rows, **how: residual_blocks(rows, 64, (64, 96), 5, **how),
    "residual 128": lambda rows, **how: residual_blocks(rows, 128, (512, 512), 1, **how),
    "residual 256": lambda rows, **how: residual_blocks(rows, 256, (256, 256), 256, **how),
    "skips": lambda rows, **how: skip_chain(rows, 100, 4, 7, **how),
    "joined 64": lambda rows, **how: joining_chain(
        rows, (28, *(64,) * 5, 3), {2: "after", 4: "before"}, **how
    ),
    "joined 256": lambda rows, **how: joining_chain(rows, (60, *(256,) * 8), {4: "before"}, **how),
    "joined behind 256": lambda rows, **how: joining_chain(
        rows, (63, *(256,) * 8, 4), {5: "after"}, **how
    ),
    "joined to a wide input": lambda rows, **how: joining_chain(
        rows, (348, 256, 256, 256, 4), {2: "before"}, **how
    ),
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def check(case) -> None:
    widths = (case.x.shape[1], *(weight.shape[0] for weight in case.weights))
    if not can_chain(widths, case.x.dtype, steps=case.steps):
        pytest.skip("not possible on this GPU")
    with triton_features.launching_directly():
        result = chain_launch.chain(*case[:4], None, *case[4:])
    assert_exact(result, eager_steps(case), eager_steps(case.to(torch.float64)))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [1, 17, 1000, 5000])
def test_it_is_as_exact_as_eager(rows, name, dtype):
    check(CASES[name](rows, dtype=dtype, device="cuda"))


@pytest.mark.parametrize("name", CASES)
def test_in_tf32_it_is_as_exact_as_cublas(name):
    with multiplying_in_tf32(True):
        check(CASES[name](3000, device="cuda"))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def test_a_compiled_model_runs_it_in_one_launch():
    model = nn.Sequential(Block(64), Block(64), nn.LayerNorm(64), nn.Linear(64, 8))
    model = model.cuda().bfloat16()
    x = torch.randn(1000, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        comparison = fusion_backend.profile(model, x, options={"fusedmlp.policy": "always"})
    counts = {each.backend: each.kernels for each in comparison.rows}
    assert counts["fusedmlp"] == 1


class Nerf(nn.Module):
    """NeRF without directions: the input once more before a layer in the middle."""

    def __init__(self, skip: int, last: nn.Module) -> None:
        super().__init__()
        read = [60, *[256] * 7]
        read[skip] += 60
        self.layers = nn.ModuleList(nn.Linear(each, 256) for each in read)
        self.last, self.skip = last, skip

    def forward(self, x):
        hidden = x
        for i, layer in enumerate(self.layers):
            hidden = torch.relu(layer(torch.cat([x, hidden], -1) if i == self.skip else hidden))
        return self.last(hidden)


@pytest.mark.parametrize("skip", [4, 5])
@pytest.mark.parametrize("is_trunk", [False, True], ids=["whole", "trunk"])
def test_nerf_is_one_launch_and_as_exact_as_eager(is_trunk, skip):
    model = Nerf(skip, nn.Identity() if is_trunk else nn.Linear(256, 4)).cuda().bfloat16()
    exact = copy.deepcopy(model).double()
    x = torch.randn(64, 192, 60, device="cuda", dtype=torch.bfloat16)
    always = {"fusedmlp.policy": "always"}
    with torch.no_grad():
        result = torch.compile(model, backend="fusedmlp", options=always)(x)
        assert_exact(result, model(x), exact(x.double()))
        comparison = fusion_backend.profile(model, x, options=always)
    counts = {each.backend: each.kernels for each in comparison.rows}
    assert counts["fusedmlp"] == 1


def test_a_chain_is_timed_once_while_it_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDMLP_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FUSEDMLP_MEASURE", "1")
    while_compiling.measured_once.cache_clear()
    model = nn.Sequential(*(Block(128) for _ in range(3))).cuda().bfloat16()
    x = torch.randn(1000, 128, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        y = torch.compile(model, backend="fusedmlp")(x)
        torch.testing.assert_close(y, model(x), rtol=2e-2, atol=2e-2)
    times = UserTable.of(gpu_of(torch.device("cuda", 0))).sites()
    (name,) = (name for name in times if "1000×128→128→128→128→128→128→128" in name)
    assert times[name].keys() == {"inductor", "pairs", "chain"}
    assert all(us > 0.5 for us in times[name].values())
