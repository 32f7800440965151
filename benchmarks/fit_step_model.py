"""Fit the model of training steps to measurements on GPUs, and hold it to others.

    python benchmarks/fit_step_model.py [--each]

Fitted to are the H200's table, its anchors (``training.json``) and its random MLPs
(``training_random.json``), and the H100's table, which was measured before there were kernels for
Hopper. Prints the factors, how far ratios of times are off, and what planning by the model alone
takes of the gain that the fastest choice would have; then the same of each half of the random MLPs
when fitted without it, and of all of them when fitted to tables and anchors alone.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import NamedTuple

import torch

from fusion_backend.planning.cases import FORMS, Case, is_half
from fusion_backend.planning.cost_model import Factors
from fusion_backend.planning.gpus import Gpu, gpu_named
from fusion_backend.planning.measurements import INDUCTOR, WORTHWHILE, shipped
from fusion_backend.planning.step_model import (
    FITTED,
    Launch,
    Step,
    careful,
    deviation,
    launches,
    predicted,
)

RESULTS = Path(__file__).parent / "results" / "h200"
# Errors beyond e^0.6 count no more; those of ratios, by which is decided, count three times.
_LARGEST, _OF_RATIOS = 0.6, 3.0
_ROUNDS, _FIRST_STEP, _SHRINKING = 14, 0.4, 0.75
_START = Factors(start=3.0, latency=0.5, memory=0.8, products=0.7, special=0.6)


class Sample(NamedTuple):
    """A measured step: of which MLP, where, and microseconds by family and of Inductor."""

    step: Step
    gpu: Gpu
    us: Mapping[str, float]
    what: str


def sample(
    case: Case, us: Mapping[str, float], packed: bool = False, gpu_name: str = "h200"
) -> Sample:
    gpu = gpu_named(gpu_name)
    setting = case.setting(torch.device("cuda", 0), gpu)
    setting = replace(setting, plain_layout=setting.plain_layout and not packed)
    return Sample(Step.of(setting, case.rows), gpu, us, f"{case}{', packed' * packed}")


def table(name: str) -> list[Sample]:
    """What was measured on a GPU itself; on the H100 by kernels for any GPU."""
    found = []
    for m in shipped(gpu_named(name)):
        if m.kind.training and name.upper() in m.source:
            activation = m.activation or FORMS[m.kind.form]
            how = (m.kind.precision, m.kind.form != "swiglu", True, m.kind.transposed)
            case = Case(activation, m.rows, *m.widths, *how)
            each = sample(case, m.microseconds, gpu_name=name)
            if name == "h100":
                step = replace(each.step, forward_on_hopper=False, gradient_on_hopper=False)
                each = each._replace(step=step)
            found.append(each)
    return found


def anchors() -> list[Sample]:
    """Those of ``benchmarks/training.py``."""
    found = []
    for row in json.loads((RESULTS / "training.json").read_text())["cases"]:
        form, sizes, *biases = row["mlp"].removeprefix("packed ").replace(",", "").split()
        rows, width, hidden = map(int, sizes.replace("→", "×").split("×"))
        activation = FORMS.get(form, f"{form}(x)")
        case = Case(activation, rows, width, hidden, width, "bfloat16", bool(biases), True)
        family = "back_to_back" if row["kernels"]["fusedmlp"] <= 4 else "epilogue"
        us = {INDUCTOR: row["us"]["inductor"], family: row["us"]["fusedmlp"]}
        found.append(sample(case, us, packed=row["mlp"].startswith("packed")))
    return found


def random_mlps() -> list[Sample]:
    """In 16 bits: the model does not speak of others."""
    rows = json.loads((RESULTS / "training_random.json").read_text())["rows"]
    halves = [row for row in rows if is_half(row["case"]["precision"])]
    return [sample(Case(**row["case"]), row["us"], row.get("packed", False)) for row in halves]


class Fit:
    """Factors of launches, and the samples that they are fitted to.

    A step takes the sum of its launches, and those of one kind depend on the factors of that kind
    alone. So sums by kind are kept, and only those of the kind that changes are made anew.
    """

    def __init__(self, found: Sequence[Sample]) -> None:
        self.factors = dict.fromkeys(FITTED, _START)
        self.measured: list[dict[str, float]] = []
        self.kept: list[dict[str, dict[str, float]]] = []
        self.parts: dict[str, list[tuple[int, str, Gpu, list[Launch]]]] = {}
        for index, each in enumerate(found):
            ways = launches([*each.us], each.step)
            self.measured.append({name: math.log(each.us[name]) for name in ways})
            self.kept.append({name: {} for name in ways})
            for name, whole in ways.items():
                for kind in dict.fromkeys(launch.kind for launch in whole):
                    part = [launch for launch in whole if launch.kind == kind]
                    self.parts.setdefault(kind, []).append((index, name, each.gpu, part))
        for kind in self.parts:
            self._set(kind, self.factors[kind])
        for kind in FITTED.keys() - self.parts.keys():  # launches of no sample
            self.factors[kind] = FITTED[kind]

    def run(self) -> dict[str, Factors]:
        """One factor after the other, longer or shorter by ever smaller steps."""
        least, step = self._loss(), _FIRST_STEP
        for _ in range(_ROUNDS):
            for kind in self.parts:
                for place in range(len(astuple(_START)) - 1):
                    for by in (math.exp(step), math.exp(-step)):
                        before = self.factors[kind]
                        values = [*astuple(before)]
                        values[place] *= by
                        self._set(kind, Factors(*values))
                        if (reached := self._loss()) < least:
                            least = reached
                        else:
                            self._set(kind, before)
            step *= _SHRINKING
        return {kind: rounded(factors) for kind, factors in self.factors.items()}

    def _set(self, kind: str, factors: Factors) -> None:
        self.factors[kind] = factors

        @functools.cache  # most launches are those of several ways
        def took(launch: Launch, gpu: Gpu) -> float:
            return launch.microseconds(factors, gpu)

        for index, name, gpu, part in self.parts[kind]:
            self.kept[index][name][kind] = math.fsum(took(launch, gpu) for launch in part)

    def _loss(self) -> float:
        total = 0.0
        for measured, kept in zip(self.measured, self.kept, strict=True):
            off = {n: us - math.log(sum(kept[n].values())) for n, us in measured.items()}
            for name, error in off.items():
                total += min(abs(error), _LARGEST) ** 1.5
                if name != INDUCTOR:
                    ratio = _OF_RATIOS * abs(off[INDUCTOR] - error)
                    total += min(ratio, _LARGEST) ** 1.5
        return total


def rounded(factors: Factors) -> Factors:
    return Factors(*(float(f"{value:.3g}") for value in astuple(factors)))


def chosen(families: Sequence[str], each: Sample, factors: Mapping[str, Factors]) -> str | None:
    times = careful(families, each.step, each.gpu, factors)
    family = min(times.keys() - {INDUCTOR}, key=lambda name: times[name], default=None)
    pays = family is not None and times[INDUCTOR] / times[family] >= WORTHWHILE
    return family if pays else None


def report(label: str, found: Sequence[Sample], factors: Mapping[str, Factors], each: bool) -> None:
    off: dict[float, list[float]] = {}
    lines, gained, possible, worst = [], 0.0, 0.0, 1.0
    for one in found:
        families = [name for name in one.us if name != INDUCTOR]
        speedups = {name: one.us[INDUCTOR] / one.us[name] for name in families}
        taken = chosen(families, one, factors)
        speedup = 1.0 if taken is None else speedups[taken]
        gained, worst = gained + math.log(speedup), min(worst, speedup)
        possible += math.log(max(1.0, *speedups.values()))
        times = predicted(families, one.step, one.gpu, factors)
        for name in times.keys() - {INDUCTOR}:
            expected = times[INDUCTOR] / times[name]
            error = math.log(speedups[name] / expected)
            off.setdefault(deviation(name, one.step), []).append(error)
            how = f"{name}, taken" if name == taken else name
            line = f"{speedups[name]:.3f}, expected {expected:.3f}: {one.what}, {how}"
            lines.append((error, line))
    took = f"{100 * gained / possible:.0f} % of the possible gain"
    print(f"{label}: {took}, worst {worst:.3f}")
    for known, errors in sorted(off.items()):
        rms = math.sqrt(sum(error * error for error in errors) / len(errors))
        print(f"  ± {known}: {len(errors)} ratios, off by {rms:.3f} (root mean square)")
    if each:
        print(*(f"  {line}" for _, line in sorted(lines)), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--each", action="store_true", help="print every MLP")
    show = parser.parse_args().each
    drawn, known = random_mlps(), [*table("h200"), *anchors(), *table("h100")]
    factors = Fit([*known, *drawn]).run()
    for kind, found in factors.items():
        print(f"{kind}: {found}")
    report("fitted to all: random MLPs", drawn, factors, show)
    report("fitted to all: tables and anchors", known, factors, show)
    for left_out in (0, 1):
        halves = drawn[1 - left_out :: 2], drawn[left_out::2]
        factors = Fit([*known, *halves[0]]).run()
        report(
            f"fitted without half {left_out} of the random MLPs: these", halves[1], factors, show
        )
    report("fitted without random MLPs: these", drawn, Fit(known).run(), show)


if __name__ == "__main__":
    main()
