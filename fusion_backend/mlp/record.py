"""One MLP as data: what a family of kernels is asked about, and what planning decides by.

An MLP has one layer after its activation. A chain has several, with an activation before each. Of
an MLP that is fused up to its hidden value there is none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from fusion_backend.mlp.expression.nodes import Expression
from fusion_backend.mlp.operands import Kind


def in_one_text(activations: Iterable[Expression]) -> str:
    """Activations as they are reported: one of them where all are the same."""
    return ", ".join(dict.fromkeys(map(str, activations)))


@dataclass(frozen=True)
class MLP:
    """An MLP and the circumstances under which it runs.

    Sizes are ints, or ``torch.SymInt`` where they are symbolic.

    Attributes:
        activations: the canonical expressions after each layer but the last, at least one; of a
            chain with ``steps``, those of its steps.
        gated: two projections enter the activation.
        rows: product of all dimensions of the input but the features.
        in_features: width of the input.
        hidden_features: width of the first hidden value.
        further_features: width after each layer that follows the first activation.
        dtype: of all tensors.
        device: where they are.
        has_bias_up: the up layer has a bias.
        plain_layout: every weight is a whole contiguous ``nn.Linear`` weight.
        training: gradients are recorded through it.
        transposed: a weight is not contiguous as ``(out_features, in_features)``, as those of
            ``Conv1D``, which GPT-2 is built of.
        strided: such a weight is not the transpose of a contiguous one either, or rows of the input
            are not contiguous, or do not start at multiples of 8 elements.
        convolution: the layers are 1×1 convolutions of channels-last data.
        operands: the kinds of what enters the activation beside the projections.
        first_frozen: no weight of a first layer needs a gradient, so training does not keep the
            input.
        steps: of a chain, what it computes, as :mod:`fusion_backend.mlp.steps` writes it; nothing
            where that is its layers and an activation between each two.
    """

    activations: tuple[Expression, ...]
    gated: bool
    rows: Any
    in_features: Any
    hidden_features: Any
    further_features: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    has_bias_up: bool
    plain_layout: bool
    training: bool
    transposed: bool = False
    strided: bool = False
    convolution: bool = False
    operands: tuple[Kind, ...] = ()
    first_frozen: bool = False
    steps: str = ""

    @property
    def activated(self) -> bool:
        """Only the first layers and the activation are fused."""
        return not self.further_features

    @property
    def is_chain(self) -> bool:
        """There are three and more layers that follow each other."""
        return len(self.further_features) > 1

    @property
    def activation(self) -> str:
        """The activations as :func:`in_one_text`."""
        return in_one_text(self.activations)

    @property
    def texts(self) -> tuple[str, ...]:
        """Each activation as a graph's argument has it."""
        return tuple(map(str, self.activations))

    @property
    def out_features(self) -> Any:
        """Width of the result.

        Where only the first layers are fused it is that of an MLP as wide out as in: the last layer
        is the same with and without fusion.
        """
        return self.further_features[-1] if self.further_features else self.in_features

    @property
    def widths(self) -> tuple[int, int, int] | None:
        """Input, first hidden and output width, or ``None`` where one of them is symbolic."""
        widths = (self.in_features, self.hidden_features, self.out_features)
        return widths if all(isinstance(width, int) for width in widths) else None

    @property
    def layer_widths(self) -> tuple[int, ...] | None:
        """Width of the input and after each layer, or ``None`` where one of them is symbolic."""
        widths = (self.in_features, self.hidden_features, *self.further_features)
        return widths if all(isinstance(width, int) for width in widths) else None

    @property
    def rows_can_be_compared(self) -> bool:
        """Whether comparisons of ``rows`` have an answer now (and at most add a guard)."""
        return isinstance(self.rows, int) or self.rows.node.hint is not None

    @property
    def likely_rows(self) -> int:
        """The number of rows that the graph is compiled with; they must be comparable."""
        return self.rows if isinstance(self.rows, int) else int(self.rows.node.hint)

    @property
    def known_rows(self) -> int | None:
        """The number of rows, or ``None`` where it is symbolic."""
        return self.rows if isinstance(self.rows, int) else None

    @property
    def kinds(self) -> str:
        """The kinds of its operands, for a sentence."""
        return ", ".join(sorted(set(self.operands)))
