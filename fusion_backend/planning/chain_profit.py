"""Whether one kernel for a chain is faster than its layers unfused, and than its pairs fused.

Only measurements of chains like it say so: those that ship with the package for the GPU. Where
there are none, pairs are fused as if there were no chain.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusion_backend.kernels.registry import BACK_TO_BACK, CHAIN
from fusion_backend.planning.discounts import exact_activation
from fusion_backend.planning.gpus import Gpu
from fusion_backend.planning.measurements import WORTHWHILE, form_of
from fusion_backend.planning.profit import Verdict
from fusion_backend.planning.setting import Setting
from fusion_backend.planning.shipped_tables import contents

#: A product and a pointwise kernel a layer, as eager has them; Inductor's were not faster where
#: both were measured.
UNFUSED = "unfused"
#: The best that two-layer sites do for the chain, the others left unfused.
PAIRS = "pairs"
# Beyond this many doublings of the work of a row and of the widest layer, in sum, a measured chain
# says nothing about another; a layer more or less counts for a quarter.
_MAX_DOUBLINGS = 1.5
_WEIGHT_OF_LAYERS = 0.25


@dataclass(frozen=True)
class ChainMeasurement:
    """Times of one chain.

    Attributes:
        form: ``gelu`` where an activation needs an ``erf``, which is dear; else ``gelu_tanh``.
        widths: of the input, of each hidden value and of the output.
        rows: how many there were.
        microseconds: of the plan ``chain``, :data:`UNFUSED`, and in :data:`PAIRS`.
        source: where the times come from, such as ``"on an H100"``.
    """

    form: str
    widths: tuple[int, ...]
    rows: int
    microseconds: dict[str, float]
    source: str

    def speedup(self, over: str) -> float:
        """How many times as fast as :data:`UNFUSED` or :data:`PAIRS` the kernel was."""
        return self.microseconds[over] / self.microseconds[CHAIN.name]

    def doublings_from(self, widths: Sequence[int]) -> float:
        """How far its widths are from those of another chain."""
        work, widest = (
            abs(math.log2(a / b)) for a, b in zip(_size(self.widths), _size(widths), strict=True)
        )
        return work + widest + _WEIGHT_OF_LAYERS * abs(len(self.widths) - len(widths))


def measured(setting: Setting) -> Verdict:
    """What measurements say of a chain on a GPU; all of them are of inference."""
    widths = setting.layer_widths
    is_like = setting.dtype in (torch.bfloat16, torch.float16) and not setting.training
    if widths is None or not is_like or not setting.rows_can_be_compared:
        return Verdict(None, "no chain like it was measured")
    form = form_of(setting.activation, gated=False)
    same = [m for m in shipped(setting.gpu) if m.form == form]
    near = min((m.doublings_from(widths) for m in same), default=math.inf)
    if near > _MAX_DOUBLINGS:
        return Verdict(None, "no chain like it was measured")
    column = sorted((m for m in same if m.doublings_from(widths) == near), key=lambda m: m.rows)
    members = column
    if setting.known_rows is not None:
        fewer = [m for m in column if m.rows <= setting.known_rows][-1:]
        more = [m for m in column if m.rows >= setting.known_rows][:1]
        members = fewer if fewer == more else [*fewer, *more]
    longer = {UNFUSED: exact_activation(setting).get(BACK_TO_BACK.name, 1.0), PAIRS: 1.0}
    speedups = {over: [m.speedup(over) / longer[over] for m in members] for over in longer}
    pays = all(min(each) >= WORTHWHILE for each in speedups.values())
    times = {over: _mean(each) for over, each in speedups.items()}
    rows = " to ".join(dict.fromkeys(str(m.rows) for m in (members[0], members[-1])))
    chain = "→".join(map(str, members[0].widths))
    grounds = (
        f"{times[UNFUSED]:.2f} times as fast as the unfused layers and {times[PAIRS]:.2f} times as "
        f"pairs fused, {members[0].source} at {rows} rows of {chain}"
    )
    return Verdict(CHAIN.name if pays else None, grounds, times[UNFUSED])


def _mean(speedups: Sequence[float]) -> float:
    return math.prod(speedups) ** (1 / len(speedups))


@functools.cache
def shipped(gpu: Gpu) -> tuple[ChainMeasurement, ...]:
    """What ships with the package for a GPU; empty where nothing does."""
    content = next(contents("chains", gpu), None)
    if content is None:
        return ()
    source = f"on an {content['machine']['gpu']}"
    return tuple(
        ChainMeasurement(row["form"], tuple(row["widths"]), row["rows"], row["us"], source)
        for row in content["rows"]
    )


def _size(widths: Sequence[int]) -> tuple[int, int]:
    """Multiplications of a row, and the widest layer's width, both padded."""
    from fusion_backend.kernels.host.configs import padded

    blocks = [padded(width) for width in widths]
    return sum(a * b for a, b in itertools.pairwise(blocks)), max(blocks)
