"""Whether a kernel gains by taking a norm or a sum with it, as measured on an H200."""

from __future__ import annotations

from typing import Any

from fusion_backend.kernels.host.targets import Target, here
from fusion_backend.mlp.record import MLP

# Up to these widths rows and what is made of them fit in registers, however many there are.
_WIDEST_NORM = 128
_WIDEST_NORM_GATED = 64

# How much of the time of all tiles must be result, and the fewest results.
_FILLED = 0.95
_SMALLEST_SUM = 1 << 22

#: Beyond, the products and not the weights are the work: kernels for few rows lose.
MOST_OF_FEW_ROWS = 128


def gains_by_norm(mlp: MLP, target: Target | None = None) -> bool:
    """Whether ``back_to_back`` is faster with the norm before an MLP within than outside.

    On an H200 it was 1.06 to 1.5 times as fast in 16 bits, but 0.88 to 1.04 times with many wide
    rows: Triton hands what is computed to matrix units through registers, which are full there.

    Args:
        mlp: of known widths.
        target: the GPU; by default the current one, or an H100 if there is none.
    """
    from fusion_backend.kernels.back_to_back import launch_sm90
    from fusion_backend.kernels.host.problems import MANY_ROWS, Problem, precision, row_class

    target = target or here()
    if mlp.dtype.itemsize != 2:
        return False  # not measured
    widest = _WIDEST_NORM_GATED if mlp.gated else _WIDEST_NORM
    assert mlp.widths is not None
    if max(mlp.in_features, mlp.out_features) <= widest:
        return True
    how = (mlp.gated, mlp.dtype, precision(mlp.dtype, target))
    problem = Problem(row_class(mlp.rows), *mlp.widths, *how)
    return problem.rows != MANY_ROWS or launch_sm90.runs(problem, mlp.rows, target)


def gains_by_residual(rows: Any, out_features: int, target: Target | None = None) -> bool:
    """Whether a last layer adds a residual in less time than cuBLAS and a sum.

    It did on an H200 where its tiles filled the card: an MLP and its sum took up to 18 % less, or
    6 % where a norm follows that would add it along. Where they did not, it took up to 14 % longer.
    Small sums stay in the cache, and cost little either way.

    Args:
        rows: how many there are, an int or a ``torch.SymInt``; unknown ones fill nothing for sure.
        out_features: width of y.
        target: the GPU; by default the current one, or an H100 if there is none.
    """
    from fusion_backend.kernels.epilogue.config_sm90 import filled

    if not isinstance(rows, int) or rows * out_features < _SMALLEST_SUM:
        return False
    return filled(rows, out_features, target or here()) >= _FILLED
