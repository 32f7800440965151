"""Arguments and grids of kernels, from tensors: everything about a launch but the launch.

Widths and strides are compile-time constants. What may be symbolic is the number of rows and the
row stride of x or grad_output, the one stride that can depend on it. That stride is passed as a
multiple of a power of two: so the compiler knows the alignment of rows that is known here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fusion_backend.kernels.back_to_back.gradient_kernel import fusedmlp_narrow_gradient
from fusion_backend.kernels.back_to_back.kernel import fusedmlp_back_to_back
from fusion_backend.kernels.codegen.specialize import Template
from fusion_backend.kernels.epilogue.kernel import fusedmlp_epilogue
from fusion_backend.kernels.epilogue.kernel_tma import fusedmlp_epilogue_tma
from fusion_backend.kernels.hidden_gradient.kernel import fusedmlp_hidden_gradient
from fusion_backend.kernels.host.configs import Config, padded
from fusion_backend.kernels.host.targets import Target
from fusion_backend.kernels.stream.kernel import fusedmlp_stream_hidden, fusedmlp_stream_out
from fusion_backend.mlp.expression.operand_names import name_of
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.operands import MOST_IN_KERNELS

# A stride that divides by this many elements is aligned for the widest loads of any dtype.
_WIDEST_UNIT = 16
_LARGEST_32_BIT = 2**31 - 1


@dataclass(frozen=True)
class Invocation:
    """A kernel template with all that its launch needs, but the activation.

    Attributes:
        template: which kernel.
        grid: number of programs; may be symbolic.
        arguments: by parameter name; compile-time constants included.
        config: the configuration, of which warps and stages are launch options.
    """

    template: Template
    grid: tuple[Any]
    arguments: dict[str, Any]
    config: Config


def epilogue_invocation(
    x: Tensor,
    weight_gate: Tensor | None,
    bias_gate: Tensor | None,
    weight_up: Tensor,
    bias_up: Tensor | None,
    postact: Tensor,
    preact_gate: Tensor | None,
    preact_up: Tensor | None,
    precision: str,
    config: Config,
    target: Target,
    operands: Sequence[Tensor] = (),
) -> Invocation:
    """The launch of ``epilogue``, into ``postact`` and those pre-activations that exist."""
    x = with_known_columns(x)
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
        **_operand_arguments(operands),
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
        **_tile_constants(config, precision),
    }
    if config.tma:
        arguments["X_ROW_STRIDE"] = int(x.stride(0))
        arguments["FLATTEN"] = config.flatten
        grid = _programs(x, hidden, config, target)
        return Invocation(fusedmlp_epilogue_tma, grid, arguments, config)
    arguments["x_row_units"], arguments["X_ROW_UNIT"] = row_units(x)
    arguments["X_COLUMN_STRIDE"] = x.stride(1)
    return Invocation(fusedmlp_epilogue, _tiles(x, hidden, config), arguments, config)


def hidden_gradient_invocation(
    grad_output: Tensor,
    weight_down: Tensor,
    preact_gate: Tensor | None,
    preact_up: Tensor,
    grad_gate: Tensor | None,
    grad_up: Tensor,
    postact: Tensor,
    precision: str,
    config: Config,
    target: Target,
    operands: Sequence[Tensor] = (),
    operand_gradients: Sequence[Tensor | None] = (),
) -> Invocation:
    """The launch of ``hidden_gradient``, into ``grad_gate``, ``grad_up`` and ``postact``."""
    grad_output = with_known_columns(grad_output)
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
        **_operand_arguments(operands),
        **_operand_arguments(operand_gradients, "grad_"),
        "rows": grad_output.shape[0],
        "grad_output_row_units": units,
        "GRAD_OUTPUT_ROW_UNIT": unit,
        "DOWN_ROW_STRIDE": down[0],
        "DOWN_COLUMN_STRIDE": down[1],
        "HIDDEN": hidden,
        "OUT": out,
        **_tile_constants(config, precision),
    }
    arguments["GRAD_OUTPUT_COLUMN_STRIDE"] = grad_output.stride(1)
    arguments["WIDE"] = is_wide(
        (grad_output.stride(), (config.block_m, config.block_k)),
        (down, (config.block_k, config.block_n)),
        ((hidden, 1), (config.block_m, config.block_n)),
    )
    grid = _tiles(grad_output, hidden, config)
    return Invocation(fusedmlp_hidden_gradient, grid, arguments, config)


def back_to_back_invocation(
    x: Tensor,
    weight_gate: Tensor | None,
    bias_gate: Tensor | None,
    weight_up: Tensor,
    bias_up: Tensor | None,
    weight_down: Tensor,
    bias_down: Tensor | None,
    y: Tensor,
    precision: str,
    config: Config,
    target: Target,
    operands: Sequence[Tensor] = (),
    residual: Tensor | None = None,
    norm: Norm | None = None,
) -> Invocation:
    """The launch of ``back_to_back``, into ``y``."""
    x = with_known_columns(x)
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
        **_operand_arguments(operands),
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
        "PRECISION": precision,
        "NORM": None if norm is None else norm.kind,
        "EPS": 0.0 if norm is None else norm.eps,
        "BLOCK_M": config.block_m,
        "BLOCK_H": config.block_n,
        "BLOCK_IN": block_in,
        "BLOCK_OUT": block_out,
        "RESIDENT": config.resident,
    }
    grid = (cdiv(x.shape[0], config.block_m),)
    if config.programs:
        grid = (config.programs * target.multiprocessors,)
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


def stream_hidden_invocation(
    x: Tensor,
    weight_gate: Tensor | None,
    bias_gate: Tensor | None,
    weight_up: Tensor,
    bias_up: Tensor | None,
    hidden: Tensor,
    precision: str,
    config: Config,
    target: Target,
    operands: Sequence[Tensor] = (),
) -> Invocation:
    """The first launch of ``stream``, into ``hidden``."""
    x = with_known_columns(x)
    features, inner = map(int, weight_up.shape)
    units, unit = row_units(x)
    gate, up = strides(weight_gate), strides(weight_up)
    share = _share(features, config, target)
    tile = (config.block_n, config.block_k)
    arguments = {
        "x": x,
        "weight_gate": weight_gate,
        "bias_gate": dense(bias_gate),
        "weight_up": weight_up,
        "bias_up": dense(bias_up),
        "hidden": hidden,
        **_operand_arguments(operands),
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
        **_share_constants(share, config, precision),
    }
    grid = (cdiv(features, share) * cdiv(x.shape[0], config.block_m),)
    return Invocation(fusedmlp_stream_hidden, grid, arguments, config)


def stream_out_invocation(
    hidden: Tensor,
    weight_down: Tensor,
    bias_down: Tensor | None,
    y: Tensor,
    precision: str,
    config: Config,
    target: Target,
) -> Invocation:
    """The second launch of ``stream``, into ``y``."""
    out, features = map(int, weight_down.shape)
    down = strides(weight_down)
    share = _share(out, config, target)
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
        **_share_constants(share, config, precision),
    }
    grid = (cdiv(out, share) * cdiv(hidden.shape[0], config.block_m),)
    return Invocation(fusedmlp_stream_out, grid, arguments, config)


def _operand_arguments(
    operands: Sequence[Tensor | None], prefix: str = ""
) -> dict[str, Tensor | None]:
    """The operands, contiguous, or their gradients, by the names of their parameters."""
    missing = [None] * (MOST_IN_KERNELS - len(operands))
    return {prefix + name_of(i): dense(operand) for i, operand in enumerate((*operands, *missing))}


def _share(features: int, config: Config, target: Target) -> int:
    """How many features each program owns, if the programs that run at a time divide them all."""
    return min(config.block_n, -(-features // (config.programs * target.multiprocessors)))


def _share_constants(share: int, config: Config, precision: str) -> dict[str, Any]:
    return {
        "PRECISION": precision,
        "SHARE": share,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "STAGES": config.num_stages,
    }


def _tile_constants(config: Config, precision: str) -> dict[str, Any]:
    return {
        "PRECISION": precision,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "PARTS": config.parts,
    }


def _tiles(x: Tensor, columns: int, config: Config) -> tuple[Any]:
    return (cdiv(x.shape[0], config.block_m) * cdiv(columns, config.block_n),)


def _programs(x: Tensor, columns: int, config: Config, target: Target) -> tuple[Any]:
    """One program per tile, or as many as are persistent: no more than tiles, if that is known."""
    (tiles,) = _tiles(x, columns, config)
    persistent = config.programs * target.multiprocessors
    if not persistent:
        return (tiles,)
    return (min(tiles, persistent) if isinstance(tiles, int) else persistent,)


def cdiv(dividend: Any, divisor: int) -> Any:
    """The quotient of an integer, possibly symbolic, rounded up."""
    return (dividend + (divisor - 1)) // divisor


def strides(weight: Tensor | None) -> tuple[int, int]:
    """Strides of a weight, which become compile-time constants."""
    return (0, 0) if weight is None else (int(weight.stride(0)), int(weight.stride(1)))


def with_known_columns(x: Tensor) -> Tensor:
    """x, or a contiguous copy where its column stride is symbolic and cannot be a constant."""
    return x if isinstance(x.stride(1), int) else x.contiguous()


def dense(tensor: Any) -> Any:
    """A tensor as kernels expect biases and pre-activations: contiguous; ``None`` stays itself."""
    return None if tensor is None else tensor.contiguous()


def row_units(x: Tensor) -> tuple[Any, int]:
    """The row stride of x as (multiple, unit), the unit being the power of two known to divide it.

    A single row has no stride worth the name; it is given that of a contiguous matrix, lest a
    kernel be compiled for each.
    """
    rows: Any = x.shape[0]
    stride: Any = x.shape[1] if isinstance(rows, int) and rows == 1 else x.stride(0)
    if not isinstance(stride, int):
        return stride, 1
    unit = math.gcd(stride, _WIDEST_UNIT)
    return stride // unit, unit


def is_wide(*tiles: tuple[tuple[Any, ...], tuple[int, int]]) -> bool:
    """Whether offsets within any of the tiles, given as (strides, extents), may exceed 32 bits."""
    return any(
        not isinstance(stride, int) or stride * extent > _LARGEST_32_BIT // 2
        for strides, extents in tiles
        for stride, extent in zip(strides, extents, strict=True)
    )
