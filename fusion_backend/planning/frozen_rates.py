"""How fast this CPU runs MLPs whose weights are constants: by Inductor's code, and by ``rows``.

Both lay such weights out once, so neither takes as long as with weights that may change. A few MLPs
``width → 4·width → width`` are timed when the first such site of a process is planned, which takes
a second at most beside compiling.

Without that what was measured on one machine speaks for all: a core with AVX2, in float32. It says
nothing of 16 bits on CPUs with instructions for them, which oneDNN uses. It also speaks for MLPs
whose times cannot be believed, because others computed meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F

from fusion_backend.compat.packed_linear import multiplies_natively, packed_linear
from fusion_backend.kernels.cpu_rows import launch
from fusion_backend.kernels.cpu_rows.compiling import CompilationError
from fusion_backend.kernels.cpu_rows.source import Kernel
from fusion_backend.kernels.registry import ROWS
from fusion_backend.planning import cpu_rates
from fusion_backend.planning.cpu_rates import ACTIVATION, UNFUSED, Cell, Rates, Ways

# Rows by width: as few as show how times grow.
_GRID: Mapping[int, tuple[int, ...]] = {
    64: (1, 16, 1024),
    256: (1, 16, 1024),
    768: (1, 16, 128),
}
_SECONDS = 1.0


def rates(dtype: torch.dtype, may_measure: bool) -> Rates | None:
    """What is known of this machine with as many threads as torch has now; None if nothing is.

    Args:
        dtype: of all tensors.
        may_measure: time MLPs, where this process did not yet.
    """
    if may_measure:
        return _measured(dtype, torch.get_num_threads())
    return None if multiplies_natively(dtype) else DEFAULT


@functools.cache
def _measured(dtype: torch.dtype, threads: int) -> Rates | None:
    """What is found now; those of the other machine stand in for what cannot be believed."""
    elsewhere = () if multiplies_natively(dtype) else DEFAULT.cells
    try:
        found = tuple(_cells(dtype))
    except CompilationError:  # that of the kernel that is timed, though another was compiled
        found = ()
    known = {(cell.width, cell.rows): cell for cell in (*elsewhere, *found)}
    if not found:
        return DEFAULT if elsewhere else None
    whole = len(found) == sum(map(len, _GRID.values()))
    source = "measured on this machine" if whole else "measured in part on this machine"
    return Rates(tuple(known.values()), f"{source} with frozen weights")


def _cells(dtype: torch.dtype) -> Iterator[Cell]:
    """The MLPs of the grid that can be believed."""
    timed = cpu_rates.timed(_GRID, lambda width, rows: _ways(width, rows, dtype), _SECONDS)
    return (cell for cell in timed if cell.seconds)


def _ways(width: int, rows: int, dtype: torch.dtype) -> Ways:
    x, up, bias_up, down, bias_down = cpu_rates.tensors(width, rows, dtype)
    first, last = packed_linear(up, bias_up, rows), packed_linear(down, bias_down, rows)
    kernel, widths = Kernel(dtype, (ACTIVATION,)), (width, 4 * width, width)
    by_rows = launch.caller(launch.Call(kernel, widths, (launch.IN_PANELS,) * 2))
    arguments = (x, *map(launch.panels, (up, down)), bias_up, bias_down, None, None, None)
    return {
        UNFUSED: lambda: last(F.leaky_relu_(first(x), 0.1)),
        ROWS.name: lambda: by_rows(*arguments),
    }


def _known(microseconds: Mapping[int, tuple[tuple[int, int], ...]]) -> Iterator[Cell]:
    """Cells of the grid, by width: what Inductor's code and ``rows`` take."""
    for width, each in _GRID.items():
        for rows, (unfused, fused) in zip(each, microseconds[width], strict=True):
            yield Cell(width, rows, {UNFUSED: unfused * 1e-6, ROWS.name: fused * 1e-6})


#: One thread of an EPYC with AVX2, float32, torch 2.14.1. Processor time: others computed too.
DEFAULT = Rates(
    tuple(
        _known(
            {
                64: ((18, 12), (37, 26), (1034, 836)),
                256: ((105, 47), (772, 461), (19236, 17318)),
                768: ((2187, 1292), (7129, 5360), (26486, 22541)),
            }
        )
    ),
    "measured with frozen weights on an EPYC with AVX2",
)
