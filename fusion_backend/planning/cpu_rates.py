"""How fast this CPU runs MLPs: unfused, by the family ``rows``, and by oneDNN.

A small grid of MLPs ``width → 4·width → width`` is timed once, which takes two seconds at most
beside compiling, and is kept in the user's table of the CPU. From that, rates of products follow
for any sizes. Training steps have a calibration of their own, when the first trained MLP is
planned. ``fusedmlp tune`` times the same MLPs for longer, and others between and beyond them.

Without a calibration what was measured on one machine speaks for all: two cores with AVX2, and in
training a core with AVX-512. It also speaks for MLPs whose times cannot be believed, because others
computed meanwhile. Then nothing is kept: a minute later, or in the next process, all is measured
again.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend.kernels import onednn
from fusion_backend.kernels.cpu_rows import gradient_launch, launch
from fusion_backend.kernels.cpu_rows.compiling import CompilationError
from fusion_backend.kernels.cpu_rows.gradient_source import GradientKernel
from fusion_backend.kernels.cpu_rows.source import Kernel
from fusion_backend.kernels.cpu_rows.support import recomputes_from
from fusion_backend.mlp.weights import Weights
from fusion_backend.planning.cases import Case, precision_of
from fusion_backend.planning.measurements import INDUCTOR
from fusion_backend.planning.undisturbed import BRIEFLY, Turns, least_seconds
from fusion_backend.planning.user_table import UserTable, cache_directory

#: Rows by width of what is timed, the fastest first.
GRID: Mapping[int, tuple[int, ...]] = {
    64: (1, 16, 128, 1024, 8192, 32768),
    256: (1, 16, 128, 1024, 4096),
    768: (1, 16, 128, 512),
}
#: What ``fusedmlp tune`` times; no MLP takes more operations than the longest of the small grid.
FINER_GRID: Mapping[int, tuple[int, ...]] = {
    64: (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 8192, 32768),
    256: (1, 4, 16, 64, 128, 256, 512, 1024, 4096),
    768: (1, 4, 16, 64, 128, 256, 512),
    32: (1, 16, 64, 256, 1024, 4096, 16384, 65536),
    128: (1, 16, 64, 256, 1024, 4096, 16384),
    512: (1, 4, 16, 64, 128, 256, 1024),
    1024: (1, 4, 16, 64, 256),
    2048: (1, 4, 16, 64),
}
_SECONDS = 2.0
_PAUSE = 60.0
#: In a table, what lines say that are no MLPs: all of the small grid, and one MLP of ``tune``'s.
_CALIBRATION, _TUNED = "calibration", "tuned rates"
_HERE = "measured on this machine"
_IN_PART = "measured in part on this machine, which others used"
#: Of the MLPs that are timed: as cheap as one can be, and known to oneDNN.
ACTIVATION = "leaky_relu(x, 0.1)"
UNFUSED = "unfused"


class Cell(NamedTuple):
    """Seconds of one MLP by each of the ways that were timed; ``unfused`` is always one.

    There are none where they could not be believed.
    """

    width: int
    rows: int
    seconds: Mapping[str, float]


class Rates(NamedTuple):
    """What a calibration found.

    Attributes:
        cells: in no particular order.
        source: where they come from, the end of a sentence.
    """

    cells: tuple[Cell, ...]
    source: str

    def seconds(self, way: str, rows: int, in_features: int, out_features: int) -> float | None:
        """The time of one product with all that an MLP has beside it; None where nothing says.

        The time an operation takes is interpolated in the logarithms of rows and of width.
        """
        width = math.sqrt(max(in_features * out_features, 1)) / 2
        found = [
            (each, rate)
            for each in sorted({cell.width for cell in self.cells})
            if (rate := self._of_width(way, each, rows)) is not None
        ]
        rate = _interpolated(found, width)
        return None if rate is None else rate * 2.0 * rows * in_features * out_features

    def _of_width(self, way: str, width: int, rows: int) -> float | None:
        """Seconds of an operation at a width that was timed."""
        found = sorted(
            (cell.rows, cell.seconds[way] / (16.0 * cell.rows * width**2))
            for cell in self.cells
            if cell.width == width and way in cell.seconds
        )
        return _interpolated(found, rows)


def _interpolated(points: list[tuple[int, float]], at: float) -> float | None:
    """The value between two points, in logarithms; that of the nearest beyond the last."""
    if not points:
        return None
    upper = next((i for i, (x, _) in enumerate(points) if x >= at), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(upper - 1, 0)], points[upper]
    if x0 == x1 or at >= x1:
        return y1
    share = math.log(max(at, x0) / x0) / math.log(x1 / x0)
    return math.exp(math.log(y0) + share * (math.log(y1) - math.log(y0)))


def rates(
    dtype: torch.dtype, may_measure: bool, training: bool = False, tuned: bool = True
) -> Rates:
    """What is known of this machine with as many threads as torch has now.

    Args:
        dtype: of all tensors.
        may_measure: calibrate, where that was not done yet.
        training: of forward and backward pass together, not of the former alone.
        tuned: whether what ``fusedmlp tune`` measured counts.
    """
    if not may_measure:
        return _default(training)
    known = calibration(dtype, training, torch.get_num_threads(), cache_directory())
    return known.rates(known.tuned() if tuned else {})


def _default(training: bool) -> Rates:
    return DEFAULT_TRAINING if training else DEFAULT


@functools.cache
def calibration(dtype: torch.dtype, training: bool, threads: int, directory: Path) -> _Calibration:
    """What this process knows, kept in a directory: one for all that :func:`rates` are of."""
    return _Calibration(dtype, training, UserTable.of_cpu(threads))


Sizes = tuple[int, int]


class _Calibration:
    """What this process knows of the machine with a number of threads."""

    def __init__(self, dtype: torch.dtype, training: bool, table: UserTable) -> None:
        self._dtype, self._training, self._table = dtype, training, table
        self._known: Rates | None = None
        self._measure_after = -math.inf  # while what is known is not all believed

    def rates(self, tuned: Mapping[Sizes, Cell]) -> Rates:
        """What is kept or measured now; of what was tuned, that counts."""
        kept = self._kept()  # perhaps by another process meanwhile
        if kept is None and _sizes(GRID) <= tuned.keys():
            kept = ()
        if kept is not None:
            return Rates(_merged(kept, tuned), _HERE)
        if self._known is None or time.monotonic() >= self._measure_after:
            self._known = self._measured()
        return Rates(_merged(self._known.cells, tuned), self._known.source)

    def _measured(self) -> Rates:
        self._measure_after = math.inf
        try:
            cells = tuple(measured(self._dtype, self._training))
        except CompilationError:  # that of the kernel that is timed, though another was compiled
            return _default(self._training)
        if not all(cell.seconds for cell in cells):
            self._measure_after = time.monotonic() + _PAUSE
            return Rates(tuple(_completed(cells, self._training)), _IN_PART)
        with contextlib.suppress(OSError):  # a directory that cannot be written to
            self._table.add({**self._line(_CALIBRATION), "cells": cells})
        return Rates(cells, _HERE)

    def _line(self, model: str) -> dict[str, Any]:
        """The beginning of a line of the table."""
        precision = precision_of(self._dtype)
        return {"model": model, "precision": precision, "training": self._training}

    def _lines(self, model: str) -> Iterator[Mapping[str, Any]]:
        wanted = self._line(model).items()
        return (row for row in self._table.models() if wanted <= row.items())

    def _kept(self) -> tuple[Cell, ...] | None:
        """The calibration that the table has."""
        line = next(self._lines(_CALIBRATION), None)
        return None if line is None else tuple(Cell(*each) for each in line["cells"])

    def tuned(self) -> dict[Sizes, Cell]:
        """What ``fusedmlp tune`` measured, of widths that can be interpolated.

        Beyond the last number of rows that was timed, rates are those of the last. So a width that
        the small grid has not counts only when all of its rows were timed.
        """
        found = [_cell_of(row) for row in self._lines(_TUNED)]
        timed = {(cell.width, cell.rows) for cell in found}
        whole = {w for w, rows in FINER_GRID.items() if timed >= {(w, each) for each in rows}}
        return {(c.width, c.rows): c for c in found if c.width in {*GRID, *whole}}


def _sizes(grid: Mapping[int, tuple[int, ...]]) -> set[Sizes]:
    return {(width, rows) for width, each in grid.items() for rows in each}


def _merged(cells: Sequence[Cell], tuned: Mapping[Sizes, Cell]) -> tuple[Cell, ...]:
    """Both; of what both measured, what was tuned."""
    return tuple(({(cell.width, cell.rows): cell for cell in cells} | dict(tuned)).values())


def _completed(cells: Sequence[Cell], training: bool) -> Iterator[Cell]:
    """All cells of the grid; those without seconds, or not reached, are of another machine.

    What counts are ratios of ways, and those of a cell are of one machine.
    """
    found = {(cell.width, cell.rows): cell for cell in cells if cell.seconds}
    for cell in _default(training).cells:
        yield found.get((cell.width, cell.rows), cell)


def case_of(width: int, rows: int, dtype: torch.dtype, training: bool) -> Case:
    """The MLP that is timed for a width and a number of rows."""
    widths = (width, 4 * width, width)
    return Case(ACTIVATION, rows, *widths, precision_of(dtype), training=training)


def tuned_line(case: Case) -> dict[str, Any]:
    """The beginning of the line that a table has of a :func:`case_of`, once it is tuned."""
    return {**case.row(), "model": _TUNED}


def tune(case: Case, turns: Turns, seconds: float) -> dict[str, Any] | None:
    """Time an MLP of the grid; ``None`` where its times cannot be believed.

    Args:
        case: one that :func:`case_of` made.
        turns: how often each way runs.
        seconds: after which only the fewest turns are made.

    Returns:
        The line of a table, with microseconds; those of unfused ATen operators stand for Inductor.

    Raises:
        CompilationError: there is no kernel to be timed.
    """
    with torch.no_grad():
        make = _maker(case.dtype, case.training)
        ways = _started(make(case.in_features, case.rows))
        found = least_seconds(ways, time.perf_counter() + seconds, turns)
    if found is None:
        return None
    names = {UNFUSED: INDUCTOR}
    us = {names.get(way, way): round(1e6 * each, 3) for way, each in found.items()}
    return {**tuned_line(case), "us": us}


def _cell_of(row: Mapping[str, Any]) -> Cell:
    """The cell of a line that :func:`tune` made."""
    names = {INDUCTOR: UNFUSED}
    seconds = {names.get(way, way): 1e-6 * us for way, us in row["us"].items()}
    return Cell(row["width"], row["rows"], seconds)


Ways = dict[str, Callable[[], object]]


def _maker(dtype: torch.dtype, training: bool) -> Callable[[int, int], Ways]:
    """What makes the ways to run the MLP of a width and a number of rows."""
    make = _training_ways if training else _ways
    return lambda width, rows: make(width, rows, dtype)


def _started(ways: Ways) -> Ways:
    """The ways, each of which ran once."""
    for run in ways.values():
        run()
    return ways


def measured(
    dtype: torch.dtype, training: bool = False, seconds: float = _SECONDS
) -> Iterator[Cell]:
    """Time the grid, as :func:`timed` does.

    Args:
        dtype: of all tensors.
        training: time forward and backward pass together.
        seconds: after which no other MLP is begun.

    Raises:
        CompilationError: there is no kernel to be timed.
    """
    return timed(GRID, _maker(dtype, training), seconds)


def timed(
    grid: Mapping[int, tuple[int, ...]], make: Callable[[int, int], Ways], seconds: float
) -> Iterator[Cell]:
    """Time a grid, small MLPs first, for as long as is given.

    Args:
        grid: rows by width.
        make: makes the ways to run the MLP of a width and a number of rows.
        seconds: after which no other MLP is begun.
    """
    deadline: float | None = None
    for width, rows in sorted(_sizes(grid), key=lambda size: size[0] ** 2 * size[1]):
        with torch.no_grad():
            ways = _started(make(width, rows))
            deadline = deadline or time.perf_counter() + seconds  # compiling does not count
            found = least_seconds(ways, deadline, BRIEFLY)
        yield Cell(width, rows, found or {})
        if time.perf_counter() > deadline:
            return


def tensors(width: int, rows: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Input, up's weight and bias, down's."""
    generator, hidden = torch.Generator().manual_seed(0), 4 * width
    for shape in ((rows, width), (hidden, width), (hidden,), (width, hidden), (width,)):
        yield torch.randn(*shape, generator=generator).to(dtype)


def _ways(width: int, rows: int, dtype: torch.dtype) -> Ways:
    x, up, bias_up, down, bias_down = tensors(width, rows, dtype)
    hidden = 4 * width

    def unfused() -> Tensor:
        return F.linear(F.leaky_relu_(F.linear(x, up, bias_up), 0.1), down, bias_down)

    kernel = Kernel(dtype, (ACTIVATION,))
    call = launch.Call(kernel, (width, hidden, width), ((width, 1), (hidden, 1)))
    by_rows = launch.caller(call)
    arguments = (x, up, down, bias_up, bias_down, None, None, None)
    ways: Ways = {
        UNFUSED: unfused,
        "rows": lambda: by_rows(*arguments),
    }
    if onednn.onednn_supports(ACTIVATION, dtype):
        weights = Weights(None, None, up, bias_up, down, bias_down)
        ways["onednn"] = lambda: onednn.forward(x, weights, ACTIVATION)
    return ways


def _training_ways(width: int, rows: int, dtype: torch.dtype) -> Ways:
    """Steps without autograd, which takes as long with fusion as without."""
    x, up, bias_up, down, bias_down = tensors(width, rows, dtype)
    hidden, dy = 4 * width, torch.ones_like(x)

    def unfused() -> object:
        preact = F.linear(x, up, bias_up)
        postact = F.leaky_relu(preact, 0.1)
        y = F.linear(postact, down, bias_down)
        d_preact = torch.ops.aten.leaky_relu_backward(dy @ down, preact, 0.1, False)
        return y, d_preact @ up, d_preact.t() @ x, d_preact.sum(0), dy.t() @ postact, dy.sum(0)

    widths, strides = (width, hidden, width), ((width, 1), (hidden, 1))
    computes = recomputes_from(width)
    forward = launch.caller(launch.Call(Kernel(dtype, (ACTIVATION,)), widths, strides))
    backward = gradient_launch.caller(
        gradient_launch.Call(
            GradientKernel(dtype, ACTIVATION),
            widths,
            ((1, 1), *strides),
            (False, False, False),
            (True, False, False, True, True, True, True),
            computes,
        )
    )

    def by_rows() -> object:
        preact = None if computes else torch.empty((rows, hidden), dtype=dtype)
        kept = () if preact is None else (preact,)
        y = forward(x, up, down, bias_up, bias_down, None, None, None, kept=kept)
        return y, backward(dy, x, None, None, up, bias_up, down, None, preact)

    return {UNFUSED: unfused, "rows": by_rows}


def _cells(way_seconds: Mapping[str, str]) -> Iterator[Cell]:
    """Cells of texts: a line a width, microseconds of each number of rows of the grid."""
    numbers = {
        way: [[float(number) * 1e-6 for number in line.split()] for line in text.splitlines()]
        for way, text in way_seconds.items()
    }
    for i, (width, each) in enumerate(GRID.items()):
        for j, rows in enumerate(each):
            yield Cell(width, rows, {way: lines[i][j] for way, lines in numbers.items()})


#: One thread of an EPYC with AVX2, float32, torch 2.14.1. Processor time: others computed too.
DEFAULT = Rates(
    tuple(
        _cells(
            {
                UNFUSED: "47 59 179 859 9530 41864\n88 348 1751 13381 53232\n1101 5058 20200 66000",
                "rows": "34 45 161 776 6314 24113\n84 327 1656 12651 49558\n983 4334 18471 65414",
                "onednn": "141 140 290 951 8028 34572\n"
                "162 475 2117 15358 56832\n"
                "1094 5076 18675 68135",
            }
        )
    ),
    "measured on an EPYC with AVX2",
)

#: The same of a training step. One thread of a Xeon with AVX-512, float32, torch 2.14.1, processor
#: time.
DEFAULT_TRAINING = Rates(
    tuple(
        _cells(
            {
                UNFUSED: "29 52 252 2359 30011 121964\n"
                "253 841 3385 24121 96344\n"
                "4211 9538 28286 90459",
                "rows": "30 58 249 1828 14329 57051\n"
                "305 822 3646 25667 96317\n"
                "5045 9617 40261 160800",
            }
        )
    ),
    "measured on a Xeon with AVX-512",
)
