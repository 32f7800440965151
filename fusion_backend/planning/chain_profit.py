"""Whether one kernel for a chain is faster than its layers unfused, and than its pairs fused.

Measurements of the same widths say so, where they ship with the package for the GPU. Of other
chains in inference a model predicts it (:mod:`chain_model`). Where it is unsure the chain itself is
timed ``while_compiling``; where nothing may be timed, the predicted gain must exceed the model's
uncertainty. Where nothing speaks, pairs are fused as if there were no chain.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion_backend.kernels.registry import BACK_TO_BACK, CHAIN
from fusion_backend.mlp.steps import Steps
from fusion_backend.planning import chain_model, discounts, while_compiling
from fusion_backend.planning.cases import kind_of
from fusion_backend.planning.chain_model import PAIRS, UNFUSED, ChainWork
from fusion_backend.planning.gpus import Gpu
from fusion_backend.planning.measurements import INDUCTOR, WORTHWHILE, form_of
from fusion_backend.planning.setting import Setting
from fusion_backend.planning.shipped_tables import contents
from fusion_backend.planning.verdict import Verdict

#: Rows for which a chain must pay whose rows are symbolic.
SOME_ROWS = (1, 64, 1024, 16384, 262144)
# Measured rows speak for so many times as many, or as few, beyond the last.
_MOST_TIMES_AS_MANY = 4
# Of the model's standard deviations, how many make it sure where the chain may be timed.
_SURE = 2.0
_NAMES = {INDUCTOR: "the unfused layers"}
_NOTHING = Verdict(None, "no chain like it was measured")


@dataclass(frozen=True)
class ChainMeasurement:
    """Times of one chain.

    Attributes:
        form: ``gelu`` where an activation needs an ``erf``, which is dear; else ``gelu_tanh``.
        widths: of the input, of each hidden value and of the output.
        rows: how many there were.
        microseconds: of the plan ``chain``, :data:`UNFUSED`, and in :data:`PAIRS` if these ran.
        source: where the times come from, such as ``"on an H100"``.
        precision: ``bfloat16``, ``tf32`` or ``ieee``.
    """

    form: str
    widths: tuple[int, ...]
    rows: int
    microseconds: dict[str, float]
    source: str
    precision: str = "bfloat16"

    def speedup(self, over: str) -> float:
        """How many times as fast as :data:`UNFUSED` or :data:`PAIRS` the kernel was."""
        rival = self.microseconds.get(over, self.microseconds[UNFUSED])
        return rival / self.microseconds[CHAIN.name]


def best(setting: Setting, may_time: bool = False) -> Verdict:
    """Whether the kernel pays for a chain on a GPU; all that is known of it is inference.

    Where rows are symbolic, it must pay for few and for many.

    Args:
        setting: the chain's circumstances.
        may_time: whether to measure the chain itself where the model is unsure.
    """
    if setting.layer_widths is None or setting.training or not setting.rows_can_be_compared:
        return _NOTHING
    precision = precision_of(setting)
    form = form_of(setting.activation, gated=False)
    column = [
        m
        for m in shipped(setting.gpu)
        if not setting.steps and m.form == form and m.precision == precision
        if _padded(m.widths) == _padded(setting.layer_widths)
    ]
    rows = SOME_ROWS if setting.known_rows is None else (setting.known_rows,)
    timed = while_compiling.decides(setting, may_time)
    verdicts = [_at(each, column, setting, precision, timed) for each in rows]
    losing = [verdict for verdict in verdicts if verdict.family is None]
    return min(losing or verdicts, key=lambda verdict: verdict.expected_speedup or 0.0)


def _at(
    rows: int,
    column: Sequence[ChainMeasurement],
    setting: Setting,
    precision: str,
    timed: bool = False,
) -> Verdict:
    """The verdict for a number of rows, with what was measured of the chain."""
    members = _of_rows(column, rows)
    if members:
        return _by_measurements(members, setting)
    return _by_model(rows, setting, precision, timed)


def precision_of(setting: Setting) -> str:
    """As tables have it: float16 runs as bfloat16 does, but for its activations."""
    precision = kind_of(setting).precision
    return "bfloat16" if precision == "float16" else precision


def _of_rows(column: Sequence[ChainMeasurement], rows: int) -> list[ChainMeasurement]:
    """Measurements of the next fewer and the next more rows; none where all are far away."""
    column = sorted(column, key=lambda m: m.rows)
    fewer = [m for m in column if m.rows <= rows][-1:]
    more = [m for m in column if m.rows >= rows][:1]
    found = fewer if fewer == more else [*fewer, *more]
    is_between = len(fewer) == len(more)
    near = (m for m in found if max(m.rows, rows) <= _MOST_TIMES_AS_MANY * min(m.rows, rows))
    return found if is_between else list(near)


def _by_measurements(members: Sequence[ChainMeasurement], setting: Setting) -> Verdict:
    longer = {UNFUSED: _longer(setting), PAIRS: 1.0}
    speedups = {over: [m.speedup(over) / longer[over] for m in members] for over in longer}
    pays = all(min(each) >= WORTHWHILE for each in speedups.values())
    times = {over: _mean(each) for over, each in speedups.items()}
    rows = " to ".join(dict.fromkeys(str(m.rows) for m in (members[0], members[-1])))
    chain = "→".join(map(str, members[0].widths))
    in_pairs = any(PAIRS in m.microseconds for m in members)
    pairs = f" and {times[PAIRS]:.2f} times as pairs fused" if in_pairs else ""
    grounds = (
        f"{times[UNFUSED]:.2f} times as fast as the unfused layers{pairs}, {members[0].source} at "
        f"{rows} rows of {chain}"
    )
    return Verdict(CHAIN.name if pays else None, grounds, times[UNFUSED])


def _by_model(rows: int, setting: Setting, precision: str, timed: bool = False) -> Verdict:
    """What the model of chains predicts, which knows NVIDIA's GPUs; or times, where it is unsure.

    It is unsure up to two standard deviations.
    """
    if precision not in chain_model.FITTED or setting.gpu.backend != "cuda":
        return _NOTHING
    times = _predicted(rows, setting, precision)
    deviation = _deviation(setting, precision)
    unfused, pairs = (times[over] / times[CHAIN.name] for over in (UNFUSED, PAIRS))
    gain = math.log(min(unfused, pairs))
    if timed and abs(gain - math.log(WORTHWHILE)) < _SURE * deviation:
        times_here = while_compiling.times(setting, (CHAIN.name,))
        if times_here is not None and CHAIN.name in times_here:
            return by_times(times_here)
    pays = gain > max(deviation, math.log(WORTHWHILE))
    grounds = (
        f"by the model {times[CHAIN.name]:.1f} µs at {rows} rows, {unfused:.2f} times as fast as "
        f"the unfused layers and {pairs:.2f} times as pairs fused ± {100 * deviation:.0f} %"
    )
    return Verdict(CHAIN.name if pays else None, grounds, unfused)


def _deviation(setting: Setting, precision: str) -> float:
    """That of the model: layers that also read the input are layers as others are, but wider."""
    assert setting.layer_widths is not None
    steps = Steps.of(setting.steps, len(setting.layer_widths) - 1)
    plain = steps.only_activates
    return (chain_model.DEVIATIONS if plain else chain_model.DEVIATIONS_OF_STEPS)[precision]


def by_times(times: Mapping[str, float]) -> Verdict:
    """What times of this very chain say, in microseconds: of the kernel, and of all without it."""
    rest = {name: us for name, us in times.items() if name != CHAIN.name}
    speedup = min(rest.values()) / times[CHAIN.name]
    each = ", ".join(f"{_NAMES.get(name, name)} {us:.1f} µs" for name, us in rest.items())
    grounds = f"measured here for this chain: {times[CHAIN.name]:.1f} µs, {each}"
    return Verdict(CHAIN.name if speedup >= WORTHWHILE else None, grounds, speedup)


def _predicted(rows: int, setting: Setting, precision: str) -> dict[str, float]:
    times = chain_model.predicted(work_of(rows, setting, precision), setting.gpu)
    times[CHAIN.name] *= longer_than_modelled(setting)
    return times


def work_of(rows: int, setting: Setting, precision: str) -> ChainWork:
    """What the model is asked of a chain, or of an MLP as one."""
    assert setting.layer_widths is not None
    functions = chain_model.functions_of(setting.activation)
    steps = Steps.of(setting.steps, len(setting.layer_widths) - 1)
    inner = None if steps.is_plain else steps
    return ChainWork(max(rows, 1), setting.layer_widths, functions, precision, inner)


def longer_than_modelled(setting: Setting) -> float:
    """By how much the kernel takes longer than the model says, which was fitted to Hopper."""
    on_others = discounts.any_gpu(gated=False)[BACK_TO_BACK.name]
    return _longer(setting) * (1.0 if setting.gpu.architecture == "sm_90" else on_others)


def _longer(setting: Setting) -> float:
    """By how much activations that are computed exactly lengthen the kernel's time."""
    return discounts.exact_activation(setting).get(BACK_TO_BACK.name, 1.0)


def _mean(speedups: Sequence[float]) -> float:
    return math.prod(speedups) ** (1 / len(speedups))


@functools.cache
def shipped(gpu: Gpu) -> tuple[ChainMeasurement, ...]:
    """What ships with the package for a GPU; empty where nothing does."""
    content = next(contents("chains", gpu), None)
    if content is None:
        return ()
    source = f"on an {content['machine']['gpu']}"
    return tuple(_measurement(row, source) for row in content["rows"])


def _measurement(row: dict[str, Any], source: str) -> ChainMeasurement:
    """One row of a table. Inductor's own code, where it was timed, is the unfused chain."""
    times = dict(row["us"])
    times[UNFUSED] = min(times[UNFUSED], times.pop(INDUCTOR, times[UNFUSED]))
    form = form_of(f"{row['form']}(x)", gated=False)
    how = (source, row.get("precision", "bfloat16"))
    return ChainMeasurement(form, tuple(row["widths"]), row["rows"], times, *how)


def _padded(widths: Sequence[int]) -> tuple[int, ...]:
    from fusion_backend.kernels.host.configs import padded

    return tuple(map(padded, widths))
