"""The operators that stand for launches on Hopper: inference, training and the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusion_backend.kernels.family import Call, Shapes

_FORWARD = f"{__package__}.launch_sm90"
_BACKWARD = f"{__package__}.gradient_launch_sm90"


def _saved(
    sizes: Sequence[Any], dtype: torch.dtype, rest: Sequence[Any], divide: Callable[..., Any]
) -> Shapes:
    """Postact, and the pre-activations, side by side if the last of ``rest`` says so."""
    (rows, _), (hidden, _), gate, *_ = sizes
    widths = [2 * hidden] if rest[-1] else [hidden] * (1 if gate is None else 2)
    return [((rows, width), dtype) for width in (hidden, *widths)]


def _hidden_gradients(
    sizes: Sequence[Any], dtype: torch.dtype, rest: Sequence[Any], divide: Callable[..., Any]
) -> Shapes:
    """Gradients of the pre-activations, postact, and sums over rows: of these, and of the first."""
    from fusion_backend.kernels.epilogue.gradient_launch_sm90 import BLOCK_M, SUMS_OF_BLOCK, Form

    (rows, _), (out, hidden), gate, preact, *_ = sizes
    _, joined, has_sums, has_output_sums = rest
    form = Form(joined or gate is not None, has_sums, has_output_sums, transposed=False)
    blocks = divide(rows + (BLOCK_M - 1), BLOCK_M) * SUMS_OF_BLOCK
    widths = [size[1] for size in (gate, preact) if size is not None]
    grads = [((rows, width), dtype) for width in (*widths, hidden)]
    return [*grads, (form.size_of_sums(blocks, out, hidden), torch.float32)]


def _of_input(
    sizes: Sequence[Any], dtype: torch.dtype, rest: Sequence[Any], divide: Callable[..., Any]
) -> Shapes:
    """The gradient of x."""
    return [((sizes[0][0], sizes[1][1]), dtype)]


CALLS = (
    Call(
        "epilogue",
        "Tensor x, Tensor weight_up, Tensor? weight_gate, Tensor? bias_up, Tensor? bias_gate, "
        "Tensor? residual, str activation",
        _FORWARD,
        transposed="plain",
    ),
    Call(
        "epilogue_saving",
        "Tensor x, Tensor weight_up, Tensor? weight_gate, Tensor? bias_up, Tensor? bias_gate, "
        "str activation, bool joined",
        _FORWARD,
        "epilogue_saving_caller",
        "prepare_epilogue_saving",
        transposed="plain",
        results=_saved,
    ),
    Call(
        "hidden_gradient",
        "Tensor grad_output, Tensor weight_down, Tensor? preact_gate, Tensor preact_up, "
        "str activation, bool joined, bool has_sums, bool has_output_sums",
        _BACKWARD,
        "hidden_gradient_caller",
        "prepare_hidden_gradient",
        transposed="always",
        results=_hidden_gradients,
        spends=(2, 3),
    ),
    Call(
        "input_gradient",
        "Tensor grad_preact, Tensor weight_gate, Tensor weight_up, Tensor? grad_up",
        _FORWARD,
        "input_gradient_caller",
        "prepare_input_gradient",
        results=_of_input,
    ),
)
