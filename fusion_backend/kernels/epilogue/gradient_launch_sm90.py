"""Launches of the kernel in ``hidden_gradient_hopper``, each prepared once and kept.

As in ``hopper_epilogue``, generated code calls what :func:`caller` returns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusion_backend.compat.tensors import empty_strided_cuda
from fusion_backend.compat.triton_launches import prepared
from fusion_backend.kernels.epilogue.config_sm90 import NARROWEST, can
from fusion_backend.kernels.epilogue.launch_sm90 import places
from fusion_backend.kernels.host import called
from fusion_backend.kernels.host.ahead import Ahead
from fusion_backend.kernels.host.called import PIECE, in_pieces
from fusion_backend.kernels.host.problems import MANY_ROWS, Problem
from fusion_backend.kernels.host.targets import Target, target_of
from fusion_backend.mlp.expression import parse
from fusion_backend.mlp.weights import is_transposed

BLOCK_M = 128
SUMS_OF_BLOCK = 4  # rows of sums of a tile: one for each warp
_COLUMNS = 128
_BLOCK_K = 64
_GROUP_M = 8
_STAGES = 5
_PART = 32  # columns of pre-activations and of results that are moved at once
_SLOTS = 2  # buffers for such parts of pre-activations, of each warpgroup
_WARPS = 4
# Of each thread: of three warpgroups at first, then of the two that sum.
_REGISTERS = 168
_SUMMING_REGISTERS = 240
_WIDEST_SWIZZLE = 128  # bytes
# Where it was measured, on an H200, to be faster: no narrower, and with more elements of hidden.
NARROWEST_RESULT = 128
SMALLEST = 1 << 20
# Elements of a weight. Where its gradient has so many, tiles fill a GPU several times, and two
# products take as long as one of both.
LARGE = 1 << 23


class Form(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        gated: whether there are two pre-activations.
        has_sums: whether gradients of pre-activations are summed, for those of biases.
        has_output_sums: whether grad_output is summed.
        transposed: whether weight_down is the transpose of a contiguous matrix.
    """

    gated: bool
    has_sums: bool
    has_output_sums: bool
    transposed: bool

    @property
    def sums(self) -> bool:
        """Whether anything is summed."""
        return self.has_sums or self.has_output_sums

    def size_of_sums(self, blocks: Any, out: Any, hidden: Any) -> tuple[Any, Any]:
        """The size of their sums, of so many rows; without elements where nothing is summed.

        Sizes may be symbolic: integers, or Inductor's expressions.
        """
        of_preacts = [hidden] * (2 if self.gated else 1) if self.has_sums else []
        columns = [*of_preacts, *([out] if self.has_output_sums else [])]
        return (blocks, sum(columns)) if self.sums else (0, hidden)


def hidden_gradient(
    grad_output: Tensor,
    weight_down: Tensor,
    preact_gate: Tensor | None,
    preact_up: Tensor,
    activation: str,
    joined: bool,
    has_sums: bool,
    has_output_sums: bool,
) -> list[Tensor]:
    """Gradients of the pre-activations, the activation recomputed, and sums over rows.

    Args:
        grad_output: ``(rows, out)``; 16 bits.
        weight_down: ``(out, hidden)``, or the transpose of a contiguous matrix.
        preact_gate: ``(rows, hidden)``, contiguous; ``None`` without a gate, or if ``joined``.
        preact_up: ``(rows, hidden)``, contiguous; if ``joined``, ``(rows, 2 · hidden)``, with that
            of the gate in the first half of each row.
        activation: as text.
        joined: whether there is a gate whose pre-activation is in ``preact_up``.
        has_sums: whether gradients of pre-activations are summed.
        has_output_sums: whether grad_output is summed.

    Returns:
        Gradients of the pre-activations, which lie as these do; ``postact`` ``(rows, hidden)``; and
        sums over some rows each, of the former and of grad_output side by side, as far as they are
        wanted, ``(any, width of all)`` in float32.
    """
    out, hidden = weight_down.shape
    gated = joined or preact_gate is not None
    form = Form(gated, has_sums, has_output_sums, is_transposed(weight_down))
    known = (activation, out, hidden, grad_output.dtype, form, grad_output.get_device())
    return _launcher(*known)(in_pieces(grad_output), weight_down, preact_gate, preact_up)


def runs(problem: Problem, rows: Any, target: Target) -> bool:
    """Whether the kernel runs a problem, and was measured to be faster than Triton's for such."""
    if problem.dtype.itemsize != 2 or problem.out_features < NARROWEST_RESULT:
        return False
    if not can(max(problem.out_features, NARROWEST), problem.hidden_features, target):
        return False
    if problem.out_features % PIECE:
        return False
    if isinstance(rows, int):
        return rows * problem.hidden_features > SMALLEST
    return problem.rows == MANY_ROWS  # symbolic ones: no more guards than there are


def parts_pairs(rows: Any, inner: int, hidden: int) -> bool:
    """Whether pre-activations of a pair are two matrices, and two products give the gradients.

    See :func:`gradient_launch.joins`.
    """
    return isinstance(rows, int) and rows < 2 * inner and hidden * inner >= LARGE


def sums_output(out: int, hidden: int) -> bool:
    """Whether the kernel sums grad_output: tiles share its columns, so a wide one is too much."""
    return out <= hidden


@functools.cache
def differentiates(activation: str, dtype: torch.dtype) -> bool:
    """Whether an activation and its derivatives are few instructions; in float16 most are not."""
    from fusion_backend.kernels.codegen.activation import exact_functions

    return not exact_functions(parse(activation), dtype, gluon=True)


def suits(
    grad_output: Tensor, weight_down: Tensor, preact_gate: Tensor | None, preact_up: Tensor
) -> bool:
    """Whether the tensors lie as the kernel wants them; weight_down may be transposed."""
    stored = weight_down.t() if is_transposed(weight_down) else weight_down
    return called.suits(grad_output, stored, preact_gate, preact_up)


def blocks(rows: Any) -> Any:
    """How many rows of sums there are, of rows, possibly symbolic, that whole tiles have."""
    return (rows + (BLOCK_M - 1)) // BLOCK_M * SUMS_OF_BLOCK


def hidden_gradient_caller(*known: Any) -> Callable[..., list[Tensor]]:
    """What generated code calls for one MLP: :func:`hidden_gradient` of any grad_output.

    Args:
        known: the activation as text, whether the pre-activations are joined, whether their
            gradients are summed and whether grad_output is, the shape of weight_down, the dtype,
            which operands there are, whether weight_down is transposed, the device's number, and
            whether the gradients take the memory of the pre-activations.
    """
    *layers, spends = known
    launch = _launcher(*_layers(*layers))
    return lambda grad_output, *others: launch(in_pieces(grad_output), *others, spends=spends)


def prepare_hidden_gradient(rows: int, *known: Any) -> None:
    """Start compiling what :func:`hidden_gradient_caller` launches; ``known`` without the last."""
    compiled.start(*_layers(*known))


def _layers(
    activation: str, joined: bool, has_sums: bool, has_output_sums: bool, *operands: Any
) -> tuple[str, int, int, torch.dtype, Form, int]:
    """What a kernel is compiled for, of what generated code knows."""
    shape, dtype, given, transposed, device = operands
    form = Form(joined or given[2], has_sums, has_output_sums, transposed)
    return activation, *shape, dtype, form, device


@functools.cache
def _launcher(
    activation: str, out: int, hidden: int, dtype: torch.dtype, form: Form, device: int
) -> Callable[..., list[Tensor]]:
    """A function of the tensors of :func:`hidden_gradient` that launches the kernel on a device."""
    empty_strided = empty_strided_cuda()
    launching = functools.cache(lambda: _launch(activation, out, hidden, dtype, form, device))

    def launch(
        grad_output: Tensor,
        weight_down: Tensor,
        preact_gate: Tensor | None,
        preact_up: Tensor,
        spends: bool = False,
    ) -> list[Tensor]:
        rows = grad_output.shape[0]
        preacts = [preact_up] if preact_gate is None else [preact_gate, preact_up]
        # A part of a tile is read before the same part of gradients is written, and by no one else.
        grads = preacts
        if not spends:
            of_preacts = (each.shape[1] for each in preacts)
            grads = [empty_strided((rows, columns), (columns, 1), dtype) for columns in of_preacts]
        postact = empty_strided((rows, hidden), (hidden, 1), dtype)
        size = form.size_of_sums(blocks(rows), out, hidden)
        sums = empty_strided(size, (size[1], 1), torch.float32)
        if rows:
            launching()(grad_output, weight_down, preacts, grads, postact, sums)
        return [*grads, postact, sums]

    return launch


def _launch(
    activation: str, out: int, hidden: int, dtype: torch.dtype, form: Form, device: int
) -> Callable[..., None]:
    """Compile for a device; the result launches the kernel on that device's current stream."""
    kernel = compiled(activation, out, hidden, dtype, form, device)
    run = prepared(kernel, _constants(out, hidden, form), device)
    multiprocessors = target_of(torch.device("cuda", device)).multiprocessors
    weight = (hidden, out, out) if form.transposed else (out, hidden, hidden)
    columns = -(-hidden // _COLUMNS)

    def launch(
        grad_output: Tensor,
        weight_down: Tensor,
        preacts: list[Tensor],
        grads: list[Tensor],
        postact: Tensor,
        sums: Tensor,
    ) -> None:
        rows = grad_output.shape[0]
        output = (grad_output.data_ptr(), rows, out, grad_output.stride(0))
        run(
            min(multiprocessors, -(-rows // BLOCK_M) * columns),
            output,
            output if form.has_output_sums else None,
            (weight_down.data_ptr(), *weight),
            *places(hidden, preacts),
            *places(hidden, grads),
            (postact.data_ptr(), rows, hidden, hidden),
            sums.data_ptr() if form.sums else None,
            rows,
        )

    return launch


@Ahead
def compiled(
    activation: str, out: int, hidden: int, dtype: torch.dtype, form: Form, device: int
) -> Any:
    """The compiled kernel (``triton.CompiledKernel``), from Triton's cache if it is there."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.runtime.jit import MockTensor

    from fusion_backend.kernels.codegen.specialize import specialize
    from fusion_backend.kernels.epilogue.gradient_kernel_sm90 import fusedmlp_hidden_gradient_hopper

    some = MockTensor(dtype)

    def described(width: int, *block: int) -> Any:
        swizzle = min(block[1] * dtype.itemsize, _WIDEST_SWIZZLE)
        layout = NVMMASharedLayout(swizzle, 8 * dtype.itemsize, rank=2)
        return TensorDescriptor(some, [BLOCK_M, width], [width, 1], list(block), layout)

    if form.transposed:
        weight = described(out, _COLUMNS, _BLOCK_K)
    else:
        weight = described(hidden, _BLOCK_K, _COLUMNS)
    part = described(hidden, BLOCK_M, _PART)
    gate = part if form.gated else None
    template: Any = fusedmlp_hidden_gradient_hopper
    kernel = specialize(template, parse(activation), dtype, gluon=True, own_launch=True)
    with torch.cuda.device(device):
        return kernel.warmup(
            described(out, BLOCK_M, _BLOCK_K),
            described(out, BLOCK_M, _PART) if form.has_output_sums else None,
            *(weight, gate, part, gate, part, part),
            *(MockTensor(torch.float32) if form.sums else None, BLOCK_M),
            *_constants(out, hidden, form),
            grid=(1,),
            num_warps=_WARPS,
            maxnreg=_REGISTERS,
            launch_pdl=True,
        )


def _constants(out: int, hidden: int, form: Form) -> tuple[Any, ...]:
    """The compile-time constants of the kernel."""
    buffers = (_STAGES, _SLOTS, _SUMMING_REGISTERS)
    tiles = (_COLUMNS, _BLOCK_K, _GROUP_M)
    return (out, hidden, *tiles, *buffers, form.has_sums, not form.transposed)
