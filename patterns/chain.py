"""Three and more linear layers joined by activations: value heads, NeRF, recommender towers.

It is made of sites of forms that can be links, each of which begins with the layer that ends the
one before. Only the last value leaves the chip, so nothing else may read one in between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fusion_backend.patterns.form import Form, NearMiss, Program


class _Returning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.last = nn.Sequential(nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> Any:
        middle = self.first(x)
        return self.last(middle), middle


def _example() -> Program:
    layers = (nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))
    return nn.Sequential(*layers), (torch.randn(4, 8),)


def _returns_a_value_between() -> Program:
    return _Returning(), (torch.randn(4, 8),)


CHAIN = Form(
    name="chain",
    summary="y = W_n · f_n(… W_2 · f_1(W_1 x + b_1) + b_2 …) + b_n",
    hidden=(),
    becomes="chain",
    example=_example,
    near_miss=NearMiss(_returns_a_value_between, reason="hidden-escapes"),
)
