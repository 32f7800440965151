"""Which MLPs a family of kernels can run. It needs no Triton: any machine can plan for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusion_backend.compat.triton_features import triton_is_interpreted
from fusion_backend.kernels.back_to_back import launch_sm90 as hopper
from fusion_backend.kernels.chain import config as chain_configs
from fusion_backend.kernels.epilogue import launch_sm90 as hopper_epilogue
from fusion_backend.kernels.host.called import PIECE
from fusion_backend.kernels.host.configs import MOST_SUMS, padded
from fusion_backend.kernels.host.problems import MANY_ROWS, Problem, precision, row_class
from fusion_backend.kernels.host.targets import H100, Target, target_of
from fusion_backend.kernels.preferences import has_any
from fusion_backend.kernels.stream import launch_sm90 as stream_launch

# Beyond, the products and not the weights are the work.
MOST_STREAMED_ROWS = 128

# Up to these widths rows and what is made of them fit in registers, however many there are.
_WIDEST_NORM = 128
_WIDEST_NORM_GATED = 64


def can_back_to_back(
    in_features: int,
    hidden_features: int,
    out_features: int,
    gated: bool,
    dtype: torch.dtype,
    target: Target | None = None,
) -> bool:
    """Whether ``launch.back_to_back`` can run an MLP.

    Args:
        in_features: width of x.
        hidden_features: width between the layers.
        out_features: width of y.
        gated: whether there are two first layers.
        dtype: of all tensors.
        target: the GPU; by default the current one, or an H100 if there is none.
    """
    target = target or _here()
    widths = (in_features, hidden_features, out_features)
    problem = Problem(MANY_ROWS, *widths, gated, dtype, precision(dtype, target))
    return has_any("back_to_back", problem, target)


def can_recompute(
    in_features: Any,
    hidden_features: Any,
    out_features: Any,
    gated: bool,
    dtype: torch.dtype,
    operands: Sequence[Any] = (),
) -> bool:
    """Whether ``launch.narrow_gradient`` differentiates an MLP from x alone.

    Its sums of the weights' gradients must fit in the registers of one program.

    Args:
        in_features: width of x.
        hidden_features: width between the layers.
        out_features: width of y.
        gated: whether there are two first layers.
        dtype: of all tensors.
        operands: of the activation.
    """
    widths = (in_features, hidden_features, out_features)
    if gated or operands or not all(isinstance(width, int) for width in widths):
        return False
    if dtype.itemsize != 2 and not triton_is_interpreted():
        return False
    block_in, block_h, block_out = map(padded, widths)
    return block_h * (block_in + block_out) <= MOST_SUMS


def gains_by_norm(
    rows: Any,
    in_features: int,
    hidden_features: int,
    out_features: int,
    gated: bool,
    dtype: torch.dtype,
    target: Target | None = None,
) -> bool:
    """Whether ``launch.back_to_back`` is faster with the norm before an MLP within than outside.

    On an H200 it was 1.06 to 1.5 times as fast in 16 bits, but 0.88 to 1.04 times with many wide
    rows: Triton hands what is computed to matrix units through registers, which are full there.

    Args:
        rows: how many there are, an int or a ``torch.SymInt``.
        in_features: width of x.
        hidden_features: width between the layers.
        out_features: width of y.
        gated: whether there are two first layers.
        dtype: of all tensors.
        target: the GPU; by default the current one, or an H100 if there is none.
    """
    target = target or _here()
    if dtype.itemsize != 2:
        return False  # not measured
    if max(in_features, out_features) <= (_WIDEST_NORM_GATED if gated else _WIDEST_NORM):
        return True
    widths = (in_features, hidden_features, out_features)
    problem = Problem(row_class(rows), *widths, gated, dtype, precision(dtype, target))
    return problem.rows != MANY_ROWS or hopper.runs(problem, rows, target)


def can_add_residual(
    hidden_features: int, out_features: int, dtype: torch.dtype, target: Target | None = None
) -> bool:
    """Whether ``launch.linear`` adds a residual in the kernel of an MLP's last layer.

    Args:
        hidden_features: width between the layers.
        out_features: width of y.
        dtype: of all tensors.
        target: the GPU; by default the current one, or an H100 if there is none.
    """
    wide_enough = hopper_epilogue.can(hidden_features, out_features, target or _here())
    return dtype.itemsize == 2 and wide_enough


def gains_by_residual(rows: Any, out_features: int, target: Target | None = None) -> bool:
    """Whether that kernel was measured to be faster than cuBLAS and a sum.

    Args:
        rows: how many there are, an int or a ``torch.SymInt``.
        out_features: width of y.
        target: the GPU; by default the current one, or an H100 if there is none.
    """
    return hopper_epilogue.gains_by_residual(rows, out_features, target or _here())


def can_chain(widths: Sequence[int], dtype: torch.dtype, target: Target | None = None) -> bool:
    """Whether ``chain_launch.chain`` can run a chain of linear layers.

    Args:
        widths: of the input, of each hidden value and of the output.
        dtype: of all tensors.
        target: the GPU; by default the current one, or an H100 if there is none.
    """
    return chain_configs.can_chain(widths, dtype, target or _here())


def can_stream(rows: int, dtype: torch.dtype) -> bool:
    """Whether ``launch.stream`` is made for so many rows.

    Args:
        rows: how many there are.
        dtype: of all tensors.
    """
    return rows <= MOST_STREAMED_ROWS and (dtype.itemsize == 2 or triton_is_interpreted())


def runs_hopper_kernels(
    family: str,
    rows: int,
    widths: Sequence[int],
    gated: bool,
    dtype: torch.dtype,
    transposed: bool,
    target: Target | None = None,
) -> bool:
    """Whether a plan runs an MLP by the kernels made for Hopper, and not by those for any GPU.

    That is for tensors that start at aligned addresses, in inference, and without operands of the
    activation.

    Args:
        family: the plan's name.
        rows: how many there are.
        widths: of x, between the layers, and of y.
        gated: whether there are two first layers.
        dtype: of all tensors.
        transposed: whether weights are the transposes of contiguous ones.
        target: the GPU; by default the current one, or an H100 if there is none.
    """
    target = target or _here()
    if family == "stream":
        return stream_launch.runs(rows, widths, gated, dtype, transposed, target)
    in_features, hidden_features, out_features = widths
    aligned = dtype.itemsize == 2 and all(width % PIECE == 0 for width in widths)
    if (transposed and (gated or family != "epilogue")) or not aligned:
        return False
    sizes = (row_class(rows), in_features, hidden_features)
    how = (gated, dtype, precision(dtype, target))
    if family == "back_to_back":
        return hopper.runs(Problem(*sizes, out_features, *how), rows, target)
    if family == "epilogue":
        return hopper_epilogue.runs(Problem(*sizes, 0, *how, tma=True), rows, target)
    return False


def _here() -> Target:
    return target_of(torch.device("cuda")) if torch.cuda.is_available() else H100
