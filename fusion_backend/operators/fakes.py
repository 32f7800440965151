"""What the operators return, as far as shapes, dtypes and strides go.

Each function named after an operator is its implementation for fake and meta tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusion_backend.mlp import operands as operands_of_f
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.weights import FirstLayer, Weights
from fusion_backend.operators.arguments import Arguments, BackwardArguments
from fusion_backend.operators.dispatch import recomputes
from fusion_backend.operators.gradients import empty_weight_gradient


def check(
    x: Tensor,
    weights: Weights,
    operands: Sequence[Tensor],
    residual: Tensor | None = None,
    norm: Norm | None = None,
) -> None:
    """Refuse shapes and dtypes that do not fit: a kernel would read beyond its tensors."""
    hidden, out = weights.weight_up.shape[0], weights.weight_down.shape[0]
    check_first_layer(x, FirstLayer(*weights[:4]), operands)
    check_tensor("weight_down", weights.weight_down, (out, hidden), like=weights.weight_up)
    check_tensor("bias_down", weights.bias_down, (out,), like=weights.weight_up)
    check_tensor("residual", residual, (*x.shape[:-1], out), like=weights.weight_up)
    if norm is not None:
        check_tensor("norm_weight", norm.weight, (x.shape[-1],), like=weights.weight_up)
        check_tensor("norm_bias", norm.bias, (x.shape[-1],), like=weights.weight_up)


def check_first_layer(x: Tensor, first: FirstLayer, operands: Sequence[Tensor]) -> None:
    """:func:`check` for the layers before the activation."""
    hidden, width = first.weight_up.shape
    expected: list[tuple[str, Tensor | None, tuple[Any, ...]]] = [
        ("x", x, (*x.shape[:-1], width)),
        ("weight_gate", first.weight_gate, (hidden, width)),
        ("bias_gate", first.bias_gate, (hidden,)),
        ("bias_up", first.bias_up, (hidden,)),
    ]
    for name, tensor, shape in expected:
        check_tensor(name, tensor, shape, like=first.weight_up)
    operands_of_f.check(operands, x, hidden)


def check_tensor(
    name: str,
    tensor: Tensor | None,
    shape: tuple[Any, ...],
    like: Tensor,
    name_of_like: str = "weight_up",
) -> None:
    """Refuse a tensor of another shape, or of another dtype or device than a second one."""
    if tensor is None:
        return
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    if tensor.dtype != like.dtype or tensor.device != like.device:
        raise ValueError(
            f"{name} must be {like.dtype} on {like.device} as {name_of_like} is, "
            f"got {tensor.dtype} on {tensor.device}"
        )


def mlp(
    x: Tensor,
    *arguments: Any,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    norm: str = "",
) -> Tensor:
    """``(..., out)``."""
    given = Arguments(x, *arguments)
    before = Norm.of(norm, norm_weight, norm_bias)
    check(x, given.weights, given.operands or (), residual, before)
    return x.new_empty((*x.shape[:-1], given.weight_down.shape[0]))


def mlp_forward(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``(..., out)`` and two of ``(..., hidden)``, the first of them empty where no gate is."""
    given = Arguments(x, *arguments)
    weights, preact = given.weights, (*x.shape[:-1], given.weight_up.shape[0])
    if recomputes(given.plan, x, weights, given.operands or ()):
        gate, up = (
            x.new_empty(0 if bias is None else bias.shape)
            for bias in (weights.bias_gate, weights.bias_up)
        )
        return mlp(x, *arguments), gate, up
    return (
        mlp(x, *arguments),
        x.new_empty(0 if weights.weight_gate is None else preact),
        x.new_empty(preact),
    )


def mlp_backward(*arguments: Any) -> list[Tensor]:
    """Each gradient as its tensor is; empty where it is not asked for."""
    given = BackwardArguments(*arguments)
    x, weight_up, weight_down = given.x, given.weight_up, given.weight_down
    hidden, out = weight_up.shape[0], weight_down.shape[0]
    like_gate = weight_up if given.weight_gate is None else given.weight_gate
    found = (
        x.new_empty(x.shape),
        empty_weight_gradient(like_gate),
        x.new_empty(hidden),
        empty_weight_gradient(weight_up),
        x.new_empty(hidden),
        empty_weight_gradient(weight_down),
        x.new_empty(out),
        *(operand.new_empty(operand.shape) for operand in given.operands),
    )
    return [
        tensor if need else x.new_empty(0) for tensor, need in zip(found, given.needs, strict=True)
    ]
