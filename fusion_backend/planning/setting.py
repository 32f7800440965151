"""The circumstances of a site: sizes, dtype, device, training. Planner and report read them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fusion_backend.fusion.matching import Match
from fusion_backend.fusion.views.linear import LinearView
from fusion_backend.fusion.views.node import tensor_of
from fusion_backend.mlp.operands import Kind
from fusion_backend.mlp.weights import is_transposed
from fusion_backend.planning.gpus import Gpu, gpu_of


@dataclass(frozen=True)
class Setting:
    """The circumstances under which a legal site runs.

    Sizes are ints, or ``torch.SymInt`` where they are symbolic.

    Attributes:
        activation: the canonical text of the expression.
        gated: two projections enter the activation.
        rows: product of all dimensions of the input but the features.
        has_bias_up: the up layer has a bias.
        plain_layout: every weight is a whole contiguous ``nn.Linear`` weight.
        transposed: a weight is not contiguous as ``(out_features, in_features)``, as those of
            ``Conv1D``, which GPT-2 is built of.
        strided: such a weight is not the transpose of a contiguous one either, or rows of the input
            are not contiguous, or do not start at multiples of 8 elements.
        training: gradients are recorded through the site.
        activated: only the first layers and the activation are fused. ``out_features`` is then that
            of an MLP as wide out as in: the last layer is the same with and without fusion.
        convolution: the layers are 1×1 convolutions of channels-last data.
        operands: the kinds of what enters the activation beside the projections.
        target: the GPU to plan for, where it is not the one that ``device`` is.
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
    target: Gpu | None = None

    @classmethod
    def of(cls, match: Match, grad_mode: bool, target: Gpu | None = None) -> Setting:
        """The setting of a legal site.

        Args:
            match: the site.
            grad_mode: gradients are recorded where it runs.
            target: the GPU to plan for instead of the device that the tensors are on.
        """
        up, down = match.sources[-1], match.down
        source, result = _tensor(up.linear.input), _tensor(match.result)
        others = [layer for layer in match.layers if not _matrix(layer).is_contiguous()]
        parts = [s.linear for s in match.sources if s.part is not None]
        return cls(
            activation=match.activation,
            gated=len(match.sources) == 2,
            rows=rows_of(source, down.feature_dim),
            in_features=up.linear.in_features,
            hidden_features=down.in_features,
            out_features=(up.linear.in_features if match.part else down.out_features),
            dtype=result.dtype,
            device=result.device if target is None else torch.device("cuda"),
            has_bias_up=up.linear.bias is not None,
            plain_layout=not others and not parts,
            transposed=bool(others),
            strided=any(layer in parts or not is_transposed(_matrix(layer)) for layer in others)
            or (down.positions == 0 and _has_strided_rows(source)),
            training=grad_mode and any(map(_requires_grad, _read(match))),
            activated=match.part is not None,
            convolution=down.positions > 0,
            operands=tuple(operand.kind for operand in match.operands),
            target=target,
        )

    @property
    def gpu(self) -> Gpu:
        """The GPU that the site would run on; there must be one."""
        return self.target or gpu_of(self.device)

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


def rows_of(tensor: torch.Tensor, feature_dim: int = -1) -> Any:
    """Product of all dimensions but the features: an int, or a ``torch.SymInt``."""
    sizes = list(tensor.shape)
    del sizes[feature_dim]
    return math.prod(sizes)


def _tensor(node: Node) -> torch.Tensor:
    tensor = tensor_of(node)
    assert tensor is not None  # linear_view gives no view of an untraced node
    return tensor


def _matrix(layer: LinearView) -> torch.Tensor:
    """Its weight as ``(out_features, in_features)``; that of a convolution as it is."""
    weight = _tensor(layer.weight)
    return weight.t() if layer.transposed else weight


def _has_strided_rows(x: torch.Tensor) -> bool:
    """Whether x, as rows, is not contiguous along them or not aligned; ``False`` if not known."""
    if x.dim() < 2 or not all(isinstance(n, int) for n in (*x.shape, *x.stride())):
        return False
    from fusion_backend.kernels.host.called import has_pieces

    return not has_pieces(x.flatten(0, -2))


def _read(match: Match) -> Iterator[Node]:
    for layer in match.layers:
        yield from layer.operands()
    yield from (operand.node for operand in match.operands if operand.kind != "seed")


def _requires_grad(node: Node) -> bool:
    return _tensor(node).requires_grad
