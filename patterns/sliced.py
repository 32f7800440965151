"""The plain MLP on some features of its first layer, whose others nothing reads.

Where something reads the others, the layer would be computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fusion_backend.patterns.form import Form, NearMiss, PackedProjection, Program


class _Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)[..., :32]))  # type: ignore[no-any-return]


class _Read(_Sliced):
    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.up(x)
        return self.down(nn.functional.gelu(hidden[..., :32])), hidden[..., 32:]


def _example() -> Program:
    return _Sliced(), (torch.randn(4, 8),)


def _others_are_read() -> Program:
    return _Read(), (torch.randn(4, 8),)


SLICED = Form(
    name="sliced",
    summary="[h, …] = W_up x + b_up;  y = W_down · f(h) + b_down",
    hidden=(PackedProjection("x"),),
    example=_example,
    near_miss=NearMiss(_others_are_read, reason="hidden-escapes"),
)
