"""What the tests of chains share: random chains and their results by PyTorch's operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend.mlp.expression import Expression, evaluate, parse


class ChainCase(NamedTuple):
    """The operands of one chain; a bias that does not exist is None."""

    x: Tensor
    weights: list[Tensor]
    biases: list[Tensor | None]
    activations: list[Expression]

    def to(self, dtype: torch.dtype) -> ChainCase:
        biases = [None if bias is None else bias.to(dtype) for bias in self.biases]
        weights = [weight.to(dtype) for weight in self.weights]
        return ChainCase(self.x.to(dtype), weights, biases, self.activations)


def random_chain(
    rows: int,
    widths: Sequence[int],
    activations: Sequence[str] = ("gelu(x)",),
    *,
    dtype: torch.dtype = torch.float32,
    biases: Sequence[bool] = (True,),
    device: str = "cpu",
) -> ChainCase:
    """A chain of these widths; the last activation and the last of ``biases`` go on to the end."""
    layers = len(widths) - 1

    def tensor(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, device=device)).to(dtype)

    def extended(values, length):
        return [values[min(i, len(values) - 1)] for i in range(length)]

    weights = [tensor(widths[i + 1], widths[i], scale=widths[i] ** -0.5) for i in range(layers)]
    has_bias = extended(biases, layers)
    return ChainCase(
        tensor(rows, widths[0]),
        weights,
        [tensor(widths[i + 1]) if has_bias[i] else None for i in range(layers)],
        [parse(text) for text in extended(activations, layers - 1)],
    )


def eager_chain(case: ChainCase) -> Tensor:
    """What ``chain_launch.chain`` computes, by PyTorch's operators."""
    value = case.x
    for i, (weight, bias) in enumerate(zip(case.weights, case.biases, strict=True)):
        if i:
            value = evaluate(case.activations[i - 1], {"x": value})
        value = F.linear(value, weight, bias)
    return value


def random_towers(
    rows: int,
    all_widths: Sequence[Sequence[int]],
    activations: Sequence[str] = ("gelu(x)",),
    **others: Any,
) -> list[ChainCase]:
    """Chains of one input; see :func:`random_chain`."""
    cases = [random_chain(rows, widths, activations, **others) for widths in all_widths]
    return [case._replace(x=cases[0].x) for case in cases]
