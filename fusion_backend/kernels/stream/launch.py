"""Launches of a whole MLP of few rows: two kernels, which overlap where they can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusion_backend.compat.inductor import compiles_to_cpp
from fusion_backend.compat.tensors import is_traced
from fusion_backend.kernels.host import targets
from fusion_backend.kernels.host.configs import Config
from fusion_backend.kernels.host.problems import stream_problems
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
from fusion_backend.kernels.stream import launch_sm90 as hopper
from fusion_backend.kernels.stream.kernel import fusedmlp_stream_hidden, fusedmlp_stream_out
from fusion_backend.mlp.expression import Expression
from fusion_backend.mlp.weights import FirstLayer, Weights, is_transposed


def stream(
    x: Tensor,
    weights: Weights,
    activation: Expression,
    operands: Sequence[Tensor] = (),
    configs: tuple[Config, Config] | None = None,
) -> Tensor:
    """A whole MLP, in two launches made for few rows; right for any number of them.

    Args:
        x: ``(rows, in)``; bfloat16, float16 or float32, like all others; any strides.
        weights: of any strides; a plain MLP has no ``weight_gate``.
        activation: of ``g`` and ``u`` with a gate, else of ``x``.
        operands: of the activation: scalars ``()``, vectors ``(hidden,)``, tensors
            ``(rows, hidden)`` and seeds ``()``; at most four.
        configs: how to launch the kernels of hidden and of y; ``None`` chooses by shape.

    Returns:
        ``(rows, out)``, contiguous, with the dtype of x.

    Raises:
        ValueError: one of ``configs`` cannot run on this GPU with these operands.
    """
    weight_gate, bias_gate, weight_up, bias_up, weight_down, bias_down = weights
    shape = (x.shape[0], weight_down.shape[0])
    if is_empty(x):
        return x.new_empty(shape)
    target = targets.target_of(x.device)
    parameters = (weight_up, weight_down, bias_up, bias_down, weight_gate, bias_gate)
    widths = (int(weight_up.shape[1]), *map(int, reversed(weight_down.shape)))
    transposed = is_transposed(weight_up) or is_transposed(weight_down)
    sizes = (widths, weight_gate is not None, x.dtype, transposed)
    plain = configs is None and not operands
    overlaps = plain and hopper.runs(x.shape[0], *sizes, target)
    if overlaps and hopper.suits(x, *parameters) and not compiles_to_cpp():
        call = torch.ops.fusedmlp.stream if is_traced(x) else hopper.stream
        result: Tensor = call(x, *parameters, str(activation))
        return result
    y, hidden = x.new_empty(shape), x.new_empty((x.shape[0], weight_up.shape[0]))
    first, second = stream_problems(x, weight_gate, weight_up, weight_down, target)
    of_hidden, of_out = configs or (None, None)
    how = How(first.precision, chosen("stream_hidden", first, target, of_hidden), target)
    layers = FirstLayer(weight_gate, bias_gate, weight_up, bias_up)
    invocation = stream_hidden_invocation(x, layers, hidden, how, operands)
    run(invocation, activation, target, operands)
    how = How(second.precision, chosen("stream_out", second, target, of_out), target)
    invocation = stream_out_invocation(hidden, weight_down, bias_down, y, how)
    run(invocation, activation, target, operands)
    return y


def stream_hidden_invocation(
    x: Tensor,
    first: FirstLayer,
    hidden: Tensor,
    how: How,
    operands: Sequence[Tensor] = (),
) -> Invocation:
    """The first launch of ``stream``, into ``hidden``."""
    x, config = with_known_columns(x), how.config
    weight_gate, bias_gate, weight_up, bias_up = first
    features, inner = map(int, weight_up.shape)
    units, unit = row_units(x)
    gate, up = strides(weight_gate), strides(weight_up)
    share = _share(features, how)
    tile = (config.block_n, config.block_k)
    arguments = {
        "x": x,
        "weight_gate": weight_gate,
        "bias_gate": dense(bias_gate),
        "weight_up": weight_up,
        "bias_up": dense(bias_up),
        "hidden": hidden,
        **operand_arguments(operands),
        "rows": x.shape[0],
        "x_row_units": units,
        "X_ROW_UNIT": unit,
        "X_COLUMN_STRIDE": x.stride(1),
        "GATE_ROW_STRIDE": gate[0],
        "GATE_COLUMN_STRIDE": gate[1],
        "UP_ROW_STRIDE": up[0],
        "UP_COLUMN_STRIDE": up[1],
        "IN": inner,
        "HIDDEN": features,
        "WIDE": is_wide(
            (x.stride(), (config.block_m, config.block_k)),
            (gate, tile),
            (up, tile),
            ((features, 1), (config.block_m, config.block_n)),
        ),
        **_share_constants(share, how),
    }
    grid = (cdiv(features, share) * cdiv(x.shape[0], config.block_m),)
    return Invocation(fusedmlp_stream_hidden, grid, arguments, config)


def stream_out_invocation(
    hidden: Tensor,
    weight_down: Tensor,
    bias_down: Tensor | None,
    y: Tensor,
    how: How,
) -> Invocation:
    """The second launch of ``stream``, into ``y``."""
    config = how.config
    out, features = map(int, weight_down.shape)
    down = strides(weight_down)
    share = _share(out, how)
    arguments = {
        "hidden": hidden,
        "weight_down": weight_down,
        "bias_down": dense(bias_down),
        "y": y,
        "rows": hidden.shape[0],
        "DOWN_ROW_STRIDE": down[0],
        "DOWN_COLUMN_STRIDE": down[1],
        "HIDDEN": features,
        "OUT": out,
        "WIDE": is_wide(
            ((features, 1), (config.block_m, config.block_k)),
            (down, (config.block_n, config.block_k)),
        ),
        **_share_constants(share, how),
    }
    grid = (cdiv(out, share) * cdiv(hidden.shape[0], config.block_m),)
    return Invocation(fusedmlp_stream_out, grid, arguments, config)


def _share(features: int, how: How) -> int:
    """How many features each program owns, if the programs that run at a time divide them all."""
    programs = how.config.programs * how.target.multiprocessors
    return min(how.config.block_n, -(-features // programs))


def _share_constants(share: int, how: How) -> dict[str, Any]:
    config = how.config
    return {
        "PRECISION": how.precision,
        "SHARE": share,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "STAGES": config.num_stages,
    }
