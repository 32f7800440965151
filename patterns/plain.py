"""The plain MLP: GPT-2, BERT, ViT, T5.

Its activation is any pointwise expression of one variable: elements of the hidden value do not mix.
"""

from __future__ import annotations

import torch
from torch import nn

from fusion_backend.patterns.form import Form, NearMiss, Program, Projection


def _example() -> Program:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), (torch.randn(4, 8),)


def _mixes_features() -> Program:
    layers = (nn.Linear(8, 32), nn.Softmax(dim=-1), nn.Linear(32, 8))
    return nn.Sequential(*layers), (torch.randn(4, 8),)


PLAIN = Form(
    name="plain",
    summary="y = W_down · f(W_up x + b_up) + b_down",
    hidden=(Projection("x"),),
    links=True,
    example=_example,
    near_miss=NearMiss(_mixes_features, reason="non-pointwise"),
)
