"""The gated MLP, with gate and up projection as two layers: Llama, Mistral, Qwen, Gemma, T5 1.1."""

from __future__ import annotations

import torch
from torch import nn

from fusion_backend.patterns.form import Form, Projection


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 32, bias=False)
        self.up = nn.Linear(8, 32, bias=False)
        self.down = nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def _example() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return _Gated(), (torch.randn(4, 8),)


GATED = Form(
    name="gated",
    summary="y = W_down · f(W_gate x + b_gate, W_up x + b_up) + b_down",
    hidden=(Projection(), Projection()),
    example=_example,
)
