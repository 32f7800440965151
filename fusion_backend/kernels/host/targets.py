"""What kernels need to know of the device they are for."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from fusion_backend.compat.triton_features import triton_is_interpreted


class Target(NamedTuple):
    """A device to configure kernels for.

    Attributes:
        backend: what Triton compiles for, ``cuda`` or ``hip``; or ``interpreter``.
        capability: CUDA compute capability as one number, such as 90; 0 for others.
        shared_memory: how much of it one program can have, in bytes.
        multiprocessors: how many there are.
    """

    backend: str
    capability: int
    shared_memory: int
    multiprocessors: int

    @property
    def has_tf32(self) -> bool:
        """Whether there are matrix units for fp32 rounded to TF32."""
        return self.capability >= 80

    @property
    def runs_triton(self) -> bool:
        """Whether Triton compiles for it; for older GPUs it uses no matrix units, and spills."""
        return self.backend != "cuda" or self.capability >= 80

    @property
    def multiplies_shared_memory(self) -> bool:
        """Whether matrix units read operands in shared memory (wgmma, tcgen05), not registers."""
        return 90 <= self.capability < 120

    @property
    def has_tma(self) -> bool:
        """Whether a copy engine moves whole tiles, and kernels that use it were run there."""
        return self.capability // 10 == 9 or self.backend == "interpreter"

    @property
    def has_fast_activations(self) -> bool:
        """Whether there are the instructions that ``activation.emit`` prints for 16 bits."""
        return self.capability >= 75

    def accuracy_of_activations(self, dtype: torch.dtype) -> torch.dtype:
        """What ``activation.emit`` is asked for, of results that are rounded to ``dtype``."""
        return dtype if self.has_fast_activations and dtype.itemsize == 2 else torch.float32


H100 = Target("cuda", 90, 232448, 132)
INTERPRETER = Target("interpreter", 0, 1 << 30, 1)


def target_of(device: torch.device) -> Target:
    """The target that tensors on ``device`` are for.

    Raises:
        RuntimeError: there is no such GPU.
    """
    if triton_is_interpreted():
        return INTERPRETER
    return _gpu(torch.cuda.current_device() if device.index is None else device.index)


def here() -> Target:
    """The current GPU, or an H100 if there is none."""
    return target_of(torch.device("cuda")) if torch.cuda.is_available() else H100


@functools.cache
def _gpu(index: int) -> Target:
    properties: Any = torch.cuda.get_device_properties(index)
    multiprocessors = properties.multi_processor_count
    if torch.version.hip is not None:
        return Target("hip", 0, properties.shared_memory_per_block, multiprocessors)
    capability = 10 * properties.major + properties.minor
    return Target("cuda", capability, properties.shared_memory_per_block_optin, multiprocessors)
