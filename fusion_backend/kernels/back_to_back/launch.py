"""Launches: a whole narrow MLP, and its backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusion_backend.compat.inductor import compiles_to_cpp
from fusion_backend.compat.tensors import is_traced
from fusion_backend.kernels.back_to_back import launch_sm90 as hopper
from fusion_backend.kernels.back_to_back.gradient_kernel import fusedmlp_narrow_gradient
from fusion_backend.kernels.back_to_back.kernel import fusedmlp_back_to_back
from fusion_backend.kernels.codegen.activation import exact_functions
from fusion_backend.kernels.host import called, targets
from fusion_backend.kernels.host.configs import Config, narrow_gradient_config, padded
from fusion_backend.kernels.host.problems import back_to_back_problem, measured_kind
from fusion_backend.kernels.invocations import (
    How,
    Invocation,
    cdiv,
    dense,
    is_empty,
    is_wide,
    operand_arguments,
    row_units,
    run,
    strides,
    with_known_columns,
)
from fusion_backend.kernels.preferences import chosen
from fusion_backend.mlp.expression import Expression
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.weights import Weights


def back_to_back(
    x: Tensor,
    weights: Weights,
    activation: Expression,
    operands: Sequence[Tensor] = (),
    config: Config | None = None,
    residual: Tensor | None = None,
    norm: Norm | None = None,
) -> Tensor:
    """A whole MLP in one launch, for widths of which ``support.can_back_to_back`` holds.

    Args:
        x: ``(rows, in)``; bfloat16, float16 or float32, like all others; any strides.
        weights: of any strides; a plain MLP has no ``weight_gate``.
        activation: of ``g`` and ``u`` with a gate, else of ``x``.
        operands: of the activation: scalars ``()``, vectors ``(hidden,)``, tensors
            ``(rows, hidden)`` and seeds ``()``; at most four.
        config: how to launch; ``None`` chooses by shape.
        residual: ``(rows, out)`` or ``None``; added before the result is rounded.
        norm: of the rows of x, which comes before the first layers; ``None`` for none.

    Returns:
        ``(rows, out)``, contiguous, with the dtype of x.

    Raises:
        ValueError: the layers are too wide, or ``config`` cannot run on this GPU.
    """
    weight_gate, _, weight_up, bias_up, weight_down, bias_down = weights
    shape = (x.shape[0], weight_down.shape[0])
    if is_empty(x):
        return x.new_empty(shape)
    target = targets.target_of(x.device)
    problem = back_to_back_problem(x, weight_gate, weight_up, weight_down, target, operands)
    of_norm = (None, None) if norm is None else (norm.weight, norm.bias)
    parameters = (weight_up, weight_down, bias_up, bias_down, residual, *of_norm)
    plain = config is None and not operands and hopper.runs(problem, x.shape[0], target)
    if plain and called.suits(x, *parameters) and not compiles_to_cpp():
        call = torch.ops.fusedmlp.back_to_back if is_traced(x) else hopper.back_to_back
        before = "" if norm is None else norm.text
        result: Tensor = call(x, *parameters, str(activation), before)
        return result
    if not operands and residual is None and norm is None:
        problem = measured_kind(problem, x, 0, weight_gate, weight_up, weight_down)
    y = x.new_empty(shape)
    how = How(problem.precision, chosen("back_to_back", problem, target, config), target)
    invocation = back_to_back_invocation(x, weights, y, how, operands, residual, norm)
    run(invocation, activation, target, operands)
    return y


def narrow_gradient(
    x: Tensor,
    grad_output: Tensor,
    weight_up: Tensor,
    bias_up: Tensor | None,
    weight_down: Tensor,
    activation: Expression,
    needs_x: bool,
) -> tuple[Tensor | None, Tensor]:
    """The backward pass of an MLP that :func:`support.can_recompute`.

    Args:
        x: ``(rows, in)``; any strides, as all.
        grad_output: ``(rows, out)``.
        weight_up: ``(hidden, in)``.
        bias_up: ``(hidden,)`` or ``None``.
        weight_down: ``(out, hidden)``.
        activation: as in the forward pass.
        needs_x: whether the gradient of x is computed.

    Returns:
        ``grad_x`` ``(rows, in)`` or ``None``, and a matrix in float32 whose rows add up to the
        gradients of weight_up, weight_down, bias_up and bias_down, one after the other.
    """
    hidden, inner, out = *map(int, weight_up.shape), int(weight_down.shape[0])
    grad_x = x.new_empty((x.shape[0], inner)) if needs_x else None
    width = hidden * (inner + out + 1) + out
    if is_empty(x):
        return grad_x, x.new_zeros((1, width), dtype=torch.float32)
    target = targets.target_of(x.device)
    exact = exact_functions(activation, x.dtype) > 0
    config = narrow_gradient_config(inner, hidden, out, exact)
    sums = x.new_empty((_programs(x, config, target), width), dtype=torch.float32)
    tensors = (x, grad_output, weight_up, bias_up, weight_down, grad_x, sums)
    run(narrow_gradient_invocation(*tensors, config), activation, target)
    return grad_x, sums


def _programs(x: Tensor, config: Config, target: targets.Target) -> int:
    """How many programs share the rows: no more than there are tiles, where that is known."""
    rows: Any = x.shape[0]
    most = target.multiprocessors * max(config.programs, 1)
    return min(most, int(cdiv(rows, config.block_m))) if isinstance(rows, int) else most


def back_to_back_invocation(
    x: Tensor,
    weights: Weights,
    y: Tensor,
    how: How,
    operands: Sequence[Tensor] = (),
    residual: Tensor | None = None,
    norm: Norm | None = None,
) -> Invocation:
    """The launch of ``back_to_back``, into ``y``."""
    x, config = with_known_columns(x), how.config
    weight_gate, bias_gate, weight_up, bias_up, weight_down, bias_down = weights
    (hidden, inner), out = weight_up.shape, weight_down.shape[0]
    units, unit = row_units(x)
    gate, up, down = strides(weight_gate), strides(weight_up), strides(weight_down)
    block_in, block_out = padded(inner), padded(out)
    arguments = {
        "x": x,
        "norm_weight": None if norm is None else dense(norm.weight),
        "norm_bias": None if norm is None else dense(norm.bias),
        "weight_gate": weight_gate,
        "bias_gate": dense(bias_gate),
        "weight_up": weight_up,
        "bias_up": dense(bias_up),
        "weight_down": weight_down,
        "bias_down": dense(bias_down),
        "residual": dense(residual),
        "y": y,
        **operand_arguments(operands),
        "rows": x.shape[0],
        "x_row_units": units,
        "X_ROW_UNIT": unit,
        "X_COLUMN_STRIDE": x.stride(1),
        "GATE_ROW_STRIDE": gate[0],
        "GATE_COLUMN_STRIDE": gate[1],
        "UP_ROW_STRIDE": up[0],
        "UP_COLUMN_STRIDE": up[1],
        "DOWN_ROW_STRIDE": down[0],
        "DOWN_COLUMN_STRIDE": down[1],
        "IN": inner,
        "HIDDEN": hidden,
        "OUT": out,
        "WIDE": is_wide(
            (x.stride(), (config.block_m, block_in)),
            (gate, (config.block_n, block_in)),
            (up, (config.block_n, block_in)),
            (down, (block_out, config.block_n)),
            ((hidden, 1), (config.block_m, config.block_n)),
        ),
        "PRECISION": how.precision,
        "NORM": None if norm is None else norm.kind,
        "EPS": 0.0 if norm is None else norm.eps,
        "BLOCK_M": config.block_m,
        "BLOCK_H": config.block_n,
        "BLOCK_IN": block_in,
        "BLOCK_OUT": block_out,
        "RESIDENT": config.resident,
        "LATE_BIAS": config.late_bias,
    }
    grid = (cdiv(x.shape[0], config.block_m),)
    if config.programs:
        grid = (config.programs * how.target.multiprocessors,)
    return Invocation(fusedmlp_back_to_back, grid, arguments, config)


def narrow_gradient_invocation(
    x: Tensor,
    grad_output: Tensor,
    weight_up: Tensor,
    bias_up: Tensor | None,
    weight_down: Tensor,
    grad_x: Tensor | None,
    sums: Tensor,
    config: Config,
) -> Invocation:
    """The launch of ``narrow_gradient``, into ``grad_x``, if there is one, and ``sums``."""
    hidden, inner, out = *map(int, weight_up.shape), int(weight_down.shape[0])
    arguments = {
        "x": dense(x),
        "grad_output": dense(grad_output),
        "weight_up": dense(weight_up),
        "bias_up": dense(bias_up),
        "weight_down": dense(weight_down),
        "grad_x": grad_x,
        "sums": sums,
        "rows": x.shape[0],
        "IN": inner,
        "HIDDEN": hidden,
        "OUT": out,
        "BLOCK_M": config.block_m,
        "BLOCK_IN": padded(inner),
        "BLOCK_H": padded(hidden),
        "BLOCK_OUT": padded(out),
    }
    return Invocation(fusedmlp_narrow_gradient, (sums.shape[0],), arguments, config)
