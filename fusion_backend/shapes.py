"""How the operator's result, shaped after the input of the MLP, becomes the site's result."""

from __future__ import annotations

from typing import Any, Literal

import torch

from fusion_backend.matching import Match
from fusion_backend.views import same_size, tensor_of

ResultShape = Literal["same", "flatten"] | tuple[int, ...]


def result_shape(match: Match) -> ResultShape | None:
    """How the operator's result becomes the site's.

    ``"same"``: it is; ``"flatten"``: leading dimensions are joined; a tuple: reshape to these
    sizes; ``None``: only sizes unknown at compile time would say.
    """
    source, result = tensor_of(match.sources[0].linear.input), tensor_of(match.result)
    if source is None or result is None:
        return None
    if source.dim() == result.dim() and all(map(same_size, source.shape[:-1], result.shape[:-1])):
        return "same"
    if result.dim() == 2 and source.dim() > 2:
        return "flatten"
    if all(isinstance(size, int) for size in result.shape):
        return tuple(result.shape)
    return None


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Whether a tensor is known to be contiguous, without adding a guard."""
    expected: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not same_size(size, 1) and not same_size(stride, expected):
            return False
        expected = expected * (1 if isinstance(size, int) and size == 0 else size)
    return True
