"""The parameters of one MLP, in the order in which every operator and kernel takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

from torch import Tensor

from fusion_backend.mlp.expression.nodes import Expression


class Weights(NamedTuple):
    """Weights in ``nn.Linear`` layout ``(out_features, in_features)``, with any strides.

    ``weight_gate`` is absent in a plain MLP; every bias may be absent.
    """

    weight_gate: Tensor | None
    bias_gate: Tensor | None
    weight_up: Tensor
    bias_up: Tensor | None
    weight_down: Tensor
    bias_down: Tensor | None

    def by_kind(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """The weights that there are, and a bias or ``None`` for each."""
        pairs = zip(self[::2], self[1::2], strict=True)
        matrices, biases = zip(*((w, b) for w, b in pairs if w is not None), strict=True)
        return list(matrices), list(biases)


class Layer(NamedTuple):
    """A linear layer: a weight ``(out_features, in_features)`` and a bias ``(out_features,)``."""

    weight: Tensor
    bias: Tensor | None


class Tower(NamedTuple):
    """Linear layers that follow each other: one of several chains of the same input.

    Attributes:
        weights: at least two, each ``(out_features, in_features)``.
        biases: one a weight, ``(out_features,)`` or ``None``.
        activations: between the layers, functions of ``x``: one less than weights.
    """

    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    activations: Sequence[Expression]


class FirstLayer(NamedTuple):
    """Those of them that are before the activation."""

    weight_gate: Tensor | None
    bias_gate: Tensor | None
    weight_up: Tensor
    bias_up: Tensor | None


def is_transposed(weight: Tensor | None) -> TypeGuard[Tensor]:
    """Whether there is a weight that is the transpose of a contiguous matrix, as in ``Conv1D``."""
    if weight is None or weight.dim() != 2 or weight.is_contiguous():
        return False
    return weight.t().is_contiguous()
