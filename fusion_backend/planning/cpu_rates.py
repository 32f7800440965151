"""How fast this CPU runs MLPs: unfused, by the family ``rows``, and by oneDNN.

A small grid of MLPs ``width → 4·width → width`` is timed once, which takes two seconds at most
beside compiling, and is kept in the user's cache directory for the CPU, its number of threads, the
dtype and the versions. From that, rates of products follow for any sizes. Training steps have a
calibration of their own, when the first trained MLP is planned.

Without a calibration what was measured on one machine speaks for all: two cores with AVX2, and in
training a core with AVX-512. It also speaks for MLPs whose times cannot be believed, because others
computed meanwhile. Then nothing is kept: a minute later, or in the next process, all is measured
again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend.fingerprint import kernels_hash
from fusion_backend.kernels import onednn
from fusion_backend.kernels.cpu_rows import gradient_launch, launch
from fusion_backend.kernels.cpu_rows.compiling import CompilationError
from fusion_backend.kernels.cpu_rows.gradient_source import GradientKernel
from fusion_backend.kernels.cpu_rows.source import Kernel
from fusion_backend.kernels.cpu_rows.support import recomputes_from
from fusion_backend.mlp.weights import Weights
from fusion_backend.planning.undisturbed import least_seconds
from fusion_backend.planning.user_table import cache_directory

#: Rows by width of what is timed, the fastest first.
GRID: Mapping[int, tuple[int, ...]] = {
    64: (1, 16, 128, 1024, 8192, 32768),
    256: (1, 16, 128, 1024, 4096),
    768: (1, 16, 128, 512),
}
_SECONDS = 2.0
_PAUSE = 60.0
_VERSION = "2"  # of how is measured
_HERE = "measured on this machine"
_IN_PART = "measured in part on this machine, which others used"
_ACTIVATION = "leaky_relu(x, 0.1)"  # as cheap as one can be, and known to oneDNN


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


def rates(dtype: torch.dtype, may_measure: bool, training: bool = False) -> Rates:
    """What is known of this machine with as many threads as torch has now.

    Args:
        dtype: of all tensors.
        may_measure: calibrate, where that was not done yet.
        training: of forward and backward pass together, not of the former alone.
    """
    if not may_measure:
        return _default(training)
    return calibration(dtype, training, torch.get_num_threads(), cache_directory()).rates()


def _default(training: bool) -> Rates:
    return DEFAULT_TRAINING if training else DEFAULT


@functools.cache
def calibration(dtype: torch.dtype, training: bool, threads: int, directory: Path) -> _Calibration:
    """What this process knows, kept in a directory: one for all that :func:`rates` are of."""
    return _Calibration(dtype, training, threads, directory)


class _Calibration:
    """What this process knows of the machine with a number of threads."""

    def __init__(self, dtype: torch.dtype, training: bool, threads: int, directory: Path) -> None:
        self._dtype, self._training = dtype, training
        self._machine = {
            "cpu": str(torch.cpu.get_capabilities().get("cpu_name", "")),
            "cores": str(os.cpu_count()),
            "threads": str(threads),
            "dtype": str(dtype),
            "training": str(training),
            "torch": torch.__version__,
            "kernels": kernels_hash()[:16],
            "calibration": _VERSION,
        }
        key = hashlib.sha256(json.dumps(self._machine, sort_keys=True).encode()).hexdigest()[:16]
        self._path = directory / "cpu" / f"{key}.json"
        self._known: Rates | None = None
        self._measure_after = -math.inf  # while what is known is not all believed

    def rates(self) -> Rates:
        """What is kept or measured now."""
        if self._known is not None and time.monotonic() < self._measure_after:
            return self._known
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return self._settled(_read(self._path))  # perhaps by another process meanwhile
        try:
            cells = tuple(measured(self._dtype, self._training))
        except CompilationError:  # that of the kernel that is timed, though another was compiled
            return self._settled(_default(self._training))
        if not all(cell.seconds for cell in cells):
            self._measure_after = time.monotonic() + _PAUSE
            self._known = Rates(tuple(_completed(cells, self._training)), _IN_PART)
            return self._known
        with contextlib.suppress(OSError):  # a directory that cannot be written to
            _write(self._path, self._machine, cells)
        return self._settled(Rates(cells, _HERE))

    def _settled(self, known: Rates) -> Rates:
        self._known, self._measure_after = known, math.inf
        return known


def _completed(cells: Sequence[Cell], training: bool) -> Iterator[Cell]:
    """All cells of the grid; those without seconds, or not reached, are of another machine.

    What counts are ratios of ways, and those of a cell are of one machine.
    """
    found = {(cell.width, cell.rows): cell for cell in cells if cell.seconds}
    for cell in _default(training).cells:
        yield found.get((cell.width, cell.rows), cell)


def _read(path: Path) -> Rates:
    rows = json.loads(path.read_text())["rows"]
    cells = [Cell(row["width"], row["rows"], row["seconds"]) for row in rows]
    return Rates(tuple(cells), _HERE)


def _write(path: Path, machine: Mapping[str, str], cells: Sequence[Cell]) -> None:
    """Write a file so that a reader sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine, "rows": [cell._asdict() for cell in cells]}
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def measured(
    dtype: torch.dtype, training: bool = False, seconds: float = _SECONDS
) -> Iterator[Cell]:
    """Time the grid, small MLPs first, for as long as is given.

    Args:
        dtype: of all tensors.
        training: time forward and backward pass together.
        seconds: after which no other MLP is begun.

    Raises:
        CompilationError: there is no kernel to be timed.
    """
    sizes = [(width, rows) for width, each in GRID.items() for rows in each]
    deadline: float | None = None
    for width, rows in sorted(sizes, key=lambda size: size[0] ** 2 * size[1]):
        with torch.no_grad():
            ways = (_training_ways if training else _ways)(width, rows, dtype)
            for run in ways.values():
                run()
            deadline = deadline or time.perf_counter() + seconds  # compiling does not count
            found = least_seconds(ways, deadline)
        yield Cell(width, rows, found or {})
        if time.perf_counter() > deadline:
            return


def _tensors(width: int, rows: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Input, up's weight and bias, down's."""
    generator, hidden = torch.Generator().manual_seed(0), 4 * width
    for shape in ((rows, width), (hidden, width), (hidden,), (width, hidden), (width,)):
        yield torch.randn(*shape, generator=generator).to(dtype)


def _ways(width: int, rows: int, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    x, up, bias_up, down, bias_down = _tensors(width, rows, dtype)
    hidden = 4 * width

    def unfused() -> Tensor:
        return F.linear(F.leaky_relu_(F.linear(x, up, bias_up), 0.1), down, bias_down)

    kernel = Kernel(dtype, (_ACTIVATION,))
    call = launch.Call(kernel, (width, hidden, width), ((width, 1), (hidden, 1)))
    by_rows = launch.caller(call)
    tensors = (x, up, down, bias_up, bias_down, None, None, None)
    ways = {"unfused": unfused, "rows": lambda: by_rows(*tensors)}
    if onednn.onednn_supports(_ACTIVATION, dtype):
        weights = Weights(None, None, up, bias_up, down, bias_down)
        ways["onednn"] = lambda: onednn.forward(x, weights, _ACTIVATION)
    return ways


def _training_ways(width: int, rows: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Steps without autograd, which takes as long with fusion as without."""
    x, up, bias_up, down, bias_down = _tensors(width, rows, dtype)
    hidden, dy = 4 * width, torch.ones_like(x)

    def unfused() -> object:
        preact = F.linear(x, up, bias_up)
        postact = F.leaky_relu(preact, 0.1)
        y = F.linear(postact, down, bias_down)
        d_preact = torch.ops.aten.leaky_relu_backward(dy @ down, preact, 0.1, False)
        return y, d_preact @ up, d_preact.t() @ x, d_preact.sum(0), dy.t() @ postact, dy.sum(0)

    widths, strides = (width, hidden, width), ((width, 1), (hidden, 1))
    computes = recomputes_from(width)
    forward = launch.caller(launch.Call(Kernel(dtype, (_ACTIVATION,)), widths, strides))
    backward = gradient_launch.caller(
        gradient_launch.Call(
            GradientKernel(dtype, _ACTIVATION),
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

    return {"unfused": unfused, "rows": by_rows}


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
                "unfused": "47 59 179 859 9530 41864\n"
                "88 348 1751 13381 53232\n"
                "1101 5058 20200 66000",
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
                "unfused": "29 52 252 2359 30011 121964\n"
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
