"""Launches of the kernel in ``back_to_back_hopper``, each prepared once and kept.

Inductor cannot inline Gluon's kernels: the code it generates calls what :func:`caller` returns. For
such a call to cost no more than a launch of Inductor's own, all that follows from shapes, dtype and
activation is looked up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from fusion_backend.compat import has_gluon
from fusion_backend.expression import parse
from fusion_backend.kernels.ahead import Ahead
from fusion_backend.kernels.called import PIECE, Known, in_pieces
from fusion_backend.kernels.problems import MANY_ROWS, Problem
from fusion_backend.kernels.targets import Target, target_of
from fusion_backend.norms import Norm

_BLOCK_H = 64
_ROWS = 64  # of a warpgroup

# Of each width, the fewest rows for which the kernel was faster than Triton's on an H100, which
# starts sooner; and the fewest and most hidden features.
_LEAST_ROWS = {64: 1 << 18, 256: 1 << 12}
_HIDDEN = {64: (128, 256), 256: (512, 4096)}

# Three warpgroups have 168 registers for each of their threads.
_REGISTERS = 168


class Shape(NamedTuple):
    """How a program is made up: warpgroups with rows, buffers of each weight and of x."""

    groups: int
    stages: int
    x_stages: int


def program_shape(width: int, hidden: int) -> Shape | None:
    """For an MLP of that width; ``None`` where Triton's kernel is as fast or faster."""
    least, most = _HIDDEN.get(width, (1, 0))
    if hidden % _BLOCK_H or not least <= hidden <= most:
        return None
    if width == 64:
        return Shape(groups=3, stages=hidden // _BLOCK_H, x_stages=2)
    return Shape(groups=2, stages=2, x_stages=1)


def runs(problem: Problem, rows: Any, target: Target) -> bool:
    """Whether the kernel runs a problem, and was measured to be faster than Triton's for such.

    In float16, where activations are not approximated, it is not.
    """
    return (
        target.backend == "cuda"
        and target.capability == 90
        and problem.rows == MANY_ROWS
        and not problem.gated
        and problem.dtype == torch.bfloat16
        and problem.in_features == problem.out_features
        and program_shape(problem.in_features, problem.hidden_features) is not None
        and guard_or_false(rows >= _LEAST_ROWS[problem.in_features])
        and has_gluon()
    )


def back_to_back(
    x: Tensor,
    weight_up: Tensor,
    weight_down: Tensor,
    bias_up: Tensor | None,
    bias_down: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    activation: str,
    norm: str,
) -> Tensor:
    """As ``launch.back_to_back`` without a gate, for operands that ``called.suits``.

    Returns:
        ``(rows, out)``, contiguous, with the dtype of x.
    """
    rows, width = x.shape
    y = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        adds_x = residual is not None and _keeps_x(width, norm) and _are_same(x, residual)
        others = (bias_up, bias_down, None if adds_x else residual, norm_weight, norm_bias)
        present = tuple(other is not None for other in others)
        shape = (width, weight_up.shape[0])
        launch = _launch(activation, *shape, x.dtype, present, x.get_device(), norm, adds_x)
        launch(x, weight_up, weight_down, others, y)
    return y


def caller(activation: str, norm: str, *known: Any) -> Callable[..., Tensor]:
    """What generated code calls for one MLP: :func:`back_to_back` of x and residual anywhere.

    Args:
        activation: as text.
        norm: before the first layer, as text.
        known: the values of :class:`~fusion_backend.kernels.called.Known`.
    """

    def call(x: Tensor, *others: Tensor | None) -> Tensor:
        *parameters, residual, norm_weight, norm_bias = others
        residual = None if residual is None else in_pieces(residual)
        rest = (residual, norm_weight, norm_bias, activation, norm)
        arguments: Any = (in_pieces(x), *parameters, *rest)
        return back_to_back(*arguments)

    return call


def prepare(rows: int, activation: str, norm: str, *known: Any) -> None:
    """Start compiling what :func:`caller` of the same arguments launches.

    Whether a residual is x itself is known when there is memory; it mostly is.
    """
    (width, hidden, _), dtype, given, _, device = Known(*known)
    _, _, _, has_bias_up, has_bias_down, has_residual, *has_norm_parameters = given
    adds_x = has_residual and _keeps_x(width, norm)
    present = (has_bias_up, has_bias_down, has_residual and not adds_x, *has_norm_parameters)
    compiled.start(activation, width, hidden, dtype, present, device, norm, adds_x)


def _keeps_x(width: int, norm: str) -> bool:
    """Whether x stays in registers to be added: a layer norm of wide rows leaves none for it."""
    return width == 64 or not norm.startswith("layer_norm")


def _are_same(x: Tensor, residual: Tensor) -> bool:
    """Whether two matrices of the same shape are the same memory."""
    return x.data_ptr() == residual.data_ptr() and x.stride() == residual.stride()


@functools.cache
def _launch(
    activation: str,
    width: int,
    hidden: int,
    dtype: torch.dtype,
    present: tuple[bool, ...],
    device: int,
    norm: str,
    adds_x: bool,
) -> Callable[..., None]:
    """Compile for a device; the result launches the kernel on that device's current stream."""
    kernel = compiled(activation, width, hidden, dtype, present, device, norm, adds_x)
    describe = _describer(width, hidden, dtype)
    constants, groups = _constants(width, hidden, norm, adds_x)
    multiprocessors = target_of(torch.device("cuda", device)).multiprocessors

    def launch(
        x: Tensor,
        weight_up: Tensor,
        weight_down: Tensor,
        others: Sequence[Tensor | None],
        y: Tensor,
    ) -> None:
        up, down = describe(weight_up, weight_down)
        programs = min(multiprocessors, -(-x.shape[0] // (_ROWS * groups)))
        sizes = (x.shape[0], x.stride(0) // PIECE)
        kernel[programs, 1, 1](
            *(x, up, down, *others, y, *sizes, *constants),
            stream=torch._C._cuda_getCurrentRawStream(device),
        )

    return launch


@Ahead
def compiled(
    activation: str,
    width: int,
    hidden: int,
    dtype: torch.dtype,
    present: Sequence[bool],
    device: int,
    norm: str = "",
    adds_x: bool = False,
) -> Any:
    """The compiled kernel (``triton.CompiledKernel``), from Triton's cache if it is there."""
    from triton.runtime.jit import MockTensor

    from fusion_backend.kernels.back_to_back_hopper import fusedmlp_back_to_back_hopper
    from fusion_backend.kernels.specialize import specialize

    some = MockTensor(dtype)
    up, down = _describer(width, hidden, dtype)(some, some)
    others = (some if each else None for each in present)
    constants, _ = _constants(width, hidden, norm, adds_x)
    template: Any = fusedmlp_back_to_back_hopper
    fast = dtype == torch.bfloat16
    kernel = specialize(template, parse(activation), fast, gluon=True, own_launch=True)
    with torch.cuda.device(device):
        return kernel.warmup(
            *(some, up, down, *others, some, PIECE, PIECE, *constants),
            grid=(1,),
            num_warps=4,
            maxnreg=_REGISTERS,
        )


def _constants(width: int, hidden: int, norm: str, adds_x: bool) -> tuple[tuple[Any, ...], int]:
    """The compile-time constants of the kernel, and how many warpgroups own rows."""
    shape = program_shape(width, hidden)
    assert shape is not None
    before = Norm.of(norm)
    kind_and_eps = None if before is None else (before.kind, before.eps)
    return (PIECE, hidden, kind_and_eps, adds_x, *shape), shape.groups


def _describer(
    width: int, hidden: int, dtype: torch.dtype
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """A function that makes the tensor descriptors of two weights."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    up_block, down_block = [_BLOCK_H, width], [width, _BLOCK_H]
    up_layout = gl.NVMMASharedLayout.get_default_for(up_block, element)
    down_layout = gl.NVMMASharedLayout.get_default_for(down_block, element)

    def describe(up: Any, down: Any) -> tuple[Any, Any]:
        return (
            TensorDescriptor(up, [hidden, width], [width, 1], up_block, up_layout),
            TensorDescriptor(down, [width, hidden], [hidden, 1], down_block, down_layout),
        )

    return describe
