"""One MLP as data: what a family of kernels is asked about, and what planning decides by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fusion_backend.mlp.operands import Kind


@dataclass(frozen=True)
class MLP:
    """An MLP and the circumstances under which it runs.

    Sizes are ints, or ``torch.SymInt`` where they are symbolic.

    Attributes:
        activation: the canonical text of the expression.
        gated: two projections enter the activation.
        rows: product of all dimensions of the input but the features.
        in_features: width of the input.
        hidden_features: width between the layers.
        out_features: width of the result.
        dtype: of all tensors.
        device: where they are.
        has_bias_up: the up layer has a bias.
        plain_layout: every weight is a whole contiguous ``nn.Linear`` weight.
        training: gradients are recorded through it.
        transposed: a weight is not contiguous as ``(out_features, in_features)``, as those of
            ``Conv1D``, which GPT-2 is built of.
        strided: such a weight is not the transpose of a contiguous one either, or rows of the input
            are not contiguous, or do not start at multiples of 8 elements.
        activated: only the first layers and the activation are fused. ``out_features`` is then that
            of an MLP as wide out as in: the last layer is the same with and without fusion.
        convolution: the layers are 1×1 convolutions of channels-last data.
        operands: the kinds of what enters the activation beside the projections.
    """

    activation: str
    gated: bool
    rows: Any
    in_features: Any
    hidden_features: Any
    out_features: Any
    dtype: torch.dtype
    device: torch.device
    has_bias_up: bool
    plain_layout: bool
    training: bool
    transposed: bool = False
    strided: bool = False
    activated: bool = False
    convolution: bool = False
    operands: tuple[Kind, ...] = ()

    @property
    def widths(self) -> tuple[int, int, int] | None:
        """Input, hidden and output width, or ``None`` where one of them is symbolic."""
        widths = (self.in_features, self.hidden_features, self.out_features)
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
