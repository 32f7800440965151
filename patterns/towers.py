"""Plain MLPs and chains of one input side by side: a policy and its value, twin critics, ensembles.

It is made of sites of other forms, which keep theirs in reports and have one call together: one
kernel runs them all, so the last of them does not wait for the first. What one of them reads must
be there where the first of them ends.
"""

from __future__ import annotations

import torch
from torch import nn

from fusion_backend.patterns.form import Form, Program


class _PolicyAndValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
        self.value = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.policy(x), self.value(x)


def _example() -> Program:
    return _PolicyAndValue(), (torch.randn(4, 8),)


TOWERS = Form(
    name="towers",
    summary="y_t = W_tn · f_tn(… W_t2 · f_t1(W_t1 x + b_t1) + b_t2 …) + b_tn for each tower t",
    hidden=(),
    becomes="towers",
    example=_example,
)
