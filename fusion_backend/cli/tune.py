"""`fusedmlp tune`: measure every plan against Inductor on this machine's GPU; keep the result.

Regret is by how much the plan of an MLP takes longer than the fastest that was measured. It is
shown of what would be planned without these measurements, and of what is planned by them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

import fusion_backend
from fusion_backend.bench.tuning_grid import grid, quick_grid
from fusion_backend.cli.loading import load_for
from fusion_backend.cli.progress import step
from fusion_backend.errors import CommandError
from fusion_backend.fusion.fuse import legal_settings
from fusion_backend.instruments.report import microseconds, table
from fusion_backend.planning import planner, profit
from fusion_backend.planning.cases import FORMS, Case
from fusion_backend.planning.gpus import gpu_of
from fusion_backend.planning.measurements import INDUCTOR, MAX_AUTOTUNE
from fusion_backend.planning.user_table import UserTable, cell

Row = dict[str, Any]

_QUICK_SECONDS = 120.0
_FEWEST_SAMPLES = 8


def run(arguments: argparse.Namespace) -> int:
    """Measure what the table lacks, write each result at once, and print all of them."""
    device = current_device()
    own = table_for(arguments.out, device)
    cases = list(dict.fromkeys(cases_of(arguments)))
    missing = [case for case in cases if not is_known(case, own.rows(), arguments)]
    rest = measure_all(missing, own, device, arguments)
    if arguments.quick:
        fit_model(own, device)
    asked = {cell(case.row()): case for case in cases}
    measured = [row for row in own.rows() if cell(row) in asked]
    if arguments.json:
        print(json.dumps(measured, indent=2))
    else:
        planned = [planned_without(asked[cell(row)], device) for row in measured]
        print(text_of(measured, planned))
    print(f"{own.path}: {len(measured)} of {len(cases)} MLPs", file=sys.stderr)
    if rest:
        print(f"{rest} are missing: the same command continues", file=sys.stderr)
    return 0 if measured or not cases else 1


def current_device() -> torch.device:
    """The GPU to measure on.

    Raises:
        CommandError: there is none.
    """
    if not torch.cuda.is_available():
        raise CommandError("there is no GPU to measure on (`fusedmlp doctor` says why)")
    return torch.device("cuda", torch.cuda.current_device())


def table_for(out: Path | None, device: torch.device) -> UserTable:
    """The user's table, or the one in the file that was asked for.

    Raises:
        CommandError: the file holds something else than measurements of this machine.
    """
    own = UserTable.of(gpu_of(device))
    if out is None:
        return own
    if out.is_file():
        try:
            machine = json.loads(out.read_text())["machine"]
        except (ValueError, KeyError, TypeError) as error:
            raise CommandError(f"{out} is no table; --out must be one, or a new file") from error
        if machine != own.machine:
            raise CommandError(
                f"{out} was measured with {machine}, and this machine has {own.machine}: "
                "--out must be a new file"
            )
    return UserTable(out.resolve(), own.machine)


def cases_of(arguments: argparse.Namespace) -> Iterable[Case]:
    """What the command line asks for: a model's MLPs, MLPs of some sizes, or the grid."""
    sizes = (arguments.form, arguments.width, arguments.hidden)
    if arguments.quick:
        if any(given is not None for given in (*sizes, arguments.rows, arguments.factory)):
            raise CommandError("--quick has MLPs of its own: leave out --model, --form, --rows …")
        return quick_grid()
    if arguments.factory is not None:
        if any(size is not None for size in (*sizes, arguments.rows)):
            raise CommandError("--model brings its own sizes: leave out --form, --rows, --width …")
        return cases_of_model(arguments)
    if all(size is None for size in (*sizes, arguments.rows)):
        return grid()
    if any(size is None for size in sizes):
        raise CommandError("sizes need all of --form, --width and --hidden")
    rows = arguments.rows or (1, 16, 64, 256, 1024, 4096)
    dtype = arguments.dtype or "bfloat16"
    precision = "ieee" if dtype == "float32" else dtype
    return [Case.of_form(sizes[0], r, *sizes[1:], precision, arguments.backward) for r in rows]


def cases_of_model(arguments: argparse.Namespace) -> list[Case]:
    """The MLPs of a model that could be fused."""
    loaded = load_for(arguments)
    with torch.set_grad_enabled(arguments.backward), step(f"capturing {arguments.factory}"):
        explanation = fusion_backend.explain(loaded.model, *loaded.args, **loaded.kwargs)
        settings = [each for graphs in explanation.graphs for each in legal_settings(graphs.before)]
    known = [each for each in settings if each.widths is not None and each.known_rows is not None]
    if not known:
        raise CommandError(f"{arguments.factory} has no MLP that can be fused, of known sizes")
    return [Case.of_setting(setting, setting.likely_rows) for setting in known]


def is_known(case: Case, rows: Sequence[Row], arguments: argparse.Namespace) -> bool:
    """Whether a table has what would be measured."""
    wanted = {INDUCTOR, MAX_AUTOTUNE} if arguments.max_autotune else {INDUCTOR}
    same = (row for row in rows if cell(row) == cell(case.row()))
    return not arguments.again and any(wanted <= row["us"].keys() for row in same)


def measure_all(
    cases: Sequence[Case], own: UserTable, device: torch.device, arguments: argparse.Namespace
) -> int:
    """Measure in turn, within the given time; how many are missing after it."""
    from fusion_backend.bench.tuning import measure

    usual = _QUICK_SECONDS if arguments.quick else math.inf
    seconds = usual if arguments.seconds is None else arguments.seconds
    deadline, missing = time.monotonic() + seconds, 0
    for number, case in enumerate(cases, start=1):
        if time.monotonic() > deadline:
            return missing + len(cases) - number + 1
        try:
            with step(f"{number}/{len(cases)}  {case}"):
                row = measure(case, device, max_autotune=arguments.max_autotune)
            own.add(row)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            missing += 1
            print(f"   {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
        torch.cuda.empty_cache()
    return missing


def fit_model(own: UserTable, device: torch.device) -> None:
    """Fit the cost model to all that a table has, and keep the factors there."""
    from fusion_backend.bench.fitting import fitted, samples

    found = samples(own.measurements(), gpu_of(device))
    if len(found) < _FEWEST_SAMPLES:
        print(f"too few MLPs to fit the cost model to: {len(found)}", file=sys.stderr)
        return
    with step("fitting the cost model"):
        factors = fitted(found)
    own.keep_factors(factors)
    off = ", ".join(f"{name} ± {100 * each.deviation:.0f} %" for name, each in factors.items())
    print(f"the cost model is fitted to {len(found)} MLPs of this GPU: {off}", file=sys.stderr)


def planned_without(case: Case, device: torch.device) -> str:
    """What runs an MLP if only what ships with the package is known: a family, or Inductor."""
    setting = case.setting(device, gpu_of(device))
    families = tuple(planner.available(setting))
    return (profit.best(families, setting).family if families else None) or INDUCTOR


def usual_times(row: Row) -> dict[str, float]:
    """Those that the default policy compares."""
    return {name: us for name, us in row["us"].items() if name != MAX_AUTOTUNE}


def regret(times: Mapping[str, float], plan: str) -> float:
    """How many times as long as the fastest a plan takes that was measured."""
    return times[plan] / min(times.values())


def text_of(rows: Sequence[Row], planned: Sequence[str]) -> str:
    """Times of Inductor, how many times as fast every plan is, and regrets, as a table.

    Args:
        rows: of the user's table.
        planned: what would run each of them without.
    """
    plans = sorted({plan for row in rows for plan in row["us"]} - {INDUCTOR})
    headers = ["MLP", "rows", "precision", "Inductor µs", *plans, "planned without", "regret"]
    lines = [
        [
            *row_of(row, plans),
            plan,
            times_of(regret(usual_times(row), plan)) if plan in row["us"] else None,
        ]
        for row, plan in zip(rows, planned, strict=True)
    ]
    return "\n\n".join([table(headers, lines), *regrets(rows, planned)])


def regrets(rows: Sequence[Row], planned: Sequence[str]) -> Iterator[str]:
    """A sentence on all regrets, if there are any."""
    pairs = zip(map(usual_times, rows), planned, strict=True)
    known = [(times, plan) for times, plan in pairs if plan in times]
    if known:
        before = [regret(times, plan) for times, plan in known]
        after = [regret(times, profit.by_times(times).family or INDUCTOR) for times, _ in known]
        yield (
            f"Regret: without these measurements {times_of(geometric_mean(before))} in the "
            f"geometric mean, {times_of(max(before))} at most; with them "
            f"{times_of(geometric_mean(after))} and {times_of(max(after))}."
        )


def times_of(ratio: float) -> str:
    """A ratio as text."""
    return f"{ratio:.2f}×"


def row_of(row: Row, plans: Sequence[str]) -> list[str | None]:
    """The cells of one MLP."""
    times = row["us"]
    sizes = f"{row['width']}→{row['hidden']}→{row.get('out', row['width'])}"
    activation = row.get("activation", FORMS[row["form"]])
    transposed = ", transposed weights" if row.get("transposed") else ""
    name = f"{activation} {sizes}{transposed}{', training' if row['training'] else ''}"
    gains = [times_of(times[INDUCTOR] / times[p]) if p in times else None for p in plans]
    return [name, str(row["rows"]), row["precision"], microseconds(times[INDUCTOR]), *gains]
