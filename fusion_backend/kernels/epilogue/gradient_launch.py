"""Launches of the backward pass: gradients of the pre-activations, of operands and of x."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusion_backend.compat.inductor import compiles_to_cpp
from fusion_backend.compat.tensors import is_traced
from fusion_backend.kernels.epilogue import config_sm90
from fusion_backend.kernels.epilogue import gradient_launch_sm90 as hopper_gradient
from fusion_backend.kernels.epilogue.gradient_kernel import fusedmlp_hidden_gradient
from fusion_backend.kernels.host import called, targets
from fusion_backend.kernels.host.configs import Config
from fusion_backend.kernels.host.problems import hidden_gradient_problem
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
    tile_constants,
    tiles,
    with_known_columns,
)
from fusion_backend.kernels.preferences import chosen
from fusion_backend.mlp.expression import Expression, passing_gradients
from fusion_backend.mlp.operands import reduced
from fusion_backend.mlp.weights import Weights


def hidden_gradient(
    grad_output: Tensor,
    weight_down: Tensor,
    preact_gate: Tensor | None,
    preact_up: Tensor,
    activation: Expression,
    operands: Sequence[Tensor] = (),
    config: Config | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of the pre-activations, and the activation recomputed.

    Args:
        grad_output: ``(rows, out)``; bfloat16, float16 or float32, like all others; any strides.
        weight_down: ``(out, hidden)``; any strides.
        preact_gate: ``(rows, hidden)`` as :func:`epilogue` saved it, or ``None`` without a gate.
        preact_up: ``(rows, hidden)`` as :func:`epilogue` saved it.
        activation: as in the forward pass.
        operands: of the activation, as in the forward pass.
        config: how to launch; ``None`` chooses by shape.

    Returns:
        ``grad_gate`` (``None`` without a gate), ``grad_up`` and ``postact``, each
        ``(rows, hidden)``, contiguous and with the dtype of grad_output.

    Raises:
        ValueError: ``config`` cannot run on this GPU with these operands.
    """
    preacts = (preact_gate, preact_up)
    return hidden_and_operand_gradients(
        grad_output, weight_down, *preacts, activation, operands, (), config
    )[:3]


def hidden_and_operand_gradients(
    grad_output: Tensor,
    weight_down: Tensor,
    preact_gate: Tensor | None,
    preact_up: Tensor,
    activation: Expression,
    operands: Sequence[Tensor],
    wanted: Sequence[int],
    config: Config | None = None,
) -> tuple[Tensor | None, Tensor, Tensor, list[Tensor]]:
    """:func:`hidden_gradient`, and the gradients of those operands that are ``wanted``.

    These have shape and dtype of the operands.
    """
    shape = (grad_output.shape[0], weight_down.shape[1])
    grad_gate = None if preact_gate is None else grad_output.new_empty(shape)
    grad_up, postact = grad_output.new_empty(shape), grad_output.new_empty(shape)
    stored: list[Tensor | None] = [None] * len(operands)
    if not is_empty(grad_output):
        target = targets.target_of(grad_output.device)
        problem = hidden_gradient_problem(grad_output, weight_down, preact_gate, target)
        tensors = (grad_output, weight_down, preact_gate, preact_up)
        results = (grad_gate, grad_up, postact)
        config = chosen("hidden_gradient", problem, target, config)
        for index in wanted:
            stored[index] = _gradient_of(operands[index], shape, config)
        how = How(problem.precision, config, target)
        invocation = hidden_gradient_invocation(tensors, results, how, operands, stored)
        run(invocation, activation, target, operands, wanted)
    found = [
        torch.zeros_like(operands[index])
        if gradient is None
        else reduced(gradient, operands[index])
        for index, gradient in ((index, stored[index]) for index in wanted)
    ]
    return grad_gate, grad_up, postact, found


def joins(x: Tensor, weights: Weights, activation: Expression) -> bool:
    """Whether the pre-activations of a pair are best saved as one matrix, side by side.

    The gradients then are one matrix, too, and one product makes both weights' gradients of it. But
    all of it is held until the last gradient is there. Of two matrices the first is given up before
    that. It counts where the gradients of these weights are larger than the activation, which is no
    longer held by then, and costs time where weights are small. Two are saved, too, where operators
    are called without a compiler: an operator says what it returns by shapes alone.

    Args:
        x: ``(rows, in)``.
        weights: of the MLP.
        activation: without operands.
    """
    gate, up = weights.weight_gate, weights.weight_up
    if gate is None or not is_traced(x):
        return False
    rows, (hidden, inner) = x.shape[0], up.shape
    if hopper_gradient.parts_pairs(rows, inner, hidden):
        return False
    if not passing_gradients(activation).issuperset(("g", "u")):
        return False
    return _is_for_hopper(activation, x, weights.weight_down, gate, up)


def summed_hidden_gradient(
    grad_output: Tensor,
    weight_down: Tensor,
    preact_gate: Tensor | None,
    preact_up: Tensor,
    activation: Expression,
    has_sums: bool,
    has_output_sums: bool,
) -> tuple[Sequence[Tensor], Tensor, Tensor, bool] | None:
    """As :func:`hidden_gradient`, by the kernel for Hopper where that runs; ``None`` elsewhere.

    It runs where :func:`joins` said so: then there is no preact_gate, and both are in preact_up.

    Returns:
        As :meth:`Family.summed_hidden_gradient`.
    """
    tensors = (grad_output, weight_down, preact_gate, preact_up)
    joined = preact_gate is None and preact_up.shape[1] != weight_down.shape[1]
    if not joined and not _is_for_hopper(activation, *tensors):
        return None
    has_output_sums = has_output_sums and hopper_gradient.sums_output(*map(int, weight_down.shape))
    how = (str(activation), joined, has_sums, has_output_sums)
    *grads, postact, sums = torch.ops.fusedmlp.hidden_gradient(*tensors, *how)
    return grads, postact, sums, has_output_sums


def _is_for_hopper(
    activation: Expression, rows: Tensor, weight_down: Tensor, gate: Tensor | None, up: Tensor
) -> bool:
    """Whether the kernel for Hopper computes the hidden gradient of an MLP.

    Args:
        activation: without operands.
        rows: ``(rows, any)``: x, or the gradient of the result.
        weight_down: ``(out, hidden)``.
        gate: the weight or the pre-activation of the gate; ``None`` without one.
        up: that of up.
    """
    if is_empty(rows):
        return False
    target = targets.target_of(rows.device)
    problem = hidden_gradient_problem(rows, weight_down, gate, target)
    return (
        hopper_gradient.runs(problem, rows.shape[0], target)
        and hopper_gradient.differentiates(str(activation), rows.dtype)
        and hopper_gradient.suits(rows, weight_down, gate, up)
        and not compiles_to_cpp()
    )


def input_gradient(
    grad_preacts: Sequence[Tensor], weight_gate: Tensor, weight_up: Tensor
) -> Tensor | None:
    """``[grad_gate | grad_up] @ [weight_gate; weight_up]`` in one kernel, or ``None``.

    Args:
        grad_preacts: as :func:`summed_hidden_gradient` returns them: two ``(rows, hidden)``, or one
            ``(rows, 2 · hidden)``.
        weight_gate: ``(hidden, in)``; any strides.
        weight_up: ``(hidden, in)``; any strides.
    """
    first, *second = grad_preacts
    hidden, inner = map(int, weight_up.shape)
    target, tensors = targets.target_of(first.device), (first, weight_gate, weight_up, *second)
    if not config_sm90.can_join(hidden, inner, target) or not called.suits(*tensors):
        return None
    if not config_sm90.joins(first.shape[0], inner, target):
        return None
    up = second[0] if second else None
    found = torch.ops.fusedmlp.input_gradient(first, weight_gate, weight_up, up)
    result: Tensor = found[0]
    return result


def _gradient_of(operand: Tensor, shape: tuple[Any, int], config: Config) -> Tensor:
    """What the kernel stores of an operand's gradient: all of it, or its sums by blocks of rows."""
    rows, hidden = shape
    if operand.dim() == 2:
        return operand.new_empty(shape)
    blocks = cdiv(rows, config.block_m)
    return operand.new_empty((blocks, hidden), dtype=torch.float32)


def hidden_gradient_invocation(
    tensors: tuple[Tensor, Tensor, Tensor | None, Tensor],
    results: tuple[Tensor | None, Tensor, Tensor],
    how: How,
    operands: Sequence[Tensor] = (),
    operand_gradients: Sequence[Tensor | None] = (),
) -> Invocation:
    """The launch of ``hidden_gradient``, into ``grad_gate``, ``grad_up`` and ``postact``.

    Args:
        tensors: grad_output, weight_down, preact_gate and preact_up.
        results: grad_gate, grad_up and postact.
        how: to launch it.
        operands: of the activation.
        operand_gradients: where to store those of the operands, if they are wanted.
    """
    grad_output, weight_down, preact_gate, preact_up = tensors
    grad_gate, grad_up, postact = results
    grad_output, config = with_known_columns(grad_output), how.config
    out, hidden = weight_down.shape
    units, unit = row_units(grad_output)
    down = strides(weight_down)
    arguments = {
        "grad_output": grad_output,
        "weight_down": weight_down,
        "preact_gate": dense(preact_gate),
        "preact_up": dense(preact_up),
        "grad_gate": grad_gate,
        "grad_up": grad_up,
        "postact": postact,
        **operand_arguments(operands),
        **operand_arguments(operand_gradients, "grad_"),
        "rows": grad_output.shape[0],
        "grad_output_row_units": units,
        "GRAD_OUTPUT_ROW_UNIT": unit,
        "DOWN_ROW_STRIDE": down[0],
        "DOWN_COLUMN_STRIDE": down[1],
        "HIDDEN": hidden,
        "OUT": out,
        **tile_constants(how),
    }
    arguments["GRAD_OUTPUT_COLUMN_STRIDE"] = grad_output.stride(1)
    arguments["WIDE"] = is_wide(
        (grad_output.stride(), (config.block_m, config.block_k)),
        (down, (config.block_k, config.block_n)),
        ((hidden, 1), (config.block_m, config.block_n)),
    )
    grid = tiles(grad_output, hidden, config)
    return Invocation(fusedmlp_hidden_gradient, grid, arguments, config)
