"""Launches: the first layers of an MLP with its activation, and a last layer with a sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend.compat.inductor import compiles_to_cpp
from fusion_backend.compat.tensors import is_traced
from fusion_backend.kernels.codegen.activation import exact_functions
from fusion_backend.kernels.epilogue import config_sm90
from fusion_backend.kernels.epilogue import gradient_launch_sm90 as hopper_gradient
from fusion_backend.kernels.epilogue import launch_sm90 as hopper
from fusion_backend.kernels.epilogue.kernel import fusedmlp_epilogue
from fusion_backend.kernels.epilogue.kernel_tma import fusedmlp_epilogue_tma
from fusion_backend.kernels.host import targets
from fusion_backend.kernels.host.configs import Config
from fusion_backend.kernels.host.problems import epilogue_problem, measured_kind
from fusion_backend.kernels.invocations import (
    How,
    Invocation,
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
from fusion_backend.mlp.expression import Expression
from fusion_backend.mlp.weights import FirstLayer


def epilogue(
    x: Tensor,
    first: FirstLayer,
    activation: Expression,
    save_preact: bool,
    operands: Sequence[Tensor] = (),
    config: Config | None = None,
    joined: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``f(x W_gateᵀ + b_gate, x W_upᵀ + b_up)``, or ``f(x W_upᵀ + b_up)`` without a gate.

    Args:
        x: ``(rows, in)``; bfloat16, float16 or float32, like all others; any strides.
        first: weights ``(hidden, in)`` of any strides, and biases ``(hidden,)``; a plain MLP has no
            ``weight_gate``.
        activation: of ``g`` and ``u`` with a gate, else of ``x``.
        save_preact: also return the pre-activations, for training.
        operands: of the activation: scalars ``()``, vectors ``(hidden,)``, tensors
            ``(rows, hidden)`` and seeds ``()``; at most four.
        config: how to launch; ``None`` chooses by shape.
        joined: let the pre-activations of a pair be one matrix where the kernel for Hopper runs.

    Returns:
        The activation and the two pre-activations, each ``(rows, hidden)``, contiguous and with the
        dtype of x. A pre-activation is ``None`` where it is not saved or does not exist. Joined,
        both are the last result, ``(rows, 2 · hidden)``, with that of the gate first.

    Raises:
        ValueError: ``config`` cannot run on this GPU with these operands.
    """
    weight_gate, bias_gate, weight_up, bias_up = first

    def results() -> tuple[Tensor, Tensor | None, Tensor | None]:
        shape = (x.shape[0], weight_up.shape[0])
        preact_gate = x.new_empty(shape) if save_preact and weight_gate is not None else None
        preact_up = x.new_empty(shape) if save_preact else None
        return x.new_empty(shape), preact_gate, preact_up

    if is_empty(x):
        return results()
    target = targets.target_of(x.device)
    problem = epilogue_problem(x, weight_gate, weight_up, target, operands)
    plain = config is None and not operands
    layers = (x, weight_up, weight_gate, bias_up, bias_gate)
    plain = plain and (not save_preact or hopper_gradient.differentiates(str(activation), x.dtype))
    runs = config_sm90.runs(problem, x.shape[0], target)
    if plain and runs and _suits_hopper(*layers):
        if not save_preact:
            return _on_hopper(*layers, None, str(activation)), None, None
        found = torch.ops.fusedmlp.epilogue_saving(*layers, str(activation), joined)
        postact, *gate, up = found
        return postact, gate[0] if gate else None, up
    written = results()
    if not operands and not save_preact:
        exact = exact_functions(activation, x.dtype, differentiated=False)
        problem = measured_kind(problem, x, exact, weight_gate, weight_up)
    config = chosen("epilogue", problem, target, config)
    how = How(problem.precision, config, target)
    invocation = epilogue_invocation(x, first, written, how, operands)
    run(invocation, activation, target, operands)
    return written


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """``x Wᵀ + b + residual``, in one kernel on Hopper, and rounded once there.

    Args:
        x: ``(rows, in)``; bfloat16, float16 or float32, like all others; any strides.
        weight: ``(out, in)``; any strides.
        bias: ``(out,)`` or ``None``.
        residual: ``(rows, out)``; any strides.

    Returns:
        ``(rows, out)``, contiguous, with the dtype of x.
    """
    out_features, in_features = map(int, weight.shape)
    residual = residual.contiguous()
    layer = (x, weight, None, bias, None, residual)
    if (
        x.dtype.itemsize == 2
        and not is_empty(x)
        and config_sm90.can(in_features, out_features, targets.target_of(x.device))
        and _suits_hopper(*layer)
    ):
        return _on_hopper(*layer, hopper.IDENTITY)
    return F.linear(x, weight, bias) + residual


def _suits_hopper(*tensors: Any) -> bool:
    """Whether the kernel for Hopper takes the tensors, and what is generated can call it."""
    return hopper.suits(*tensors) and not compiles_to_cpp()


def _on_hopper(x: Tensor, *layers_and_activation: Any) -> Tensor:
    """By the kernel for Hopper, or traced as the operator that stands for it."""
    call: Any = torch.ops.fusedmlp.epilogue if is_traced(x) else hopper.epilogue
    result: Tensor = call(x, *layers_and_activation)
    return result


def epilogue_invocation(
    x: Tensor,
    first: FirstLayer,
    results: tuple[Tensor, Tensor | None, Tensor | None],
    how: How,
    operands: Sequence[Tensor] = (),
) -> Invocation:
    """The launch of ``epilogue``, into ``postact`` and those pre-activations that exist."""
    x, config = with_known_columns(x), how.config
    weight_gate, bias_gate, weight_up, bias_up = first
    postact, preact_gate, preact_up = results
    hidden, inner = weight_up.shape
    gate, up = strides(weight_gate), strides(weight_up)
    tile = (config.block_n, config.block_k)
    arguments = {
        "x": x,
        "weight_gate": weight_gate,
        "bias_gate": dense(bias_gate),
        "weight_up": weight_up,
        "bias_up": dense(bias_up),
        "postact": postact,
        "preact_gate": preact_gate,
        "preact_up": preact_up,
        **operand_arguments(operands),
        "rows": x.shape[0],
        "GATE_ROW_STRIDE": gate[0],
        "GATE_COLUMN_STRIDE": gate[1],
        "UP_ROW_STRIDE": up[0],
        "UP_COLUMN_STRIDE": up[1],
        "IN": inner,
        "HIDDEN": hidden,
        "WIDE": is_wide(
            (x.stride(), (config.block_m, config.block_k)),
            (gate, tile),
            (up, tile),
            ((hidden, 1), (config.block_m, config.block_n)),
        ),
        **tile_constants(how),
    }
    if config.tma:
        arguments["X_ROW_STRIDE"] = int(x.stride(0))
        arguments["FLATTEN"] = config.flatten
        grid = _programs(x, hidden, how)
        return Invocation(fusedmlp_epilogue_tma, grid, arguments, config)
    arguments["x_row_units"], arguments["X_ROW_UNIT"] = row_units(x)
    arguments["X_COLUMN_STRIDE"] = x.stride(1)
    return Invocation(fusedmlp_epilogue, tiles(x, hidden, config), arguments, config)


def _programs(x: Tensor, columns: int, how: How) -> tuple[Any]:
    """One program per tile, or as many as are persistent: no more than tiles, if that is known."""
    (count,) = tiles(x, columns, how.config)
    persistent = how.config.programs * how.target.multiprocessors
    if not persistent:
        return (count,)
    return (min(count, persistent) if isinstance(count, int) else persistent,)
