"""The gated MLP, with gate and up projection as two layers: Llama, Mistral, Qwen, Gemma, T5 1.1.

Its activation is any pointwise expression of two variables. A third layer of the same input is one
too many.
"""

from __future__ import annotations

import torch
from torch import nn

from fusion_backend.patterns.form import Form, NearMiss, Program, Projection


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 32, bias=False)
        self.up = nn.Linear(8, 32, bias=False)
        self.down = nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class _GatedTwice(_Gated):
    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Linear(8, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.silu(self.gate(x)) * self.up(x)
        return self.down(torch.sigmoid(self.outer(x)) * hidden)  # type: ignore[no-any-return]


def _example() -> Program:
    return _Gated(), (torch.randn(4, 8),)


def _has_three_layers() -> Program:
    return _GatedTwice(), (torch.randn(4, 8),)


GATED = Form(
    name="gated",
    summary="y = W_down · f(W_gate x + b_gate, W_up x + b_up) + b_down",
    hidden=(Projection("g"), Projection("u", linear=True)),
    example=_example,
    near_miss=NearMiss(_has_three_layers, reason="unknown-form"),
)
