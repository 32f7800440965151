"""What a launch passes to its kernel, from tensors, and the launch: real, or traced.

Widths and strides are compile-time constants. What may be symbolic is the number of rows and the
row stride of x or grad_output, the one stride that can depend on it. That stride is passed as a
multiple of a power of two: so the compiler knows the alignment of rows that is known here.

Under tracing, ``torch.library.wrap_triton`` turns a launch into a node that Inductor inlines. The
number of rows is compared with few constants, to choose a configuration; a grid of no programs,
which no rows make, is launched as nothing by Triton and by Inductor.
"""

from __future__ import annotations

import contextvars
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

from fusion_backend.compat.triton_features import triton_is_interpreted
from fusion_backend.kernels.codegen.specialize import Template, specialize
from fusion_backend.kernels.host.configs import Config
from fusion_backend.kernels.host.targets import Target
from fusion_backend.mlp.expression import Expression
from fusion_backend.mlp.expression.operand_names import name_of
from fusion_backend.mlp.operands import MOST_IN_KERNELS, kind_of

# A stride that divides by this many elements is aligned for the widest loads of any dtype.
_WIDEST_UNIT = 16
LARGEST_32_BIT = 2**31 - 1


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


class How(NamedTuple):
    """How a kernel is launched.

    Attributes:
        precision: of products of fp32, as in ``problems.Problem``.
        config: tiles, warps and stages.
        target: the GPU.
    """

    precision: str
    config: Config
    target: Target


def run(
    invocation: Invocation,
    activation: Expression,
    target: Target,
    operands: Sequence[Tensor] = (),
    wanted: Sequence[int] = (),
) -> None:
    """Launch a kernel with an activation, or trace its launch."""
    operand: Tensor = next(iter(invocation.arguments.values()))
    accuracy = target.accuracy_of_activations(operand.dtype)
    kinds = tuple(map(kind_of, operands))
    kernel = specialize(invocation.template, activation, accuracy, kinds, tuple(wanted))
    ordered = [invocation.arguments[name] for name in kernel.arg_names]
    if not triton_is_interpreted():
        kernel = wrap_triton(kernel)
    launch = functools.partial(
        kernel[invocation.grid],
        *ordered,
        num_warps=invocation.config.num_warps,
        num_stages=invocation.config.num_stages,
    )
    if invocation.config.tma:
        contextvars.copy_context().run(_with_scratch, launch, operand.device)
    else:
        launch()


def is_empty(x: Tensor) -> bool:
    """Whether it is known already that there are no rows. No rows at run time: an empty grid."""
    return isinstance(x.shape[0], int) and x.shape[0] == 0


def _with_scratch(launch: Callable[[], object], device: torch.device) -> None:
    """Launch a kernel that makes tensor descriptors, for which Triton asks for memory on the GPU.

    Triton keeps the function that it asks in a context variable, which is the user's to set;
    Inductor sets it for its own launches.
    """

    def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
        return torch.empty(size, dtype=torch.int8, device=device)

    triton.set_allocator(allocate)
    launch()


def operand_arguments(
    operands: Sequence[Tensor | None], prefix: str = ""
) -> dict[str, Tensor | None]:
    """The operands, contiguous, or their gradients, by the names of their parameters."""
    missing = [None] * (MOST_IN_KERNELS - len(operands))
    return {prefix + name_of(i): dense(operand) for i, operand in enumerate((*operands, *missing))}


def tile_constants(how: How) -> dict[str, Any]:
    """Arguments of kernels that compute a tile at a time."""
    config = how.config
    return {
        "PRECISION": how.precision,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "PARTS": config.parts,
    }


def tiles(x: Tensor, columns: int, config: Config) -> tuple[Any]:
    """A grid of one program a tile."""
    return (cdiv(x.shape[0], config.block_m) * cdiv(columns, config.block_n),)


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
        not isinstance(stride, int) or stride * extent > LARGEST_32_BIT // 2
        for strides, extents in tiles
        for stride, extent in zip(strides, extents, strict=True)
    )
