"""Which MLPs a family of kernels can run. It needs no Triton: any machine can plan for a GPU."""

from __future__ import annotations

import torch

from fusion_backend.kernels.preferences import has_any
from fusion_backend.kernels.problems import MANY_ROWS, Problem, precision
from fusion_backend.kernels.targets import H100, Target, target_of


def can_back_to_back(
    in_features: int,
    hidden_features: int,
    out_features: int,
    gated: bool,
    dtype: torch.dtype,
    target: Target | None = None,
) -> bool:
    """Whether ``launch.back_to_back`` can run an MLP.

    Args:
        in_features: width of x.
        hidden_features: width between the layers.
        out_features: width of y.
        gated: whether there are two first layers.
        dtype: of all tensors.
        target: the GPU; by default the current one, or an H100 if there is none.
    """
    if target is None:
        target = target_of(torch.device("cuda")) if torch.cuda.is_available() else H100
    widths = (in_features, hidden_features, out_features)
    problem = Problem(MANY_ROWS, *widths, gated, dtype, precision(dtype, target))
    return has_any("back_to_back", problem, target)
