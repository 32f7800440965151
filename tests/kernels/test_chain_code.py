"""What the chain kernel compiles to, for each kind of GPU."""

from __future__ import annotations

import functools
import inspect
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from chain_cases import joining_chain, normed_chain, residual_blocks, skip_chain
from fusion_backend.kernels.chain.config import ChainProblem, chosen, shared_memory
from fusion_backend.kernels.chain.launch import chain_code
from fusion_backend.kernels.chain.source import chain_kernel
from fusion_backend.kernels.host.problems import MANY_ROWS
from fusion_backend.mlp.expression import parse
from kernel_cases import compiled
from kernel_compilation import (
    ELSEWHERE,
    GPUS,
    copied_by_inductor,
    registers,
    source_of,
    spilled_bytes,
)
from repetition import slow_but

pytestmark = compiled

CHAINS = {
    "3x64": (64,) * 4,
    "policy": (64, 64, 64, 64, 16),
    "value": (64, 128, 128, 1),
    "4x128": (128,) * 5,
    "tower": (13, 512, 256, 64),
    "nerf": (64,) * 9,
    "head": (256, 128, 64, 32, 1),
    "4x256": (256,) * 5,
    "wide policy": (348, 64, 64, 17),
    "wide tower": (479, 256, 128, 1),
    "wide result": (64, 64, 64, 1024),
}
ON_HOPPER = [("sm_90", *each) for each in itertools.product(CHAINS, [MANY_ROWS, 1024])]
MOST_DIFFERENT = ["policy", "tower", "4x256", "wide policy", "wide tower", "wide result"]
LAUNCHES = [*ON_HOPPER, *itertools.product(ELSEWHERE, MOST_DIFFERENT, [MANY_ROWS])]
on_each_gpu = pytest.mark.parametrize(
    ("gpu", "name", "rows"),
    slow_but([("sm_90", "policy", MANY_ROWS), ("sm_90", "wide policy", 1024)], LAUNCHES),
)


def launch_of(gpu: str, name: str, rows: int, dtype: torch.dtype, precision: str = "ieee") -> Any:
    """The kernel that is taken for a chain, its arguments by name, and why it is taken."""
    target, widths = GPUS[gpu].target, CHAINS[name]

    def matrix(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    problem = ChainProblem(rows, widths, dtype, precision)
    config = chosen(problem, target)
    weights = [matrix(out, inner) for inner, out in itertools.pairwise(widths)]
    biases = [matrix(out) for out in widths[1:]]
    x = matrix(rows, widths[0])
    activations = [parse("gelu_tanh(x)")] * (len(widths) - 2)
    code = chain_code(x, weights, biases, activations, (), problem, config, target)
    kernel = chain_kernel(code)
    layers = itertools.chain.from_iterable(zip(weights, biases, strict=True))
    values = (x, *layers, matrix(rows, widths[-1]), rows, x.stride(0) // code.x_row_unit)
    arguments = dict(zip(kernel.arg_names, values, strict=True))
    return kernel, SimpleNamespace(arguments=arguments), problem, config


@functools.cache
def kernel_of(
    gpu: str, name: str, rows: int, dtype: torch.dtype = torch.bfloat16, precision: str = "ieee"
) -> Any:
    """That kernel, compiled; the problem and the configuration."""
    kernel, launch, problem, config = launch_of(gpu, name, rows, dtype, precision)
    source = source_of(kernel, launch)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return triton.compile(source, GPUS[gpu].triton_target, options), problem, config


@on_each_gpu
def test_registers_are_spilled_by_wide_chains_only_and_few(gpu, name, rows):
    """Tiles of 128 rows were measured to be faster all the same than those that spill nothing."""
    wide = rows == MANY_ROWS and max(CHAINS[name]) > 128
    assert spilled_bytes(kernel_of(gpu, name, rows)[0]) <= (256 if wide else 0)


@on_each_gpu
def test_shared_memory_is_no_more_than_foreseen_and_available(gpu, name, rows):
    kernel, problem, config = kernel_of(gpu, name, rows)
    target = GPUS[gpu].target
    foreseen = shared_memory(config, problem, target)
    assert kernel.metadata.shared <= foreseen <= target.shared_memory


@on_each_gpu
def test_products_run_on_the_matrix_units(gpu, name, rows):
    kernel, _, config = kernel_of(gpu, name, rows)
    if gpu == "gfx942":
        assert "v_mfma" in kernel.asm["amdgcn"]
        return
    units = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}
    tall = config.block_m >= 64
    assert units.get(gpu if tall else "", "mma.sync") in kernel.asm["ptx"]


@pytest.mark.parametrize(
    "name", slow_but(["policy"], ["3x64", "policy", "value", "4x128", "nerf", "head"])
)
def test_resident_programs_fit_on_a_multiprocessor_together(name):
    kernel, _, config = kernel_of("sm_90", name, MANY_ROWS)
    assert config.resident
    threads = 32 * config.num_warps
    assert config.programs * threads * 8 * -(-registers(kernel) // 8) <= 65536
    assert (
        config.programs * (kernel.metadata.shared + 1024)
        <= GPUS["sm_90"].target.shared_memory + 1024
    )


def test_exact_products_of_float32_use_no_tf32():
    kernel, _, _ = kernel_of("sm_90", "3x64", MANY_ROWS, torch.float32)
    assert "tf32" not in kernel.asm["ptx"]


@pytest.mark.parametrize(
    ("name", "rows"),
    slow_but(
        [("wide policy", 1024)],
        itertools.product((name for name in CHAINS if name != "nerf"), [MANY_ROWS, 1024]),
    ),
)
def test_products_in_tf32_round_their_operands_and_fit(name, rows):
    kernel, problem, config = kernel_of("sm_90", name, rows, torch.float32, "tf32")
    assert ".tf32.tf32" in kernel.asm["ptx"]
    assert "cvt.rna.tf32.f32" in kernel.asm["ptx"]
    assert spilled_bytes(kernel) <= (256 if max(CHAINS[name]) > 128 else 0)
    foreseen = shared_memory(config, problem, GPUS["sm_90"].target)
    assert kernel.metadata.shared <= foreseen <= GPUS["sm_90"].target.shared_memory


def test_a_last_layer_of_one_column_is_not_rounded_to_tf32():
    """cuBLAS multiplies by a vector exactly."""
    code = {name: code_of(name) for name in ("value", "policy")}
    assert "'tf32x3'" in code["value"]
    assert "'tf32x3'" not in code["policy"]


def code_of(name: str) -> str:
    """What is printed for a chain in TF32 on Hopper."""
    return inspect.getsource(launch_of("sm_90", name, 1024, torch.float32, "tf32")[0].fn)


def test_inductor_can_copy_the_kernel_with_all_it_calls(tmp_path):
    kernel, launch, _, _ = launch_of("sm_90", "value", MANY_ROWS, torch.bfloat16)
    copied = copied_by_inductor(kernel, tmp_path)
    code = source_of(copied.fusedmlp_chain, launch)
    result = triton.compile(code, GPUS["sm_90"].triton_target)
    assert ".approx.f32" in result.asm["ptx"]  # of the activation, which is called by name


STEPS = {
    "normed policy": normed_chain(1, (348, 256, 256, 17), dtype=torch.bfloat16),
    "normed 64": normed_chain(1, (64, 64, 64, 64, 16), dtype=torch.bfloat16),
    "residual 64": residual_blocks(1, 64, (64,) * 4, 6, dtype=torch.bfloat16),
    "residual 128": residual_blocks(1, 128, (128,) * 4, 6, dtype=torch.bfloat16),
    "residual 256": residual_blocks(1, 256, (512,) * 3, 1, dtype=torch.bfloat16),
    "skips": skip_chain(1, 64, 5, 3, dtype=torch.bfloat16),
    "joined 64": joining_chain(1, (64, *(64,) * 6, 3), {3: "before"}, dtype=torch.bfloat16),
    "joined 256": joining_chain(1, (60, *(256,) * 8, 4), {4: "before"}, dtype=torch.bfloat16),
    "joined 256 twice": joining_chain(
        1, (63, *(256,) * 7), {2: "before", 4: "after"}, dtype=torch.bfloat16
    ),
}
STEPS_ON_HOPPER = [("sm_90", *each) for each in itertools.product(STEPS, [MANY_ROWS, 1024])]
STEPS_ELSEWHERE = itertools.product(
    ELSEWHERE, ["normed 64", "residual 128", "joined 64", "joined 256"], [MANY_ROWS]
)


@functools.cache
def kernel_of_steps(gpu: str, name: str, rows: int, precision: str = "ieee") -> Any:
    """The kernel that is taken for a chain with steps, compiled; its problem and configuration.

    It is in bfloat16, or in float32 and TF32.
    """
    dtype = torch.float32 if precision == "tf32" else torch.bfloat16
    target, case = GPUS[gpu].target, STEPS[name].to(dtype)
    widths = (case.x.shape[1], *(weight.shape[0] for weight in case.weights))
    problem = ChainProblem(rows, widths, dtype, precision, case.steps)
    config = chosen(problem, target)
    code = chain_code(*case[:4], case.norms, problem, config, target)
    kernel = chain_kernel(code)
    layers = itertools.chain.from_iterable(zip(case.weights, case.biases, strict=True))
    parameters = [each for each in case.parameters if each is not None]
    y = case.x.new_empty((1, widths[-1]))
    values = (case.x, *layers, *parameters, y, rows, widths[0] // code.x_row_unit)
    arguments = dict(zip(kernel.arg_names, values, strict=True))
    source = source_of(kernel, SimpleNamespace(arguments=arguments))
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return triton.compile(source, GPUS[gpu].triton_target, options), problem, config


@pytest.mark.parametrize(
    ("gpu", "name", "rows"),
    slow_but(
        [("sm_90", "normed policy", 1024), ("sm_90", "residual 64", MANY_ROWS)],
        [*STEPS_ON_HOPPER, *STEPS_ELSEWHERE],
    ),
)
def test_chains_with_steps_fit_and_spill_few_registers(gpu, name, rows):
    kernel, problem, config = kernel_of_steps(gpu, name, rows)
    target = GPUS[gpu].target
    # Tiles of 32 rows by 4 warps were measured to be faster than those that spill less, and of
    # chains without norms and sums those of 128 rows.
    most = {"residual": 320, "joined": 256}.get(name.split()[0], 64)
    assert spilled_bytes(kernel) <= (most if rows == MANY_ROWS else 64)
    assert kernel.metadata.shared <= shared_memory(config, problem, target) <= target.shared_memory


@pytest.mark.parametrize(
    ("name", "rows"),
    slow_but(
        [("normed 64", 1024), ("joined 64", 1024)],
        itertools.product(
            ["normed 64", "residual 64", "residual 128", "joined 64"], [MANY_ROWS, 1024]
        ),
    ),
)
def test_chains_with_steps_in_tf32_round_their_operands_and_fit(name, rows):
    kernel, problem, config = kernel_of_steps("sm_90", name, rows, "tf32")
    assert "cvt.rna.tf32.f32" in kernel.asm["ptx"]
    assert spilled_bytes(kernel) <= 64
    target = GPUS["sm_90"].target
    assert kernel.metadata.shared <= shared_memory(config, problem, target) <= target.shared_memory
