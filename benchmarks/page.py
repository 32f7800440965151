"""Write the measured figures into docs/performance.md.

    python benchmarks/page.py

What `fusedmlp bench` left in benchmarks/results/mlps.json (on a GPU) and cpu.json, what the other
programs in benchmarks/ left in models.json, counters.json and norms.json, and the tables that
`fusedmlp tune` and benchmarks/chains.py wrote, that ship with the package and that the planner
chooses by, become the tables between the markers of the page. The plots of `fusedmlp bench` are
drawn anew from its results on a GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fusion_backend.bench.plots import write_plots

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
PLOTS = ROOT / "docs" / "plots"
RESULTS = ROOT / "benchmarks" / "results"
MLPS, CPU, MODELS = RESULTS / "mlps.json", RESULTS / "cpu.json", RESULTS / "models.json"
COUNTERS, NORMS = RESULTS / "counters.json", RESULTS / "norms.json"
TABLES = ROOT / "fusion_backend" / "tables"

PEERS_SECTION = """\
## Single MLPs beside their peers

Every installed way to run an MLP, on the same tensors, in turns within one process: eager,
Inductor's default mode and its max-autotune (with the persistent TMA templates), its
`b2b_gemm_pass` where that applies, cuBLASLt's epilogue where that is exact, Liger, QuACK, and
`torch.compile(backend="fusedmlp")`. `bare` is the cuBLAS products alone. Times are medians in
microseconds: on a GPU of CUDA-graph replays with weights that come from device memory, on a CPU of
ordinary calls. *floor* is the larger of bytes / memory bandwidth and FLOPs / peak; the speed-up is
over the better of Inductor's two modes. Spreads, errors against float64, TFLOP/s and GB/s of each
are in `benchmarks/results/`. Measured and published by:

```sh
fusedmlp bench --jobs 14 --out benchmarks/results/mlps.json   # on a GPU
fusedmlp bench --out benchmarks/results/cpu.json              # on a CPU
python benchmarks/page.py
```

<!-- peers: begin -->
<!-- peers: end -->

"""


def main() -> int:
    PAGE.write_text(rewritten(PAGE.read_text()))
    if MLPS.is_file():
        for path in write_plots(json.loads(MLPS.read_text()), PLOTS):
            print(f"wrote {path}", file=sys.stderr)
    return 0


def rewritten(page: str) -> str:
    """The page with its tables made anew."""
    measured = [json.loads(path.read_text()) for path in (MLPS, CPU) if path.is_file()]
    if measured and "<!-- peers: begin -->" not in page:
        page = page.replace("## Whole models", f"{PEERS_SECTION}## Whole models", 1)
    if "<!-- peers: begin -->" in page:
        page = between(page, "peers", peers_section(measured))
    if MODELS.is_file():
        page = between(page, "models", models_section(json.loads(MODELS.read_text())))
    if COUNTERS.is_file():
        page = between(page, "counters", counters_section(json.loads(COUNTERS.read_text())))
    if NORMS.is_file():
        page = between(page, "norms", norms_section(json.loads(NORMS.read_text())))
    paths = sorted(TABLES.glob("*.json"))
    for name, write in (("chains", chains_section), ("plans", plans_section)):
        of_chains = name == "chains"
        tables = (json.loads(p.read_text()) for p in paths if ("chains" in p.stem) == of_chains)
        page = between(page, name, "\n\n".join(map(write, tables)))
    return page


def between(page: str, name: str, section: str) -> str:
    """The page with what stands between two markers replaced."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = page.split(begin)
    after = rest.split(end)[1]
    return f"{before}{begin}\n{section}\n{end}{after}"


def peers_section(measured: list[dict[str, Any]]) -> str:
    """Single MLPs under every peer, machine by machine; the plots are the first machine's."""
    if not measured:
        return "Not measured yet."
    plots = [
        "![Speed-up over Inductor by MLP and number of rows](plots/speedup.png)",
        "![TFLOP/s under the roofline](plots/roofline.png)",
    ]
    on_gpu = any(row["kernels"] is not None for row in ran(measured[0]))
    return "\n\n".join([*map(peers_table, measured), *(plots if on_gpu else [])])


def ran(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of all cells and peers that were timed."""
    rows = (row for cell in results["cells"].values() for row in cell["peers"].values())
    return [row for row in rows if "us" in row]


def peers_table(results: dict[str, Any]) -> str:
    """One machine: what it is, one line an MLP, and the geometric means."""
    where, cells = results["machine"], results["cells"]
    peers = [
        name
        for name in results["peers"]
        if any("us" in cell["peers"].get(name, {}) for cell in cells.values())
    ]
    headings = ["MLP", "rows", "floor", *peers, "speed-up", "of floor", "kernels", "plan"]
    missing = [name for name, each in results["peers"].items() if name not in peers]
    lines = [
        f"{where['device']}, PyTorch {where['torch']}, fusedmlp {where['fusedmlp']}"
        + (f"; not installed or nowhere applicable: {', '.join(missing)}." if missing else "."),
        "",
        table_row(headings),
        "|" + "---|" * len(headings),
        *(peers_row(cell, peers) for cell in cells.values()),
        "",
        *(
            f"- {grid}, {each['cells']} MLPs: geometric mean {each['geometric_mean']:.2f} times "
            f"Inductor's better mode, worst {each['worst']:.2f} ({each['worst_cell']})."
            for grid, each in results["summary"].items()
        ),
    ]
    return "\n".join(lines)


def peers_row(cell: dict[str, Any], peers: list[str]) -> str:
    """The line of one MLP; the fastest of those that compute all of it is set in bold."""
    rows = cell["peers"]
    whole = [row["us"] for row in rows.values() if row.get("error") is not None and "us" in row]
    bias = {None: "", True: ", biases", False: ", no biases"}[cell["bias"]]
    cells = [
        f"{cell['form']} {cell['width']}/{cell['hidden']} {cell['precision']}{bias}",
        str(cell["rows"]),
        digits(cell["floor_us"]),
    ]
    for peer in peers:
        us = rows.get(peer, {}).get("us")
        text = "failed" if "failure" in rows.get(peer, {}) else "–"
        if us is not None:
            text = digits(us)
            best = us == min(whole) and rows[peer]["error"] is not None
            text = f"**{text}**" if best else text
        cells.append(text)
    ours = rows.get("fusedmlp", {})
    cells.append("–" if cell["speedup"] is None else f"{cell['speedup']:.2f}")
    cells.append(f"{ours['floor_share']:.0%}" if "us" in ours else "–")
    counts = [rows.get(peer, {}).get("kernels") for peer in ("inductor", "fusedmlp")]
    cells.append(" → ".join("–" if count is None else str(count) for count in counts))
    cells.append(cell["plan"] or "–")
    return table_row(cells)


def models_section(results: dict[str, Any]) -> str:
    """Whole models: one line a model and batch."""
    where = results["machine"]
    graphs = results.get("cuda_graphs", '`mode="reduce-overhead"`')
    measured = [case for case in results["cases"].values() if "failure" not in case]
    present = {name for case in measured for name in case["default"]}
    backends = [
        name for name in ("eager", "inductor", "max-autotune", "fusedmlp") if name in present
    ]
    lines = [
        f"{where['device']}, PyTorch {where['torch']}, fusedmlp {where['fusedmlp']}. Side by side: "
        f"{beside(backends)}. With CUDA graphs: {graphs}.",
        "",
        "| model, batch | MLPs | kernels | GPU ms | wall ms | ms, CUDA graphs | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, case in results["cases"].items():
        line = failure_row(name, case) if "failure" in case else model_row(name, case, backends)
        lines.append(line)
    return "\n".join(lines)


def failure_row(name: str, case: dict[str, Any]) -> str:
    """The line of a model that could not be measured."""
    return f"| {name} | failed: {case['failure'].split(':')[0]} | | | | | |"


def model_row(name: str, case: dict[str, Any], backends: list[str]) -> str:
    """The line of one model; a dash where a backend was not measured or failed."""
    default = [case["default"].get(backend, {}) for backend in backends]
    graphs = [case.get("cuda_graphs", {}).get(backend, {}) for backend in backends]
    cells = [
        name,
        ", ".join(f"{count} {plan}" for plan, count in case["plans"].items()),
        beside(str(row.get("kernels", "–")) for row in default),
        beside(milliseconds(row.get("gpu_us")) for row in default),
        beside(milliseconds(row.get("wall_us")) for row in default),
        beside(milliseconds(row.get("wall_us")) for row in graphs) if any(graphs) else "–",
        beside(scientific(row.get("error")) for row in default),
    ]
    return table_row(cells)


def counters_section(results: dict[str, Any]) -> str:
    """What bounds the kernels: one line a launch, shares of the peak in percent."""
    kernels = results["kernels"]
    units = [name for name, value in kernels[0].items() if isinstance(value, float)]
    where = results["machine"]
    lines = [
        f"{where['device']}, PyTorch {where['torch']}; shares are percent of the peak:",
        "",
        table_row(["MLP", "kernel", *units, "waiting for (cycles an instruction)"]),
        "|" + "---|" * (len(units) + 3),
    ]
    for each in kernels:
        waits = ", ".join(f"{name} {cycles:.1f}" for name, cycles in each["stalls"].items())
        kernel = each["kernel"].removeprefix("fusedmlp_")
        figures = [digits(each[name]) if name in each else "–" for name in units]
        lines.append(table_row([each["mlp"], f"`{kernel}`", *figures, waits]))
    return "\n".join(lines)


def norms_section(results: dict[str, Any]) -> str:
    """MLPs with a norm before their second layer: one line each."""
    ways = ("inductor", "epilogue", "folded", "products")
    where = results["machine"]
    lines = [
        f"{where['device']}, PyTorch {where['torch']}, microseconds:",
        "",
        table_row(["MLP", *ways]),
        "|" + "---|" * (len(ways) + 1),
    ]
    for case in results["cases"]:
        times = (digits(case["us"][way]) if way in case["us"] else "–" for way in ways)
        lines.append(table_row([case["mlp"], *times]))
    return "\n".join(lines)


def chains_section(table: dict[str, Any]) -> str:
    """Chains on one GPU: one line a chain and number of rows."""
    where = table["machine"]
    ways = ("unfused", "pairs", "chain")
    lines = [
        f"{where['gpu']}, PyTorch {where['torch']}, microseconds on the GPU:",
        "",
        table_row(["chain", "rows", *ways]),
        "|" + "---|" * (len(ways) + 2),
    ]
    for row in table["rows"]:
        best = min(row["us"][way] for way in ways)
        times = [digits(row["us"][way]) for way in ways]
        times = [
            f"**{t}**" if row["us"][w] == best else t for w, t in zip(ways, times, strict=True)
        ]
        chain = f"{row['form']} {'→'.join(map(str, row['widths']))}"
        lines.append(table_row([chain, str(row["rows"]), *times]))
    return "\n".join(lines)


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


def scientific(number: float | None) -> str:
    """Two significant digits."""
    return "–" if number is None else f"{number:.1e}"


def digits(number: float) -> str:
    """Three significant digits, without exponent."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


if __name__ == "__main__":
    sys.exit(main())
