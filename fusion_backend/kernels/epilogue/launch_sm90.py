"""Launches of the kernel in ``epilogue_hopper``, each prepared once and kept.

As in ``hopper``, generated code calls what :func:`caller` returns, and all that follows from
shapes, dtype and activation is looked up.
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
from fusion_backend.kernels.host import called
from fusion_backend.kernels.host.ahead import Ahead
from fusion_backend.kernels.host.called import PIECE, Known, in_pieces
from fusion_backend.kernels.host.problems import MANY_ROWS, Problem
from fusion_backend.kernels.host.targets import Target, target_of
from fusion_backend.mlp.expression import parse
from fusion_backend.mlp.weights import is_transposed

_BLOCK_K = 64
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

# How much of the tiles must be result for the input's gradient to be computed at once.
_FILLED_ENOUGH = 0.85

# Where it was measured, on an H200, to be faster: with more rows, no narrower, and with no fewer
# elements of the result, of which else too few programs would have a tile. Plain layers are
# compared with Triton's kernel.
_FEW_ROWS = 64
_FEW_ROWS_PLAIN = 256
NARROWEST = 256
_SMALLEST = 1 << 19
_SMALLEST_PLAIN = 1 << 21


class Tile(NamedTuple):
    """What a program computes at a time.

    Attributes:
        rows: of the result.
        columns: of the weights; of a gated pair, half from either.
        stages: buffers of operands.
        time: how long it takes, whatever the unit; measured on an H200 at its power limit.
    """

    rows: int
    columns: int
    stages: int
    time: int

    @property
    def box(self) -> int:
        """How many rows are loaded and stored at once: a power of two."""
        return 64 if self.rows % 128 else 128


SQUARE = Tile(128, 128, 5, 68)
WIDE = Tile(128, 192, 4, 99)
TALL = Tile(192, 128, 4, 98)
TILES = (SQUARE, WIDE, TALL)
# Where pre-activations are stored, fewer columns are at once, which leaves memory for more buffers.
_SAVING_TILES = (SQUARE._replace(stages=6), WIDE, TALL._replace(stages=5))


class Form(NamedTuple):
    """What layers a kernel is compiled for.

    Attributes:
        gated: whether there are two.
        has_bias_up: whether up has a bias.
        has_bias_gate: whether the gate has one.
        transposed: whether the weight is the transpose of a contiguous matrix; only of a plain one.
        has_residual: whether something is added to the result.
        saves: whether pre-activations are stored, too.
        joined: whether there are two weights of one layer, transposed, of which the first has the
            first half of its inputs.
        apart: whether the halves of these inputs are two matrices, too.
    """

    gated: bool
    has_bias_up: bool
    has_bias_gate: bool
    transposed: bool
    has_residual: bool = False
    saves: bool = False
    joined: bool = False
    apart: bool = False

    @classmethod
    def of(
        cls,
        weight_up: Tensor,
        weight_gate: Tensor | None,
        bias_up: Tensor | None,
        bias_gate: Tensor | None,
        residual: Tensor | None,
        saves: bool = False,
    ) -> Form:
        """What layers these are."""
        has_biases = bias_up is not None, bias_gate is not None
        how = is_transposed(weight_up), residual is not None, saves
        return cls(weight_gate is not None, *has_biases, *how)


def runs(problem: Problem, rows: Any, target: Target) -> bool:
    """Whether the kernel runs a problem, and was measured to be faster than Triton's for such."""
    hidden = problem.hidden_features
    if not problem.tma or not can(problem.in_features, hidden, target):
        return False
    if problem.gated:
        return problem.rows > _FEW_ROWS and guard_or_false(rows * hidden > _SMALLEST)
    if isinstance(rows, int):
        return rows > _FEW_ROWS_PLAIN and rows * hidden > _SMALLEST_PLAIN
    return problem.rows == MANY_ROWS  # symbolic ones: no more guards than there are


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


def filled(rows: int, out_features: int, target: Target) -> float:
    """How much of the tiles that there is time for is result, of a last layer with a residual.

    All programs have time for a tile in each of the turns that one of them needs.
    """
    programs = target.multiprocessors
    turns = -(-_count(SQUARE, rows, out_features, gated=False) // programs)
    return rows * out_features / (turns * programs * SQUARE.rows * SQUARE.columns)


def can(in_features: int, out_features: int, target: Target) -> bool:
    """Whether layers of 16 bits are wide enough for the kernel, which runs on Hopper only."""
    return (
        target.backend == "cuda"
        and target.capability == 90
        and in_features >= NARROWEST
        and in_features % PIECE == 0
        and out_features % PIECE == 0
        and has_gluon()
    )


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


def can_join(hidden: int, inner: int, target: Target) -> bool:
    """Whether :func:`input_gradient` takes weights ``(hidden, inner)``.

    A block of the sum must be of one of them.
    """
    return hidden % _BLOCK_K == 0 and can(2 * hidden, inner, target)


def joins(rows: Any, inner: int, target: Target) -> bool:
    """Whether :func:`input_gradient` was measured to be no slower than two products of cuBLAS."""
    return not isinstance(rows, int) or filled(rows, inner, target) >= _FILLED_ENOUGH


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


def tiles_for(activation: str, dtype: torch.dtype, form: Form) -> tuple[Tile, ...]:
    """The tiles that the kernel can have; larger ones leave no registers for all that it may do."""
    square, wide, tall = _SAVING_TILES if form.saves else TILES
    adds = form.has_residual or (form.saves and (not form.gated or form.has_bias_up))
    if adds or not is_inline(activation, dtype):
        return (square,)
    return (square, tall) if form.transposed else (square, wide, tall)


def fastest_tile(
    rows: int, hidden: int, gated: bool, target: Target, tiles: Sequence[Tile] = TILES
) -> Tile:
    """The tile with which the programs, all together, take the least time."""

    def time(tile: Tile) -> int:
        turns = -(-_count(tile, rows, hidden, gated) // target.multiprocessors)
        return turns * tile.time

    return min(tiles, key=time)


def tile_of(
    activation: str, dtype: torch.dtype, rows: int, hidden: int, form: Form, device: int
) -> Tile:
    """The fastest tile for some rows on a device, of those that an activation may have."""
    target = target_of(torch.device("cuda", device))
    tiles = tiles_for(activation, dtype, form)
    return fastest_tile(rows, hidden, form.gated, target, tiles)


def _count(tile: Tile, rows: int, hidden: int, gated: bool) -> int:
    """How many tiles the result has."""
    return -(-rows // tile.rows) * -(-hidden // _width(tile, gated))


@functools.cache
def is_inline(activation: str, dtype: torch.dtype) -> bool:
    """Whether an activation is few instructions in the kernels for Hopper."""
    from fusion_backend.kernels.codegen.activation import emit

    return emit(parse(activation), dtype, gluon=True).is_inline


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
    tile_rows, columns = tile.rows, -(-hidden // _width(tile, form.gated))

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

    width = _width(tile, form.gated)
    smallest = width - _piece(width) or width
    weight = described(inner, smallest, _BLOCK_K)
    if form.transposed:
        weight = described(hidden, _BLOCK_K, tile.columns)
    result = described(hidden, tile.box, _stored(tile, smallest, hidden, form.saves))
    bias_gate = some if form.has_bias_gate else None
    bias_up = some if form.has_bias_up else None
    template: Any = fusedmlp_epilogue_hopper
    kernel = specialize(template, parse(activation), dtype, gluon=True, own_launch=True)
    with torch.cuda.device(device):
        return kernel.warmup(
            described(inner, tile.box, _BLOCK_K),
            described(inner, tile.box, _BLOCK_K) if form.apart else None,
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


def _width(tile: Tile, gated: bool) -> int:
    """How many columns of the result a tile has."""
    return tile.columns // 2 if gated else tile.columns


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
    width = _width(tile, form.gated)
    how = (_BLOCK_K, _GROUP_M, tile.stages, _SUMMING_REGISTERS, form.transposed)
    return (inner, hidden, width, _piece(width), *how, tile.rows // tile.box)
