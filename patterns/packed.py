"""The gated MLP with gate and up projection packed in one weight: Phi-3, GLM, diffusers' GEGLU.

Both variables are slices of the features of one layer. Slices of its rows are another program.
"""

from __future__ import annotations

import torch
from torch import nn

from fusion_backend.patterns.form import Form, NearMiss, PackedProjection, Program


class _Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(8, 64, bias=False)
        self.down = nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up)  # type: ignore[no-any-return]


class _PackedRows(_Packed):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(64, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=0)
        return self.down(nn.functional.silu(gate) * up)  # type: ignore[no-any-return]


def _example() -> Program:
    return _Packed(), (torch.randn(4, 8),)


def _packs_rows() -> Program:
    return _PackedRows(), (torch.randn(4, 8),)


PACKED = Form(
    name="packed",
    summary="[g, u] = W_packed x + b_packed;  y = W_down · f(g, u) + b_down",
    hidden=(PackedProjection("g"), PackedProjection("u", linear=True)),
    example=_example,
    near_miss=NearMiss(_packs_rows, reason="non-pointwise"),
)
