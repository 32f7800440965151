"""Launches of the pair of kernels in ``stream_hopper``, each prepared once and kept.

Inductor passes on no attribute of the launch of a kernel that is not its own, so the code that it
generates calls what :func:`caller` returns. For such a call to cost no more than two launches of
Inductor's own, all that follows from shapes, dtype and activation is made ready beforehand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from fusion_backend.compat.tensors import empty_strided_cuda
from fusion_backend.compat.triton_launches import prepared
from fusion_backend.kernels.host import called
from fusion_backend.kernels.host.ahead import Ahead
from fusion_backend.kernels.host.called import PIECE, Known, address
from fusion_backend.kernels.host.targets import Target, target_of
from fusion_backend.kernels.stream.config import (
    COUNTERS,
    MOST_ROWS,
    Pair,
    is_faster,
    preferred,
    row_class,
)
from fusion_backend.mlp.expression import parse
from fusion_backend.mlp.weights import is_transposed

# For a compiler, to which all numbers of rows, and strides in pieces, are the same.
_SOME_ROWS = PIECE

# Offsets within the rows of a tile have 32 bits.
_LARGEST_STRIDE = 1 << 23


class Problem(NamedTuple):
    """What kernels are compiled for.

    Attributes:
        activation: as text.
        rows: the class of rows.
        widths: of x, between the layers, and of y.
        dtype: of all tensors.
        gated: whether there are two first layers.
        biases: whether there is one of the up, of the down and of the gate projection.
        transposed: whether the weights before and after hidden are the transposes of contiguous
            ones.
    """

    activation: str
    rows: int
    widths: tuple[int, int, int]
    dtype: torch.dtype
    gated: bool
    biases: tuple[bool, bool, bool]
    transposed: tuple[bool, bool] = (False, False)


def runs(
    rows: Any,
    widths: Sequence[int],
    gated: bool,
    dtype: torch.dtype,
    transposed: bool,
    target: Target,
) -> bool:
    """Whether the pair runs an MLP, and was measured to be faster than two kernels one by one."""
    return (
        target.backend == "cuda"
        and target.capability == 90
        and is_faster(rows, widths, gated, dtype, transposed)
        and guard_or_false(rows <= MOST_ROWS)
    )


def suits(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether x and the weights and biases, as for :func:`stream`, lie as the kernels want them.

    Weights may be transposed, both of a gated pair or none.
    """
    weight_up, _, _, _, weight_gate, _ = parameters
    alike = weight_gate is None or is_transposed(weight_gate) == is_transposed(weight_up)
    stored = (each.t() if is_transposed(each) else each for each in parameters)
    return alike and called.suits(x, *stored) and x.stride(0) <= _LARGEST_STRIDE


def stream(
    x: Tensor,
    weight_up: Tensor,
    weight_down: Tensor,
    bias_up: Tensor | None,
    bias_down: Tensor | None,
    weight_gate: Tensor | None,
    bias_gate: Tensor | None,
    activation: str,
) -> Tensor:
    """As ``launch.stream`` without operands, for tensors that :func:`suits`.

    Returns:
        ``(rows, out)``, contiguous, with the dtype of x.
    """
    parameters = (weight_up, weight_down, bias_up, bias_down, weight_gate, bias_gate)
    given = (True, *(parameter is not None for parameter in parameters))
    transposed = (False, *map(is_transposed, parameters))
    widths = (x.shape[1], *weight_down.shape[::-1])
    return caller(activation, widths, x.dtype, given, transposed, x.get_device())(x, *parameters)


@functools.cache
def caller(activation: str, *known: Any) -> Callable[..., Tensor]:
    """What generated code calls for one MLP: :func:`stream` of its tensors, and of any x.

    Args:
        activation: as text.
        known: the values of :class:`~fusion_backend.kernels.host.called.Known`.
    """
    tensors = Known(*known)
    device, out_features = tensors.device, tensors.widths[2]
    launchers: dict[int, Callable[..., Tensor]] = {}

    def call(x: Tensor, *parameters: Tensor | None) -> Tensor:
        rows = x.shape[0]
        if not rows:
            return x.new_empty((0, out_features))
        bound = row_class(rows)
        if bound not in launchers:
            problem = _problem(activation, bound, tensors)
            launchers[bound] = launcher(problem, _pair(problem, device), device)
        return launchers[bound](called.in_pieces(x), *parameters)

    return call


def prepare(rows: int, activation: str, *known: Any) -> None:
    """Start compiling what :func:`caller` of the same arguments launches for so many rows."""
    tensors = Known(*known)
    problem = _problem(activation, row_class(rows), tensors)
    pair = _pair(problem, tensors.device)
    compiled_hidden.start(problem, pair, tensors.device)
    compiled_out.start(problem, pair, tensors.device)


def _problem(activation: str, rows: int, known: Known) -> Problem:
    _, _, _, has_bias_up, has_bias_down, gated, has_bias_gate = known.given
    biases = (has_bias_up, has_bias_down, has_bias_gate)
    stored = (known.transposed[1], known.transposed[2])
    return Problem(activation, rows, known.widths, known.dtype, gated, biases, stored)


def _pair(problem: Problem, device: int) -> Pair:
    target = target_of(torch.device("cuda", device))
    return preferred(problem.rows, *problem.widths, problem.gated, problem.transposed, target)


def launcher(problem: Problem, pair: Pair, device: int) -> Callable[..., Tensor]:
    """A function that launches a pair on the current stream of a device, and returns y."""
    first, second = compiled(problem, pair, device)
    first_constants, second_constants = constants(problem, pair)
    run_first = prepared(first, first_constants, device)
    run_second = prepared(second, second_constants, device)
    _, hidden_features, out_features = problem.widths
    dtype, splits = problem.dtype, pair.out.splits
    first_rows, first_shares = pair.hidden.block_m, -(-hidden_features // pair.hidden.share)
    second_rows, second_shares = pair.out.block_m, -(-out_features // pair.out.share) * splits
    empty_strided = empty_strided_cuda()

    def launch(
        x: Tensor,
        weight_up: Tensor,
        weight_down: Tensor,
        bias_up: Tensor | None,
        bias_down: Tensor | None,
        weight_gate: Tensor | None,
        bias_gate: Tensor | None,
    ) -> Tensor:
        rows = x.shape[0]
        y = empty_strided((rows, out_features), (out_features, 1), dtype)
        hidden = empty_strided((rows, hidden_features), (hidden_features, 1), dtype)
        scratch = None
        if splits > 1:
            size = COUNTERS + splits * rows * out_features
            scratch = empty_strided((size,), (1,), torch.float32)
        hidden_address, scratch_address = hidden.data_ptr(), address(scratch)
        run_first(
            first_shares * -(-rows // first_rows),
            *(x.data_ptr(), address(weight_gate), address(bias_gate)),
            *(weight_up.data_ptr(), address(bias_up)),
            *(hidden_address, scratch_address, rows, x.stride(0) // PIECE),
        )
        run_second(
            second_shares * -(-rows // second_rows),
            *(hidden_address, weight_down.data_ptr(), address(bias_down)),
            *(y.data_ptr(), scratch_address, rows),
        )
        return y

    return launch


def compiled(problem: Problem, pair: Pair, device: int) -> tuple[Any, Any]:
    """The compiled kernels (``triton.CompiledKernel``), from Triton's cache if they are there."""
    return compiled_hidden(problem, pair, device), compiled_out(problem, pair, device)


@Ahead
def compiled_hidden(problem: Problem, pair: Pair, device: int) -> Any:
    """The compiled kernel of the first layers (``triton.CompiledKernel``)."""
    from fusion_backend.kernels.stream.kernel_sm90 import fusedmlp_stream_hopper_hidden as template

    some = _some(problem.dtype)
    bias_up, _, bias_gate = (some if has_bias else None for has_bias in problem.biases)
    gate = some if problem.gated else None
    tensors = (some, gate, bias_gate, some, bias_up, some, _some_scratch(pair))
    arguments = (*tensors, _SOME_ROWS, _SOME_ROWS, *constants(problem, pair)[0])
    return _half(template, problem, arguments, pair.hidden.warps, device)


@Ahead
def compiled_out(problem: Problem, pair: Pair, device: int) -> Any:
    """The compiled kernel of the last layer (``triton.CompiledKernel``)."""
    from fusion_backend.kernels.stream.kernel_sm90 import fusedmlp_stream_hopper_out as template

    some = _some(problem.dtype)
    bias_down = some if problem.biases[1] else None
    tensors = (some, some, bias_down, some, _some_scratch(pair))
    arguments = (*tensors, _SOME_ROWS, *constants(problem, pair)[1])
    return _half(template, problem, arguments, pair.out.warps, device)


def _some(dtype: torch.dtype) -> Any:
    from triton.runtime.jit import MockTensor

    return MockTensor(dtype)


def _some_scratch(pair: Pair) -> Any:
    return _some(torch.float32) if pair.out.splits > 1 else None


def _half(
    template: Any, problem: Problem, arguments: tuple[Any, ...], warps: int, device: int
) -> Any:
    from fusion_backend.kernels.codegen.specialize import specialize

    kernel = specialize(template, parse(problem.activation), problem.dtype, own_launch=True)
    with torch.cuda.device(device):
        return kernel.warmup(*arguments, grid=(1,), num_warps=warps, launch_pdl=True)


def constants(problem: Problem, pair: Pair) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The compile-time constants of both kernels."""
    inner, hidden_features, out_features = problem.widths
    hidden, out = pair
    return (
        (
            *(PIECE, inner, hidden_features),
            *(hidden.share, hidden.block_m, hidden.block_n, hidden.block_k),
            *(hidden.lanes, hidden.stages, problem.transposed[0]),
        ),
        (
            *(hidden_features, out_features),
            *(out.share, out.splits, out.block_m, out.block_n, out.block_k),
            *(out.lanes, out.stages, problem.transposed[1], 32 * out.warps),
        ),
    )
