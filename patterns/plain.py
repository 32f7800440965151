"""The plain MLP: GPT-2, BERT, ViT, T5."""

from __future__ import annotations

import torch
from torch import nn

from fusion_backend.patterns.form import Form, Projection


def _example() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), (torch.randn(4, 8),)


PLAIN = Form(
    name="plain",
    summary="y = W_down · f(W_up x + b_up) + b_down",
    hidden=(Projection(),),
    example=_example,
)
