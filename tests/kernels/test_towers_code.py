"""What the kernel of several towers compiles to: no more than the largest of them alone takes."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from torch import Tensor

from fusion_backend.kernels.chain.config import ChainProblem, shared_memory
from fusion_backend.kernels.chain.launch import chain_code, operands_of
from fusion_backend.kernels.chain.source import ChainCode, chain_kernel
from fusion_backend.kernels.chain.towers_config import chosen
from fusion_backend.kernels.chain.towers_source import TowersCode, towers_kernel
from fusion_backend.kernels.host.configs import Config
from fusion_backend.kernels.host.problems import MANY_ROWS
from fusion_backend.mlp.expression import parse
from kernel_cases import compiled
from kernel_compilation import ELSEWHERE, GPUS, copied_by_inductor, source_of, spilled_bytes
from kernel_compilation import registers as registers_of
from repetition import slow_but

pytestmark = compiled

TOWERS = {
    "policy and value": ((348, 64, 64, 17), (348, 64, 64, 1)),
    "twin": ((393, 256, 256, 1),) * 2,
    "ensemble": ((64, 64, 64, 1),) * 5,
    "pairs": ((64, 64, 1), (64, 64, 4), (64, 64, 1)),
}
LAUNCHES = [("sm_90", *each) for each in itertools.product(TOWERS, [MANY_ROWS, 1024])]
on_each_gpu = pytest.mark.parametrize(
    ("gpu", "name", "rows"),
    slow_but(
        [("sm_90", "policy and value", 1024), ("sm_90", "pairs", MANY_ROWS)],
        [*LAUNCHES, *itertools.product(ELSEWHERE, TOWERS, [MANY_ROWS])],
    ),
)


class Launch:
    """Towers as they are launched on a GPU, without contents."""

    def __init__(self, gpu: str, name: str, rows: int, dtype: torch.dtype, precision: str) -> None:
        self.gpu, target = GPUS[gpu], GPUS[gpu].target
        problems = [ChainProblem(rows, widths, dtype, precision) for widths in TOWERS[name]]
        configs = chosen(problems, target)
        assert configs is not None
        self.config = configs[0]
        self.foreseen = max(map(shared_memory, configs, problems, itertools.repeat(target)))
        self.x = torch.empty((rows, problems[0].widths[0]), dtype=dtype, device="meta")
        self.towers = [
            self._tower(problem, config) for problem, config in zip(problems, configs, strict=True)
        ]

    def _tower(self, problem: ChainProblem, config: Config) -> tuple[ChainCode, list[Tensor]]:
        """What a tower is printed from, its operands and its result."""

        def matrix(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=problem.dtype, device="meta")

        weights = [matrix(out, inner) for inner, out in itertools.pairwise(problem.widths)]
        biases = [matrix(out) for out in problem.widths[1:]]
        activations = [parse("tanh(x)")] * (len(weights) - 1)
        layers = (weights, biases, activations)
        code = chain_code(self.x, *layers, (), problem, config, self.gpu.target)
        return code, [*operands_of(weights, biases), matrix(problem.rows, problem.widths[-1])]

    def source(self, kernel: Any, tensors: list[Tensor]) -> Any:
        units = self.x.stride(0) // self.towers[0][0].x_row_unit
        values = (self.x, *tensors, self.x.shape[0], units)
        arguments = dict(zip(kernel.arg_names, values, strict=True))
        return source_of(kernel, SimpleNamespace(arguments=arguments))

    def compiled(self, kernel: Any, tensors: list[Tensor]) -> Any:
        options = {"num_warps": self.config.num_warps, "num_stages": self.config.num_stages}
        return triton.compile(self.source(kernel, tensors), self.gpu.triton_target, options)

    @functools.cached_property
    def kernel(self) -> Any:
        return towers_kernel(TowersCode(tuple(code for code, _ in self.towers)))

    @functools.cached_property
    def tensors(self) -> list[Tensor]:
        return list(itertools.chain.from_iterable(tensors for _, tensors in self.towers))

    @functools.cached_property
    def together(self) -> Any:
        return self.compiled(self.kernel, self.tensors)

    @functools.cached_property
    def apart(self) -> list[Any]:
        """Those that differ."""
        different = dict(self.towers)
        return [self.compiled(chain_kernel(code), each) for code, each in different.items()]


@functools.cache
def launch_of(
    gpu: str, name: str, rows: int, dtype: torch.dtype = torch.bfloat16, precision: str = "ieee"
) -> Launch:
    return Launch(gpu, name, rows, dtype, precision)


@on_each_gpu
def test_they_take_as_much_shared_memory_as_the_largest_alone(gpu, name, rows):
    launch = launch_of(gpu, name, rows)
    most = max(kernel.metadata.shared for kernel in launch.apart)
    assert launch.together.metadata.shared <= most
    assert launch.together.metadata.shared <= launch.foreseen


@on_each_gpu
def test_nothing_is_spilled(gpu, name, rows):
    launch = launch_of(gpu, name, rows)
    most = max(map(spilled_bytes, launch.apart))
    assert spilled_bytes(launch.together) <= most


@pytest.mark.parametrize(
    ("name", "rows"),
    slow_but([("policy and value", 1024)], itertools.product(TOWERS, [MANY_ROWS, 1024])),
)
def test_as_many_programs_fit_on_a_multiprocessor_as_of_the_largest_alone(name, rows):
    launch = launch_of("sm_90", name, rows)
    threads = 32 * launch.config.num_warps

    def fitting(kernel: Any) -> int:
        return 65536 // (threads * 8 * -(-registers_of(kernel) // 8))

    assert fitting(launch.together) >= min(2, *map(fitting, launch.apart))


@on_each_gpu
def test_towers_load_and_multiply_as_each_alone(gpu, name, rows):
    """A pointer that is chosen among several is known to be aligned as they are."""
    if gpu == "gfx942":
        pytest.skip("read in PTX")
    launch = launch_of(gpu, name, rows)
    alone = [kernel.asm["ptx"] for kernel in launch.apart]
    found = launch.together.asm["ptx"]
    for instruction in ("wgmma.mma_async", "mma.sync", "tcgen05.mma", "cp.async.cg", ".v4"):
        assert found.count(instruction) == sum(code.count(instruction) for code in alone)


def test_products_in_tf32_fit(tmp_path):
    launch = launch_of("sm_90", "policy and value", 1024, torch.float32, "tf32")
    assert ".tf32.tf32" in launch.together.asm["ptx"]
    assert spilled_bytes(launch.together) == 0


def test_inductor_can_copy_the_kernel_with_all_it_calls(tmp_path):
    launch = launch_of("sm_90", "pairs", MANY_ROWS)
    copied = copied_by_inductor(launch.kernel, tmp_path)
    result = launch.compiled(copied.fusedmlp_chain_towers, launch.tensors)
    assert "activation" not in result.asm["ptx"]
    assert result.metadata.shared == launch.together.metadata.shared
