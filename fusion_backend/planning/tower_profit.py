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
from fusion_backend.planning.chain_model import PAIRS, UNFUSED
from fusion_backend.planning.chain_profit import (
    SOME_ROWS,
    longer_than_modelled,
    precision_of,
    work_of,
)
from fusion_backend.planning.gains import MOST_OF_FEW_ROWS
from fusion_backend.planning.measurements import WORTHWHILE
from fusion_backend.planning.setting import Setting
from fusion_backend.planning.verdict import Verdict

_NOTHING = Verdict(None, "nothing is known of so many MLPs in one launch")
# Any of these may run an MLP of two layers by itself; the last one few rows only.
_RIVALS = (BACK_TO_BACK.name, EPILOGUE.name, LIBRARY.name, STREAM.name)


def best(settings: Sequence[Setting], fused: Sequence[bool]) -> Verdict:
    """Whether MLPs and chains of one input are to be one launch, in inference on a GPU.

    Args:
        settings: of plain MLPs and of chains. The last one joins the others: with it the launch
            must be faster than all of them apart, and no slower than without it.
        fused: whether each is fused alone. A chain that is not runs in pairs, or unfused.

    Returns:
        The family, and how many times as fast it is as a launch each.
    """
    first = settings[0]
    precision = precision_of(first)
    known = precision in chain_model.FITTED and first.gpu.backend == "cuda"
    if not known or any(s.training or s.layer_widths is None for s in settings):
        return _NOTHING
    if any(s.steps for s in settings) or not first.rows_can_be_compared:
        return _NOTHING
    rows = SOME_ROWS if first.known_rows is None else (max(first.known_rows, 1),)
    alone = [one and s.is_chain for one, s in zip(fused, settings, strict=True)]
    gains = [_gain(each, settings, alone, precision) for each in rows]
    lowest, highest = min(gains), max(gains)
    # What the model says of the chains' kernel is off alike for one launch and for a launch each.
    margin = math.log(WORTHWHILE) if all(alone) else chain_model.DEVIATIONS[precision]
    pays = lowest >= 1.0 and math.log(max(highest, 1.0)) > margin
    where = f"at {rows[0]} rows" if len(rows) == 1 else f"at up to {rows[-1]} rows"
    span = f"{highest:.2f}" if len(rows) == 1 else f"{lowest:.2f} to {highest:.2f}"
    grounds = f"by the model {span} times as fast {where} as each in a launch of its own"
    return Verdict(CHAIN.name if pays else None, grounds, lowest)


def _gain(rows: int, settings: Sequence[Setting], alone: Sequence[bool], precision: str) -> float:
    """How many times as fast one launch is as what there is without; 0 where it is not to be.

    Args:
        rows: how many there are.
        settings: of what it would run.
        alone: which of them are launches of the same kernel without it.
        precision: of their products.
    """
    apart = [
        _together(rows, (setting,), precision) if one else _otherwise(rows, setting, precision)
        for setting, one in zip(settings, alone, strict=True)
    ]
    time = _together(rows, settings, precision)
    before = _together(rows, settings[:-1], precision) if len(settings) > 2 else apart[0]
    if time is None or before is None or None in apart:
        return 0.0
    known = [each for each in apart if each is not None]
    most = known[-1] if alone[-1] else known[-1] / math.exp(chain_model.DEVIATIONS[precision])
    return sum(known) / time if time <= before + most else 0.0


def _together(rows: int, settings: Sequence[Setting], precision: str) -> float | None:
    works = [work_of(rows, setting, precision) for setting in settings]
    time = chain_model.of_towers(works, settings[0].gpu)
    return None if time is None else time * max(map(longer_than_modelled, settings))


def _otherwise(rows: int, setting: Setting, precision: str) -> float:
    """The shortest time without the chains' kernel, whatever is planned."""
    work, gpu = work_of(rows, setting, precision), setting.gpu
    if setting.is_chain:
        fitted = chain_model.FITTED[precision]
        return min(chain_model.time_of(way, work, gpu, fitted) for way in (UNFUSED, PAIRS))
    assert setting.widths is not None
    families = _RIVALS if rows <= MOST_OF_FEW_ROWS else _RIVALS[:-1]
    known = cost_model.predicted(families, cost_model.Work(work.rows, setting.widths), gpu)
    return work.size * min(known.values())
