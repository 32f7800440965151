"""Whether one launch for several MLPs of one input is faster than a launch each.

The kernel is that of chains, so the model of chains says it (:mod:`chain_model`). A launch less is
saved, and what multiprocessors wait for in a chain of few rows is waited for once. Nothing is
joined that is launched in another way than alone, since the model does not tell one way from
another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fusion_backend.kernels.registry import BACK_TO_BACK, CHAIN, EPILOGUE, LIBRARY, STREAM
from fusion_backend.planning import chain_model, cost_model
from fusion_backend.planning.chain_profit import (
    SOME_ROWS,
    longer_than_modelled,
    precision_of,
    work_of,
)
from fusion_backend.planning.gains import MOST_OF_FEW_ROWS
from fusion_backend.planning.measurements import WORTHWHILE
from fusion_backend.planning.profit import Verdict
from fusion_backend.planning.setting import Setting

_NOTHING = Verdict(None, "nothing is known of so many MLPs in one launch")
# Any of these may run an MLP of two layers by itself; the last one few rows only.
_RIVALS = (BACK_TO_BACK.name, EPILOGUE.name, LIBRARY.name, STREAM.name)


def best(settings: Sequence[Setting]) -> Verdict:
    """Whether MLPs and chains of one input are to be one launch, in inference on a GPU.

    Args:
        settings: of plain MLPs and of chains that are fused. The last one joins the others: with
            it the launch must be faster than without it, and than all of them apart.

    Returns:
        The family, and how many times as fast it is as a launch each.
    """
    first = settings[0]
    precision = precision_of(first)
    known = precision in chain_model.FITTED and first.gpu.backend == "cuda"
    if not known or any(s.training or s.layer_widths is None for s in settings):
        return _NOTHING
    if not first.rows_can_be_compared:
        return _NOTHING
    rows = SOME_ROWS if first.known_rows is None else (max(first.known_rows, 1),)
    gains = [_gain(each, settings, precision) for each in rows]
    lowest, highest = min(gains), max(gains)
    pays = lowest >= 1.0 and math.log(highest) > _margin(settings, precision)
    where = f"at {rows[0]} rows" if len(rows) == 1 else f"at up to {rows[-1]} rows"
    span = f"{highest:.2f}" if len(rows) == 1 else f"{lowest:.2f} to {highest:.2f}"
    grounds = f"by the model {span} times as fast {where} as each in a launch of its own"
    return Verdict(CHAIN.name if pays else None, grounds, lowest)


def _margin(settings: Sequence[Setting], precision: str) -> float:
    """By how much, as a logarithm, the model must be in favour.

    What it says of chains is off alike for one launch and for a launch each; an MLP by itself runs
    on other kernels.
    """
    if all(setting.is_chain for setting in settings):
        return math.log(WORTHWHILE)
    return chain_model.DEVIATIONS[precision]


def _gain(rows: int, settings: Sequence[Setting], precision: str) -> float:
    """How many times as fast one launch is as a launch each; 0 where it would not be one more."""
    apart = [_alone(rows, setting, precision) for setting in settings]
    time = _together(rows, settings, precision)
    before = _together(rows, settings[:-1], precision)
    if time is None or before is None or time > before + apart[-1]:
        return 0.0
    return sum(apart) / time


def _together(rows: int, settings: Sequence[Setting], precision: str) -> float | None:
    works = [work_of(rows, setting, precision) for setting in settings]
    time = chain_model.of_towers(works, settings[0].gpu)
    return None if time is None else time * max(map(longer_than_modelled, settings))


def _alone(rows: int, setting: Setting, precision: str) -> float:
    """Of a chain its kernel's time; of an MLP of two layers that of the fastest there may be."""
    if setting.is_chain:
        alone = _together(rows, (setting,), precision)
        return 0.0 if alone is None else alone
    assert setting.widths is not None
    families = _RIVALS if rows <= MOST_OF_FEW_ROWS else _RIVALS[:-1]
    size = work_of(rows, setting, precision).size
    work = cost_model.Work(max(rows, 1), setting.widths)
    return size * min(cost_model.predicted(families, work, setting.gpu).values())
