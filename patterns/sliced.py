"""The plain MLP on some features of its first layer, whose others nothing reads."""

from __future__ import annotations

import torch
from torch import nn

from fusion_backend.patterns.form import Form, PackedProjection


class _Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)[..., :32]))  # type: ignore[no-any-return]


def _example() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return _Sliced(), (torch.randn(4, 8),)


SLICED = Form(
    name="sliced",
    summary="[h, …] = W_up x + b_up;  y = W_down · f(h) + b_down",
    hidden=(PackedProjection(),),
    example=_example,
)
