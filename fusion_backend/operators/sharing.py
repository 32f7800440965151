"""``torch.ops.fusedmlp.share``: a rank's share of what all ranks together add once.

Under tensor parallelism each rank has a partial sum of the last layer's result, and its bias is to
be added once. DTensor divides a replicated tensor by the number of ranks where it becomes partial,
and so does this. The gradient of each rank's copy is whole, not divided: that of a sum of equal
shares.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusion_backend.compat.dispatcher import below_autograd


def register(library: torch.library.Library) -> None:
    """Define the operator in a library."""
    library.define("share(Tensor tensor, int ranks) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("share", _divided, "CompositeExplicitAutograd")
    library.impl("share", _Share.apply, "Autograd")


def _divided(tensor: Tensor, ranks: int) -> Tensor:
    return tensor / ranks


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int) -> Tensor:
        with below_autograd():
            return _divided(tensor, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
