"""What the operators refuse: shapes, dtypes and devices that do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from fusion_backend.mlp import operands as operands_of_f
from fusion_backend.mlp.steps import Steps
from fusion_backend.operators.arguments import Given

_Expected = Iterator[tuple[str, Tensor | None, tuple[Any, ...]]]


def check(given: Given) -> None:
    """Refuse shapes and dtypes that do not fit: a kernel would read beyond its tensors.

    Raises:
        ValueError: as said.
    """
    like = given.first.weight_up
    for name, tensor, shape in _first_layers(given):
        _check_tensor(name, tensor, shape, like, "weight_up")
    operands_of_f.check(given.operands, given.x, like.shape[0])
    for name, tensor, shape in _further(given):
        _check_tensor(name, tensor, shape, like, "weight_up")


def _first_layers(given: Given) -> _Expected:
    x, first = given.x, given.first
    hidden, width = first.weight_up.shape
    yield "x", x, (*x.shape[:-1], width)
    yield "weight_gate", first.weight_gate, (hidden, width)
    yield "bias_gate", first.bias_gate, (hidden,)
    yield "bias_up", first.bias_up, (hidden,)


def _further(given: Given) -> _Expected:
    x, norm = given.x, given.norm
    for weight, bias in given.further:
        out = weight.shape[0]
        yield "weight_down", weight, (out, given.first.weight_up.shape[0])
        yield "bias_down", bias, (out,)
    yield "residual", given.residual, (*x.shape[:-1], given.out_features)
    if norm is not None:
        yield "norm_weight", norm.weight, x.shape[-1:]
        yield "norm_bias", norm.bias, x.shape[-1:]


def check_chain(given: Given) -> None:
    """:func:`check` of layers that are named by their places.

    Raises:
        ValueError: as said.
    """
    x, layers = given.x, ((given.first.weight_up, given.first.bias_up), *given.further)
    widths = (x.shape[-1], *(weight.shape[0] for weight, _ in layers))
    depths = widths[:-1] if given.steps is None else given.steps.depths(widths)
    for i, (weight, bias) in enumerate(layers):
        out = weight.shape[0]
        _check_tensor(f"weights[{i}]", weight, (out, depths[i]), x, "x")
        _check_tensor(f"biases[{i}]", bias, (out,), x, "x")
    if given.steps is not None:
        _check_steps(given, given.steps)


def _check_steps(given: Given, steps: Steps) -> None:
    """Refuse norms and sums of values of other widths."""
    layers = (given.first.weight_up, *(layer.weight for layer in given.further))
    widths = [given.x.shape[-1], *(weight.shape[0] for weight in layers)]
    of_value = [widths[group] for group in steps.group_of]
    for i, step in enumerate(steps.all):
        for read in step.reads:
            if of_value[read] != of_value[i]:
                raise ValueError(
                    f"step {i} must read values of {of_value[i]} features, "
                    f"got {of_value[read]} of value {read}"
                )
    at = [of_value[i] for i, step in enumerate(steps.all) if step.is_norm]
    for i, (norm, width) in enumerate(zip(given.norms, at, strict=True)):
        for j, tensor in enumerate((norm.weight, norm.bias)):
            _check_parameter(f"norms[{2 * i + j}]", tensor, width, given.x)


def _check_parameter(name: str, tensor: Tensor | None, width: Any, x: Tensor) -> None:
    """Refuse a norm's parameter of another shape or device; it has a floating dtype of its own."""
    if tensor is None:
        return
    if tensor.shape != (width,) or not tensor.is_floating_point() or tensor.device != x.device:
        raise ValueError(
            f"{name} must be a floating ({width},) on {x.device}, "
            f"got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        )


def _check_tensor(
    name: str, tensor: Tensor | None, shape: tuple[Any, ...], like: Tensor, name_of_like: str
) -> None:
    """Refuse a tensor of another shape, or of another dtype or device than a second one."""
    if tensor is None:
        return
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    if tensor.dtype != like.dtype or tensor.device != like.device:
        raise ValueError(
            f"{name} must be {like.dtype} on {like.device} as {name_of_like} is, "
            f"got {tensor.dtype} on {tensor.device}"
        )
