"""The grids of ``fusedmlp tune``: narrow to wide, one row to many, on GPUs plain and gated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from fusion_backend.planning import cpu_rates
from fusion_backend.planning.cases import Case

_LARGEST_INPUT = 1 << 24
# Of bfloat16's numbers of rows, those of float16: its activations take longer, and little else.
_ROWS_OF_FLOAT16 = (1, 16, 64, 128, 512, 4096, 16384, 65536)


def quick_grid() -> Iterator[Case]:
    """Few MLPs of all sizes, in an order in which any beginning has all of them."""
    plain = {64: 256, 256: 1024, 768: 3072, 2048: 8192}
    gated = {64: 256, 768: 2048, 2048: 5632}
    for width, rows in [
        *((768, 16), (2048, 2048), (64, 65536), (768, 1024), (2048, 1), (256, 64)),
        *((768, 128), (64, 1024), (768, 8192), (2048, 64), (256, 16384), (768, 1)),
    ]:
        yield Case.of_form("gelu_tanh", rows, width, plain[width])
        if width in gated:
            yield Case.of_form("swiglu", rows, width, gated[width])


def rates_grid(dtype: torch.dtype, training: bool, quick: bool) -> Iterator[Case]:
    """The MLPs that a CPU's rates follow from: those of its calibration, and unless quick, others.

    Width by width, since a width counts once all of its rows were timed.
    """
    sizes = cpu_rates.GRID if quick else cpu_rates.FINER_GRID
    for width, each in sizes.items():
        for rows in each:
            yield cpu_rates.case_of(width, rows, dtype, training)


def grid() -> Iterator[Case]:
    """Every MLP that a table of a GPU holds: half precision first, then float32, then training."""
    yield from _bfloat16()
    yield from _transposed()
    for case in _bfloat16():
        if case.rows in _ROWS_OF_FLOAT16:
            yield replace(case, precision="float16")
    yield from _float32()
    yield from _training()


def _bfloat16() -> Iterator[Case]:
    for width, hidden in [(64, 256), (128, 512), (256, 1024)]:
        for rows in (1, 64, 1024, 16384, 65536):
            yield Case.of_form("gelu_tanh", rows, width, hidden)
            yield Case.of_form("swiglu", rows, width, hidden)
    for width, hidden in [(768, 3072), (1024, 4096), (2048, 8192), (4096, 16384)]:
        for rows in (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 16384):
            if rows * width <= _LARGEST_INPUT:
                yield Case.of_form("gelu_tanh", rows, width, hidden)
    for width, hidden in [(768, 2048), (2048, 5632), (2048, 8192), (4096, 14336)]:
        for rows in (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384):
            if rows * width <= _LARGEST_INPUT:
                yield Case.of_form("swiglu", rows, width, hidden)
    for width, hidden in [(768, 3072), (1024, 4096)]:
        for rows in (1, 16, 64, 128, 256, 512, 1024, 4096, 16384):
            yield Case.of_form("gelu", rows, width, hidden)
    for rows in (1, 64, 1024, 16384, 65536):
        yield Case.of_form("gelu", rows, 256, 1024)
    for width, hidden in [(2048, 8192), (4096, 16384)]:
        for rows in (1, 16, 64, 128, 512, 1024, 4096):
            yield Case.of_form("gelu", rows, width, hidden)
    yield Case.of_form("gelu", 197, 768, 3072)  # an image of ViT-B and of ViT-L, in patches
    yield Case.of_form("gelu", 197, 1024, 4096)
    for rows in (1024, 65536):
        yield Case.of_form("gelu", rows, 64, 256)
        yield Case.of_form("gelu", rows, 128, 512)


def _transposed() -> Iterator[Case]:
    """Weights stored the other way round; the plain ones are GPT-2's, in all of its sizes."""
    for width, hidden in [(64, 256), (128, 512), (256, 1024)]:
        for rows in (1, 64, 1024, 65536):
            yield _turned(Case.of_form("gelu_tanh", rows, width, hidden))
    for width, hidden in [(768, 3072), (1024, 4096), (1280, 5120), (1600, 6400)]:
        for rows in (1, 16, 64, 128, 256, 512, 1024, 4096, 16384):
            if rows * width <= _LARGEST_INPUT:
                yield _turned(Case.of_form("gelu_tanh", rows, width, hidden))
    for rows in (1, 16, 64, 128, 512, 4096):
        yield _turned(Case.of_form("gelu", rows, 768, 3072))
    for width, hidden in [(768, 2048), (2048, 5632), (4096, 14336)]:
        for rows in (1, 16, 64, 128, 512, 4096):
            yield _turned(Case.of_form("swiglu", rows, width, hidden))
    for rows in (512, 2048, 16384):
        yield _turned(Case.of_form("gelu_tanh", rows, 768, 3072, training=True))


def _turned(case: Case) -> Case:
    return replace(case, transposed=True)


def _float32() -> Iterator[Case]:
    for precision in ("tf32", "ieee"):
        for rows, width, hidden in [(65536, 64, 256), (16, 768, 3072), (4096, 768, 3072)]:
            yield Case.of_form("gelu_tanh", rows, width, hidden, precision)
        yield Case.of_form("swiglu", 16, 2048, 5632, precision)


def _training() -> Iterator[Case]:
    for rows in (512, 2048, 16384):
        yield Case.of_form("gelu_tanh", rows, 768, 3072, training=True)
        yield Case.of_form("swiglu", rows, 768, 2048, training=True)
    for rows in (512, 4096):
        yield Case.of_form("swiglu", rows, 2048, 8192, training=True)
    yield Case.of_form("gelu_tanh", 65536, 64, 256, training=True)
