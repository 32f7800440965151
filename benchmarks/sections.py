"""What was measured, as Markdown: one function a subject, from the JSON of one machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import geometric_mean, mean
from typing import Any

from fusion_backend.bench.grids import GRIDS
from fusion_backend.bench.whole_model import BACKENDS
from fusion_backend.planning.measurements import WORTHWHILE

Results = dict[str, Any]

#: The families that tables have times of.
FAMILIES = ("back_to_back", "stream", "epilogue", "library")
#: Input widths of narrow MLPs, at most, and what an MLP's speed-up is not to be below.
NARROW, TOO_SLOW = 256, 0.98
#: Those that train whole models, side by side.
TRAINERS = ("eager", "inductor", "fusedmlp")


def peers_section(results: Results, goals: Mapping[str, float] | None = None) -> str:
    """Single MLPs under every peer: one line an MLP, and the geometric means.

    Args:
        results: of `fusedmlp bench`.
        goals: by name of a cell, the microseconds that fusedmlp is meant to reach.
    """
    published = [cell.name for cells in GRIDS.values() for cell in cells]
    order = {name: place for place, name in enumerate(published)}
    names = sorted(results["cells"], key=lambda name: order.get(name, len(order)))
    cells, goals = {name: results["cells"][name] for name in names}, goals or {}
    peers = [
        name
        for name in results["peers"]
        if any("us" in cell["peers"].get(name, {}) for cell in cells.values())
    ]
    missing = [name for name in results["peers"] if name not in peers]
    goal = ["goal"] if goals else []
    headings = ["MLP", "rows", "floor", *peers, *goal]
    headings += ["speed-up", "of floor", "kernels", "family"]
    lines = [
        f"{measured_with(results['machine'])}"
        + (f"; not installed or nowhere applicable: {', '.join(missing)}." if missing else "."),
        "",
        *table(headings, [peers_row(name, cell, peers, goals) for name, cell in cells.items()]),
        "",
        *(
            f"- {grid}, {each['cells']} MLPs: geometric mean {each['geometric_mean']:.2f} times "
            f"Inductor's better mode, worst {each['worst']:.2f} ({each['worst_cell']})."
            for grid, each in results["summary"].items()
            if grid != "all" or len(results["summary"]) != 2  # one grid is all of them
        ),
        *([goals_line(cells, goals)] if goals else []),
    ]
    return "\n".join(lines)


def peers_row(
    name: str, cell: dict[str, Any], peers: list[str], goals: Mapping[str, float]
) -> list[str]:
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
    if goals:
        cells.append(goal_text(ours.get("us"), goals.get(name)))
    cells.append("–" if cell["speedup"] is None else f"{cell['speedup']:.2f}")
    cells.append(f"{ours['floor_share']:.0%}" if "us" in ours else "–")
    counts = [rows.get(peer, {}).get("kernels") for peer in ("inductor", "fusedmlp")]
    cells.append(" → ".join("–" if count is None else str(count) for count in counts))
    cells.append(cell["plan"] or "–")
    return cells


def goal_text(us: float | None, goal: float | None) -> str:
    """A goal, and whether it is met or by how much it is missed."""
    if goal is None:
        return "–"
    if us is None:
        return digits(goal)
    return f"{digits(goal)}, met" if is_met(us, goal) else f"{digits(goal)}, {us / goal - 1:+.0%}"


def goals_line(cells: Mapping[str, Any], goals: Mapping[str, float]) -> str:
    """How many goals are met."""
    times = {name: cell["peers"].get("fusedmlp", {}).get("us") for name, cell in cells.items()}
    there = [name for name in goals if times.get(name)]
    met = [name for name in there if is_met(times[name], goals[name])]
    return f"- {len(met)} of {len(there)} goals met; the others with the distance to them."


def is_met(us: float, goal: float) -> bool:
    """Whether a time, in the digits in which it is published, reaches the goal."""
    return float(digits(us)) <= goal


def models_section(results: Results) -> str:
    """Whole models: one line a model and batch."""
    graphs = results.get("cuda_graphs", '`mode="reduce-overhead"`')
    measured = [case for case in results["cases"].values() if "failure" not in case]
    present = {name for case in measured for name in case["default"]}
    backends = [name for name in BACKENDS if name in present]
    headings = ["model, batch", "MLPs", "kernels", "GPU ms", "wall ms", "ms, CUDA graphs", "error"]
    lines = [
        f"{measured_with(results['machine'])}. Side by side: {beside(backends)}. "
        f"With CUDA graphs: {graphs}.",
        "",
        *table(
            headings,
            [
                failure_row(name, case) if "failure" in case else model_row(name, case, backends)
                for name, case in results["cases"].items()
            ],
        ),
    ]
    return "\n".join(lines)


def failure_row(name: str, case: dict[str, Any]) -> list[str]:
    """The line of a model that could not be measured."""
    return [name, f"failed: {case['failure'].split(':')[0]}", *5 * [""]]


def model_row(name: str, case: dict[str, Any], backends: list[str]) -> list[str]:
    """The line of one model; a dash where a backend was not measured or failed."""
    default = [case["default"].get(backend, {}) for backend in backends]
    graphs = [case.get("cuda_graphs", {}).get(backend, {}) for backend in backends]
    return [
        name,
        ", ".join(f"{count} {plan}" for plan, count in case["plans"].items()),
        beside(str(row.get("kernels", "–")) for row in default),
        beside(milliseconds(row.get("gpu_us")) for row in default),
        beside(milliseconds(row.get("wall_us")) for row in default),
        beside(milliseconds(row.get("wall_us")) for row in graphs) if any(graphs) else "–",
        beside(scientific(row.get("error")) for row in default),
    ]


def host_section(results: Results) -> str:
    """What the host pays: one line an MLP for calls, one line a model for compiling."""
    lines = [f"{measured_with(results['machine'])}."]
    if "calls" in results:
        ways = list(results["calls"][0]["issued"])
        rows = [
            [
                call["mlp"],
                call["plan"] or "–",
                *(beside(digits(call[until][way]) for way in ways) for until in ("issued", "done")),
            ]
            for call in results["calls"]
        ]
        lines += ["", f"Microseconds a call, {beside(ways)}:", ""]
        lines += table(["MLP", "family", "issued", "done"], rows)
    if "compiling" in results:
        headings = ["model", "", "s, Inductor", "s, fusedmlp", "CPU s", "ratio", "new files"]
        rows = [
            compiling_row(model, state, {backend: each[state] for backend, each in found.items()})
            for model, found in results["compiling"].items()
            for state in ("cold", "warm")
        ]
        lines += ["", "Until a model has been compiled and called once:", ""]
        lines += table(headings, rows)
    return "\n".join(lines)


def compiling_row(model: str, state: str, runs: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """Seconds with cold or warm caches, the least of several processes."""
    seconds = {backend: min(run["seconds"] for run in each) for backend, each in runs.items()}
    computed = {backend: min(run["cpu_seconds"] for run in each) for backend, each in runs.items()}
    return [
        model,
        f"{state} caches",
        *(digits(seconds[backend]) for backend in ("inductor", "fusedmlp")),
        beside(digits(computed[backend]) for backend in ("inductor", "fusedmlp")),
        f"{seconds['fusedmlp'] / seconds['inductor']:.2f}",
        beside(str(max(run["new_files"] for run in runs[b])) for b in ("inductor", "fusedmlp")),
    ]


def counters_section(results: Results) -> str:
    """What bounds the kernels: one line a launch, shares of the peak in percent."""
    kernels, load = results["kernels"], results.get("load", {})
    units = [name for name, value in kernels[0].items() if isinstance(value, float)]
    rows = []
    for each in kernels:
        waits = ", ".join(f"{name} {cycles:.1f}" for name, cycles in each["stalls"].items())
        kernel = each["kernel"].removeprefix("fusedmlp_")
        figures = [digits(each[name]) if name in each else "–" for name in units]
        at = [digits(load[each["mlp"]][name]) for name in ("MHz", "W")] if load else []
        rows.append([each["mlp"], f"`{kernel}`", *figures, *at, waits])
    headings = ["MLP", "kernel", *units, *(("MHz", "W") if load else ())]
    headings.append("waiting for (cycles an instruction)")
    first = f"{measured_with(results['machine'])}; shares are percent of the peak"
    if load:
        limits = next(iter(load.values()))
        first += f", which clocks with {limits['most MHz']:.0f} MHz at most and takes"
        first += f" {limits['most W']:.0f} W"
    return "\n".join([f"{first}:", "", *table(headings, rows)])


def norms_section(results: Results) -> str:
    """Norms before the first layer of an MLP and before its second: one line an MLP."""
    places = {
        "before": (
            "Before the first layer:",
            ("inductor", "fused", "mlp", "block, inductor", "block, fused"),
        ),
        "between": ("Before the second layer:", ("inductor", "epilogue", "folded", "products")),
    }
    lines = [f"{measured_with(results['machine'])}, microseconds."]
    for place, (title, ways) in places.items():
        if results.get(place):
            rows = [[case["mlp"], *ways_of(case, ways)] for case in results[place]]
            lines += ["", title, "", *table(["MLP", *ways], rows)]
    return "\n".join(lines)


def sums_section(results: Results) -> str:
    """Sums after an MLP of wide layers: one line an MLP."""
    pairs = (("sum", "within"), ("sum; norm", "within; norm"), ("norm alone", "within; norm alone"))
    rows = []
    for case in results["cases"]:
        times = [f"{digits(case['us'][a])} → {digits(case['us'][b])}" for a, b in pairs]
        rows.append([case["mlp"], f"{case['tiles']:.2f}", digits(case["us"]["mlp"]), *times])
    headings = ["MLP", "tiles", "mlp", *(each for each, _ in pairs)]
    first = f"{measured_with(results['machine'])}, microseconds, `sum` → `within`:"
    return "\n".join([first, "", *table(headings, rows)])


def deep_mlps_section(results: Results) -> str:
    """Deep MLPs of wide layers: one line a model."""
    rows = []
    for case in results["models"]:
        us = case["us"]
        widths = "→".join(map(str, case["widths"]))
        kernels = " → ".join(str(case[f"{name} kernels"]) for name in ("inductor", "fusedmlp"))
        times = [digits(us["inductor"]), digits(us["fusedmlp"])]
        gain = f"{us['inductor'] / us['fusedmlp']:.2f}"
        rows.append([f"{case['model']}, {widths}", str(case["rows"]), kernels, *times, gain])
    headings = ["model", "rows", "kernels", "inductor", "fusedmlp", "speed-up"]
    first = f"{measured_with(results['machine'])}, bfloat16, microseconds; kernels of one call:"
    return "\n".join([first, "", *table(headings, rows)])


def random_mlps_section(results: Results) -> str:
    """MLPs drawn at random: one line a seed."""
    lines = []
    for run in results["runs"]:
        times = [row["us"] for row in run["rows"]]
        gains = [us["inductor"] / us["fusedmlp"] for us in times]
        best = [us["inductor"] / min(us.values()) for us in times]
        narrow = [g for g, row in zip(gains, run["rows"], strict=True) if row["width"] <= NARROW]
        lines.append(
            [
                "training" if run["training"] else "inference",
                str(run["seed"]),
                f"{len(times)} of {run['drawn']}",
                f"{geometric_mean(gains):.2f}",
                f"{geometric_mean(narrow):.2f}",
                f"{min(gains):.2f}",
                str(sum(gain < TOO_SLOW for gain in gains)),
                f"{geometric_mean(b / g for b, g in zip(best, gains, strict=True)) - 1:.1%}",
            ]
        )
    headings = ["", "seed", "MLPs", "speed-up", "narrow", "worst", f"below {TOO_SLOW}", "regret"]
    machine = results["machine"]
    first = f"PyTorch {machine['torch']}, Triton {machine['triton']}:"
    return "\n".join([first, "", *table(headings, lines)])


def training_section(results: Results) -> str:
    """Training steps: one line an MLP."""
    ways, sides = ("inductor", "fusedmlp", "recompute"), ("inductor", "fusedmlp")
    rows = []
    for case in (*results["cases"], *results["others"]):
        us, mb, error = case["us"], case["mb"], case["error"]
        times = [digits(us[way]) for way in ("bare", *ways)]
        ratios = [f"{us['inductor'] / us['fusedmlp']:.2f}", f"{us['fusedmlp'] / us['bare']:.2f}"]
        kernels = beside(str(case["kernels"][way]) for way in sides)
        peaks = beside(digits(mb[way] - mb["gradients"]) for way in ways)
        errors = beside(f"{error[way]:.1e}" for way in ("eager", *sides)) if error else "–"
        rows.append([case["mlp"], *times, *ratios, kernels, peaks, errors])
    speedup = ["speed-up", "of bare"]
    others = ["kernels", "peak MB, recompute last", "error, eager / inductor / fusedmlp"]
    headings = ["MLP", "bare", *ways, *speedup, *others]
    gains = [case["us"]["inductor"] / case["us"]["fusedmlp"] for case in results["cases"]]
    first = f"{measured_with(results['machine'])}, microseconds; inductor / fusedmlp:"
    overall = f"- The first {len(gains)}: geometric mean {geometric_mean(gains):.2f}."
    memory = "- Peaks are without the gradients that a step returns."
    return "\n".join([first, "", *table(headings, rows), "", overall, memory])


def cpu_section(results: Results) -> str:
    """MLPs and chains on a CPU: one line each, and the geometric mean."""
    cells, machine = results["cells"], results["machine"]
    trains = any(cell["peak_mb"] for cell in cells)
    rows = []
    for cell in cells:
        row = [cell["cell"], *(digits(cell["ms"][way]) for way in ("eager", "inductor", "auto"))]
        row += [f"{cell['ratio']['auto']:.2f}", cell["plan"]]
        if trains:
            row.append(beside(digits(cell["peak_mb"][way]) for way in ("inductor", "auto")))
        rows.append(row)
    ratios = [cell["ratio"]["auto"] for cell in cells]
    gains = [cell["ms"]["inductor"] / cell["ms"]["auto"] for cell in cells]
    slowest = cells[gains.index(min(gains))]
    busy = sum(not cell["idle"] for cell in cells)
    seed = f", seed {machine['seed']}" if "seed" in machine else ""
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] != 1)}"
    memory = ["peak MB, inductor / fusedmlp"] * trains
    idle = f"Other programs computed during {busy} of them." if busy else "The machine was idle."
    return "\n".join(
        [
            f"{measured_with(machine)}, {results['dtype']}, {threads}{seed}; milliseconds:",
            "",
            *table(["MLP", "eager", "inductor", "fusedmlp", "speed-up", "plan", *memory], rows),
            "",
            f"- {len(cells)} cells: geometric mean {geometric_mean(gains):.2f} times Inductor, "
            f"worst {min(gains):.2f} ({slowest['cell']}); {geometric_mean(ratios):.2f} times the "
            f"better of eager and Inductor, which `speed-up` is, worst {min(ratios):.2f}.",
            f"- {idle}",
        ]
    )


def training_models_section(results: Results) -> str:
    """Training steps of whole models: one line a model."""
    rows = []
    for case in results["cases"]:
        name = f"{case['model']}, {case['batch']}"
        if "us" not in case:
            rows.append([name, f"failed: {', '.join(case['failures'].values())}", *6 * [""]])
            continue
        us = case["us"]
        both = "inductor" in us and "fusedmlp" in us
        mlps = [case.get("sites", "–"), *case.get("plans", ()), *case.get("reasons", ())]
        rows.append(
            [
                name,
                ", ".join(mlps),
                beside(milliseconds(us.get(way)) for way in TRAINERS),
                f"{us['inductor'] / us['fusedmlp']:.2f}" if both else "–",
                beside(milliseconds(case["gpu_us"].get(way)) for way in TRAINERS),
                beside(megabytes(case["mb"].get(way)) for way in TRAINERS),
                beside(str(case["kernels"].get(way, "–")) for way in TRAINERS),
                off_eager(case["losses"]),
            ]
        )
    headings = ["model, batch", "MLPs fused", "ms", "speed-up", "GPU ms", "peak MB", "kernels"]
    first = f"{measured_with(results['machine'])}. Side by side: {beside(TRAINERS)}:"
    return "\n".join([first, "", *table([*headings, "losses off eager's"], rows)])


def off_eager(losses: Mapping[str, list[float]]) -> str:
    """The largest difference of a loss from eager's, by backend."""
    eager = losses.get("eager", [])
    return beside(
        f"{max(abs(a - b) for a, b in zip(losses[way], eager, strict=True)):.1e}"
        if eager and way in losses
        else "–"
        for way in TRAINERS[1:]
    )


def megabytes(number: float | None) -> str:
    """Three significant digits."""
    return "–" if number is None else digits(number)


def many_gpus_section(results: Results) -> str:
    """Training on the GPUs of one machine: one line a way to spread the model over ranks."""
    rows = []
    for run in results["runs"]:
        found = {each["backend"]: each for each in run["results"]}
        steps = {way: 1e6 * each["step"] for way, each in found.items()}
        both = "inductor" in steps and "fusedmlp" in steps
        ours = found.get("fusedmlp", {}).get("sites", [])
        rows.append(
            [
                way_of(run),
                str(run["ranks"]),
                str(run["rows"]),
                beside(milliseconds(steps.get(way)) for way in TRAINERS),
                f"{steps['inductor'] / steps['fusedmlp']:.2f}" if both else "–",
                beside(thousands(found.get(way)) for way in TRAINERS),
                beside(megabytes(found.get(way, {}).get("peak")) for way in TRAINERS),
                beside(in_collectives(found.get(way)) for way in TRAINERS),
                beside(str(found.get(way, {}).get("kernels", "–")) for way in TRAINERS),
                ", ".join(dict.fromkeys(ours)) or "–",
                f"{found['eager']['losses'][-1]:.4f}" if "eager" in found else "–",
                off_eager({way: each["losses"] for way, each in found.items()}),
            ]
        )
    headings = ["", "ranks", "rows", "ms a step", "speed-up", "1000 tokens/s", "peak MB"]
    headings += ["collectives", "kernels", "MLPs fused", "eager's loss", "others off it"]
    first = f"{measured_with(results['machine'])}. Side by side: {beside(TRAINERS)}."
    failed = [
        f"- {way_of(run)} on {run['ranks']}, {run['rows']} rows, {way}: {why}"
        for run in results["runs"]
        for way, why in run["failures"].items()
    ]
    lines = [first, "", *table(headings, rows), "", *scaling_lines(results)]
    if failed:
        lines += ["", "Not measured:", "", *failed]
    return "\n".join(lines)


def scaling_lines(results: Results) -> list[str]:
    """Weak and strong scaling: tokens a second beside those of one GPU."""
    alone = {run["rows"]: run for run in results["runs"] if run["ranks"] == 1}
    rows = []
    for run in results["runs"]:
        weak, strong = (alone.get(rows) for rows in (run["rows"] // run["ranks"], run["rows"]))
        if run["ranks"] == 1 or not (weak or strong):
            continue
        cells = [way_of(run), str(run["ranks"]), str(run["rows"])]
        cells.append(beside(gain(run, weak, way, "{:.0%}", run["ranks"]) for way in TRAINERS))
        cells.append(beside(gain(run, strong, way, "{:.2f}", 1) for way in TRAINERS))
        rows.append(cells)
    headings = ["", "ranks", "rows", "weak: tokens/s of a rank", "strong: tokens/s"]
    return ["Beside one GPU:", "", *table(headings, rows)] if rows else []


def gain(run: Results, other: Results | None, way: str, form: str, ranks: int) -> str:
    """Tokens a second of a backend over ranks and those of another run."""
    found = [
        each["tokens_per_second"]
        for source in (run, other or {"results": []})
        for each in source["results"]
        if each["backend"] == way
    ]
    return form.format(found[0] / found[1] / ranks) if len(found) == 2 else "–"


def way_of(run: Results) -> str:
    """How a model is spread over ranks."""
    tensor = run["tensor"]
    within = f"TP {tensor} × FSDP2 {run['ranks'] // tensor}"
    names = {"none": "one GPU", "ddp": "DDP", "fsdp": "FSDP2", "tp": f"TP {tensor}"}
    return names.get(run["parallel"], within)


def thousands(result: Results | None) -> str:
    """Tokens a second, in thousands."""
    return "–" if result is None else digits(result["tokens_per_second"] / 1e3)


def in_collectives(result: Results | None) -> str:
    """The share of a step in collectives, the mean of the ranks, and that of the exposed ones."""
    if result is None or not result["collectives"]:
        return "–"
    exposed = f" ({mean(result['exposed']):.0%})" if result["exposed"] else ""
    return f"{mean(result['collectives']):.0%}{exposed}"


def convolutions_section(results: Results) -> str:
    """1×1 convolutions: one line a block."""
    ways = ("eager", "inductor", "fused")
    rows = [[each["block"], *ways_of(each, ways), each["plan"]] for each in results["cases"]]
    first = f"{measured_with(results['machine'])}, microseconds:"
    return "\n".join([first, "", *table(["block", *ways, "family"], rows)])


def ways_of(case: Mapping[str, Any], ways: Iterable[str]) -> list[str]:
    """Times by way, a dash where one does not apply."""
    return [digits(case["us"][way]) if way in case["us"] else "–" for way in ways]


def _chain(row: dict[str, Any]) -> str:
    """The form, the widths, and the precision of float32."""
    widths = "→".join(map(str, row["widths"]))
    precision = row.get("precision", "bfloat16")
    return " ".join([row["form"], widths, *([precision] if precision != "bfloat16" else [])])


def chains_section(results: Results) -> str:
    """Chains: one line a chain, one column a number of rows, as pairs and as one kernel.

    Where no pair was measured, the unfused layers stand in their place.
    """
    cells = {
        (_chain(row), row["rows"]): " → ".join(
            digits(us) for us in (row["us"].get("pairs", row["us"]["unfused"]), row["us"]["chain"])
        )
        for row in results["rows"]
    }
    first = (
        f"{measured_with(results['machine'])}, microseconds on the GPU, `pairs` → `chain`, or "
        "unfused → `chain` where no family ran the pairs:"
    )
    return "\n".join([first, "", *by_rows("chain", cells)])


def plans_section(results: Results) -> str:
    """The fastest family of each measured MLP: a table a kind, one column a number of rows."""
    kinds: dict[str, dict[tuple[str, int], str]] = {}
    for row in results["rows"]:
        kind = (
            {"ieee": "float32", "tf32": "TF32"}.get(row["precision"], row["precision"]),
            "training" if row["training"] else "inference",
            "transposed weights" if row.get("transposed") else "",
        )
        cells = kinds.setdefault(", ".join(filter(None, kind)), {})
        cells[f"{row['form']} {row['width']}/{row['hidden']}", row["rows"]] = fastest(row["us"])
    lines = [f"{measured_with(results['machine'])}."]
    for title, cells in kinds.items():
        lines += ["", f"In {title}:", "", *by_rows("MLP", cells)]
    return "\n".join(lines)


def fastest(us: Mapping[str, float]) -> str:
    """The fastest family and its speed-up; Inductor, where none gains enough."""
    families = {name: us["inductor"] / time for name, time in us.items() if name in FAMILIES}
    best = max(families, key=lambda name: families[name], default="")
    if not best or families[best] < WORTHWHILE:
        return "Inductor"
    return f"{best} {families[best]:.2f}"


def by_rows(first: str, cells: Mapping[tuple[str, int], str]) -> list[str]:
    """A table with a line for each name and a column for each number of rows."""
    names, columns = dict.fromkeys(name for name, _ in cells), sorted({rows for _, rows in cells})
    lines = [[name, *(cells.get((name, rows), "–") for rows in columns)] for name in names]
    return table([first, *(f"{rows:,} rows" if rows > 1 else "1 row" for rows in columns)], lines)


def measured_with(machine: Mapping[str, str]) -> str:
    """The versions of what is measured and of what measures."""
    ours = f", fusedmlp {machine['fusedmlp']}" if "fusedmlp" in machine else ""
    return f"PyTorch {machine['torch']}{ours}"


def table(headings: list[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a Markdown table."""
    cells = [headings, len(headings) * ["---"], *rows]
    return [f"| {' | '.join(row)} |" for row in cells]


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
