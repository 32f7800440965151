"""How leading dimensions change between the input of an MLP, its operands and its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from fusion_backend.fusion.match import Match
from fusion_backend.fusion.views.convolutions import features_last, is_channels_last
from fusion_backend.fusion.views.node import same_size, tensor_of
from fusion_backend.fusion.views.operand import Entering

ResultShape = (
    Literal["same", "flatten", "channels", "channels copied", "one position"] | tuple[int, ...]
)


def result_shape(match: Match) -> ResultShape | None:
    """How the operator's result becomes the site's.

    ``"same"``: it is; ``"flatten"``: leading dimensions are joined; a tuple: reshape to these
    sizes; ``None``: only sizes unknown at compile time would say.

    Of 1×1 convolutions, whose result must have the strides that it had: ``"channels"``: the
    features become the second dimension, in a view or, ``"channels copied"``, in a contiguous copy;
    ``"one position"``: dimensions of size 1 follow the features; ``None``: neither input nor result
    is channels-last.
    """
    source, result = tensor_of(match.sources[0].linear.input), tensor_of(match.result)
    if source is None or result is None:
        return None
    if match.down.positions:
        return _shape_of_convolution(source, result)
    return _reshape(source, result)


def operand_shape(match: Match, operand: Entering) -> ResultShape | None:
    """How an operand with a value for each hidden one gets the leading dimensions of the input.

    ``"channels"``: its second dimension, the features of a convolution, becomes the last.
    """
    source, value = tensor_of(match.sources[0].linear.input), tensor_of(operand.node)
    if source is None or value is None:
        return None
    if match.down.positions:
        return "channels"
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


def _shape_of_convolution(source: torch.Tensor, result: torch.Tensor) -> ResultShape | None:
    """A channels-last weight makes the result channels-last, whatever the input is."""
    if _has_strides(result, features_last(result.dim() - 2)):
        return "channels"
    if not is_channels_last(source) or not _has_strides(result, range(result.dim())):
        return None
    if all(same_size(size, 1) for size in result.shape[2:]):
        return "one position"
    return "channels copied"


def _has_strides(tensor: torch.Tensor, order: Sequence[int]) -> bool:
    """Whether the strides are those of a new tensor whose dimensions lie in memory in ``order``."""
    expected: Any = 1
    for dim in reversed(order):
        if not same_size(tensor.stride(dim), expected):
            return False
        size = tensor.shape[dim]
        expected = expected * (1 if isinstance(size, int) and size == 0 else size)
    return True


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Whether a tensor is known to be laid out as a new one, without adding a guard."""
    return _has_strides(tensor, range(tensor.dim()))
