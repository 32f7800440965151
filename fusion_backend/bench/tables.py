"""Results as text: one cell with all of its peers, and all cells side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from fusion_backend.bench.results import Results, reference_us
from fusion_backend.instruments.report import WIDTH, microseconds, scientific, table

#: So many times the floor takes longer than any kernel does that was measured properly.
FAR = 100
#: Below this the launch of a kernel, or the call of a function, is all that is measured.
LEAST_US = 1.0


def cell_text(name: str, cell: Mapping[str, Any]) -> str:
    """One cell: a line a peer that ran it, and who did not, with the reason."""
    plan = f"; fusedmlp: {cell['plan']}" if cell["plan"] else ""
    busy = "; the machine was not idle" if cell.get("idle") is False else ""
    title = f"{name}; floor {microseconds(cell['floor_us'])} µs ({cell['bound']}){plan}{busy}"
    headers = [
        "peer", "µs", "spread", "vs Inductor", "TFLOP/s", "GB/s", "of floor", "error", "kernels",
        "memsets",
    ]  # fmt: skip
    reference = reference_us(cell)
    ran = {peer: row for peer, row in cell["peers"].items() if "us" in row}
    rows = [_peer_row(peer, row, reference) for peer, row in ran.items()]
    shown = [i for i in range(len(headers)) if any(row[i] is not None for row in rows)]
    lines = [title, table([headers[i] for i in shown], [[row[i] for i in shown] for row in rows])]
    for peer, row in cell["peers"].items():
        if peer not in ran:
            lines.append(f"  {peer}: {row.get('absent') or 'failed: ' + row['failure']}")
    return "\n".join(lines)


def _peer_row(peer: str, row: Mapping[str, Any], reference: float | None) -> list[Any]:
    return [
        peer,
        microseconds(row["us"]),
        f"{row['spread']:.1%}",
        None if reference is None else f"{reference / row['us']:.2f}×",
        f"{row['tflops']:.3g}",
        f"{row['gbps']:.0f}",
        f"{row['floor_share']:.0%}",
        scientific(row["error"]),
        row["kernels"],
        row["memsets"],
    ]


def overview(results: Results) -> str:
    """All cells: one line each, one column a peer in microseconds; then the summary."""
    cells = results["cells"]
    peers = [
        name
        for name in results["peers"]
        if any("us" in cell["peers"].get(name, {}) for cell in cells.values())
    ]
    headers = ["µs", "floor", *peers, "vs Inductor", "of floor", "plan"]
    rows = [_overview_row(name, cell, peers) for name, cell in cells.items()]
    lines = [_where(results), "", table(headers, rows), "", *_summary_lines(results)]
    lines += _not_idle(results)
    lines += _not_measurable(results)
    lines += _not_installed(results)
    return "\n".join(lines)


def _overview_row(name: str, cell: Mapping[str, Any], peers: list[str]) -> list[Any]:
    rows = cell["peers"]
    share = rows.get("fusedmlp", {}).get("floor_share")
    return [
        name,
        microseconds(cell["floor_us"]),
        *(microseconds(rows.get(peer, {}).get("us")) for peer in peers),
        None if cell["speedup"] is None else f"{cell['speedup']:.2f}×",
        None if share is None else f"{share:.0%}",
        cell["plan"],
    ]


def _where(results: Results) -> str:
    where = results["machine"]
    return f"{where['device']}, PyTorch {where['torch']}, fusedmlp {where['fusedmlp']}"


def _summary_lines(results: Results) -> list[str]:
    return [
        f"{grid}, {each['cells']} cells: {each['geometric_mean']:.3f}× Inductor's better mode in "
        f"the geometric mean, {each['worst']:.3f}× in the worst ({each['worst_cell']})"
        for grid, each in results["summary"].items()
    ]


def _not_idle(results: Results) -> list[str]:
    busy = sum(cell.get("idle") is False for cell in results["cells"].values())
    if not busy:
        return []
    text = f"The machine was not idle in {busy} of {len(results['cells'])} cells: other programs"
    return [textwrap.fill(f"{text} computed there, too. Measure these again.", WIDTH)]


def _not_measurable(results: Results) -> list[str]:
    """A warning, where even the fastest way to run an MLP took a hundred times its floor."""
    far = []
    for name, cell in results["cells"].items():
        times = [row["us"] for row in cell["peers"].values() if "us" in row]
        if times and min(times) > FAR * max(cell["floor_us"], LEAST_US):
            far.append(name)
    if not far:
        return []
    text = (
        f"Even the fastest way took more than {FAR} times the floor in {len(far)} of "
        f"{len(results['cells'])} cells ({far[0]}): this machine cannot be measured on, or its "
        "data sheet is wrong. Other programs, a virtual machine, or a GPU that is held back do that"
    )
    return [textwrap.fill(f"{text}.", WIDTH)]


def _not_installed(results: Results) -> list[str]:
    reasons = {
        row["absent"]
        for cell in results["cells"].values()
        for row in cell["peers"].values()
        if "not installed" in row.get("absent", "")
    }
    return [textwrap.fill(f"Not measured: {'; '.join(sorted(reasons))}.", WIDTH)] if reasons else []
