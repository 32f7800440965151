"""1×1 convolutions: linear layers over the channels of every position."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fusion_backend.fusion.views.linear import LinearView
from fusion_backend.fusion.views.node import argument, operation, same_size, tensor_of

# Where groups stand among the arguments; ``aten.convolution`` has ``transposed`` before them.
_GROUPS = {"conv1d": 6, "conv2d": 6, "conv3d": 6, "convolution": 8}


def convolution_view(node: Any) -> LinearView | None:
    """The linear layer over channels that a convolution is, or ``None``.

    It is one if its kernel has one element, and neither stride nor padding nor groups. Its
    input is ``(N, in_features, *positions)``, its weight ``(out_features, in_features, 1, …)``.
    """
    if not isinstance(node, Node) or tensor_of(node) is None or operation(node) not in _GROUPS:
        return None
    source, weight = argument(node, 0, "input"), argument(node, 1, "weight")
    read, kernel = tensor_of(source), tensor_of(weight)
    if read is None or kernel is None or read.dim() != kernel.dim():
        return None  # without a batch, the first dimension is the features
    if not all(same_size(size, 1) for size in kernel.shape[2:]) or not _is_simple(node):
        return None
    bias = argument(node, 2, "bias")
    return LinearView(node, source, weight, bias, transposed=False, positions=kernel.dim() - 2)


def _is_simple(node: Node) -> bool:
    """Whether every result comes of one position of the input, and of all channels there."""
    padding = argument(node, 4, "padding", 0)
    return (
        _is(argument(node, 3, "stride", 1), 1)
        and (padding in ("same", "valid") or _is(padding, 0))
        and argument(node, _GROUPS[operation(node)], "groups", 1) == 1
        and not (operation(node) == "convolution" and argument(node, 6, "transposed", False))
    )


def _is(given: Any, number: int) -> bool:
    """Whether all elements of an argument, which may be one number for all, are ``number``."""
    return all(item == number for item in (given if isinstance(given, (tuple, list)) else (given,)))


def features_last(positions: int) -> tuple[int, ...]:
    """The permutation of ``(N, features, *positions)`` to ``(N, *positions, features)``."""
    return (0, *range(2, positions + 2), 1)


def features_second(positions: int) -> tuple[int, ...]:
    """The permutation of ``(N, *positions, features)`` to ``(N, features, *positions)``."""
    return (0, positions + 1, *range(1, positions + 1))


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether the features of each position of ``(N, features, *positions)`` stand together.

    Known without adding a guard; then ``(N, *positions, features)`` is a contiguous view.
    """
    order, expected = features_last(tensor.dim() - 2), 1
    for dim in reversed(order):
        if not same_size(tensor.shape[dim], 1) and not same_size(tensor.stride(dim), expected):
            return False
        expected = expected * tensor.shape[dim]
    return True
