"""Launches of the kernel in ``epilogue_hopper``, each prepared once and kept.

As in ``hopper``, generated code calls what :func:`caller` returns, and all that follows from
shapes, dtype and activation is looked up; only tensor descriptors are made anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from fusion_backend.compat import has_gluon
from fusion_backend.expression import parse
from fusion_backend.kernels import called
from fusion_backend.kernels.ahead import Ahead
from fusion_backend.kernels.called import PIECE, Known, in_pieces
from fusion_backend.kernels.problems import MANY_ROWS, Problem, row_class
from fusion_backend.kernels.targets import Target, target_of
from fusion_backend.weights import is_transposed

_BLOCK_M = 128
_BLOCK_K = 64
_GROUP_M = 8
_WARPS = 4
# Of tiles of so many columns, of which a gated pair has half from either weight: buffers of
# operands, as many as shared memory holds; and how long a tile takes.
STAGES = {128: 5, 192: 4}
_TIMES = {128: 66, 192: 100}
# How many columns are finished at once; and how many where the activation calls functions, for
# whose registers the sums of wider tiles leave no room.
_STORED = 64
_STORED_BY_CALLS = 32
_WIDEST_BY_CALLS = 128
_WIDEST_TRANSPOSED = 128
# Of each thread: of three warpgroups at first, then of the two that sum.
_REGISTERS = 168
_SUMMING_REGISTERS = 240
_SWIZZLES = {128: 128, 64: 128, 32: 64}  # bytes, by the 16-bit elements of a row of a tile

# Where it was measured, on an H200, to be faster: with more rows, no narrower, and with no fewer
# elements of the result, of which else too few programs would have a tile. Plain layers are
# compared with Triton's kernel. Products alone, after a first one by this kernel, are compared with
# cuBLAS: 4096 rows and more gain 2 % on average, and up to 5; 1024 and 2048 neither gain nor lose.
_FEW_ROWS = 64
_FEW_ROWS_PLAIN = 256
_MANY_ROWS_LINEAR = 4096
_NARROWEST = 256
_NARROWEST_RESULT = 512
_SMALLEST = 1 << 19
_SMALLEST_PLAIN = 1 << 21
# Of the programs, the part that must have a tile in the last turn as in all others, on average, for
# a product alone: cuBLAS has tiles of more sizes.
_FILLED = 0.95

# The activation of a product alone.
IDENTITY = "x"


class Form(NamedTuple):
    """What layers a kernel is compiled for.

    Attributes:
        gated: whether there are two.
        has_bias_up: whether up has a bias.
        has_bias_gate: whether the gate has one.
        transposed: whether the weight is the transpose of a contiguous matrix; only of a plain one.
    """

    gated: bool
    has_bias_up: bool
    has_bias_gate: bool
    transposed: bool

    @classmethod
    def of(
        cls,
        weight_up: Tensor,
        weight_gate: Tensor | None,
        bias_up: Tensor | None,
        bias_gate: Tensor | None,
    ) -> Form:
        """What layers these are."""
        has_biases = bias_up is not None, bias_gate is not None
        return cls(weight_gate is not None, *has_biases, is_transposed(weight_up))


def runs(problem: Problem, rows: Any, target: Target) -> bool:
    """Whether the kernel runs a problem, and was measured to be faster than Triton's for such."""
    hidden = problem.hidden_features
    if not problem.tma or not _can(problem.in_features, hidden, target):
        return False
    if problem.gated:
        return problem.rows > _FEW_ROWS and guard_or_false(rows * hidden > _SMALLEST)
    if isinstance(rows, int):
        return rows > _FEW_ROWS_PLAIN and rows * hidden > _SMALLEST_PLAIN
    return problem.rows == MANY_ROWS  # symbolic ones: no more guards than there are


def runs_linear(rows: Any, in_features: int, out_features: int, target: Target) -> bool:
    """Whether :func:`linear` may run one linear layer of 16 bits, and not cuBLAS at all times."""
    many = rows >= _MANY_ROWS_LINEAR if isinstance(rows, int) else row_class(rows) == MANY_ROWS
    return many and out_features >= _NARROWEST_RESULT and _can(in_features, out_features, target)


def suits(
    x: Tensor,
    weight_up: Tensor,
    weight_gate: Tensor | None,
    bias_up: Tensor | None,
    bias_gate: Tensor | None,
) -> bool:
    """Whether the tensors lie as the kernel wants them; a plain weight may be transposed."""
    plain = weight_gate is None
    stored = weight_up.t() if plain and is_transposed(weight_up) else weight_up
    return called.suits(x, stored, weight_gate, bias_up, bias_gate)


def _can(in_features: int, out_features: int, target: Target) -> bool:
    return (
        target.backend == "cuda"
        and target.capability == 90
        and in_features >= _NARROWEST
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
    activation: str,
) -> Tensor:
    """As ``launch.epilogue``, for operands that :func:`suits`.

    Returns:
        ``(rows, hidden)``, contiguous, with the dtype of x.
    """
    rows, inner = x.shape
    hidden = weight_up.shape[0]
    postact = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    if rows:
        device = x.get_device()
        form = Form.of(weight_up, weight_gate, bias_up, bias_gate)
        columns = _columns(activation, x.dtype, rows, hidden, form, device)
        launch = _launch(activation, inner, hidden, x.dtype, form, columns, device)
        launch(x, weight_gate, bias_gate, weight_up, bias_up, postact)
    return postact


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As ``launch.linear``, for operands that :func:`suits`.

    The kernel begins while the one before it ends, which cuBLAS's cannot do. By itself it loses
    nothing only with many rows, and where tiles fill the card.
    """
    form = Form.of(weight, None, bias, None)
    if _pays(x.shape[0], weight.shape[0], x.dtype, form, x.get_device()):
        return epilogue(x, weight, None, bias, None, IDENTITY)
    return F.linear(x, weight, bias)


def caller(activation: str, *known: Any) -> Callable[..., Tensor]:
    """What generated code calls for one MLP: :func:`epilogue` or :func:`linear` of any x.

    Args:
        activation: as text.
        known: the values of :class:`~fusion_backend.kernels.called.Known`.
    """

    def call(x: Tensor, *parameters: Tensor | None) -> Tensor:
        arguments: Any = (in_pieces(x), *parameters, activation)
        return epilogue(*arguments)

    def call_linear(
        x: Tensor, weight: Tensor, weight_gate: None, bias: Tensor | None, bias_gate: None
    ) -> Tensor:
        return linear(in_pieces(x), weight, bias)

    return call_linear if activation == IDENTITY else call


def prepare(rows: int, activation: str, *known: Any) -> None:
    """Start compiling what :func:`caller` of the same arguments launches for so many rows."""
    (inner, hidden, _), dtype, given, transposed, device = Known(*known)
    _, _, gated, has_bias_up, has_bias_gate = given
    form = Form(gated, has_bias_up, has_bias_gate, transposed[1])
    if activation != IDENTITY or _pays(rows, hidden, dtype, form, device):
        columns = _columns(activation, dtype, rows, hidden, form, device)
        compiled.start(activation, inner, hidden, dtype, form, columns, device)


def columns_of_tiles(
    rows: int, hidden: int, gated: bool, target: Target, widest: int = max(STAGES)
) -> int:
    """How wide tiles must be for the programs, all together, to take the least time."""

    def time(columns: int) -> int:
        tiles = _tiles(rows, hidden, columns, gated)
        return -(-tiles // target.multiprocessors) * _TIMES[columns]

    return min((columns for columns in STAGES if columns <= widest), key=time)


@functools.lru_cache(1024)  # asked for in each call
def _columns(
    activation: str, dtype: torch.dtype, rows: int, hidden: int, form: Form, device: int
) -> int:
    widest = max(STAGES) if _is_inline(activation, dtype) else _WIDEST_BY_CALLS
    if form.transposed:
        widest = min(widest, _WIDEST_TRANSPOSED)
    target = target_of(torch.device("cuda", device))
    return columns_of_tiles(rows, hidden, form.gated, target, widest)


def _pays(rows: int, out_features: int, dtype: torch.dtype, form: Form, device: int) -> bool:
    """Whether a product alone loses nothing: it is long, and few programs are idle in the end."""
    if rows < _MANY_ROWS_LINEAR:
        return False
    columns = _columns(IDENTITY, dtype, rows, out_features, form, device)
    programs = target_of(torch.device("cuda", device)).multiprocessors
    tiles = _tiles(rows, out_features, columns, form.gated)
    return tiles >= _FILLED * programs * -(-tiles // programs)


def _tiles(rows: int, hidden: int, columns: int, gated: bool) -> int:
    return -(-rows // _BLOCK_M) * -(-hidden // _width(columns, gated))


@functools.cache
def _is_inline(activation: str, dtype: torch.dtype) -> bool:
    from fusion_backend.kernels.activation import emit

    return emit(parse(activation), dtype == torch.bfloat16, gluon=True).is_inline


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
    form: Form,
    columns: int,
    device: int,
) -> Callable[..., None]:
    """Compile for a device; the result launches the kernel on that device's current stream."""
    kernel = compiled(activation, inner, hidden, dtype, form, columns, device)
    constants = _constants(inner, hidden, form, columns)
    multiprocessors = target_of(torch.device("cuda", device)).multiprocessors

    def launch(
        x: Tensor,
        weight_gate: Tensor | None,
        bias_gate: Tensor | None,
        weight_up: Tensor,
        bias_up: Tensor | None,
        postact: Tensor,
    ) -> None:
        rows = x.shape[0]
        programs = min(multiprocessors, _tiles(rows, hidden, columns, form.gated))
        gate = None if weight_gate is None else _described(weight_gate)
        up = _described(weight_up.t() if form.transposed else weight_up)
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
    form: Form,
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

    width = _width(columns, form.gated)
    smallest = width - _piece(width) or width
    stored = min(smallest, _STORED if _is_inline(activation, dtype) else _STORED_BY_CALLS)
    weight = described(inner, smallest, _BLOCK_K)
    if form.transposed:
        weight = described(hidden, _BLOCK_K, columns)
    bias_gate = some if form.has_bias_gate else None
    bias_up = some if form.has_bias_up else None
    template: Any = fusedmlp_epilogue_hopper
    fast = dtype == torch.bfloat16
    kernel = specialize(template, parse(activation), fast, gluon=True, own_launch=True)
    with torch.cuda.device(device):
        return kernel.warmup(
            described(inner, _BLOCK_M, _BLOCK_K),
            *(weight if form.gated else None, bias_gate, weight, bias_up),
            described(hidden, _BLOCK_M, stored),
            *(_BLOCK_M, *_constants(inner, hidden, form, columns)),
            grid=(1,),
            num_warps=_WARPS,
            maxnreg=_REGISTERS,
            launch_pdl=True,
        )


def _width(columns: int, gated: bool) -> int:
    """How many columns of the result a tile has."""
    return columns // 2 if gated else columns


def _piece(width: int) -> int:
    """How many of these columns the first piece has: the greatest power of two."""
    return 1 << (width.bit_length() - 1)


def _constants(inner: int, hidden: int, form: Form, columns: int) -> tuple[int, ...]:
    """The compile-time constants of the kernel."""
    width = _width(columns, form.gated)
    how = (_BLOCK_K, _GROUP_M, STAGES[columns], _SUMMING_REGISTERS, form.transposed)
    return (inner, hidden, width, _piece(width), *how)
