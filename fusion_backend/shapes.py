"""How leading dimensions change between the input of an MLP, its operands and its result."""

from __future__ import annotations

from typing import Literal

import torch

from fusion_backend.entering import Entering
from fusion_backend.matching import Match
from fusion_backend.views import same_size, tensor_of

ResultShape = Literal["same", "flatten"] | tuple[int, ...]


def result_shape(match: Match) -> ResultShape | None:
    """How the operator's result becomes the site's.

    ``"same"``: it is; ``"flatten"``: leading dimensions are joined; a tuple: reshape to these
    sizes; ``None``: only sizes unknown at compile time would say.
    """
    source, result = tensor_of(match.sources[0].linear.input), tensor_of(match.down.node)
    return None if source is None or result is None else _reshape(source, result)


def operand_shape(match: Match, operand: Entering) -> ResultShape | None:
    """How an operand with a value for each hidden one gets the leading dimensions of the input."""
    source, value = tensor_of(match.sources[0].linear.input), tensor_of(operand.node)
    if source is None or value is None:
        return None
    shape = _reshape(value, source)
    return (*shape[:-1], match.down.in_features) if isinstance(shape, tuple) else shape


def _reshape(source: torch.Tensor, result: torch.Tensor) -> ResultShape | None:
    if source.dim() == result.dim() and all(map(same_size, source.shape[:-1], result.shape[:-1])):
        return "same"
    if result.dim() == 2 and source.dim() > 2:
        return "flatten"
    if all(isinstance(size, int) for size in result.shape):
        return tuple(result.shape)
    return None
