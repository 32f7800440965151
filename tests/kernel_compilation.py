"""Compiles the launches of kernels for GPUs that are not there, and reads what came out."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusion_backend.kernels.back_to_back.compiled import source_of
from fusion_backend.kernels.back_to_back.launch import back_to_back_invocation
from fusion_backend.kernels.codegen.specialize import specialize
from fusion_backend.kernels.epilogue.gradient_launch import hidden_gradient_invocation
from fusion_backend.kernels.epilogue.launch import epilogue_invocation
from fusion_backend.kernels.host.configs import Config, Kernel
from fusion_backend.kernels.host.problems import Problem
from fusion_backend.kernels.host.targets import Target
from fusion_backend.kernels.invocations import How, Invocation, cdiv
from fusion_backend.kernels.stream.launch import stream_hidden_invocation, stream_out_invocation
from fusion_backend.mlp.expression import parse
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.operands import Kind
from fusion_backend.mlp.weights import FirstLayer, Weights
from fusion_backend.planning.gpus import gpu_named, kernel_target


class HopperDriver:
    """In place of Triton's driver: it only says what to compile for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def symbolic_size(mode: FakeTensorMode, name: str, value: int) -> torch.SymInt:
    """A size of fake tensors that is not known; ``value`` is an example of it.

    Not for use within the mode, in which the tensor here would be fake before it gets the size.
    """
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    meta = torch.empty(value, 1, device="meta")
    source = ConstantSource(name)
    size = mode.from_tensor(meta, symbolic_context=context, source=source).shape[0]
    assert isinstance(size, torch.SymInt)
    return size


ROWS = 1000


@dataclass(frozen=True)
class GPU:
    target: Target
    triton_target: GPUTarget


def _gpu(architecture: str) -> GPU:
    """The known GPU of an architecture."""
    target = kernel_target(gpu_named(architecture))
    assert target is not None
    if target.backend == "hip":
        return GPU(target, GPUTarget("hip", architecture, 64))
    return GPU(target, GPUTarget("cuda", target.capability, 32))


#: Those that kernels are compiled for in tests.
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
GPUS = {architecture: _gpu(architecture) for architecture in ARCHITECTURES}
ELSEWHERE = tuple(each for each in ARCHITECTURES if each != "sm_90")


def invocation(
    family: Kernel,
    problem: Problem,
    target: Target,
    config: Config,
    kinds: Sequence[Kind] = (),
    residual: bool = False,
    norm: str = "",
) -> Invocation:
    """The launch for tensors without contents.

    As it is where most is stored and loaded: in training, plain layers with biases, gated ones (as
    usual) without. ``kinds`` are those of the activation's operands, whose gradients are wanted; a
    ``residual`` is for ``back_to_back`` only.
    """

    def matrix(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=problem.dtype, device="meta")

    inner, hidden, out = problem[1:4]
    operands = [_operand(kind, hidden, problem.dtype) for kind in kinds]
    gated, how = problem.gated, How(problem.precision, config, target)
    preact = matrix(ROWS, hidden)
    gate_preact = preact if gated else None
    x = matrix(ROWS, inner)
    first = FirstLayer(
        matrix(hidden, inner) if gated else None,
        None,
        matrix(hidden, inner),
        None if gated else matrix(hidden),
    )
    if family == "epilogue":
        return epilogue_invocation(x, first, (preact, gate_preact, preact), how, operands)
    if family == "stream_hidden":
        return stream_hidden_invocation(x, first, preact, how, operands)
    if family == "stream_out":
        tensors = (preact, matrix(out, hidden), None if gated else matrix(out))
        return stream_out_invocation(*tensors, matrix(ROWS, out), how)
    if family == "hidden_gradient":
        tensors = (matrix(ROWS, out), matrix(out, hidden), gate_preact, preact)
        results = (gate_preact, preact, preact)
        gradients = [_gradient(kind, hidden, config, problem.dtype) for kind in kinds]
        return hidden_gradient_invocation(tensors, results, how, operands, gradients)
    added = matrix(ROWS, out) if residual else None
    parameters = (matrix(inner), matrix(inner) if norm.startswith("layer_norm") else None)
    before = Norm.of(norm, *parameters) if norm else None
    weights, y = Weights(*first, matrix(out, hidden), matrix(out)), matrix(ROWS, out)
    return back_to_back_invocation(x, weights, y, how, operands, residual=added, norm=before)


def _operand(kind: Kind, hidden: int, dtype: torch.dtype) -> Tensor:
    if kind == "seed":
        return torch.empty((), dtype=torch.int64, device="meta")
    shapes = {"scalar": (), "vector": (hidden,), "elementwise": (ROWS, hidden)}
    return torch.empty(shapes[kind], dtype=dtype, device="meta")


def _gradient(kind: Kind, hidden: int, config: Config, dtype: torch.dtype) -> Tensor | None:
    if kind == "seed":
        return None
    if kind == "elementwise":
        return torch.empty((ROWS, hidden), dtype=dtype, device="meta")
    blocks = cdiv(ROWS, config.block_m)
    return torch.empty((blocks, hidden), dtype=torch.float32, device="meta")


def source(
    launch: Invocation, activation: str, target: Target, kinds: Sequence[Kind] = ()
) -> ASTSource:
    """What Triton would compile for a launch whose tensors are aligned."""
    accuracy = target.accuracy_of_activations(_dtype(launch))
    wanted = [i for i in range(len(kinds)) if launch.arguments.get(f"grad_p{i}") is not None]
    kernel = specialize(launch.template, parse(activation), accuracy, tuple(kinds), tuple(wanted))
    return source_of(kernel, launch)


def compile_for(gpu: str, launch: Invocation, activation: str, kinds: Sequence[Kind] = ()) -> Any:
    """The compiled kernel (``triton.CompiledKernel``)."""
    code = source(launch, activation, GPUS[gpu].target, kinds)
    options = {"num_warps": launch.config.num_warps, "num_stages": launch.config.num_stages}
    return triton.compile(code, target=GPUS[gpu].triton_target, options=options)


def spilled_bytes(kernel: Any) -> int:
    """Bytes of registers that each thread keeps in memory."""
    if "amdgcn" in kernel.asm:
        return 4 * int(re.search(r"\.vgpr_spill_count:\s*(\d+)", kernel.asm["amdgcn"])[1])
    return _usage(kernel, "STACK")


def registers(kernel: Any) -> int:
    """Registers of each thread, on NVIDIA."""
    return _usage(kernel, "REG")


def _usage(kernel: Any, resource: str) -> int:
    report = _read_by("cuobjdump", "-res-usage", kernel)
    return int(re.search(rf"{resource}:(\d+)", report)[1])


def _read_by(name: str, option: str, kernel: Any) -> str:
    """What one of NVIDIA's tools, of those that come with Triton, says of a kernel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    if not tool.exists():
        pytest.skip(f"{tool} is not there to read the machine code")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [tool, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def copied_by_inductor(kernel: Any, folder: Path) -> ModuleType:
    """A module with the copy of a kernel, and of all that it calls, that Inductor makes."""
    from torch._inductor.codegen.wrapper import (
        user_defined_triton_kernel_transitive_closure_source_code as closure,
    )

    imports = (
        "import triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice"
    )
    file = folder / "copied.py"
    file.write_text(f"{imports}\n\n@triton.jit\n{closure(kernel)}")
    spec = importlib.util.spec_from_file_location("copied", file)
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    return copied


def products_and_waits(kernel: Any) -> tuple[int, int]:
    """How many instructions for sm_90 start products, and how many wait for some to be finished."""
    code = "\n".join(_machine_code(kernel))
    return code.count("HGMMA"), code.count("WARPGROUP.DEPBAR")


def touched_in_flight(kernel: Any) -> list[str]:
    """Instructions for sm_90 that touch an accumulator while matrix units may still write to it."""
    lines = _machine_code(kernel)
    labels = {line: at for at, line in enumerate(lines) if line.startswith(".L")}
    accumulators: set[int] = set()
    for line in lines:
        if product := re.search(r"HGMMA\.\d+x(\d+)x\d+\S* R(\d+)", line):
            columns, first = map(int, product.groups())
            accumulators |= {*range(first, first + columns // 2)}  # 64 rows by 128 threads
    assert accumulators
    found, seen, pending = set(), set(), [(0, False)]
    while pending:
        at, in_flight = pending.pop()
        if at >= len(lines) or (at, in_flight) in seen:
            continue
        seen.add((at, in_flight))
        line = lines[at]
        if "HGMMA" in line:
            in_flight = True
        elif "WARPGROUP.DEPBAR.LE gsb0, 0x0" in line:
            in_flight = False
        elif in_flight and accumulators & {int(r) for r in re.findall(r"\bR(\d+)", line)}:
            found.add(line)
        if target := re.search(r"BRA\S* .*\((\.L\w+)\)", line):
            pending.append((labels[f"{target[1]}:"], in_flight))
        if line.startswith("@") or not re.match(r"(BRA|EXIT|RET)\b", line):
            pending.append((at + 1, in_flight))
    return sorted(found)


def _machine_code(kernel: Any) -> list[str]:
    """Labels and instructions."""
    listing = _read_by("nvdisasm", "-c", kernel)
    return re.findall(r"^(?:\s*/\*[0-9a-f]+\*/\s+)?(@?\S.*?;|\.L\w+:)$", listing, re.MULTILINE)


def _dtype(launch: Invocation) -> torch.dtype:
    operand: Tensor = next(iter(launch.arguments.values()))
    return operand.dtype
