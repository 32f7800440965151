"""GPUs to plan for: the one that a tensor is on, or one that is not in this machine.

What is known of a GPU here are the quantities of its data sheet. They decide which kernels fit, and
feed the ``heuristic`` where no measurement speaks.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fusion_backend.errors import OptionError

if TYPE_CHECKING:
    from fusion_backend.kernels.host.targets import Target


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        name: as torch prints it.
        capability: CUDA compute capability; ``(0, 0)`` for AMD.
        shared_memory: how much of it one program can have, in bytes.
        multiprocessors: how many there are.
        gigabytes_per_second: peak of the device memory.
        teraflops: dense half-precision products accumulated in float32, at the peak clock.
        backend: ``cuda`` or ``hip``.
    """

    name: str
    capability: tuple[int, int]
    shared_memory: int
    multiprocessors: int
    gigabytes_per_second: float
    teraflops: float
    backend: str = "cuda"

    @property
    def architecture(self) -> str:
        """What its kernels are compiled for, such as ``sm_90``."""
        if self.backend != "cuda":
            return self.backend
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def model(self) -> str:
        """The short name of its model, such as ``h100`` of "NVIDIA H100 80GB HBM3"."""
        found = re.search(r"\b[A-Z]+\d+[A-Z]*\b", self.name)
        return found[0].lower() if found else ""


# From the vendors' data sheets; shared memory from the CUDA programming guide.
_H100 = Gpu("NVIDIA H100", (9, 0), 232448, 132, 3350, 989)
_KNOWN = {
    "h100": _H100,
    "h200": Gpu("NVIDIA H200", (9, 0), 232448, 132, 4800, 989),
    "a100": Gpu("NVIDIA A100", (8, 0), 166912, 108, 2039, 312),
    "l40s": Gpu("NVIDIA L40S", (8, 9), 101376, 142, 864, 362),
    "b200": Gpu("NVIDIA B200", (10, 0), 232448, 148, 8000, 2250),
    "mi300x": Gpu("AMD Instinct MI300X", (0, 0), 65536, 304, 5300, 1307, backend="hip"),
}
_KNOWN |= {gpu.architecture: gpu for gpu in reversed(_KNOWN.values()) if gpu.backend == "cuda"}

# Half-precision operations a clock and multiprocessor on matrix units, by capability.
_FLOPS_PER_CLOCK = {(8, 0): 2048, (9, 0): 4096, (10, 0): 8192, (10, 3): 8192}
_FLOPS_PER_CLOCK_ELSEWHERE = 1024
_FLOPS_PER_CLOCK_OF_AMD = 2048


def gpu_named(name: str) -> Gpu:
    """The GPU of a short name, such as ``h100``, or of an architecture, such as ``sm_90``.

    Raises:
        OptionError: no such GPU is known; the message lists those that are.
    """
    if not isinstance(name, str) or name.lower() not in _KNOWN:
        raise OptionError(f"target must be one of {', '.join(_KNOWN)}, got {name!r}")
    return _KNOWN[name.lower()]


def gpu_of(device: torch.device) -> Gpu:
    """The GPU that ``device`` is.

    Raises:
        RuntimeError: there is no such GPU.
    """
    return _gpu(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _gpu(index: int) -> Gpu:
    properties: Any = torch.cuda.get_device_properties(index)
    hip = torch.version.hip is not None
    capability = (0, 0) if hip else (properties.major, properties.minor)
    flops = _FLOPS_PER_CLOCK.get(capability, _FLOPS_PER_CLOCK_ELSEWHERE)
    if hip:
        flops = _FLOPS_PER_CLOCK_OF_AMD
    multiprocessors = properties.multi_processor_count
    return Gpu(
        name=properties.name,
        capability=capability,
        shared_memory=properties.shared_memory_per_block
        if hip
        else properties.shared_memory_per_block_optin,
        multiprocessors=multiprocessors,
        # Rates are in kHz, and memory moves data twice a clock.
        gigabytes_per_second=2e-6 * properties.memory_clock_rate * properties.memory_bus_width / 8,
        teraflops=1e-9 * properties.clock_rate * multiprocessors * flops,
        backend="hip" if hip else "cuda",
    )


def kernel_target(gpu: Gpu | None) -> Target | None:
    """What kernels need to know of a GPU, which need not be in this machine."""
    from fusion_backend.kernels.host.targets import Target

    if gpu is None:
        return None
    capability = 10 * gpu.capability[0] + gpu.capability[1]
    return Target(gpu.backend, capability, gpu.shared_memory, gpu.multiprocessors)
