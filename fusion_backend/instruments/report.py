"""Tables and sentences of which results are made for people."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tabulate import tabulate

from fusion_backend.fusion.sites import Site, by_call
from fusion_backend.instruments.backend_rows import (
    KernelChange,
    KernelCounts,
    baseline_of,
    runs_same_program,
)
from fusion_backend.instruments.claims import SiteLaunches

Shared = TypeVar("Shared", bound=Hashable)

MISSING = "–"
WIDTH = 100
ACTIVATION_WIDTH = 40
KERNEL_WIDTH = 80
# What nearly every C++ kernel of PyTorch has in its name.
_COMMON = re.compile(r"^void |\b(?:at::native|c10|std)::|\(anonymous namespace\)::")


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Plain columns: text to the left, numbers (given as text) to the right."""
    cells = [[MISSING if cell is None else cell for cell in row] for row in rows]
    numeric = [all(is_number(row[column]) for row in cells) for column in range(len(headers))]
    text: str = tabulate(
        cells,
        headers=headers,
        disable_numparse=True,
        colalign=["right" if each else "left" for each in numeric] if cells else None,
    )
    return text


def is_number(cell: Any) -> bool:
    """Whether a cell stands in a column of numbers: a number with its unit, or a missing one."""
    return not isinstance(cell, str) or cell == MISSING or cell.lstrip("+-")[:1].isdigit()


def comparison_cells(
    rows: Sequence[KernelCounts], counted: str
) -> tuple[list[str], list[list[Any]]]:
    """Headers and rows of a comparison, without columns of which nothing is known."""
    baseline = baseline_of(rows)
    cells = [comparison_row(row, baseline) for row in rows]
    headers = [
        "backend", counted, "memcpys", "memsets", "GPU µs", "wall µs",
        f"vs {baseline.backend}", "error", "gradient error",
        "peak MB", "saved MB", "first call s",
    ]  # fmt: skip
    shown = [i for i in range(len(headers)) if any(each[i] is not None for each in cells)]
    return [headers[i] for i in shown], [[each[i] for i in shown] for each in cells]


def sites_text(sites: Sequence[SiteLaunches], gradients: Mapping[str, int]) -> str:
    """What the plan of each site claims to launch in a call, and what was launched."""
    text = table(*sites_cells(sites))
    return f"{text}\n\n{gradients_text(gradients)}" if gradients else text


def sites_cells(sites: Sequence[SiteLaunches]) -> tuple[list[str], list[list[Any]]]:
    """Headers and rows of what is claimed and launched of each site."""
    headers = ["fused MLP", "plan", "claimed", "launched", "µs", "kernels"]
    return headers, [
        [s.label, s.plan, s.claimed, s.launched, microseconds(s.time_us), ", ".join(s.kernels)]
        for s in sites
    ]


def gradients_text(gradients: Mapping[str, int]) -> str:
    """How often fused kernels of backward passes were launched."""
    counts = [f"{name} {times}×" for name, times in sorted(gradients.items())]
    return f"Backward passes: {', '.join(counts)}."


def changes_text(changes: Sequence[KernelChange], before: str, after: str) -> str:
    """Kernels side by side, and the sums of their columns."""
    headers = ["kernel", before, after, "change", f"{before} µs", f"{after} µs", "change µs"]
    sums = [
        sum(each.before for each in changes), sum(each.after for each in changes),
        sum(each.before_us for each in changes), sum(each.after_us for each in changes),
    ]  # fmt: skip
    rows = [change_row(*each) for each in changes]
    return table(headers, [*rows, change_row("all", *sums)])


def change_row(
    name: str, before: float, after: float, before_us: float, after_us: float
) -> list[Any]:
    """The cells of one kernel."""
    name = kernel_text(name)
    longer = after_us - before_us
    change = f"{longer:+.0f}" if abs(longer) >= 100 else f"{longer:+.3g}"
    counts = [before, after, f"{after - before:+}"]
    return [name, *counts, microseconds(before_us), microseconds(after_us), change]


def kernel_text(name: str) -> str:
    """A kernel's name for a table. That of a C++ template has its types in it: it is cut."""
    name = _COMMON.sub("", name)
    return name if len(name) <= KERNEL_WIDTH else f"{name[: KERNEL_WIDTH - 1]}…"


def megabytes(size: int | None) -> str | None:
    """Three significant digits."""
    return None if size is None else f"{size / 1e6:.3g}"


def seconds(time: float | None) -> str | None:
    """Two significant digits."""
    return None if time is None else f"{time:.2g}"


def comparison_row(row: KernelCounts, baseline: KernelCounts) -> list[Any]:
    """One backend's cells."""
    return [
        row.backend,
        row.kernels,
        row.memcpys,
        row.memsets,
        microseconds(row.gpu_us),
        microseconds(row.wall_us),
        ratio_text(row, baseline),
        scientific(row.error),
        scientific(row.gradient_error),
        megabytes(row.peak_bytes),
        megabytes(row.saved_bytes),
        seconds(row.first_call_s),
    ]


def ratio_text(row: KernelCounts, baseline: KernelCounts) -> str:
    """How many times as fast as the baseline a row is, if it is another program."""
    if runs_same_program(row, baseline):
        return "same program"
    return f"{baseline.wall_us / row.wall_us:.2f}×"


def microseconds(time: float | None) -> str | None:
    """Three significant digits, without exponent."""
    if time is None:
        return None
    return f"{time:.0f}" if time >= 100 else f"{time:.3g}"


def scientific(number: float | None) -> str | None:
    """Two significant digits."""
    return None if number is None else f"{number:.1e}"


def summary(sites: Sequence[Site], target: str | None) -> str:
    """How many MLPs were found and fused, and how many others could be, on a target if any."""
    found, fused = len(sites), sum(site.fused for site in sites)
    if not found:
        return "No MLP found: no two linear layers are joined by pointwise work."
    where = f", planned for an {target}" if target else ""
    legal = sum(site.legal for site in sites if not site.fused)
    but = f"; {legal} {'is' if legal == 1 else 'are'} legal, not fused" if legal else ""
    return f"{fused} of {found} MLP{'s' if found > 1 else ''} fused{where}{but}"


def explanation_cells(
    named: Sequence[tuple[str, Site]],
) -> tuple[list[str], list[list[str | None]]]:
    """Headers and rows of named sites; without a speed-up where none is expected of any."""
    headers = [
        "module", "form", "activation", "rows × widths", "dtype", "plan or reason", "expected",
    ]  # fmt: skip
    rows = [[label, *site_cells(site)] for label, site in named]
    shown = len(headers) if any(row[-1] for row in rows) else len(headers) - 1
    return headers[:shown], [row[:shown] for row in rows]


def together(named: Sequence[tuple[str, Site]]) -> list[str]:
    """Which sites are one call; one line for each such call."""
    calls = by_call(site for _, site in named)
    return [
        f"{enumeration([named[i][0] for i in call], len(call))}: {named[call[0]][1].detail}"
        for call in calls
        if len(call) > 1 and named[call[0]][1].fused
    ]


def places(named: Sequence[tuple[str, Site]]) -> list[str]:
    """Which line calls the layers; one sentence for all sites that have both in common."""
    known = grouped(
        (label, ("" if f": {s.layers}" in label else f": {s.layers}", short_source(s.source)))
        for label, s in named
        if s.source
    )
    return [f"{enumeration(names)}{layers} ({source})" for (layers, source), names in known]


def short_source(source: str) -> str:
    """``model.py:12`` without its folder."""
    return source.replace("\\", "/").rpartition("/")[-1]


def site_cells(site: Site) -> list[str | None]:
    """One site's cells but its name; the last is missing where no speed-up is expected."""
    within = " + norm" * bool(site.norm) + " + residual" * site.residual
    outcome = f"{site.plan}{within}" if site.fused else str(site.reason)
    activation = textwrap.fill(site.activation, ACTIVATION_WIDTH, break_long_words=False) or MISSING
    speedup = None if site.expected_speedup is None else f"{site.expected_speedup:.2f}×"
    shape = site.sizes
    return [site.form, activation, shape, site.dtype, outcome, speedup]


def meanings(named: Sequence[tuple[str, Site]]) -> list[str]:
    """What the operands of activations are; one sentence for all sites that have it in common."""
    known = grouped((label, site.operands) for label, site in named if site.operands)
    return [
        f"{enumeration(names)}: {', '.join(f'p{i} is the {what}' for i, what in enumerate(all_))}."
        for all_, names in known
    ]


def refusals(named: Sequence[tuple[str, Site]]) -> list[str]:
    """Why sites are not fused; one sentence for all that have it in common."""
    known = grouped((label, site.detail) for label, site in named if not site.fused)
    return [f"{enumeration(names)}: {detail}." for detail, names in known]


def grouped(named: Iterable[tuple[str, Shared]]) -> list[tuple[Shared, list[str]]]:
    """What names have in common, each with all names that have it."""
    known: dict[Shared, list[str]] = {}
    for name, shared in named:
        known.setdefault(shared, []).append(name)
    return list(known.items())


def enumeration(names: Sequence[str], most: int = 3) -> str:
    """Up to so many different names, and how many more."""
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - 2} more" if len(names) > most else ""
    return ", ".join(names[:2] if more else names) + more


def bullet(text: str) -> str:
    """A list item, wrapped."""
    return textwrap.fill(text, WIDTH, initial_indent="- ", subsequent_indent="  ")


def note_text(note: str) -> str:
    """A note, wrapped."""
    return textwrap.fill(note, WIDTH, initial_indent="Note: ", subsequent_indent="  ")
