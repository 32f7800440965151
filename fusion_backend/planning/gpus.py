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
from fusion_backend.options import nearest

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
        gfx: what AMD calls the architecture, such as ``gfx942``; empty for NVIDIA.
    """

    name: str
    capability: tuple[int, int]
    shared_memory: int
    multiprocessors: int
    gigabytes_per_second: float
    teraflops: float
    backend: str = "cuda"
    gfx: str = ""

    @property
    def architecture(self) -> str:
        """What its kernels are compiled for, such as ``sm_90`` or ``gfx942``."""
        if self.backend != "cuda":
            return self.gfx or self.backend
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def model(self) -> str:
        """The short name of its model, such as ``h100`` of "NVIDIA H100 80GB HBM3"."""
        found = re.search(r"\b[A-Z]+\d+[A-Z]*\b", self.name)
        return found[0].lower() if found else ""


# From the data sheets; shared memory from the CUDA programming guide. An architecture stands
# for the first of its GPUs here.
_HOPPER_MEMORY, _AMPERE_MEMORY, _SMALL_MEMORY = 232448, 166912, 101376
KNOWN = {
    "h100": Gpu("NVIDIA H100", (9, 0), _HOPPER_MEMORY, 132, 3350, 989),
    "h200": Gpu("NVIDIA H200", (9, 0), _HOPPER_MEMORY, 132, 4800, 989),
    "a100": Gpu("NVIDIA A100", (8, 0), _AMPERE_MEMORY, 108, 2039, 312),
    "a10": Gpu("NVIDIA A10", (8, 6), _SMALL_MEMORY, 72, 600, 125),
    "a6000": Gpu("NVIDIA RTX A6000", (8, 6), _SMALL_MEMORY, 84, 768, 155),
    "rtx3090": Gpu("NVIDIA GeForce RTX 3090", (8, 6), _SMALL_MEMORY, 82, 936, 71),
    "orin": Gpu("Jetson AGX Orin", (8, 7), _AMPERE_MEMORY, 16, 205, 43),
    "l40s": Gpu("NVIDIA L40S", (8, 9), _SMALL_MEMORY, 142, 864, 362),
    "l4": Gpu("NVIDIA L4", (8, 9), _SMALL_MEMORY, 58, 300, 121),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", (8, 9), _SMALL_MEMORY, 128, 1008, 165),
    "t4": Gpu("NVIDIA T4", (7, 5), 65536, 40, 320, 65),
    "b200": Gpu("NVIDIA B200", (10, 0), _HOPPER_MEMORY, 148, 8000, 2250),
    "b300": Gpu("NVIDIA B300", (10, 3), _HOPPER_MEMORY, 148, 8000, 2250),
    "thor": Gpu("Jetson AGX Thor", (11, 0), _HOPPER_MEMORY, 20, 273, 258),
    "rtx5090": Gpu("NVIDIA GeForce RTX 5090", (12, 0), _SMALL_MEMORY, 170, 1792, 209),
    "gb10": Gpu("NVIDIA GB10", (12, 1), _SMALL_MEMORY, 48, 273, 125),
    "mi300x": Gpu("AMD Instinct MI300X", (0, 0), 65536, 304, 5300, 1307, "hip", "gfx942"),
    # One of the two GPUs of the module: programs see two.
    "mi250x": Gpu("AMD Instinct MI250X", (0, 0), 65536, 110, 1638, 191, "hip", "gfx90a"),
}
KNOWN |= {gpu.architecture: gpu for gpu in reversed(KNOWN.values())}

# Half-precision operations a clock and multiprocessor on matrix units that accumulate in float32,
# by capability. GeForce cards do half of what other cards with the same chips do.
_FLOPS_PER_CLOCK = {(8, 0): 2048, (8, 7): 2048, (9, 0): 4096}
_FLOPS_PER_CLOCK |= {(10, 0): 8192, (10, 3): 8192, (11, 0): 8192}
_FLOPS_PER_CLOCK_ELSEWHERE = 1024
_FLOPS_PER_CLOCK_OF_AMD = {"gfx90a": 1024}
_FLOPS_PER_CLOCK_OF_AMD_ELSEWHERE = 2048


def known_gpus() -> tuple[str, ...]:
    """The names that :func:`gpu_named` lists: models first, then architectures."""
    return tuple(KNOWN)


def gpu_named(name: str) -> Gpu:
    """The GPU of a short name, such as ``h100``, or of an architecture, such as ``sm_90``.

    Case, blanks, hyphens and the maker's words do not matter: ``RTX 4090`` is ``rtx4090``.

    Raises:
        OptionError: no such GPU is known; the message lists those that are.
    """
    known = {_bare(each): gpu for each, gpu in KNOWN.items()}
    if not isinstance(name, str):
        raise OptionError(
            f"target must be the name of a GPU, got {type(name).__name__}; give an argument of the "
            f"model that has this name by functools.partial(model, target=…)"
        )
    if _bare(name) not in known:
        near = nearest(name, KNOWN)
        raise OptionError(f"target must be one of {', '.join(KNOWN)}, got {name!r}{near}")
    return known[_bare(name)]


def _bare(name: str) -> str:
    """A name without what people write in different ways."""
    words = re.sub(r"[^a-z0-9]", " ", name.lower()).split()
    makers = {"nvidia", "geforce", "amd", "instinct", "tesla", "rtx"}
    return "".join(word for word in words if word not in makers).removeprefix("rtx")


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
    gfx = properties.gcnArchName.partition(":")[0] if hip else ""
    capability = (0, 0) if hip else (properties.major, properties.minor)
    flops = flops_per_clock(properties.name, capability, gfx)
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
        gfx=gfx,
    )


def flops_per_clock(name: str, capability: tuple[int, int], gfx: str = "") -> int:
    """Half-precision operations a clock and multiprocessor, accumulated in float32.

    Args:
        name: of the GPU, as torch prints it.
        capability: of NVIDIA's.
        gfx: the architecture of AMD's.
    """
    if gfx:
        return _FLOPS_PER_CLOCK_OF_AMD.get(gfx, _FLOPS_PER_CLOCK_OF_AMD_ELSEWHERE)
    flops = _FLOPS_PER_CLOCK.get(capability, _FLOPS_PER_CLOCK_ELSEWHERE)
    return flops // 2 if "GeForce" in name else flops


def kernel_target(gpu: Gpu | None) -> Target | None:
    """What kernels need to know of a GPU, which need not be in this machine."""
    from fusion_backend.kernels.host.targets import Target

    if gpu is None:
        return None
    capability = 10 * gpu.capability[0] + gpu.capability[1]
    return Target(gpu.backend, capability, gpu.shared_memory, gpu.multiprocessors)
