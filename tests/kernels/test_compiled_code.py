"""What the kernels compile to, for each kind of GPU and each configuration that is taken there."""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from fusion_backend.compat import tf32
from fusion_backend.kernels.host.candidates import candidates
from fusion_backend.kernels.host.configs import Config, Kernel, fits, shared_memory
from fusion_backend.kernels.host.problems import MANY_ROWS, Problem, precision
from fusion_backend.kernels.host.targets import H100
from fusion_backend.kernels.preferences import chosen
from kernel_cases import compiled
from kernel_compilation import (
    ELSEWHERE,
    GPUS,
    compile_for,
    invocation,
    registers,
    spilled_bytes,
    touched_in_flight,
)
from repetition import slow_but, telling

pytestmark = compiled

# Of a multiprocessor, and what it keeps for itself of each program's shared memory.
REGISTERS = 65536
RESERVED_SHARED_MEMORY = 1024

ACTIVATIONS = {False: "gelu_tanh(x)", True: "silu(g) * u"}


class Launch(NamedTuple):
    """A kernel for a GPU; without a configuration, the one that is taken."""

    gpu: str
    family: Kernel
    problem: Problem
    config: Config | None = None
    residual: bool = False
    norm: str = ""

    def __str__(self) -> str:
        problem, config = self.problem, self.config
        kind = "gated" if problem.gated else "plain"
        words = [self.gpu, self.family, kind, str(problem.dtype)[6:], str(problem.rows)]
        words.append(str(problem.hidden_features))
        if self.family == "back_to_back":
            words.append(str(problem.in_features))
        words.extend([f"{problem.exact_rows}rows"] * (problem.exact_rows > 0))
        if config is not None:
            words.append(f"{config.block_m}x{config.block_n}x{config.block_k}")
        words.extend(["tma"] * self.taken.tma + ["residual"] * self.residual)
        words.extend([self.norm.partition("(")[0]] * bool(self.norm))
        return "-".join(words)

    @property
    def taken(self) -> Config:
        return chosen(self.family, self.problem, GPUS[self.gpu].target, self.config)


def wide(rows: int, gated: bool, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Problem:
    return Problem(rows, 768, 3072, 768, gated, dtype, **more)


def narrow(width: int, gated: bool, rows: int = MANY_ROWS) -> Problem:
    return Problem(rows, width, 4 * width, width, gated, torch.bfloat16)


def streams(rows: int, widths: tuple[int, int], gated: bool) -> dict[Kernel, Problem]:
    """The problems of both kernels of a stream of (width, hidden)."""
    width, hidden = widths
    first = Problem(rows, width, hidden, 0, gated, torch.bfloat16)
    return {
        "stream_hidden": first,
        "stream_out": first._replace(in_features=0, out_features=width, gated=False),
    }


# On each GPU what compiles fastest, for the default run.
SMALL = [Launch(gpu, "back_to_back", narrow(16, False, rows=16)) for gpu in ELSEWHERE]


def stream_launches():
    """Launches of streams: few rows, narrow and wide."""
    for rows in (1, 16, 64, 1024):
        for widths, gated in [((768, 3072), False), ((4096, 14336), True)]:
            for family, problem in streams(rows, widths, gated).items():
                yield Launch("sm_90", family, problem)
    for gpu, rows in itertools.product(ELSEWHERE, (1, 16, 64)):
        for family, problem in streams(rows, (4096, 14336), True).items():
            yield Launch(gpu, family, problem)


def half_launches():
    """Launches in 16 bits, of which none may spill."""
    both = (False, True)
    for rows, family, gated in itertools.product(
        (MANY_ROWS, 1024, 64, 16), ("epilogue", "hidden_gradient"), both
    ):
        yield Launch("sm_90", family, wide(rows, gated))
    for gpu, family, gated in itertools.product(ELSEWHERE, ("epilogue", "hidden_gradient"), both):
        yield Launch(gpu, family, wide(MANY_ROWS, gated))
    for width, gated, residual in itertools.product((64, 128, 256), both, both):
        yield Launch("sm_90", "back_to_back", narrow(width, gated), residual=residual)
    for width, gated in itertools.product((64, 128, 256), both):
        many = width <= (64 if gated else 128)  # where norms gain
        rows, norm = (MANY_ROWS, "layer_norm(1e-05)") if many else (1024, "rms_norm(1e-06)")
        yield Launch("sm_90", "back_to_back", narrow(width, gated, rows), None, True, norm)
    for gpu, gated in itertools.product(ELSEWHERE, both):
        yield Launch(gpu, "back_to_back", narrow(256, gated), residual=gated)
        yield Launch(gpu, "back_to_back", narrow(64, gated))
    yield from SMALL
    for family, gated, hidden in itertools.product(
        ("epilogue", "hidden_gradient"), both, (8192, 16384)
    ):
        yield Launch("sm_90", family, wide(1024, gated)._replace(hidden_features=hidden))
    for width, gated in itertools.product((64, 128, 256), both):
        yield Launch("sm_90", "back_to_back", narrow(width, gated, rows=1024))
    yield Launch("sm_90", "back_to_back", narrow(64, False, rows=16))
    for family in ("epilogue", "hidden_gradient"):
        yield Launch("sm_90", family, wide(MANY_ROWS, True, torch.float16))
    for width, gated, rows in itertools.product((64, 128, 256), both, (2000, 5000)):
        yield Launch("sm_90", "back_to_back", narrow(width, gated)._replace(exact_rows=rows))
    for gated in both:
        for config in candidates("epilogue", wide(64, gated)):
            yield Launch("sm_90", "epilogue", wide(64, gated), config)


STREAMS = [*stream_launches()]


def described_launches():
    """Launches that load by tensor descriptors."""
    for rows, gated in itertools.product((1024, MANY_ROWS), (False, True)):
        problem = Problem(rows, 4096, 16384, 0, gated, torch.bfloat16, tma=True)
        launch = Launch("sm_90", "epilogue", problem)
        if launch.taken.tma:
            yield launch
    yield Launch("sm_90", "epilogue", wide(MANY_ROWS, False, tma=True))


DESCRIBED = [*described_launches()]
HALF = [*half_launches(), *STREAMS, *DESCRIBED]
MATRICES = [launch for launch in HALF if launch.problem.rows > 1]
SINGLE = [
    Launch("sm_90", "epilogue", wide(MANY_ROWS, True, torch.float32)),
    Launch("sm_90", "epilogue", wide(MANY_ROWS, True, torch.float32, precision="tf32x3")),
    Launch("gfx942", "hidden_gradient", wide(MANY_ROWS, False, torch.float32)),
]


def shown(launch):
    problem, config = launch.problem, launch.taken
    yield launch.family
    yield "gated", problem.gated
    yield problem.dtype, problem.precision
    yield "tma", config.tma
    yield from (launch.residual, launch.norm, ("flatten", config.flatten))
    yield launch.family, ("resident", config.resident)


QUICK = telling([each for each in (*HALF, *SINGLE) if each.gpu == "sm_90"], shown) + SMALL


def each(launches):
    return pytest.mark.parametrize("launch", slow_but(QUICK, launches), ids=str)


@functools.cache
def kernel_of(launch: Launch) -> Any:
    target = GPUS[launch.gpu].target
    added = {"residual": launch.residual, "norm": launch.norm}
    call = invocation(launch.family, launch.problem, target, launch.taken, **added)
    return compile_for(launch.gpu, call, ACTIVATIONS[launch.problem.gated])


@each(HALF)
def test_no_register_is_spilled(launch):
    assert spilled_bytes(kernel_of(launch)) == 0


@each([*HALF, *SINGLE])
def test_shared_memory_is_no_more_than_foreseen_and_available(launch):
    target = GPUS[launch.gpu].target
    foreseen = shared_memory(launch.family, launch.taken, launch.problem, target)
    assert kernel_of(launch).metadata.shared <= foreseen <= target.shared_memory


RESIDENT = [launch for launch in HALF if launch.family == "back_to_back" and launch.taken.resident]


@each(RESIDENT)
def test_resident_programs_fit_on_a_multiprocessor_together(launch):
    kernel, config = kernel_of(launch), launch.taken
    threads = 32 * config.num_warps
    assert config.programs * threads * 8 * -(-registers(kernel) // 8) <= REGISTERS
    each = kernel.metadata.shared + RESERVED_SHARED_MEMORY
    assert config.programs * each <= GPUS[launch.gpu].target.shared_memory + RESERVED_SHARED_MEMORY


@each(MATRICES)
def test_products_run_on_the_matrix_units(launch):
    assembly = kernel_of(launch).asm
    if launch.gpu == "gfx942":
        assert "v_mfma" in assembly["amdgcn"]
        return
    tall = launch.taken.block_m >= 64  # fewer rows do not fill Hopper's and Blackwell's units
    units = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}
    assert units.get(launch.gpu if tall else "", "mma.sync") in assembly["ptx"]


@each(DESCRIBED)
def test_operands_are_loaded_by_the_copy_engine(launch):
    assembly = kernel_of(launch).asm["ptx"]
    assert "cp.async.bulk.tensor" in assembly
    assert "cp.async.cg" not in assembly
    assert ("cp.async.bulk.tensor.2d.global" in assembly) == launch.taken.flatten


@pytest.mark.parametrize(
    "activation",
    slow_but(
        ["gelu_tanh(x)"],
        ["gelu_tanh(x)", "gelu(x)", "relu(x)", "silu(x)", "x * sigmoid(1.702 * x)"],
    ),
)
def test_accumulators_are_reset_when_the_matrix_units_have_written_them(activation):
    """Triton leaves the order to ptxas where the loop over tiles is flattened."""
    launch = Launch("sm_90", "epilogue", wide(MANY_ROWS, False, tma=True))
    assert launch.taken.flatten
    call = invocation("epilogue", launch.problem, H100, launch.taken)
    assert touched_in_flight(compile_for("sm_90", call, activation)) == []


@pytest.mark.parametrize("allowed", [True, False])
def test_tf32_is_used_if_and_only_if_it_is_allowed(allowed):
    with tf32.multiplying_in_tf32(allowed):
        problem = wide(MANY_ROWS, True, torch.float32, precision=precision(torch.float32, H100))
    assembly = kernel_of(Launch("sm_90", "epilogue", problem)).asm["ptx"]
    assert (".tf32" in assembly) == allowed


@pytest.mark.parametrize("gpu", GPUS)
def test_the_configuration_taken_fits_on_every_gpu(gpu):
    target = GPUS[gpu].target
    for rows, gated, dtype in itertools.product(
        (16, 64, 1024, MANY_ROWS), (False, True), (torch.bfloat16, torch.float16, torch.float32)
    ):
        for family in ("epilogue", "hidden_gradient"):
            problem = wide(rows, gated, dtype)
            assert fits(family, chosen(family, problem, target), problem, target)
