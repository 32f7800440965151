"""Launches of the kernel for Hopper, each prepared once and kept.

Generated code calls what :func:`caller` returns, and all that follows from shapes, dtype and
activation is looked up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusion_backend.compat.tensors import empty_strided_cuda
from fusion_backend.compat.triton_launches import prepared
from fusion_backend.kernels.epilogue.config_sm90 import (
    BLOCK_K,
    Form,
    Tile,
    fastest_tile,
    tiles_for,
    width_of,
)
from fusion_backend.kernels.host import called
from fusion_backend.kernels.host.ahead import Ahead
from fusion_backend.kernels.host.called import Known, in_pieces
from fusion_backend.kernels.host.targets import target_of
from fusion_backend.mlp.expression import parse
from fusion_backend.mlp.weights import is_transposed

_GROUP_M = 8
_WARPS = 4
# Of each thread: of three warpgroups at first, then of the two that sum.
_REGISTERS = 168
_SUMMING_REGISTERS = 240
_WIDEST_SWIZZLE = 128  # bytes
# Of the result, at once: elements, and columns where the last ones need a mask.
_STORED_ELEMENTS = 4096
_STORED_MASKED = 32

# Of a matrix: its address, rows and columns, and the elements from a row to the next.
Place = tuple[int, int, int, int]

# The activation of a last layer.
IDENTITY = "x"


def suits(
    x: Tensor,
    weight_up: Tensor,
    weight_gate: Tensor | None,
    bias_up: Tensor | None,
    bias_gate: Tensor | None,
    residual: Tensor | None = None,
) -> bool:
    """Whether the tensors lie as the kernel wants them; a plain weight may be transposed."""
    plain = weight_gate is None
    stored = weight_up.t() if plain and is_transposed(weight_up) else weight_up
    return called.suits(x, stored, weight_gate, bias_up, bias_gate, residual)


def epilogue(
    x: Tensor,
    weight_up: Tensor,
    weight_gate: Tensor | None,
    bias_up: Tensor | None,
    bias_gate: Tensor | None,
    residual: Tensor | None,
    activation: str,
) -> Tensor:
    """As ``launch.epilogue``, for operands that :func:`suits`; plus the residual, if there is one.

    Returns:
        ``(rows, hidden)``, contiguous, with the dtype of x.
    """
    form = Form.of(weight_up, weight_gate, bias_up, bias_gate, residual)
    known = (activation, x.shape[1], weight_up.shape[0], x.dtype, form, x.get_device())
    return launcher(*known)(x, weight_up, weight_gate, bias_up, bias_gate, residual)


def epilogue_saving(
    x: Tensor,
    weight_up: Tensor,
    weight_gate: Tensor | None,
    bias_up: Tensor | None,
    bias_gate: Tensor | None,
    activation: str,
    joined: bool,
) -> list[Tensor]:
    """:func:`epilogue` for training: the activation and then the pre-activations, up's last.

    If ``joined``, these are one matrix ``(rows, 2 · hidden)``, the gate's in the first half of each
    row.
    """
    form = Form.of(weight_up, weight_gate, bias_up, bias_gate, None, saves=True)
    known = (activation, x.shape[1], weight_up.shape[0], x.dtype, form, x.get_device())
    return _saving_launcher(*known)(joined, x, weight_up, weight_gate, bias_up, bias_gate)


def epilogue_saving_caller(*known: Any) -> Callable[..., list[Tensor]]:
    """What generated code calls for one MLP: :func:`epilogue_saving` of any x.

    Args:
        known: the activation as text, whether the pre-activations are joined, the shape of a
            weight, the dtype, which operands there are, whether the weight is transposed, and the
            device's number.
    """
    launch, joined = _saving_launcher(*_saving_layers(*known)), known[1]
    return lambda x, *parameters: launch(joined, in_pieces(x), *parameters)


def prepare_epilogue_saving(rows: int, *known: Any) -> None:
    """Start compiling what :func:`epilogue_saving_caller` launches for so many rows."""
    _prepare(rows, *_saving_layers(*known))


def _saving_layers(
    activation: str,
    joined: bool,
    shape: tuple[int, int],
    dtype: torch.dtype,
    given: tuple[bool, ...],
    transposed: bool,
    device: int,
) -> tuple[str, int, int, torch.dtype, Form, int]:
    """What the kernel is compiled for, of what generated code knows."""
    _, _, gated, has_bias_up, has_bias_gate = given
    form = Form(gated, has_bias_up, has_bias_gate, transposed, saves=True)
    return activation, shape[1], shape[0], dtype, form, device


def input_gradient(
    grad_preact: Tensor, weight_gate: Tensor, weight_up: Tensor, grad_up: Tensor | None
) -> list[Tensor]:
    """``[grad_gate | grad_up] @ [weight_gate; weight_up]``, summed before it is rounded.

    Args:
        grad_preact: ``(rows, 2 · hidden)``, or the gate's ``(rows, hidden)``.
        weight_gate: ``(hidden, in)``, contiguous; of a width that :func:`can_join`.
        weight_up: likewise.
        grad_up: ``(rows, hidden)``, contiguous; ``None`` where it is part of grad_preact.

    Returns:
        ``(rows, in)``, contiguous, as the only element.
    """
    (hidden, inner), apart = weight_up.shape, grad_up is not None
    device = grad_preact.get_device()
    launch = _joining_launcher((hidden, inner), grad_preact.dtype, apart, device)
    return [launch(grad_preact, weight_gate, weight_up, grad_up)]


def input_gradient_caller(*known: Any) -> Callable[..., list[Tensor]]:
    """What generated code calls: :func:`input_gradient` of one pair of weights.

    Args:
        known: as of :func:`epilogue_saving_caller`, without activation and ``joined``.
    """
    shape, dtype, given, _, device = known
    launch = _joining_launcher(shape, dtype, given[3], device)
    return lambda grad_preact, *others: [launch(in_pieces(grad_preact), *others)]


def prepare_input_gradient(rows: int, *known: Any) -> None:
    """Start compiling what :func:`input_gradient_caller` launches for so many rows."""
    shape, dtype, given, _, device = known
    _prepare(rows, IDENTITY, *_joined_layers(shape, dtype, given[3], device))


def _joining_launcher(
    shape: tuple[int, int], dtype: torch.dtype, apart: bool, device: int
) -> Callable[..., Tensor]:
    """A function of the tensors of :func:`input_gradient`."""
    launch = launcher(IDENTITY, *_joined_layers(shape, dtype, apart, device))

    def call(grad_preact: Tensor, gate: Tensor, up: Tensor, grad_up: Tensor | None) -> Tensor:
        return launch(grad_preact, up, gate, None, None, None, second=grad_up)

    return call


def _joined_layers(
    shape: tuple[int, int], dtype: torch.dtype, apart: bool, device: int
) -> tuple[int, int, torch.dtype, Form, int]:
    """The layer that :func:`input_gradient` is."""
    hidden, inner = shape
    form = Form(False, False, False, True, joined=True, apart=apart)
    return 2 * hidden, inner, dtype, form, device


def _prepare(rows: int, activation: str, *layers: Any) -> None:
    inner, hidden, dtype, form, device = layers
    tile = tile_of(activation, dtype, rows, hidden, form, device)
    compiled.start(activation, inner, hidden, dtype, form, tile, device)


def caller(activation: str, *known: Any) -> Callable[..., Tensor]:
    """What generated code calls for one MLP: :func:`epilogue` of any x and residual.

    Args:
        activation: as text.
        known: the values of :class:`~fusion_backend.kernels.host.called.Known`.
    """
    launch = launcher(activation, *_layers(*known))

    def call(
        x: Tensor,
        weight_up: Tensor,
        weight_gate: Tensor | None,
        bias_up: Tensor | None,
        bias_gate: Tensor | None,
        residual: Tensor | None,
    ) -> Tensor:
        residual = None if residual is None else in_pieces(residual)
        return launch(in_pieces(x), weight_up, weight_gate, bias_up, bias_gate, residual)

    return call


def prepare(rows: int, activation: str, *known: Any) -> None:
    """Start compiling what :func:`caller` of the same arguments launches for so many rows."""
    _prepare(rows, activation, *_layers(*known))


def _layers(*known: Any) -> tuple[int, int, torch.dtype, Form, int]:
    """Widths of x and of the result, dtype, form and device, of what generated code knows."""
    (inner, hidden, _), dtype, given, transposed, device = Known(*known)
    _, _, gated, has_bias_up, has_bias_gate, has_residual = given
    form = Form(gated, has_bias_up, has_bias_gate, transposed[1], has_residual)
    return inner, hidden, dtype, form, device


def tile_of(
    activation: str, dtype: torch.dtype, rows: int, hidden: int, form: Form, device: int
) -> Tile:
    """The fastest tile for some rows on a device, of those that an activation may have."""
    target = target_of(torch.device("cuda", device))
    tiles = tiles_for(activation, dtype, form)
    return fastest_tile(rows, hidden, form.gated, target, tiles)


@functools.cache
def launcher(
    activation: str, inner: int, hidden: int, dtype: torch.dtype, form: Form, device: int
) -> Callable[..., Tensor]:
    """A function of the tensors of :func:`epilogue` that launches the kernel on a device."""
    empty_strided = empty_strided_cuda()
    of_rows = _launches(activation, inner, hidden, dtype, form, device)

    def launch(x: Tensor, *others: Tensor | None, second: Tensor | None = None) -> Tensor:
        rows = x.shape[0]
        postact = empty_strided((rows, hidden), (hidden, 1), dtype)
        if rows:
            of_rows(rows)(x, *others, (postact,), second)
        return postact

    return launch


@functools.cache
def _saving_launcher(
    activation: str, inner: int, hidden: int, dtype: torch.dtype, form: Form, device: int
) -> Callable[..., list[Tensor]]:
    """A function of the tensors of :func:`epilogue_saving` that launches the kernel on a device."""
    empty_strided = empty_strided_cuda()
    of_rows, gated = _launches(activation, inner, hidden, dtype, form, device), form.gated

    def launch(joined: bool, x: Tensor, *parameters: Tensor | None) -> list[Tensor]:
        rows, width = x.shape[0], 2 * hidden if joined else hidden
        postact = empty_strided((rows, hidden), (hidden, 1), dtype)
        count = 2 if gated and not joined else 1
        preacts = (empty_strided((rows, width), (width, 1), dtype) for _ in range(count))
        results = [postact, *preacts]
        if rows:
            of_rows(rows)(x, *parameters, None, results)
        return results

    return launch


def places(hidden: int, matrices: Sequence[Tensor]) -> tuple[Place | None, Place]:
    """Where the gate's matrix is, ``None`` without a gate, and up's.

    Args:
        hidden: their width.
        matrices: the gate's, if there is one, and up's; or one that has both side by side.
    """
    *gate, last = matrices
    (rows, width), start = last.shape, last.data_ptr()
    if width == hidden:
        of_gate = (gate[0].data_ptr(), rows, hidden, hidden) if gate else None
        return of_gate, (start, rows, hidden, hidden)
    return (start, rows, hidden, width), (start + hidden * last.itemsize, rows, hidden, width)


def _launches(
    activation: str, inner: int, hidden: int, dtype: torch.dtype, form: Form, device: int
) -> Callable[[int], Callable[..., None]]:
    """What launches the kernel for a number of rows: which tile it has depends on that."""

    @functools.lru_cache(1024)
    def of_rows(rows: int) -> Callable[..., None]:
        tile = tile_of(activation, dtype, rows, hidden, form, device)
        return launch_of_tile(activation, inner, hidden, dtype, form, tile, device)

    return of_rows


@functools.cache
def launch_of_tile(
    activation: str,
    inner: int,
    hidden: int,
    dtype: torch.dtype,
    form: Form,
    tile: Tile,
    device: int,
) -> Callable[..., None]:
    """Compile for a device; the result launches the kernel on that device's current stream."""
    kernel = compiled(activation, inner, hidden, dtype, form, tile, device)
    run = prepared(kernel, _constants(inner, hidden, form, tile), device)
    multiprocessors = target_of(torch.device("cuda", device)).multiprocessors
    weight = (inner, hidden, hidden) if form.transposed else (hidden, inner, inner)
    if form.joined:
        weight = (inner // 2, hidden, hidden)
    width = inner // 2 if form.apart else inner
    tile_rows, columns = tile.rows, -(-hidden // width_of(tile, form.gated))

    def launch(
        x: Tensor,
        weight_up: Tensor,
        weight_gate: Tensor | None,
        bias_up: Tensor | None,
        bias_gate: Tensor | None,
        residual: Tensor | None,
        results: Sequence[Tensor],
        second: Tensor | None = None,
    ) -> None:
        rows, (postact, *preacts) = x.shape[0], results
        saved = places(hidden, preacts) if preacts else (None, None)
        run(
            min(multiprocessors, -(-rows // tile_rows) * columns),
            (x.data_ptr(), rows, width, x.stride(0)),
            None if second is None else (second.data_ptr(), rows, width, width),
            None if weight_gate is None else (weight_gate.data_ptr(), *weight),
            None if bias_gate is None else bias_gate.data_ptr(),
            (weight_up.data_ptr(), *weight),
            None if bias_up is None else bias_up.data_ptr(),
            None if residual is None else residual.data_ptr(),
            (postact.data_ptr(), rows, hidden, hidden),
            *saved,
            rows,
        )

    return launch


@Ahead
def compiled(
    activation: str,
    inner: int,
    hidden: int,
    dtype: torch.dtype,
    form: Form,
    tile: Tile,
    device: int,
) -> Any:
    """The compiled kernel (``triton.CompiledKernel``), from Triton's cache if it is there."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.runtime.jit import MockTensor

    from fusion_backend.kernels.codegen.specialize import specialize
    from fusion_backend.kernels.epilogue.kernel_sm90 import fusedmlp_epilogue_hopper

    some = MockTensor(dtype)

    def described(width: int, *block: int) -> Any:
        swizzle = min(block[1] * dtype.itemsize, _WIDEST_SWIZZLE)
        layout = NVMMASharedLayout(swizzle, 8 * dtype.itemsize, rank=2)
        return TensorDescriptor(some, [tile.rows, width], [width, 1], list(block), layout)

    width = width_of(tile, form.gated)
    smallest = width - _piece(width) or width
    weight = described(inner, smallest, BLOCK_K)
    if form.transposed:
        weight = described(hidden, BLOCK_K, tile.columns)
    result = described(hidden, tile.box, _stored(tile, smallest, hidden, form.saves))
    bias_gate = some if form.has_bias_gate else None
    bias_up = some if form.has_bias_up else None
    template: Any = fusedmlp_epilogue_hopper
    kernel = specialize(template, parse(activation), dtype, gluon=True, own_launch=True)
    with torch.cuda.device(device):
        return kernel.warmup(
            described(inner, tile.box, BLOCK_K),
            described(inner, tile.box, BLOCK_K) if form.apart else None,
            *(weight if form.gated or form.joined else None, bias_gate, weight, bias_up),
            some if form.has_residual else None,
            *(
                result,
                result if form.saves and form.gated else None,
                result if form.saves else None,
            ),
            *(tile.rows, *_constants(inner, hidden, form, tile)),
            grid=(1,),
            num_warps=_WARPS,
            maxnreg=_REGISTERS,
            launch_pdl=True,
        )


def _piece(width: int) -> int:
    """How many of these columns the first piece has: the greatest power of two."""
    return 1 << (width.bit_length() - 1)


def _stored(tile: Tile, smallest: int, hidden: int, saves: bool) -> int:
    """How many columns are stored at once, of pieces of at least so many.

    Fewer where the last ones need a mask, or pre-activations are stored as well, for whose
    registers the sums of tall tiles leave no room.
    """
    stored = min(_STORED_ELEMENTS // tile.box, smallest)
    return min(stored, _STORED_MASKED) if saves or hidden % stored else stored


def _constants(inner: int, hidden: int, form: Form, tile: Tile) -> tuple[int, ...]:
    """The compile-time constants of the kernel."""
    width = width_of(tile, form.gated)
    how = (BLOCK_K, _GROUP_M, tile.stages, _SUMMING_REGISTERS, form.transposed)
    return (inner, hidden, width, _piece(width), *how, tile.rows // tile.box)
