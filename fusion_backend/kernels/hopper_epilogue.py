"""Launches of the kernel in ``epilogue_hopper``, each prepared once and kept.

As in ``hopper``, generated code calls what :func:`caller` returns, and all that follows from
shapes, dtype and activation is looked up; only tensor descriptors are made anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from fusion_backend.compat import has_gluon
from fusion_backend.expression import parse
from fusion_backend.kernels.ahead import Ahead
from fusion_backend.kernels.called import PIECE, Known, in_pieces
from fusion_backend.kernels.problems import Problem
from fusion_backend.kernels.targets import Target, target_of

_BLOCK_M = 128
_BLOCK_K = 64
_GROUP_M = 8
_WARPS = 4
# Of tiles of so many columns: buffers of operands, as many as shared memory holds; and how long a
# tile takes. Narrow ones load more for a product, which costs about 3 %.
STAGES = {128: 4, 64: 6, 96: 5}
_TIMES = {128: 128, 64: 66, 96: 99}
# Of each thread: of three warpgroups at first, then of the two that sum.
_REGISTERS = 168
_SUMMING_REGISTERS = 240
_SWIZZLES = {64: 128, 32: 64}  # bytes of a row of 16-bit elements in shared memory

# Where it was measured, on an H200, to be faster: with more rows, no narrower, and with no fewer
# elements of the result, of which else too few programs would have a tile.
_FEW_ROWS = 64
_NARROWEST = 256
_SMALLEST = 1 << 19


def runs(problem: Problem, rows: Any, target: Target) -> bool:
    """Whether the kernel runs a problem, and was measured to be faster than Triton's for such."""
    return (
        target.backend == "cuda"
        and target.capability == 90
        and problem.gated
        and problem.rows > _FEW_ROWS
        and problem.tma
        and problem.in_features >= _NARROWEST
        and problem.in_features % PIECE == 0
        and problem.hidden_features % PIECE == 0
        and guard_or_false(rows * problem.hidden_features > _SMALLEST)
        and has_gluon()
    )


def epilogue(
    x: Tensor,
    weight_gate: Tensor,
    weight_up: Tensor,
    bias_gate: Tensor | None,
    bias_up: Tensor | None,
    activation: str,
) -> Tensor:
    """As ``launch.epilogue`` with a gate, for operands that ``called.suits``.

    Returns:
        ``(rows, hidden)``, contiguous, with the dtype of x.
    """
    rows, inner = x.shape
    hidden = weight_up.shape[0]
    postact = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    if rows:
        device = x.get_device()
        columns = columns_of_tiles(rows, hidden, target_of(x.device))
        has_biases = bias_gate is not None, bias_up is not None
        launch = _launch(activation, inner, hidden, x.dtype, *has_biases, columns, device)
        launch(x, weight_gate, bias_gate, weight_up, bias_up, postact)
    return postact


def caller(activation: str, *known: Any) -> Callable[..., Tensor]:
    """What generated code calls for one MLP: :func:`epilogue` of x in any layout.

    Args:
        activation: as text.
        known: the values of :class:`~fusion_backend.kernels.called.Known`.
    """

    def call(x: Tensor, *parameters: Tensor | None) -> Tensor:
        arguments: Any = (in_pieces(x), *parameters, activation)
        return epilogue(*arguments)

    return call


def prepare(rows: int, activation: str, *known: Any) -> None:
    """Start compiling what :func:`caller` of the same arguments launches for so many rows."""
    (inner, hidden, _), dtype, given, _, device = Known(*known)
    _, _, _, *has_biases = given
    columns = columns_of_tiles(rows, hidden, target_of(torch.device("cuda", device)))
    compiled.start(activation, inner, hidden, dtype, *has_biases, columns, device)


def columns_of_tiles(rows: int, hidden: int, target: Target) -> int:
    """How wide tiles must be for the programs, all together, to take the least time."""

    def time(columns: int) -> int:
        tiles = -(-rows // _BLOCK_M) * -(-hidden // columns)
        return -(-tiles // target.multiprocessors) * _TIMES[columns]

    return min(STAGES, key=time)


class _Described(NamedTuple):
    """What Triton's launcher reads of a tensor descriptor, without the checks of its class."""

    base: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str = "zero"
    round_f32_to_tf32: bool = False


def _described(tensor: Tensor) -> _Described:
    return _Described(tensor, tensor.shape, tensor.stride())


@functools.cache
def _launch(
    activation: str,
    inner: int,
    hidden: int,
    dtype: torch.dtype,
    has_bias_gate: bool,
    has_bias_up: bool,
    columns: int,
    device: int,
) -> Callable[..., None]:
    """Compile for a device; the result launches the kernel on that device's current stream."""
    kernel = compiled(activation, inner, hidden, dtype, has_bias_gate, has_bias_up, columns, device)
    constants = _constants(inner, hidden, columns)
    blocks_n = -(-hidden // columns)
    multiprocessors = target_of(torch.device("cuda", device)).multiprocessors

    def launch(
        x: Tensor,
        weight_gate: Tensor,
        bias_gate: Tensor | None,
        weight_up: Tensor,
        bias_up: Tensor | None,
        postact: Tensor,
    ) -> None:
        rows = x.shape[0]
        programs = min(multiprocessors, -(-rows // _BLOCK_M) * blocks_n)
        gate, up = _described(weight_gate), _described(weight_up)
        kernel[programs, 1, 1](
            *(_described(x), gate, bias_gate, up, bias_up, _described(postact), rows, *constants),
            stream=torch._C._cuda_getCurrentRawStream(device),
        )

    return launch


@Ahead
def compiled(
    activation: str,
    inner: int,
    hidden: int,
    dtype: torch.dtype,
    has_bias_gate: bool,
    has_bias_up: bool,
    columns: int,
    device: int,
) -> Any:
    """The compiled kernel (``triton.CompiledKernel``), from Triton's cache if it is there."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.runtime.jit import MockTensor

    from fusion_backend.kernels.epilogue_hopper import fusedmlp_epilogue_hopper
    from fusion_backend.kernels.specialize import specialize

    some = MockTensor(dtype)

    def described(width: int, *block: int) -> Any:
        layout = NVMMASharedLayout(_SWIZZLES[block[1]], 8 * dtype.itemsize, rank=2)
        return TensorDescriptor(some, [_BLOCK_M, width], [width, 1], list(block), layout)

    smallest = columns - _piece(columns) or columns
    weight = described(inner, smallest, _BLOCK_K)
    bias_gate, bias_up = (some if has_bias else None for has_bias in (has_bias_gate, has_bias_up))
    template: Any = fusedmlp_epilogue_hopper
    fast = dtype == torch.bfloat16
    kernel = specialize(template, parse(activation), fast, gluon=True, own_launch=True)
    with torch.cuda.device(device):
        return kernel.warmup(
            described(inner, _BLOCK_M // 2, _BLOCK_K),
            *(weight, bias_gate, weight, bias_up),
            described(hidden, _BLOCK_M // 2, min(smallest, _BLOCK_K)),
            *(_BLOCK_M, *_constants(inner, hidden, columns)),
            grid=(1,),
            num_warps=_WARPS,
            maxnreg=_REGISTERS,
        )


def _piece(columns: int) -> int:
    """How many of a tile's columns the first piece has: the greatest power of two."""
    return 1 << (columns.bit_length() - 1)


def _constants(inner: int, hidden: int, columns: int) -> tuple[int, ...]:
    """The compile-time constants of the kernel."""
    how = (_BLOCK_K, _GROUP_M, STAGES[columns], _SUMMING_REGISTERS)
    return (inner, hidden, columns, _piece(columns), *how)
