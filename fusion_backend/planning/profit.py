"""Whether some family of kernels is expected to beat Inductor's own code for a site.

On GPUs measurements of the very MLP decide: of a table, the user's own or one that ships with the
package, or those made ``while_compiling``. Else the ``step_model`` decides of training steps, and
the ``cost_model`` of inference, of what and on what GPUs they were checked. Of other sites the
nearest measurements of tables decide, and else the ``heuristic`` predicts. Under
``mode="max-autotune"`` a site is measured ``on_the_spot``. Of CPUs ``cpu_profit`` speaks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fusion_backend.compat import inductor
from fusion_backend.kernels import registry
from fusion_backend.planning import (
    cost_model,
    cpu_profit,
    discounts,
    heuristic,
    on_the_spot,
    step_model,
    while_compiling,
)
from fusion_backend.planning.cases import FORMS, kind_of
from fusion_backend.planning.cost_model import Factors, Work
from fusion_backend.planning.gains import MOST_OF_FEW_ROWS
from fusion_backend.planning.measurements import (
    INDUCTOR,
    MAX_AUTOTUNE,
    WORTHWHILE,
    Kind,
    Measurement,
    Widths,
    are_aligned,
    column,
    merged,
    nearest,
    shipped,
)
from fusion_backend.planning.setting import Setting
from fusion_backend.planning.step_model import Step
from fusion_backend.planning.user_table import UserTable
from fusion_backend.planning.verdict import Verdict, by_times

# Symbolic rows are told apart at these bounds, and by no more of them than needed; at
# MOST_OF_FEW_ROWS, between them, only where something was measured there.
_FEW_ROWS, _MANY_ROWS = 64, 1024
# And at these where a model speaks of any number. It is asked of the first of a class, too, but of
# two where that is one, for which torch compiles code of its own.
_BOUNDS_OF_MODELS = (_FEW_ROWS, MOST_OF_FEW_ROWS, 512, 2048, 8192, 16384)
_FIRST_OF_A_CLASS = 8
_NOISE = 0.98
# Of the model's standard deviations, how many make it sure.
_SURE = 1.5
_MOST_COMPILED = 2
_UNALIGNED = "widths that are no multiples of 8 were measured in narrow layers only"


def best(
    families: Sequence[str],
    setting: Setting,
    may_measure: bool = False,
    may_calibrate: bool = False,
    may_time: bool = False,
) -> Verdict:
    """The fastest of the families that can run a site, if it beats Inductor.

    Args:
        families: those that can run it, at least one.
        setting: the site's circumstances.
        may_measure: whether to measure on the spot, where that is wanted.
        may_calibrate: whether to measure this machine's rates, if it is a CPU and they are unknown.
        may_time: whether to measure the site itself on a GPU where nothing else decides.
    """
    if setting.activated and setting.training:
        return Verdict(None, "a part of an MLP was measured in inference only")
    if setting.training and setting.device.type != "cpu" and _has_dear_gradients(setting):
        return Verdict(
            None, "the gradients of what enters its activation were measured to cost more"
        )
    if setting.widths is None or not setting.rows_can_be_compared:
        return Verdict(None, "its sizes are not known before the run")
    if setting.device.type == "cpu":
        return cpu_profit.best(families, setting, may_calibrate)
    timed = while_compiling.decides(setting, may_time)
    return _on_gpu(families, setting, setting.widths, may_measure, timed)


def _has_dear_gradients(setting: Setting) -> bool:
    """Whether tensors enter the activation of which a training step was measured to be slower.

    On an H100: 0.96 of Inductor's speed with another layer's results, 0.95 with a number a feature
    in a gated MLP; but 1.05 with one in a plain MLP, and 1.13 with dropout.
    """
    given = [kind for kind in setting.operands if kind != "seed"]
    return "elementwise" in given or (setting.gated and bool(given))


def _on_gpu(
    families: Sequence[str], setting: Setting, widths: Widths, may_measure: bool, timed: bool
) -> Verdict:
    evidence = _Evidence.of(families, setting, widths)
    able = {INDUCTOR, *families}
    if timed and not evidence.is_of_the_same():
        times = while_compiling.times(setting, rivals(families, setting))
        if times is not None:
            verdict = by_times({name: us for name, us in times.items() if name in able})
            return replace(verdict, grounds=verdict.grounds + _modelled(able, setting))
    if may_measure and on_the_spot.wanted(setting, evidence.measured):
        on_the_spot.measure(setting)
        evidence = _Evidence.of(families, setting, widths)
    by_cost = cost_model.speaks_for(setting) and not inductor.max_autotunes()
    if by_cost and setting.known_rows is not None and not evidence.is_of_the_same():
        modelled = _by_cost_model(families, setting)
        if modelled is not None:
            return modelled
    by_cost = by_cost and setting.known_rows is None and not evidence.is_exact()
    known = step_model.speaks_for(setting) and any(
        family in step_model.KNOWN for family in families
    )
    by_steps = known and not evidence.is_of_the_same(step_model.known(families, setting))
    if by_steps or by_cost:
        evidence = replace(evidence, measured=(), measurements=(), by_model=True)
    elif not (are_aligned(widths) or evidence.is_exact()):
        narrow = [] if setting.training else [registry.BACK_TO_BACK.name]
        families = [family for family in families if family in narrow]
        evidence = replace(evidence, families=families)
        if not families:
            return Verdict(None, _UNALIGNED)
    if setting.known_rows is None:
        members = _class_of(families, setting, evidence)
        family = _fastest(families, members)
    else:
        members = evidence.around(setting.known_rows)
        family = _fastest(families, members, nowhere_below=WORTHWHILE)
    if setting.activated and not all(m.measured for m in members):
        return Verdict(None, "the heuristic was fitted to whole MLPs")
    if by_steps:
        return _by_steps(family, families, setting)
    if by_cost:
        times, sure = _costs(families, setting)
        if sure:
            return _by_costs(family, setting, times, sure)
    tried = family or max(families, key=lambda family: _speedup(family, members))
    grounds = _grounds(tried, members, setting)
    if not all(m.measured for m in members):
        grounds += _modelled(able, setting)
    return Verdict(family, grounds, _speedup(tried, members))


def _by_cost_model(families: Sequence[str], setting: Setting) -> Verdict | None:
    """The family that is worthwhile for sure by the model, if one is, and what that predicts.

    ``None`` where it knows none of the families.
    """
    times, sure = _costs(families, setting)
    if not sure:
        return None
    best = max(sure, key=lambda name: sure[name])
    return _by_costs(best if sure[best] >= WORTHWHILE else None, setting, times, sure)


def _costs(families: Sequence[str], setting: Setting) -> tuple[dict[str, float], dict[str, float]]:
    """Microseconds by the cost model, and the gains of families that are sure.

    Where rows are symbolic, of those that are likely.
    """
    work, gpu, fitted = Work.of(setting), setting.gpu, _factors(setting)
    able = [name for name in families if _takes(name, work.rows)]
    times = cost_model.predicted(able, work, gpu, fitted)
    return times, cost_model.sure_gains(times, work, gpu, fitted)


def _by_costs(
    family: str | None, setting: Setting, times: Mapping[str, float], sure: Mapping[str, float]
) -> Verdict:
    """The family that pays, if one does, and what the cost model predicts."""
    work, gpu, fitted = Work.of(setting), setting.gpu, _factors(setting)
    deviations = {name: cost_model.deviation(name, INDUCTOR, work, gpu, fitted) for name in sure}
    grounds = f"expected{_of_rows(setting)} by the cost model: {_expected(times, deviations)}"
    tried = family or max(sure, key=lambda name: sure[name])
    return Verdict(family, grounds, times[INDUCTOR] / times[tried])


def _by_steps(family: str | None, families: Sequence[str], setting: Setting) -> Verdict:
    """The family that pays, if one does, and what the model of training steps predicts.

    Where rows are symbolic, that is of those that are likely.
    """
    step = Step.of(setting, setting.likely_rows)
    times = step_model.predicted(families, step, setting.gpu)
    speedups = {name: times[INDUCTOR] / us for name, us in times.items() if name != INDUCTOR}
    if not speedups:
        return Verdict(None, "its activation's derivatives take kernels longer than they save")
    expected = _expected(times, {name: step_model.deviation(name, step) for name in speedups})
    grounds = f"expected of a training step{_of_rows(setting)} by the model: {expected}"
    tried = family or max(speedups, key=lambda name: speedups[name])
    return Verdict(family, grounds, speedups[tried])


def _of_rows(setting: Setting) -> str:
    """Of how many rows a prediction is, where that goes without saying for known ones."""
    return "" if setting.known_rows is not None else f" of {max(setting.likely_rows, 1)} rows"


def _expected(times: Mapping[str, float], deviations: Mapping[str, float]) -> str:
    """Predicted microseconds of Inductor and of families, and how sure their gains are."""
    each = [
        f"{name} {times[name]:.1f} µs, {times[INDUCTOR] / times[name]:.2f} times as fast "
        f"± {100 * deviation:.0f} %"
        for name, deviation in deviations.items()
    ]
    return "; ".join([f"Inductor {times[INDUCTOR]:.1f} µs", *each])


def _modelled(families: Iterable[str], setting: Setting) -> str:
    """What the cost model predicts of a site of known rows, in inference in 16 bits."""
    if setting.training or setting.known_rows is None or setting.dtype.itemsize != 2:
        return ""
    work, fitted = Work.of(setting), _factors(setting)
    names = [name for name in families if name != INDUCTOR]
    times = cost_model.predicted(sorted(names), work, setting.gpu, fitted)
    each = (
        f"{'Inductor' if name == INDUCTOR else name} {us:.1f} µs "
        f"± {100 * fitted[cost_model.kernel_of(name, work, setting.gpu)].deviation:.0f} %"
        for name, us in times.items()
    )
    return f"; by the model: {', '.join(each)}"


def _factors(setting: Setting) -> Mapping[str, Factors]:
    """The cost model's: those that the user's table has of the GPU, else those that ship."""
    own = UserTable.of(setting.gpu).factors() if setting.target is None else {}
    return {**cost_model.FITTED, **own} if own else cost_model.FITTED


def rivals(families: Sequence[str], setting: Setting) -> list[str]:
    """Families that may be faster than Inductor's code, and than one another, by the model.

    At most two whose kernels are to be compiled, because all but one are compiled in vain. The
    model is of 16 bits; of float32, only narrow layers in one kernel gained where measured.
    """
    if setting.dtype == torch.float32:
        return [name for name in families if name == registry.BACK_TO_BACK.name]
    work, gpu, fitted = Work.of(setting), setting.gpu, _factors(setting)
    times = cost_model.predicted(families, work, gpu, fitted)

    def is_slower(name: str, other: str) -> bool:
        """Whether the model is sure of it."""
        off = cost_model.deviation(name, other, work, gpu, fitted)
        return math.log(times[name] / times[other]) > _SURE * off

    best = min(times.keys() - {INDUCTOR}, key=lambda name: times[name], default=INDUCTOR)
    near = [
        name
        for name in sorted(times, key=lambda name: times[name])
        if name != INDUCTOR and not is_slower(name, best)
        if not is_slower(name, INDUCTOR)
    ]
    compiled = [name for name in near if name != registry.LIBRARY.name]
    return [name for name in near if name not in compiled[_MOST_COMPILED:]]


@dataclass(frozen=True)
class _Evidence:
    """What speaks for one MLP: measurements near it, else the heuristic's predictions.

    Attributes:
        measured: of its kind.
        measurements: these, and what those of other kinds say of it.
        own: what the user measured.
        by_model: a model predicts what the site itself launches, and nothing measured counts.
    """

    families: Sequence[str]
    setting: Setting
    kind: Kind
    widths: Widths
    measured: Sequence[Measurement]
    measurements: Sequence[Measurement]
    own: Sequence[Measurement]
    by_model: bool = False

    @classmethod
    def of(cls, families: Sequence[str], setting: Setting, widths: Widths) -> _Evidence:
        own = UserTable.of(setting.gpu).measurements() if setting.target is None else ()
        kind, known = kind_of(setting), merged(own, shipped(setting.gpu))
        measured = _of_kind(kind, known, setting)
        measurements = _with_bfloat16s(measured, kind, known, setting)
        if kind.form == "gelu":
            covered = {m.widths for m in measurements}
            others = [m for m in known if m.widths not in covered]
            similar = replace(kind, form="gelu_tanh")
            tanhs = _with_bfloat16s(_of_kind(similar, others, setting), similar, others, setting)
            guessed = map(discounts.of_erf, tanhs)
            measurements = [*measurements, *(replace(m, kind=kind) for m in guessed if m)]
        return cls(families, setting, kind, widths, measured, measurements, own)

    def is_exact(self) -> bool:
        """Whether an MLP of these very widths was measured."""
        return any(m.widths == self.widths for m in self.measurements)

    def is_of_the_same(self, rivals: Sequence[str] = ()) -> bool:
        """Whether the very MLP was measured on the very kind of GPU, and by all of the rivals.

        A training step that the user measured counts whatever biases the site has, of which tables
        do not tell: the user measures what a model of theirs has.
        """
        setting = self.setting
        # Of a target the name lacks what follows in that of a device: "H100", "H100 80GB HBM3".
        source = f"on an {setting.gpu.name} "
        usual = FORMS[self.kind.form]
        # Tables that ship have biases where MLPs are plain, and two weights where they are gated.
        as_measured = setting.has_bias_up != setting.gated
        as_measured = as_measured and not (setting.training and setting.packed)
        own = {m.cell for m in self.own} if setting.training else ()
        return any(
            (m.widths, m.rows) == (self.widths, setting.known_rows)
            and f"{m.source} ".startswith(source)
            and (m.activation or usual) == setting.activation
            and (as_measured or m.cell in own)
            and not m.estimated
            and m.microseconds.keys() >= set(rivals)
            for m in self.measured
        )

    def of_rows(self, rows: int) -> Measurement:
        """What speaks for a number of rows."""
        near = nearest(self.measurements, self.kind, rows, self.widths)
        if near is not None:
            return near
        gpu, fitted = self.setting.gpu, _factors(self.setting)
        if step_model.speaks_for(self.setting):
            times = step_model.careful(self.families, Step.of(self.setting, rows), gpu)
        elif self.by_model:
            able = [name for name in self.families if _takes(name, rows)]
            work = replace(Work.of(self.setting), rows=rows)
            times = cost_model.careful(able, work, gpu, fitted)
        else:
            times = None
        if times is not None:
            source = f"on an {gpu.name}"
            return Measurement(self.kind, rows, *self.widths, times, source, measured=False)
        guess = heuristic.predicted(self.families, self.kind, rows, self.widths, gpu, fitted)
        return discounts.of_its_activation(guess, self.setting)

    def around(self, rows: int) -> Sequence[Measurement]:
        """What speaks for a number of rows: measured there, or at the next fewer and the next more.

        Tiles and waves make times jump: what pays on both sides is believed to pay in between.
        """
        near = self.of_rows(rows)
        if not near.measured:
            return [near]
        measured = column(self.measurements, self.kind, near.widths)
        fewer = [m for m in measured if m.rows <= rows][-1:]
        more = [m for m in measured if m.rows >= rows][:1]
        return fewer if fewer == more else [*fewer, *more]

    def measured_in(self, lower: int, upper: int) -> Sequence[Measurement]:
        """What was measured of more than ``lower`` and up to ``upper`` rows."""
        measured = [m for m in self.measurements if lower < m.rows <= upper]
        return column(measured, self.kind, self.widths)

    def of_class(self, lower: int, upper: int) -> Sequence[Measurement]:
        """What speaks for more than ``lower`` and up to ``upper`` rows."""
        members = self.measured_in(lower, upper)
        if members:
            return members
        judged = {rows for rows in heuristic.ROWS if lower < rows <= upper}
        if self.by_model:
            judged = (judged - {1}) | {lower + _FIRST_OF_A_CLASS if lower else 2}
        return [self.of_rows(rows) for rows in sorted(judged)]


def _takes(family: str, rows: int) -> bool:
    """Whether so many rows are not too many for a family."""
    return rows <= MOST_OF_FEW_ROWS or not registry.named(family).few_rows


def _of_kind(kind: Kind, known: Sequence[Measurement], setting: Setting) -> list[Measurement]:
    """What was measured of a kind, for the kernels that a site would run on."""
    measured = [discounts.of_its_kernels(m, setting) for m in known if m.kind == kind]
    if kind.precision == "bfloat16":
        measured = [discounts.of_its_activation(m, setting) for m in measured]
    return measured


def _with_bfloat16s(
    measured: Sequence[Measurement], kind: Kind, known: Sequence[Measurement], setting: Setting
) -> Sequence[Measurement]:
    """What was measured of a kind; in float16, of which less was, with what bfloat16's says."""
    if kind.precision != "float16":
        return measured
    guessed = _of_kind(replace(kind, precision="bfloat16"), known, setting)
    return merged(measured, [replace(m, kind=kind) for m in guessed])


def _grounds(family: str, members: Sequence[Measurement], setting: Setting) -> str:
    first, last = members[0], members[-1]
    said = f"{_speedup(family, members):.2f} times as fast as Inductor {first.source}"
    what = ", weights transposed" if setting.transposed else ""
    what += ", forward and backward" if setting.training else ""
    if first.measured:
        rows = " to ".join(dict.fromkeys(str(m.rows) for m in (first, last)))
        width, hidden, out = first.widths
        guessed = any(family in m.estimated for m in members)
        by = ", an estimate from other kernels or another activation" if guessed else ""
        return f"{said} at {rows} rows of {width}→{hidden}→{out}{what}{by}"
    outdated = setting.target is None and UserTable.of(setting.gpu).outdated()
    why = "with other versions of torch, Triton or fusedmlp" if outdated else "there"
    nothing = f"nothing like it was measured {why}, `fusedmlp tune` does"
    if not _speedup(family, members):
        return f"{nothing}, and the heuristic expects no gain {first.source}"
    return f"the heuristic expects {said}{what}; {nothing}"


def _fastest(
    families: Sequence[str], members: Sequence[Measurement], nowhere_below: float = _NOISE
) -> str | None:
    """The fastest family over some measured MLPs: faster than Inductor, and nowhere slower."""
    over = _baseline()
    able = [
        family
        for family in families
        if all((m.speedup(family, over) or 0.0) >= nowhere_below for m in members)
    ]
    family = max(able, key=lambda family: _speedup(family, members), default=None)
    return family if family and _speedup(family, members) >= WORTHWHILE else None


def _speedup(family: str, members: Sequence[Measurement]) -> float:
    """Geometric mean over measured MLPs; 0 where the family did not run one of them."""
    over = _baseline()
    speedups = [measured.speedup(family, over) or 0.0 for measured in members]
    return math.prod(speedups) ** (1 / len(speedups)) if speedups else 0.0


def _baseline() -> str:
    """The mode of Inductor that is to be beaten."""
    return MAX_AUTOTUNE if inductor.max_autotunes() else INDUCTOR


def _class_of(
    families: Sequence[str], setting: Setting, evidence: _Evidence
) -> Sequence[Measurement]:
    """What speaks for a symbolic number of rows.

    Rows are compared only with those bounds at which the fastest family changes, because each
    comparison becomes a guard, and each side of it compiled code of its own.
    """
    bounds = [_FEW_ROWS, _MANY_ROWS, sys.maxsize]
    if evidence.by_model:
        bounds = [*_BOUNDS_OF_MODELS, sys.maxsize]
    elif evidence.measured_in(_FEW_ROWS, MOST_OF_FEW_ROWS):
        bounds.insert(1, MOST_OF_FEW_ROWS)
    classes: list[tuple[int, list[Measurement]]] = []
    lower = 0
    for upper in bounds:
        members = list(evidence.of_class(lower, upper))
        if classes and _fastest(families, classes[-1][1]) == _fastest(families, members):
            members = classes.pop()[1] + members
        classes.append((upper, members))
        lower = upper
    for upper, members in classes[:-1]:
        if setting.rows <= upper:
            return members
    return classes[-1][1]
