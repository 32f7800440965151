"""The MLP of a site, and the GPU that it is planned for. Planner and report read them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from fusion_backend.mlp.record import MLP
from fusion_backend.planning.gpus import Gpu, gpu_of


@dataclass(frozen=True)
class Setting(MLP):
    """The MLP that a legal site is, and the GPU that it is planned for, of which MLPs know nothing.

    Attributes:
        target: that GPU, where it is not the one that ``device`` is.
        frozen: Inductor takes all weights for constants, and its own code packs them once.
    """

    target: Gpu | None = None
    frozen: bool = False

    @property
    def gpu(self) -> Gpu:
        """The GPU that the site would run on; there must be one."""
        return self.target or gpu_of(self.device)

    @property
    def packed(self) -> bool:
        """The weights of both first layers are halves of one."""
        return self.gated and not self.plain_layout and not self.transposed


def rows_of(tensor: torch.Tensor, feature_dim: int = -1) -> Any:
    """Product of all dimensions but the features: an int, or a ``torch.SymInt``."""
    sizes = list(tensor.shape)
    del sizes[feature_dim]
    return math.prod(sizes)
