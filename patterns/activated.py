"""Of an MLP of any form, the layers before the activation, and the activation.

They are fused without the last layer where a norm stands before that (EVA-02, the prediction heads
of BERT) or something else reads the hidden value (LoRA of the last layer, auxiliary outputs). Of
a norm before the activation nothing is fused.
"""

from __future__ import annotations

import torch
from torch import nn

from fusion_backend.patterns.form import Form, NearMiss, Program


def _example() -> Program:
    layers = (nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))
    return nn.Sequential(*layers), (torch.randn(4, 8),)


def _norm_first() -> Program:
    layers = (nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))
    return nn.Sequential(*layers), (torch.randn(4, 8),)


ACTIVATED = Form(
    name="activated",
    summary="h = f(W_up x + b_up), or h = f(W_gate x + b_gate, W_up x + b_up)",
    hidden=(),
    becomes="activated_linear",
    example=_example,
    near_miss=NearMiss(_norm_first, reason="norm-between"),
)
