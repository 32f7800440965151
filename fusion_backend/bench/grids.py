"""The published grids of cells."""

from __future__ import annotations

from fusion_backend.bench.cells import Cell


def _cells(form: str, *sizes: tuple[int, int, int], **settings: object) -> tuple[Cell, ...]:
    return tuple(Cell(form, *size, **settings) for size in sizes)  # type: ignore[arg-type]


#: Where memory, launches or the activation bound the work, and where arithmetic does.
FORWARD = (
    *_cells(
        "gelu_tanh",
        (262144, 64, 256), (1024, 64, 256), (16384, 128, 512), (65536, 256, 1024),
        (1, 768, 3072), (16, 768, 3072), (128, 768, 3072), (512, 768, 3072),
        (4096, 768, 3072), (16384, 768, 3072), (1, 4096, 16384), (4096, 4096, 16384),
    ),
    *_cells(
        "swiglu",
        (1, 4096, 14336), (16, 4096, 14336), (64, 4096, 14336), (512, 4096, 14336),
        (4096, 4096, 14336),
    ),
)  # fmt: skip
HALF = (
    *_cells("gelu_tanh", (16384, 128, 512), (4096, 768, 3072), precision="float16"),
    *_cells("swiglu", (16, 4096, 14336), precision="float16"),
)
SINGLE = tuple(
    cell
    for precision in ("tf32", "float32")
    for cell in (
        *_cells("gelu_tanh", (65536, 64, 256), (16, 768, 3072), precision=precision),
        *_cells("swiglu", (512, 2048, 5632), precision=precision),
    )
)
#: What Inductor's back-to-back pass takes.
BIAS_FREE = _cells("gelu_tanh", (65536, 64, 256), (16, 768, 3072), (4096, 768, 3072), bias=False)
CPU = tuple(
    cell
    for form in ("gelu", "gelu_tanh", "swiglu")
    for cell in _cells(
        form,
        (1, 768, 3072), (16, 768, 3072), (128, 768, 3072), (512, 768, 3072),
        (4096, 64, 256), (65536, 64, 256),
        precision="float32",
    )
)  # fmt: skip

GRIDS = {"forward": FORWARD, "half": HALF, "single": SINGLE, "bias-free": BIAS_FREE, "cpu": CPU}
GPU_GRIDS = ("forward", "half", "single", "bias-free")


def grids_for(device_type: str) -> tuple[str, ...]:
    """The grids that are published for a kind of device."""
    return GPU_GRIDS if device_type == "cuda" else ("cpu",)


def grid_of(cell: Cell, device_type: str) -> str | None:
    """The grid that a cell is published in, ``None`` if in none."""
    for grid in grids_for(device_type):
        if any(cell.name == published.name for published in GRIDS[grid]):
            return grid
    return None
