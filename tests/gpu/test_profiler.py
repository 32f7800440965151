"""profile() and explain() where there are kernels to count."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fusion_backend import Comparison, explain, profile
from fusion_backend.instruments.kernel_counts import GPU_KERNELS

ALWAYS = {"fusedmlp.policy": "always"}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(768, 3072)
        self.act = nn.GELU(approximate="tanh")
        self.proj = nn.Linear(3072, 768)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.act(self.fc(x)))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return MLP().to("cuda", torch.bfloat16)


@pytest.fixture(scope="module")
def x() -> Tensor:
    # So many rows that cuBLAS has no use for split-K, which adds kernels.
    return torch.randn(4096, 768, device="cuda", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def comparison(model: nn.Module, x: Tensor) -> Comparison:
    with torch.no_grad():
        return profile(model, x, steps=5, options=ALWAYS)


def test_the_gpu_is_counted_and_named(comparison: Comparison) -> None:
    assert comparison.counted == GPU_KERNELS
    assert comparison.device == torch.cuda.get_device_name()


def test_an_mlp_is_three_kernels_before_and_at_most_two_after(comparison: Comparison) -> None:
    assert comparison["eager"].kernels == 3
    assert comparison["inductor"].kernels == 3
    assert comparison["fusedmlp"].kernels <= 2
    comparison.assert_fewer_kernels()


def test_fills_of_cublas_are_not_kernels(comparison: Comparison) -> None:
    for row in comparison.rows:
        assert row.memsets is not None
        assert not [name for name in row.names if name.startswith(("Memset", "Memcpy"))]


def test_times_and_errors_are_measured(comparison: Comparison) -> None:
    eager = comparison["eager"]
    for row in comparison.rows:
        assert row.gpu_us is not None
        assert 0 < row.gpu_us < 10_000
        assert 0 < row.wall_us < 100_000
        assert row.error is not None
        assert eager.error is not None
        assert 0 < row.error < 1.5 * eager.error


def test_one_kernel_is_counted_as_one(x: Tensor) -> None:
    assert profile(torch.relu, x, backends=["eager"])["eager"].kernels == 1


def test_a_copy_by_the_driver_is_no_kernel(x: Tensor) -> None:
    counts = profile(torch.clone, x, backends=["eager"])["eager"]
    assert (counts.kernels, counts.memcpys) == (0, 1)


def test_a_function_without_arguments_is_counted_too(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        counts = profile(lambda: model(x), backends=["eager"])
    assert counts.counted == GPU_KERNELS
    assert counts["eager"].kernels == 3


def test_backward_is_counted_with_its_gradients(model: nn.Module, x: Tensor) -> None:
    comparison = profile(model, x, steps=5, options=ALWAYS, backward=True)
    comparison.assert_fewer_kernels()
    eager = comparison["eager"]
    for row in comparison.rows:
        assert row.gradient_error is not None
        assert eager.gradient_error is not None
        assert 0 < row.gradient_error < 1.5 * eager.gradient_error
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_replayed_cuda_graph_is_noted(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        comparison = profile(
            model, x, backends=["eager", "inductor"], steps=5, mode="reduce-overhead"
        )
    assert comparison["inductor"].kernels > 0
    assert comparison.notes[-1].startswith("inductor ran in CUDA graphs")


def test_steps_with_random_numbers_still_have_the_same_kernels(x: Tensor) -> None:
    comparison = profile(nn.Dropout(), x, backends=["eager"])
    assert comparison["eager"].kernels == 1
    assert comparison["eager"].error is None


def test_random_number_generators_of_the_gpu_are_left_as_they_were(x: Tensor) -> None:
    state = torch.cuda.get_rng_state()
    profile(nn.Dropout(), x, backends=["eager"])
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_explain_names_the_plan_on_the_gpu(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        (site,) = explain(model, x, options=ALWAYS).sites
    assert site.device == "cuda"
    assert site.plan in {"back_to_back", "epilogue", "library"}
