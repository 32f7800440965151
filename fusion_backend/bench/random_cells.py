"""MLPs drawn at random: what nobody chose to measure, so that anyone can check "never slower"."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice

from fusion_backend.bench.cells import Cell

_PLAIN = (
    *("gelu", "gelu_tanh", "silu", "relu", "square(relu(x))", "x * sigmoid(1.702 * x)"),
    *("tanh(x)", "mish(x)", "hardswish(x)", "softplus(x, 1.0, 20.0)"),
)
_GATED = ("swiglu", "swiglu", "geglu", "geglu_tanh")
_WIDE = (
    *(384, 512, 576, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2304, 2560, 3072, 3584, 4096),
    *(5120, 6144, 8192),
)
_NARROW = (8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256, 100, 50)
_RATIOS = (0.5, 1, 2, 2.6875, 3.5, 4, 4)
_OUT = (1, 10, 64, 512, 1000)
# A cell is measured in a second or two, and its hidden value takes a gigabyte.
_MOST_FLOPS, _MOST_HIDDEN = 4e12, 1 << 29


def drawn(number: int, seed: int) -> list[Cell]:
    """So many different MLPs, the same for the same seed, in bfloat16 and float16.

    Two thirds are wide (384 to 8192), the others narrow (8 to 256). Rows go from 1 to 2¹⁸, as
    often up to 2 as between 2¹⁷ and 2¹⁸; half of them are powers of two. Four in ten are gated, six
    in ten have biases, one in five has another output width than input width.
    """
    found: dict[Cell, None] = {}
    for cell in islice(_draw(random.Random(seed)), 100 * number):
        if len(found) < number:
            found[cell] = None
    return list(found)


def _draw(source: random.Random) -> Iterator[Cell]:
    while True:
        gated = source.random() < 0.4
        form = source.choice(_GATED if gated else _PLAIN)
        wide = source.random() < 0.65
        width = source.choice(_WIDE if wide else _NARROW)
        hidden = max(16, int(width * source.choice(_RATIOS)) // 16 * 16)
        out = width if source.random() < 0.8 else source.choice((*_OUT, 2 * width))
        rows = int(2 ** source.uniform(0, 15 if wide else 18))
        if source.random() < 0.5:
            rows = 1 << (rows.bit_length() - 1)
        precision = source.choices(("bfloat16", "float16"), (7, 2))[0]
        biased = source.random() < 0.6
        flops = 2 * rows * hidden * ((2 if gated else 1) * width + out)
        if flops <= _MOST_FLOPS and rows * hidden <= _MOST_HIDDEN:
            yield Cell(form, rows, width, hidden, precision, biased, out)
