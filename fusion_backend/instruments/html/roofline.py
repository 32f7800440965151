"""Sites under the roof of a device: work for each byte moved, and how fast it can be done.

    FLOP/s ≤ min(peak of products, bytes a second · FLOPs a byte)

FLOPs are those of the products, two for each multiplication with its addition. Bytes are those of
input, weights and result, each moved once, and those of the hidden value as often as it is written
and read: between kernels it is in memory, within one it is not.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from fusion_backend.errors import FusedMLPError
from fusion_backend.fusion.sites import Site
from fusion_backend.kernels import registry
from fusion_backend.mlp.expression import parse, variables
from fusion_backend.planning.gpus import Gpu

_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


class Roof(NamedTuple):
    """What a device reaches.

    Attributes:
        bytes_per_second: of its memory.
        flops_per_second: of products.
        source: where the two come from, for a caption.
    """

    bytes_per_second: float
    flops_per_second: float
    source: str

    def at(self, intensity: float) -> float:
        """FLOPs a second that are possible at so many FLOPs a byte."""
        return min(self.flops_per_second, self.bytes_per_second * intensity)


class Work(NamedTuple):
    """One run of a site.

    Attributes:
        flops: of its products.
        unfused: bytes that move where each product and the activation are kernels of their own.
        fused: bytes that move in its plan.
    """

    flops: int
    unfused: int
    fused: int


def roof_of(gpu: Gpu, dtype: str) -> Roof | None:
    """The roof of a GPU by its data sheet; ``None`` for a dtype that this says nothing of."""
    if _ITEMSIZE.get(dtype) != 2:
        return None
    return Roof(1e9 * gpu.gigabytes_per_second, 1e12 * gpu.teraflops, f"data sheet of {gpu.name}")


def work_of(site: Site) -> Work | None:
    """What a site does; ``None`` where its sizes are not known."""
    rows, inner, hidden, out = site.shape
    itemsize = _ITEMSIZE.get(site.dtype)
    if not isinstance(rows, int) or not inner or itemsize is None:
        return None
    widths = (inner, *(site.chain or (hidden,)), out)
    first = 2 if _is_gated(site) else 1
    further = sum(one * other for one, other in pairwise(widths[1:]))
    weights = first * widths[0] * widths[1] + further
    moved = weights + rows * (inner + out)
    hidden_values = rows * sum(widths[1:-1])
    # Each first layer's result is written and read, and what the activation makes of them.
    unfused = moved + 2 * (first + 1) * hidden_values
    fused = moved + (0 if _stays_on_chip(site) else 2 * hidden_values)
    return Work(2 * rows * weights, itemsize * unfused, itemsize * fused)


def _is_gated(site: Site) -> bool:
    if not site.activation or site.chain:
        return False
    try:
        return {"g", "u"} <= set(variables(parse(site.activation)))
    except FusedMLPError:
        return False


def _stays_on_chip(site: Site) -> bool:
    return site.plan is not None and registry.named(site.plan).launches == 1
