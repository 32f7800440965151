"""Three and more linear layers joined by activations: value heads, NeRF, recommender towers."""

from __future__ import annotations

import torch
from torch import nn

from fusion_backend.patterns.form import Form, Projection


def _example() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    layers = (nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))
    return nn.Sequential(*layers), (torch.randn(4, 8),)


CHAIN = Form(
    name="chain",
    summary="y = W_n · f_n(… W_2 · f_1(W_1 x + b_1) + b_2 …) + b_n",
    hidden=(Projection(),),
    example=_example,
)
