"""A GPU that is not in this machine, for a process that compiles for it and runs nothing.

What torch and Triton ask a driver for is answered from a data sheet. That changes both for good, so
it is for a process of its own.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch


def pretend(properties: Mapping[str, Any], architecture: str) -> None:
    """Let torch and Triton believe that there is one GPU.

    Args:
        properties: as ``torch.cuda.get_device_properties`` has them.
        architecture: such as ``sm_90`` or ``gfx942``.
    """
    import triton
    from torch._subclasses import fake_tensor

    def zero(*arguments: Any) -> int:
        return 0

    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": zero,
        "get_device_properties": lambda *device: SimpleNamespace(**properties),
        "_exchange_device": zero,
        "_maybe_exchange_device": zero,
    }
    for name, value in answers.items():
        setattr(torch.cuda, name, value)
    private: Any = fake_tensor
    private.init_gpu_context = zero
    if not architecture.startswith("sm_"):
        version: Any = torch.version
        version.hip = version.hip or "pretended"
    driver: Any = triton.runtime.driver
    driver._active = SimpleNamespace(
        get_current_target=lambda: _triton_target(architecture),
        get_current_device=zero,
        get_current_stream=zero,
    )


def _triton_target(architecture: str) -> Any:
    from triton.backends.compiler import GPUTarget

    if architecture.startswith("sm_"):
        return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    return GPUTarget("hip", architecture, 64)


def compiled(source: Any, architecture: str, options: Mapping[str, Any]) -> Any:
    """A kernel of Triton's compiled for an architecture (``triton.CompiledKernel``)."""
    import triton

    return triton.compile(source, target=_triton_target(architecture), options=dict(options))


class Resources(NamedTuple):
    """What one program of a kernel takes; ``None`` where nothing here can read it.

    Attributes:
        registers: of each thread.
        spilled: bytes of registers that each thread keeps in memory.
        shared_memory: in bytes.
        warps: of a program.
        machine_code: in bytes.
    """

    registers: int | None
    spilled: int | None
    shared_memory: int
    warps: int
    machine_code: int


def resources(kernel: Any) -> Resources:
    """What a compiled kernel takes, by the tools that come with Triton."""
    metadata = kernel.metadata
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        registers, spilled = _number(r"\.vgpr_count:\s*(\d+)", text), None
        count = _number(r"\.vgpr_spill_count:\s*(\d+)", text)
        spilled = None if count is None else 4 * count
        code = kernel.asm["hsaco"]
    else:
        code = kernel.asm["cubin"]
        text = _resource_usage(code)
        registers, spilled = _number(r"\bREG:(\d+)", text), _number(r"\bSTACK:(\d+)", text)
    return Resources(registers, spilled, metadata.shared, metadata.num_warps, len(code))


def _number(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return int(found[1]) if found else None


def _resource_usage(cubin: bytes) -> str:
    """What ``cuobjdump`` says; empty where Triton came without it."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
