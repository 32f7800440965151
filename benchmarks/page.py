"""Write the measured figures into docs/performance.md.

    python benchmarks/page.py

What `benchmarks/models.py` left in benchmarks/results/models.json, and the tables that
`fusedmlp tune` wrote, that ship with the package and that the planner chooses by, become the tables
between the markers of the page.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
MODELS = ROOT / "benchmarks" / "results" / "models.json"
TABLES = ROOT / "fusion_backend" / "tables"


def main() -> int:
    PAGE.write_text(rewritten(PAGE.read_text()))
    return 0


def rewritten(page: str) -> str:
    """The page with its tables made anew."""
    if MODELS.is_file():
        page = between(page, "models", models_section(json.loads(MODELS.read_text())))
    tables = [json.loads(path.read_text()) for path in sorted(TABLES.glob("*.json"))]
    return between(page, "plans", "\n\n".join(map(plans_section, tables)))


def between(page: str, name: str, section: str) -> str:
    """The page with what stands between two markers replaced."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = page.split(begin)
    after = rest.split(end)[1]
    return f"{before}{begin}\n{section}\n{end}{after}"


def models_section(results: dict[str, Any]) -> str:
    """Whole models: one line a model and batch."""
    where = results["machine"]
    lines = [
        f"{where['device']}, PyTorch {where['torch']}, fusedmlp {where['fusedmlp']}. Each triple "
        "is eager / Inductor / fusedmlp; the pair is Inductor / fusedmlp with CUDA graphs "
        '(`mode="reduce-overhead"`).',
        "",
        "| model, batch | MLPs | kernels | GPU ms | wall ms | wall ms, CUDA graphs | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, case in results["cases"].items():
        lines.append(failure_row(name, case) if "failure" in case else model_row(name, case))
    return "\n".join(lines)


def failure_row(name: str, case: dict[str, Any]) -> str:
    """The line of a model that could not be measured."""
    return f"| {name} | failed: {case['failure'].split(':')[0]} | | | | | |"


def model_row(name: str, case: dict[str, Any]) -> str:
    """The line of one model."""
    default = [case["default"][backend] for backend in ("eager", "inductor", "fusedmlp")]
    graphs = [case["cuda_graphs"][b] for b in ("inductor", "fusedmlp") if "cuda_graphs" in case]
    cells = [
        name,
        ", ".join(f"{count} {plan}" for plan, count in case["plans"].items()),
        beside(str(row["kernels"]) for row in default),
        beside(milliseconds(row["gpu_us"]) for row in default),
        beside(milliseconds(row["wall_us"]) for row in default),
        beside(milliseconds(row["wall_us"]) for row in graphs) or "–",
        beside("–" if row["error"] is None else f"{row['error']:.1e}" for row in default),
    ]
    return table_row(cells)


def plans_section(table: dict[str, Any]) -> str:
    """Single MLPs on one GPU: one line a form, size and number of rows."""
    where = table["machine"]
    measured = [row for row in table["rows"] if not row["control"]]
    names = {name for row in measured for name in row["us"]}
    modes = [mode for mode in ("inductor", "max_autotune") if mode in names]
    plans = sorted(names.difference(modes))
    titles = {"inductor": "Inductor", "max_autotune": "Inductor, max-autotune"}
    headings = ["MLP", "precision", "rows", *map(titles.get, modes), *(f"`{p}`" for p in plans)]
    lines = [
        f"{where['gpu']}, PyTorch {where['torch']}, microseconds on the GPU:",
        "",
        table_row(headings),
        "|" + "---|" * len(headings),
        *(plan_row(row, modes, plans) for row in measured),
    ]
    return "\n".join(lines)


def plan_row(row: dict[str, Any], modes: list[str], plans: list[str]) -> str:
    """The line of one MLP; what is faster than Inductor's default mode is set in bold."""
    times, inductor = row["us"], row["us"]["inductor"]
    form = f"{row['form']}{', training' if row['training'] else ''} {row['width']}/{row['hidden']}"
    cells = [form, row["precision"], str(row["rows"])]
    cells += [digits(times[mode]) if mode in times else "–" for mode in modes]
    for plan in plans:
        text = digits(times[plan]) if plan in times else "–"
        cells.append(f"**{text}**" if times.get(plan, inductor) < inductor else text)
    return table_row(cells)


def table_row(cells: Iterable[str]) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def beside(cells: Iterable[str]) -> str:
    """Cells side by side."""
    return " / ".join(cells)


def milliseconds(microseconds: float | None) -> str:
    """Microseconds as milliseconds."""
    return "–" if microseconds is None else digits(microseconds / 1e3)


def digits(number: float) -> str:
    """Three significant digits, without exponent."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


if __name__ == "__main__":
    sys.exit(main())
