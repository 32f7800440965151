"""`fusedmlp tune`: measure every plan against Inductor on this machine; keep the result.

On a GPU, and on a CPU for MLPs that are asked for, it is the MLP itself that is measured. A CPU's
own grid refines the calibration, from which times of all other MLPs follow.

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
from typing import Any, NamedTuple

import torch

import fusion_backend
from fusion_backend.bench.tuning_grid import grid, quick_grid, rates_grid
from fusion_backend.cli.loading import choose_device, choose_dtype, load_for
from fusion_backend.cli.progress import step
from fusion_backend.errors import CommandError, MeasurementError
from fusion_backend.fusion.settings import legal_settings
from fusion_backend.instruments.report import microseconds, table
from fusion_backend.options import Options
from fusion_backend.planning import cpu_profit, cpu_rates, planner, profit
from fusion_backend.planning.cases import FORMS, Case, is_described, particulars
from fusion_backend.planning.gpus import gpu_of
from fusion_backend.planning.measurements import INDUCTOR, MAX_AUTOTUNE
from fusion_backend.planning.user_table import UserTable, cell
from fusion_backend.planning.verdict import by_times

Row = dict[str, Any]

_QUICK_SECONDS = {"cuda": 120.0, "cpu": 60.0}
_FEWEST_SAMPLES = 8


class Planned(NamedTuple):
    """What runs an MLP, a family or Inductor: without the measurements, and by them."""

    without: str
    by_them: str


def run(arguments: argparse.Namespace) -> int:
    """Measure what the table lacks, write each result at once, and print all of them."""
    device = current_device(arguments)
    if device.type == "cpu":
        check_request_for_cpu(arguments)
    own = table_for(arguments.out, device)
    asked = {cell(line_of(case, arguments, device)): case for case in cases_of(arguments, device)}
    known = set() if arguments.again else known_cells(own.rows(), arguments)
    missing = [case for name, case in asked.items() if name not in known]
    rest = measure_all(missing, own, device, arguments)
    if arguments.quick and device.type == "cuda":
        fit_model(own, device)
    measured = [row for row in own.rows() if cell(row) in asked]
    if arguments.json:
        print(json.dumps(measured, indent=2))
    else:
        planned = [planned_for(row, asked[cell(row)], device) for row in measured]
        print(text_of(measured, planned, "unfused" if device.type == "cpu" else "Inductor"))
    print(f"{own.path}: {len(measured)} of {len(asked)} MLPs", file=sys.stderr)
    if rest:
        print(f"{rest} are missing: the same command continues", file=sys.stderr)
    return 0 if measured or not asked else 1


def current_device(arguments: argparse.Namespace) -> torch.device:
    """What is measured: the device that was asked for, or a GPU if there is one, or the CPU.

    Raises:
        CommandError: there is no GPU, and one was asked for.
    """
    device = choose_device(arguments.device)
    if device.type == "cpu":
        return device
    return torch.device("cuda", torch.cuda.current_device())


def check_request_for_cpu(arguments: argparse.Namespace) -> None:
    """Refuse what only a GPU has.

    Raises:
        CommandError: something was asked for that would not be believed, or not be measured.
    """
    if arguments.max_autotune:
        raise CommandError("--max-autotune needs a GPU: on a CPU its templates take constants only")
    if arguments.out is not None:
        raise CommandError(
            "--out is for the table of a GPU: of a CPU the one in FUSEDMLP_CACHE_DIR is read"
        )
    if not Options.from_environment().calibrate:
        raise CommandError("FUSEDMLP_CALIBRATE=0: nothing measured here is believed; unset it")


def refines_rates(arguments: argparse.Namespace, device: torch.device) -> bool:
    """Whether the MLPs are those that a CPU's rates follow from."""
    return device.type == "cpu" and arguments.factory is None and not has_sizes(arguments)


def has_sizes(arguments: argparse.Namespace) -> bool:
    """Whether the command line says something of the sizes of MLPs."""
    sizes = (arguments.form, arguments.width, arguments.hidden, arguments.rows)
    return any(size is not None for size in sizes)


def line_of(case: Case, arguments: argparse.Namespace, device: torch.device) -> Row:
    """The beginning of the line that a table has of an MLP."""
    return cpu_rates.tuned_line(case) if refines_rates(arguments, device) else case.row()


def table_for(out: Path | None, device: torch.device) -> UserTable:
    """The user's table, or the one in the file that was asked for.

    Raises:
        CommandError: the file holds something else than measurements of this machine.
    """
    if device.type == "cpu":
        return UserTable.of_cpu(torch.get_num_threads())
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


def cases_of(arguments: argparse.Namespace, device: torch.device) -> Iterable[Case]:
    """What the command line asks for: a model's MLPs, MLPs of some sizes, or the grid."""
    if arguments.quick and (has_sizes(arguments) or arguments.factory is not None):
        raise CommandError("--quick has MLPs of its own: leave out --model, --form, --rows …")
    if arguments.factory is not None:
        if has_sizes(arguments):
            raise CommandError("--model brings its own sizes: leave out --form, --rows, --width …")
        return cases_of_model(arguments, device)
    if has_sizes(arguments):
        return cases_of_sizes(arguments, "float32" if device.type == "cpu" else "bfloat16")
    if device.type == "cpu":
        dtype = choose_dtype(arguments.dtype) or torch.float32
        trained = (False, True) if arguments.backward else (False,)
        return [case for each in trained for case in rates_grid(dtype, each, arguments.quick)]
    return quick_grid() if arguments.quick else grid()


def cases_of_sizes(arguments: argparse.Namespace, usual_dtype: str) -> list[Case]:
    """MLPs of the sizes of a command line."""
    sizes = (arguments.form, arguments.width, arguments.hidden)
    if any(size is None for size in sizes):
        raise CommandError("sizes need all of --form, --width and --hidden")
    rows = arguments.rows or (1, 16, 64, 256, 1024, 4096)
    dtype = arguments.dtype or usual_dtype
    precision = "ieee" if dtype == "float32" else dtype
    return [Case.of_form(sizes[0], r, *sizes[1:], precision, arguments.backward) for r in rows]


def cases_of_model(arguments: argparse.Namespace, device: torch.device) -> list[Case]:
    """The MLPs of a model that could be fused.

    On a CPU no others speak for an MLP that cannot be measured by itself, so it is left out.
    """
    loaded = load_for(arguments)
    with torch.set_grad_enabled(arguments.backward), step(f"capturing {arguments.factory}"):
        explanation = fusion_backend.explain(loaded.model, *loaded.args, **loaded.kwargs)
        settings = [each for graphs in explanation.graphs for each in legal_settings(graphs.before)]
    known = [each for each in settings if each.widths is not None and each.known_rows is not None]
    if not known:
        raise CommandError(f"{arguments.factory} has no MLP that can be fused, of known sizes")
    if device.type == "cpu":
        whole = [each for each in known if is_described(each)]
        if not whole:
            raise CommandError(
                f"{arguments.factory} has only MLPs that are not measured by themselves (packed "
                "weights, operands, in part): `fusedmlp tune` without --model refines their rates"
            )
        if len(whole) < len(known):
            left = f"{len(known) - len(whole)} of {len(known)} MLPs are left out"
            print(f"{left}: packed weights, operands, or fused in part", file=sys.stderr)
        known = whole
    return [Case.of_setting(setting, setting.likely_rows) for setting in known]


def known_cells(rows: Sequence[Row], arguments: argparse.Namespace) -> set[tuple[Any, ...]]:
    """What a table has of all that would be measured of an MLP."""
    wanted = {INDUCTOR, MAX_AUTOTUNE} if arguments.max_autotune else {INDUCTOR}
    return {cell(row) for row in rows if wanted <= row.get("us", {}).keys()}


def measure_all(
    cases: Sequence[Case], own: UserTable, device: torch.device, arguments: argparse.Namespace
) -> int:
    """Measure in turn, within the given time; how many are missing after it."""
    usual = _QUICK_SECONDS[device.type] if arguments.quick else math.inf
    seconds = usual if arguments.seconds is None else arguments.seconds
    deadline, missing, disturbed = time.monotonic() + seconds, 0, 0
    for number, case in enumerate(cases, start=1):
        if time.monotonic() > deadline:
            missing += len(cases) - number + 1
            break
        try:
            with step(f"{number}/{len(cases)}  {case}"):
                row = measured_row(case, device, arguments)
            own.add(row)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            missing += 1
            disturbed += isinstance(error, MeasurementError)
            print(f"   {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if disturbed:
        print(
            f"{disturbed} MLPs were disturbed: stop what else computes, or give this process cores "
            "of its own (`taskset`), and repeat the command",
            file=sys.stderr,
        )
    return missing


def measured_row(case: Case, device: torch.device, arguments: argparse.Namespace) -> Row:
    """The line of the table."""
    from fusion_backend.bench import tuning

    if refines_rates(arguments, device):
        return tuning.measure_rates(case)
    return tuning.measure(case, device, max_autotune=arguments.max_autotune)


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


def planned_for(row: Row, case: Case, device: torch.device) -> Planned:
    """What runs an MLP without the measurements, and by them."""
    without = planned_without(case, device)
    if device.type == "cuda":
        return Planned(without, by_times(usual_times(row)).family or INDUCTOR)
    return Planned(without, planned_on_cpu(case, device, tuned=True))


def planned_without(case: Case, device: torch.device) -> str:
    """What runs an MLP if only what ships with the package is known; on a CPU, its calibration."""
    if device.type == "cpu":
        return planned_on_cpu(case, device, tuned=False)
    setting = case.setting(device, gpu_of(device))
    families = tuple(planner.available(setting))
    return (profit.best(families, setting).family if families else None) or INDUCTOR


def planned_on_cpu(case: Case, device: torch.device, tuned: bool) -> str:
    """What runs an MLP on the CPU, by what was tuned or without."""
    setting = case.setting(device)
    families = tuple(planner.available(setting))
    return (
        cpu_profit.best(families, setting, True, tuned).family if families else None
    ) or INDUCTOR


def usual_times(row: Row) -> dict[str, float]:
    """Those that the default policy compares."""
    return {name: us for name, us in row["us"].items() if name != MAX_AUTOTUNE}


def regret(times: Mapping[str, float], plan: str) -> float:
    """How many times as long as the fastest a plan takes that was measured."""
    return times[plan] / min(times.values())


def text_of(rows: Sequence[Row], planned: Sequence[Planned], baseline: str) -> str:
    """Times of Inductor, how many times as fast every plan is, and regrets, as a table.

    Args:
        rows: of the user's table.
        planned: what runs each of them.
        baseline: what is called Inductor.
    """
    plans = sorted({plan for row in rows for plan in row["us"]} - {INDUCTOR})
    headers = ["MLP", "rows", "precision", f"{baseline} µs", *plans, "planned without", "regret"]
    lines = [
        [
            *row_of(row, plans),
            baseline.lower() if plan == INDUCTOR else plan,
            times_of(regret(usual_times(row), plan)) if plan in row["us"] else None,
        ]
        for row, (plan, _) in zip(rows, planned, strict=True)
    ]
    return "\n\n".join([table(headers, lines), *regrets(rows, planned)])


def regrets(rows: Sequence[Row], planned: Sequence[Planned]) -> Iterator[str]:
    """A sentence on all regrets, if there are any."""
    pairs = list(zip(map(usual_times, rows), planned, strict=True))
    known = [(times, plans) for times, plans in pairs if times.keys() >= {*plans}]
    if known:
        before = [regret(times, plans.without) for times, plans in known]
        after = [regret(times, plans.by_them) for times, plans in known]
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
    name = f"{activation} {sizes}{particulars(row)}"
    gains = [times_of(times[INDUCTOR] / times[p]) if p in times else None for p in plans]
    return [name, str(row["rows"]), row["precision"], microseconds(times[INDUCTOR]), *gains]
