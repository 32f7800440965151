"""Results as PNG: a heat-map of speed-ups, and the roofline. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusion_backend.bench.results import INDUCTOR, OURS, Results, ceilings_from_data, reference_us
from fusion_backend.errors import CommandError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 120
#: Colours saturate at this speed-up, and at its inverse.
STRONGEST = 3.0
OTHERS = ("eager", "cublaslt", "liger", "liger-mlp", "quack")


def check_matplotlib() -> None:
    """Fail early where plots are wanted and cannot be made.

    Raises:
        CommandError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise CommandError(
            "plots need matplotlib: pip install 'fusedmlp[bench]', or leave --plots out"
        ) from error


def write_plots(results: Results, folder: Path) -> tuple[Path, ...]:
    """Write ``speedup.png`` and ``roofline.png`` into a folder, and return their paths.

    Raises:
        CommandError: matplotlib is not installed, or no cell has a time of fusedmlp and Inductor.
    """
    check_matplotlib()
    if not any(cell["speedup"] is not None for cell in results["cells"].values()):
        raise CommandError("there is nothing to plot: no cell was measured with both compilers")
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "speedup.png", folder / "roofline.png"
    _speedup(results, paths[0])
    _roofline(results, paths[1])
    return paths


def _title(results: Results) -> str:
    where = results["machine"]
    return f"{where['device']}, PyTorch {where['torch']}, fusedmlp {where['fusedmlp']}"


def _speedup(results: Results, path: Path) -> None:
    """One row an MLP, one column a number of rows, coloured by the logarithm of the speed-up."""
    from matplotlib.figure import Figure

    cells = [cell for cell in results["cells"].values() if cell["speedup"] is not None]
    lines = list(dict.fromkeys(map(_line, cells)))
    columns = sorted({cell["rows"] for cell in cells})
    values = [[math.nan] * len(columns) for _ in lines]
    for cell in cells:
        values[lines.index(_line(cell))][columns.index(cell["rows"])] = cell["speedup"]

    figure = Figure(figsize=(3.5 + 0.8 * len(columns), 1.6 + 0.38 * len(lines)), dpi=DPI)
    axes = figure.add_subplot()
    logarithms = [[math.log2(value) for value in row] for row in values]
    strongest = math.log2(STRONGEST)
    axes.imshow(logarithms, cmap="RdYlGn", vmin=-strongest, vmax=strongest, aspect="auto")
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            if not math.isnan(value):
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(columns)), [str(rows) for rows in columns])
    axes.set_yticks(range(len(lines)), lines)
    axes.tick_params(labelsize=8)
    axes.set_xlabel("rows", fontsize=9)
    axes.set_title(f"Speed-up over Inductor's better mode\n{_title(results)}", fontsize=9)
    figure.savefig(path, bbox_inches="tight")


def _line(cell: Mapping[str, Any]) -> str:
    bias = {None: "", True: ", biases", False: ", no biases"}[cell["bias"]]
    return f"{cell['form']} {cell['width']}/{cell['hidden']}, {cell['precision']}{bias}"


def _roofline(results: Results, path: Path) -> None:
    """TFLOP/s over FLOPs a byte under the roof, one panel a precision."""
    from matplotlib.figure import Figure

    ceilings = ceilings_from_data(results["machine"]["ceilings"])
    cells = list(results["cells"].values())
    precisions = list(dict.fromkeys(cell["precision"] for cell in cells))
    figure = Figure(figsize=(1.0 + 4.6 * len(precisions), 4.4), dpi=DPI)
    for index, precision in enumerate(precisions, 1):
        axes = figure.add_subplot(1, len(precisions), index)
        peak = ceilings.flops_per_second[precision]
        own = [cell for cell in cells if cell["precision"] == precision]
        _roof(axes, own, ceilings.bytes_per_second, peak)
        _points(axes, own)
        axes.set_title(precision, fontsize=9)
        axes.set_xlabel("FLOPs a byte", fontsize=9)
        axes.tick_params(which="both", labelsize=7)
    figure.axes[0].set_ylabel("TFLOP/s", fontsize=9)
    figure.axes[0].legend(fontsize=7, loc="lower right")
    figure.suptitle(f"Roofline: {_title(results)}", fontsize=9)
    figure.savefig(path, bbox_inches="tight")


def _roof(axes: Axes, cells: list[Mapping[str, Any]], bandwidth: float, peak: float) -> None:
    intensities = [cell["flops"] / cell["bytes"] for cell in cells]
    corner = peak / bandwidth
    ends = sorted((min(*intensities, corner) / 2, corner, max(*intensities, corner) * 2))
    roof = [min(intensity * bandwidth, peak) / 1e12 for intensity in ends]
    axes.loglog(ends, roof, color="black", linewidth=1)


def _points(axes: Axes, cells: list[Mapping[str, Any]]) -> None:
    def place(name: str, marker: str, times: list[float | None], size: int) -> None:
        shown = [(cell, us) for cell, us in zip(cells, times, strict=True) if us is not None]
        axes.scatter(
            [cell["flops"] / cell["bytes"] for cell, _ in shown],
            [cell["flops"] / us / 1e6 for cell, us in shown],
            marker=marker,
            s=size,
            label=name,
        )

    place(OURS, "o", [cell["peers"].get(OURS, {}).get("us") for cell in cells], 30)
    place(f"the better of {' and '.join(INDUCTOR)}", "x", list(map(reference_us, cells)), 25)
    for name in OTHERS:
        times = [cell["peers"].get(name, {}).get("us") for cell in cells]
        if any(us is not None for us in times):
            place(name, ".", times, 12)
