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

from fusion_backend.compat.tensors import empty_strided_cuda
from fusion_backend.compat.triton_features import has_gluon
from fusion_backend.compat.triton_launches import prepared
from fusion_backend.kernels.host.ahead import Ahead
from fusion_backend.kernels.host.called import PIECE, Known, address, in_pieces
from fusion_backend.kernels.host.problems import MANY_ROWS, Problem
from fusion_backend.kernels.host.targets import Target, target_of
from fusion_backend.mlp.expression import parse
from fusion_backend.mlp.norms import Norm

_BLOCK_H = 64
_ROWS = 64  # of a warpgroup

# Of each width, the fewest rows for which the kernel was faster than Triton's on an H200, which
# starts sooner, by the fewest hidden features of which that holds; and the most of these.
_LEAST_ROWS = {64: {128: 1 << 18}, 256: {512: 1 << 16, 1024: 1 << 12}}
_MOST_HIDDEN = {64: 256, 256: 4096}

# Where the residual is in what an MLP may have beside x and weights: biases, it, norm parameters.
_RESIDUAL = 2

# Three warpgroups have 168 registers for each of their threads.
_REGISTERS = 168


class Shape(NamedTuple):
    """How a program is made up: warpgroups with rows, buffers of each weight and of x."""

    groups: int
    stages: int
    x_stages: int


def program_shape(width: int, hidden: int) -> Shape | None:
    """For an MLP of that width; ``None`` where Triton's kernel is as fast or faster."""
    if hidden % _BLOCK_H or hidden > _MOST_HIDDEN.get(width, 0):
        return None
    if hidden < min(_LEAST_ROWS[width]):
        return None
    if width == 64:
        return Shape(groups=3, stages=hidden // _BLOCK_H, x_stages=2)
    return Shape(groups=2, stages=2, x_stages=1)


def runs(problem: Problem, rows: Any, target: Target) -> bool:
    """Whether the kernel runs a problem, and was measured to be faster than Triton's for such."""
    return (
        target.backend == "cuda"
        and target.capability == 90
        and problem.rows == MANY_ROWS
        and not problem.gated
        and problem.dtype.itemsize == 2
        and problem.in_features == problem.out_features
        and program_shape(problem.in_features, problem.hidden_features) is not None
        and guard_or_false(rows >= _least_rows(problem.in_features, problem.hidden_features))
        and has_gluon()
    )


def _least_rows(width: int, hidden: int) -> int:
    by_hidden = _LEAST_ROWS[width]
    return by_hidden[max(least for least in by_hidden if least <= hidden)]


def back_to_back(
    x: Tensor,
    weight_up: Tensor,
    weight_down: Tensor,
    *others_and_texts: Any,
) -> Tensor:
    """As ``launch.back_to_back`` without a gate, for operands that ``called.suits``.

    Args:
        x: ``(rows, in)``.
        weight_up: ``(hidden, in)``.
        weight_down: ``(out, hidden)``.
        others_and_texts: bias_up, bias_down, residual, norm_weight and norm_bias, or ``None`` for
            each; the activation and the norm, as texts.

    Returns:
        ``(rows, out)``, contiguous, with the dtype of x.
    """
    *others, activation, norm = others_and_texts
    given = tuple(other is not None for other in others)
    known = (activation, x.shape[1], weight_up.shape[0], x.dtype, given, x.get_device(), norm)
    return launcher(*known)(x, weight_up, weight_down, *others)


def caller(activation: str, norm: str, *known: Any) -> Callable[..., Tensor]:
    """What generated code calls for one MLP: :func:`back_to_back` of x and residual anywhere.

    Args:
        activation: as text.
        norm: before the first layer, as text.
        known: the values of :class:`~fusion_backend.kernels.host.called.Known`.
    """
    launch = launcher(activation, *_layers(*known), norm)

    def call(x: Tensor, *others: Tensor | None) -> Tensor:
        *parameters, residual, norm_weight, norm_bias = others
        residual = None if residual is None else in_pieces(residual)
        return launch(in_pieces(x), *parameters, residual, norm_weight, norm_bias)

    return call


def prepare(rows: int, activation: str, norm: str, *known: Any) -> None:
    """Start compiling what :func:`caller` of the same arguments launches.

    Whether a residual is x itself is known when there is memory; it mostly is.
    """
    width, hidden, dtype, given, device = _layers(*known)
    adds_x = given[_RESIDUAL] and _keeps_x(width, norm)
    compiled.start(activation, width, hidden, dtype, _passed(given, adds_x), device, norm, adds_x)


def _layers(*known: Any) -> tuple[int, int, torch.dtype, tuple[bool, ...], int]:
    """Widths of x and between the layers, dtype, what there is beside weights, and the device."""
    (width, hidden, _), dtype, given, _, device = Known(*known)
    return width, hidden, dtype, given[3:], device


def _passed(given: tuple[bool, ...], adds_x: bool) -> tuple[bool, ...]:
    """Which of them the kernel gets: no residual if that is x."""
    return (*given[:_RESIDUAL], given[_RESIDUAL] and not adds_x, *given[_RESIDUAL + 1 :])


def _keeps_x(width: int, norm: str) -> bool:
    """Whether x stays in registers to be added: a layer norm of wide rows leaves none for it."""
    return width == 64 or not norm.startswith("layer_norm")


def _are_same(x: Tensor, residual: Tensor) -> bool:
    """Whether two matrices of the same shape are the same memory."""
    return x.data_ptr() == residual.data_ptr() and x.stride() == residual.stride()


@functools.cache
def launcher(
    activation: str,
    width: int,
    hidden: int,
    dtype: torch.dtype,
    given: tuple[bool, ...],
    device: int,
    norm: str,
) -> Callable[..., Tensor]:
    """A function of the tensors of :func:`back_to_back` that launches the kernel on a device."""
    empty_strided = empty_strided_cuda()
    can_add_x = given[_RESIDUAL] and _keeps_x(width, norm)

    @functools.cache
    def launching(adds_x: bool) -> Callable[..., None]:
        return _launch(activation, width, hidden, dtype, given, device, norm, adds_x)

    def launch(
        x: Tensor,
        weight_up: Tensor,
        weight_down: Tensor,
        bias_up: Tensor | None,
        bias_down: Tensor | None,
        residual: Tensor | None,
        *norm_parameters: Tensor | None,
    ) -> Tensor:
        rows = x.shape[0]
        y = empty_strided((rows, width), (width, 1), dtype)
        if rows:
            adds_x = can_add_x and residual is not None and _are_same(x, residual)
            others = (bias_up, bias_down, None if adds_x else residual, *norm_parameters)
            launching(adds_x)(x, weight_up, weight_down, others, y)
        return y

    return launch


def _launch(
    activation: str,
    width: int,
    hidden: int,
    dtype: torch.dtype,
    given: tuple[bool, ...],
    device: int,
    norm: str,
    adds_x: bool,
) -> Callable[..., None]:
    """Compile for a device; the result launches the kernel on that device's current stream."""
    present = _passed(given, adds_x)
    kernel = compiled(activation, width, hidden, dtype, present, device, norm, adds_x)
    constants, groups = _constants(width, hidden, norm, adds_x)
    run = prepared(kernel, constants, device)
    multiprocessors = target_of(torch.device("cuda", device)).multiprocessors

    def launch(
        x: Tensor,
        weight_up: Tensor,
        weight_down: Tensor,
        others: Sequence[Tensor | None],
        y: Tensor,
    ) -> None:
        rows = x.shape[0]
        run(
            min(multiprocessors, -(-rows // (_ROWS * groups))),
            x.data_ptr(),
            (weight_up.data_ptr(), hidden, width, width),
            (weight_down.data_ptr(), width, hidden, hidden),
            *map(address, others),
            y.data_ptr(),
            rows,
            x.stride(0) // PIECE,
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
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.runtime.jit import MockTensor

    from fusion_backend.kernels.back_to_back.kernel_sm90 import fusedmlp_back_to_back_hopper
    from fusion_backend.kernels.codegen.specialize import specialize

    some = MockTensor(dtype)

    def described(shape: list[int], block: list[int]) -> Any:
        element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
        layout = gl.NVMMASharedLayout.get_default_for(block, element)
        return TensorDescriptor(some, shape, [shape[1], 1], block, layout)

    up = described([hidden, width], [_BLOCK_H, width])
    down = described([width, hidden], [width, _BLOCK_H])
    others = (some if each else None for each in present)
    constants, _ = _constants(width, hidden, norm, adds_x)
    template: Any = fusedmlp_back_to_back_hopper
    kernel = specialize(template, parse(activation), dtype, gluon=True, own_launch=True)
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
