"""Kernels under the roof of a device: work for each byte moved, and how fast it is done.

    FLOP/s ≤ min(peak of products, bytes a second · FLOPs a byte)

FLOPs are those of the products, two for each multiplication with its addition. Bytes are those of
input, weights and result, each moved once, and those of the hidden value as often as it is written
and read: between kernels it is in memory, within one it is not.

How long a kernel takes is measured, or, for a GPU that is not there, predicted by planning's cost
model: of that of the whole MLP each kernel has the part that it has of the bounds of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fusion_backend.errors import FusedMLPError
from fusion_backend.fusion.sites import Site
from fusion_backend.kernels import registry
from fusion_backend.mlp.expression import parse, variables
from fusion_backend.mlp.steps import Steps
from fusion_backend.planning import cost_model
from fusion_backend.planning.gpus import Gpu

#: The form of a site that ends with its hidden value.
ACTIVATED = "activated"
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


class Part(NamedTuple):
    """What one kernel of a site's plan does.

    Attributes:
        name: which layers it computes.
        flops: of its products.
        bytes: that it reads and writes.
    """

    name: str
    flops: int
    bytes: int


class Work(NamedTuple):
    """One run of a site.

    Attributes:
        flops: of its products.
        unfused: bytes that move where each product and the activation are kernels of their own.
        fused: bytes that move in its plan.
        parts: the kernels of its plan, one or two.
    """

    flops: int
    unfused: int
    fused: int
    parts: tuple[Part, ...]


def roof_of(gpu: Gpu, dtype: str) -> Roof | None:
    """The roof of a GPU by its data sheet; ``None`` for a dtype that this says nothing of."""
    if _ITEMSIZE.get(dtype) != 2:
        return None
    return Roof(1e9 * gpu.gigabytes_per_second, 1e12 * gpu.teraflops, f"data sheet of {gpu.name}")


def work_of(site: Site) -> Work | None:
    """What a site does; ``None`` where its sizes are not known."""
    rows, inner, hidden, out = site.shape
    itemsize = _ITEMSIZE.get(site.dtype)
    if not isinstance(rows, int) or not rows or not inner or itemsize is None:
        return None
    widths = (inner, *(site.chain or (hidden,)), out)
    first = 2 if is_gated(site) else 1
    depths = Steps.of(site.steps, len(widths) - 1).depths(widths)
    layers = [
        _layers(rows, one, other, first if i == 0 else 1, itemsize)
        for i, (one, other) in enumerate(zip(depths, widths[1:], strict=True))
    ]
    if site.form == ACTIVATED:
        layers = layers[:1]
    hidden_bytes = itemsize * rows * sum(widths[1 : len(layers)])
    flops, moved = sum(each.flops for each in layers), sum(each.bytes for each in layers)
    # Each first layer's result is written and read, and what the activation makes of them; of that,
    # one writing and one reading are among the bytes of the layers.
    written = itemsize * rows * sum(widths[1 : max(len(layers), 2)])
    unfused = moved + 2 * first * written
    parts: tuple[Part, ...]
    if launches_of(site) == 1:
        parts = (Part(site.plan or "all layers", flops, moved - 2 * hidden_bytes),)
    else:
        parts = (layers[0]._replace(name="first layers"), _joined(layers[1:]))
    return Work(flops, unfused, sum(part.bytes for part in parts), parts)


def _layers(rows: int, inner: int, out: int, count: int, itemsize: int) -> Part:
    """Linear layers side by side, of whose results one value is made."""
    weights = count * inner * out
    return Part("", 2 * rows * weights, itemsize * (weights + rows * (inner + out)))


def _joined(layers: Sequence[Part]) -> Part:
    return Part("last layer", sum(each.flops for each in layers), sum(e.bytes for e in layers))


def is_gated(site: Site) -> bool:
    """Whether a site has two first layers."""
    if not site.activation or site.chain:
        return False
    try:
        return {"g", "u"} <= set(variables(parse(site.activation)))
    except FusedMLPError:
        return False


def launches_of(site: Site) -> int:
    """How many kernels the plan of a site is; those of one that is left alone are not known."""
    if site.plan is None:
        return 2
    return 1 if site.form == ACTIVATED else min(registry.named(site.plan).launches, 2)


def predicted_times(site: Site, work: Work, gpu: Gpu, roof: Roof) -> list[float] | None:
    """Microseconds of each part of a site's plan; ``None`` where the cost model knows it not."""
    rows, inner, hidden, out = site.shape
    known = site.fused and not site.training and not site.chain and site.form != ACTIVATED
    if not known or not isinstance(rows, int) or _ITEMSIZE.get(site.dtype) != 2:
        return None
    seen = cost_model.Work(rows, (inner, hidden, out), is_gated(site))
    whole = cost_model.predicted([str(site.plan)], seen, gpu).get(str(site.plan))
    if whole is None:
        return None
    bounds = [part.flops / roof.at(part.flops / part.bytes) for part in work.parts]
    return [whole * bound / sum(bounds) for bound in bounds]
