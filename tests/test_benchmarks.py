"""The benchmark of whole models: what it measures, and the page that it writes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def row(kernels: int, wall_us: float) -> dict[str, Any]:
    return {"kernels": kernels, "gpu_us": wall_us / 2, "wall_us": wall_us, "error": 0.00123}


RESULTS = {
    "machine": {"device": "Some GPU", "torch": "2.11.0", "fusedmlp": "0.1.0"},
    "cases": {
        "GPT-2 small, 1 × 128 tokens": {
            "sites": 12,
            "plans": {"epilogue": 12},
            "default": {
                "eager": row(218, 11900.0),
                "inductor": row(101, 3390.0),
                "fusedmlp": row(65, 2500.0),
            },
            "cuda_graphs": {"inductor": row(101, 840.0), "fusedmlp": row(65, 700.0)},
        },
        "Llama 1B, 1 × 1 token": {"failure": "OutOfMemoryError: too large"},
    },
}


TABLE = {
    "machine": {"gpu": "Some GPU", "torch": "2.11.0"},
    "rows": [
        {
            "form": "swiglu",
            "rows": 64,
            "width": 128,
            "hidden": 512,
            "us": {"inductor": 10.41, "epilogue": 6.48, "back_to_back": 10.77},
            "precision": "bfloat16",
            "training": False,
        }
    ],
}


PEERS = {
    "machine": {"device": "Some GPU", "torch": "2.11.0", "fusedmlp": "0.1.0"},
    "peers": {
        "bare": {"what": "the products", "version": None},
        "inductor": {"what": "torch.compile", "version": None},
        "quack": {"what": "quack.mlp.MLP", "version": None},
        "fusedmlp": {"what": "ours", "version": None},
    },
    "cells": {
        "gelu_tanh 1024×64→256→64, bfloat16, biases": {
            "form": "gelu_tanh",
            "rows": 1024,
            "width": 64,
            "hidden": 256,
            "precision": "bfloat16",
            "bias": None,
            "floor_us": 2.04,
            "plan": "back_to_back",
            "speedup": 2.0,
            "peers": {
                "bare": {"us": 3.9, "error": None, "floor_share": 0.5, "kernels": 2},
                "inductor": {"us": 8.04, "error": 0.002, "floor_share": 0.25, "kernels": 3},
                "quack": {"absent": "quack-kernels is not installed"},
                "fusedmlp": {"us": 4.02, "error": 0.002, "floor_share": 0.507, "kernels": 1},
            },
        }
    },
    "summary": {
        "forward": {
            "cells": 1,
            "geometric_mean": 2.0,
            "worst": 2.0,
            "worst_cell": "gelu_tanh 1024×64→256→64, bfloat16, biases",
        }
    },
}


def script(name: str) -> ModuleType:
    path = ROOT / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up their annotations
    sys.path.insert(0, str(ROOT / "benchmarks"))  # as when the program is run
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def cells(section: str, label: str) -> list[str]:
    """The cells beside the first one in the row of a table; of several such rows, those of all."""
    rows = (line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("|"))
    stripped = ([cell.strip() for cell in row] for row in rows)
    return [cell for first, *others in stripped if first == label for cell in others]


def test_page_states_the_machine_and_every_model() -> None:
    section = script("sections").models_section(RESULTS)
    assert "PyTorch 2.11.0, fusedmlp 0.1.0. Side by side: eager / inductor / fusedmlp." in section
    assert cells(section, "GPT-2 small, 1 × 128 tokens") == [
        "12 epilogue",
        "218 / 101 / 65",
        "5.95 / 1.7 / 1.25",
        "11.9 / 3.39 / 2.5",
        "– / 0.84 / 0.7",
        "1.2e-03 / 1.2e-03 / 1.2e-03",
    ]
    assert cells(section, "Llama 1B, 1 × 1 token")[0] == "failed: OutOfMemoryError"


@pytest.mark.parametrize(("us", "cell"), [(6.48, "epilogue 1.61"), (10.4, "Inductor")])
def test_page_names_the_fastest_family_or_inductor(us: float, cell: str) -> None:
    (row,) = TABLE["rows"]
    single = {**row, "rows": 1, "us": {"inductor": 8.0, "stream": 4.0}}
    rows = [{**row, "us": {**row["us"], "epilogue": us}}, single]
    section = script("sections").plans_section({**TABLE, "rows": rows})
    assert "In bfloat16, inference:" in section
    assert cells(section, "MLP") == ["1 row", "64 rows"]
    assert cells(section, "swiglu 128/512") == ["stream 2.00", cell]


def test_page_tells_kinds_of_measurements_apart() -> None:
    (row,) = TABLE["rows"]
    other = {**row, "precision": "ieee", "training": True, "transposed": True}
    section = script("sections").plans_section({**TABLE, "rows": [row, other]})
    assert "In float32, training, transposed weights:" in section


def test_page_sets_a_chain_beside_its_pairs() -> None:
    row = {"form": "gelu", "widths": [8, 16, 1], "us": {"unfused": 9.0, "pairs": 8.0, "chain": 4.0}}
    table = {**TABLE, "rows": [{**row, "rows": rows} for rows in (4096, 64)]}
    section = script("sections").chains_section(table)
    assert cells(section, "chain") == ["64 rows", "4,096 rows"]
    assert cells(section, "gelu 8→16→1") == ["8 → 4", "8 → 4"]


@pytest.mark.parametrize("trains", [False, True])
def test_page_sets_mlps_on_a_cpu_beside_eager_and_inductor(trains: bool) -> None:
    ms = {"eager": 2.0, "inductor": 3.0, "auto": 1.0}
    cell = {"cell": "plain gelu 4096×64→256→64 bias", "ms": ms, "ratio": {"auto": 2.0}}
    cell |= {
        "plan": "rows",
        "idle": True,
        "peak_mb": {"inductor": 8.0, "auto": 2.0} if trains else {},
    }
    slower = {"eager": 0.5, "inductor": 0.75, "auto": 1.0}
    slow = {**cell, "cell": "plain gelu 1×8→16→8", "ratio": {"auto": 0.5}, "ms": slower}
    slow["idle"] = False
    machine = {"device": "Some, avx2, 2 cores", "threads": 1, "torch": "2.14", "fusedmlp": "0.1.0"}
    results = {"machine": machine, "dtype": "float32", "cells": [cell, slow]}
    section = script("sections").cpu_section(results)
    memory = ["8 / 2"] if trains else []
    assert cells(section, cell["cell"]) == ["2", "3", "1", "2.00", "rows", *memory]
    assert "geometric mean 1.50 times Inductor, worst 0.75 (plain gelu 1×8→16→8)" in section
    assert "1.00 times the better of eager and Inductor, which `speed-up` is, worst 0.50" in section
    assert "1 of them" in section


def test_page_sets_our_time_beside_every_peers() -> None:
    section = script("sections").peers_section(PEERS)
    assert "PyTorch 2.11.0, fusedmlp 0.1.0; not installed or nowhere applicable: quack." in section
    found = dict(
        zip(cells(section, "MLP"), cells(section, "gelu_tanh 64/256 bfloat16"), strict=True)
    )
    peers = {"floor": "2.04", "bare": "3.9", "inductor": "8.04", "fusedmlp": "**4.02**"}
    gains = {"speed-up": "2.00", "of floor": "51%", "kernels": "3 → 1", "family": "back_to_back"}
    assert list(found.items()) == list({"rows": "1024", **peers, **gains}.items())
    assert "- forward, 1 MLPs: geometric mean 2.00 times Inductor's better mode" in section


@pytest.mark.parametrize(
    ("goal", "said", "met"),
    [(4.02, "4.02, met", 1), (4.0, "4, +0%", 0), (3.35, "3.35, +20%", 0)],
)
def test_page_sets_goals_beside_what_was_reached(goal: float, said: str, met: int) -> None:
    (name,) = PEERS["cells"]
    section = script("sections").peers_section(PEERS, {name: goal})
    found = cells(section, "gelu_tanh 64/256 bfloat16")
    assert found[found.index("**4.02**") :][:3] == ["**4.02**", said, "2.00"]
    assert f"- {met} of 1 goals met" in section


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program, where nothing was measured yet."""
    made = script("page")
    for name in ("RESULTS", "TABLES"):
        monkeypatch.setattr(made, name, tmp_path / name.lower())
        (tmp_path / name.lower()).mkdir()
    return made


def put(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def test_each_machine_has_a_page_with_a_section_for_each_subject(page: ModuleType) -> None:
    put(page.RESULTS / "some" / "mlps.json", PEERS)
    put(page.RESULTS / "some" / "models.json", RESULTS)
    put(page.RESULTS / "other" / "plans.md", "remark on a GPU of which there is a table only")
    put(page.TABLES / "mlps_other.json", TABLE | {"machine": {"gpu": "Other GPU", "torch": "2"}})
    put(page.TABLES / "mlps_some.json", TABLE)
    other, some = (page.machine_page(folder) for folder in page.machines())
    assert headings(other) == ["# Other GPU", "## The fastest family"]
    assert headings(some) == [
        "# Some GPU",
        "## Single MLPs beside their peers",
        "## Whole models",
        "## The fastest family",
    ]
    assert "remark on a GPU" in other
    assert "plots/some/speedup.png" in some


def headings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("#")]


def test_page_takes_remarks_and_goals_from_beside_the_results(page: ModuleType) -> None:
    (name,) = PEERS["cells"]
    put(page.RESULTS / "some" / "mlps.json", PEERS)
    put(page.RESULTS / "some" / "about.md", "All of one day.\n")
    put(page.RESULTS / "some" / "mlps.md", "Of one run.\n")
    put(page.RESULTS / "some" / "goals.json", {name: 5})
    text = page.machine_page(page.RESULTS / "some")
    assert "# Some GPU\n\nAll of one day.\n\n## Single MLPs beside their peers\n\nOf one" in text
    assert "5, met" in cells(text, "gelu_tanh 64/256 bfloat16")


def test_results_of_two_machines_in_one_folder_are_refused(page: ModuleType) -> None:
    put(page.RESULTS / "some" / "mlps.json", PEERS)
    put(page.RESULTS / "some" / "norms.json", {"machine": {"device": "Other GPU", "torch": "2"}})
    with pytest.raises(SystemExit, match="must be of one machine, got Other GPU, Some GPU"):
        page.machine_page(page.RESULTS / "some")


HOST = {
    "machine": {"device": "Some GPU", "torch": "2.11.0"},
    "calls": [
        {
            "mlp": "swiglu 16 × 64/256",
            "plan": "back_to_back",
            "issued": {"eager": 98.2, "inductor": 144.6, "fusedmlp": 71.5},
            "done": {"eager": 99.5, "inductor": 147.1, "fusedmlp": 73.3},
        }
    ],
    "compiling": {
        "GPT-2 small": {
            "inductor": {
                "cold": [
                    {"seconds": 24.0, "cpu_seconds": 12.0, "new_files": 90},
                    {"seconds": 20.0, "cpu_seconds": 13.0, "new_files": 90},
                ],
                "warm": [
                    {"seconds": 5.0, "cpu_seconds": 4.5, "new_files": 0},
                    {"seconds": 4.0, "cpu_seconds": 4.6, "new_files": 0},
                ],
            },
            "fusedmlp": {
                "cold": [{"seconds": 21.0, "cpu_seconds": 12.5, "new_files": 80}],
                "warm": [
                    {"seconds": 4.2, "cpu_seconds": 4.4, "new_files": 0},
                    {"seconds": 4.4, "cpu_seconds": 4.7, "new_files": 1},
                ],
            },
        }
    },
}


def test_page_says_what_a_call_and_compiling_cost_the_host() -> None:
    section = script("sections").host_section(HOST)
    assert cells(section, "swiglu 16 × 64/256") == [
        "back_to_back",
        "98.2 / 145 / 71.5",
        "99.5 / 147 / 73.3",
    ]
    assert cells(section, "GPT-2 small") == [
        *("cold caches", "20", "21", "12 / 12.5", "1.05", "90 / 80"),
        *("warm caches", "4", "4.2", "4.5 / 4.4", "1.05", "0 / 1"),
    ]


def test_published_pages_are_made_of_the_published_results() -> None:
    page = script("page")
    for folder in page.machines():
        text = (page.PAGES / f"{folder.name}.md").read_text()
        assert text == page.machine_page(folder), "run: python benchmarks/page.py"
    text = (page.PAGES / "many-gpus.md").read_text()
    assert text == page.many_gpus_page(), "run: python benchmarks/page.py"


class Prepared:
    """In place of the real one: measures nothing."""

    def __init__(self, case: Any, names: tuple[str, ...]) -> None:
        self.names = names

    def measured(self, rounds: int) -> dict[str, Any]:
        return {"default": {name: row(rounds, 1.0) for name in self.names}, "plans": {}}


def run(models: ModuleType, monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr(sys, "argv", ["models.py", *argv])
    code: int = models.main()
    return code


def test_a_run_is_continued_and_measures_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, results = script("models"), tmp_path / "models.json"
    monkeypatch.setattr(models, "Prepared", Prepared)
    assert run(models, monkeypatch, str(results), "--seconds", "0") == 0
    assert not results.exists()
    only = ("--only", "sequential, 4096 rows", "--only", "no such model")
    run(models, monkeypatch, str(results), *only, "--rounds", "1")
    assert len(json.loads(results.read_text())["cases"]) == 1
    run(models, monkeypatch, str(results), "--rounds", "2")
    cases = json.loads(results.read_text())["cases"]
    assert [case["default"]["eager"]["kernels"] for case in cases.values()][:2] == [1, 2]


def test_a_model_is_measured_again_where_max_autotune_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, results = script("models"), tmp_path / "models.json"
    monkeypatch.setattr(models, "Prepared", Prepared)
    for _ in range(2):
        run(models, monkeypatch, str(results), "--only", "e", "--max-autotune", "bert")
    with_max = {
        name
        for name, case in json.loads(results.read_text())["cases"].items()
        if {"max-autotune", "fusedmlp, max-autotune"} <= case["default"].keys()
    }
    assert with_max == {"BERT, 8 × 64 tokens"}


def test_results_of_another_card_are_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, results = script("models"), tmp_path / "models.json"
    results.write_text(json.dumps({"machine": {"device": "Some GPU"}, "cases": {}}))
    with pytest.raises(SystemExit, match="is of another machine or version"):
        run(models, monkeypatch, str(results))


def test_the_8b_models_share_the_card_with_no_others() -> None:
    models = script("models")
    batches, left = [], list(models.GPU_CASES)
    while left:
        batches.append(models.next_batch(left, 9))
        left = left[len(batches[-1]) :]
    assert [{case.name == "Llama 8B" for case in batch} for batch in batches] == [{False}, {True}]


def test_a_model_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, results = script("models"), tmp_path / "models.json"

    def fails(case: Any, names: tuple[str, ...]) -> Prepared:
        if case.name == "BERT":
            raise RuntimeError("no memory")
        return Prepared(case, names)

    monkeypatch.setattr(models, "Prepared", fails)
    run(models, monkeypatch, str(results))
    cases = json.loads(results.read_text())["cases"]
    assert cases["BERT, 8 × 64 tokens"] == {"failure": "RuntimeError: no memory"}
    assert len(cases) > 1


def test_compile_times_of_one_model_leave_the_others_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, path = script("host"), tmp_path / "host.json"

    def starts(model: str, backend: str, device: str, cache: Path) -> str:
        """In place of a process: leaves a file in the cache the first time."""
        cache.mkdir(exist_ok=True)
        (cache / "kernel").touch()
        return backend

    monkeypatch.setattr(host, "started", starts)
    monkeypatch.setattr(host, "answer", lambda process: {"seconds": 1.0, "backend": process})
    for model in ("8 MLPs", "GPT-2 small"):
        run(host, monkeypatch, str(path), "--only", "compiling", "--model", model, "--device=cpu")
    compiling = json.loads(path.read_text())["compiling"]
    assert list(compiling) == ["8 MLPs", "GPT-2 small"]
    for found in compiling.values():
        for backend, runs in found.items():
            cold = {"seconds": 1.0, "backend": backend, "new_files": 1}
            assert runs == {"cold": 2 * [cold], "warm": 2 * [{**cold, "new_files": 0}]}


def test_host_times_of_another_card_are_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, path = script("host"), tmp_path / "host.json"
    path.write_text(json.dumps({"machine": {"device": "Some GPU"}}))
    with pytest.raises(SystemExit, match="is of another machine or version"):
        run(host, monkeypatch, str(path), "--only", "compiling")


STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
REPORT = "\n".join(
    [
        "==PROF== Connected to process 1",
        '"ID","Kernel Name","gpu__time_duration.sum",'
        '"sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",'
        f'"{STALLED.format("wait")}","{STALLED.format("gmma")}"',
        '"","","nsecond","%","inst","inst"',
        '"0","fusedmlp_back_to_back","1,234","56.9","0.5","1.5"',
    ]
)


LOAD = {"MHz": 1305.0, "most MHz": 1980.0, "W": 699.15, "most W": 700.0}


def test_counters_are_read_from_the_profilers_report() -> None:
    assert script("counters").rows(REPORT) == [
        {
            "kernel": "fusedmlp_back_to_back",
            "us": 1.234,
            "special functions": 56.9,
            "stalls": {"gmma": 1.5, "wait": 0.5},
        }
    ]


def test_counters_of_an_mlp_are_those_between_two_kernels_that_wait() -> None:
    names = ["spin_kernel", "first", "second", "spin_kernel", "spin_kernel", "third"]
    cases = script("counters").by_case([{"kernel": name} for name in names])
    assert [[launch["kernel"] for launch in case] for case in cases] == [
        ["first", "second"],
        [],
        ["third"],
    ]


def test_counters_come_with_the_clock_and_the_power(monkeypatch: pytest.MonkeyPatch) -> None:
    counters, asked = script("counters"), []

    def smi(command: list[str], **_: object) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(stdout="1305, 1980, 699.15, 700.00\n")

    monkeypatch.setattr(counters, "sleep", lambda seconds: None)
    monkeypatch.setattr(counters.subprocess, "run", smi)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(uuid="12-34")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert counters.device_state() == LOAD
    assert "--id=GPU-12-34" in asked[0]


@pytest.mark.parametrize(
    ("load", "headings", "figures", "limits"),
    [
        ({}, [], [], "percent of the peak:"),
        (
            {"gelu 8×4→16→4": LOAD},
            ["MHz", "W"],
            ["1305", "699"],
            "1980 MHz at most and takes 700 W:",
        ),
    ],
)
def test_page_says_what_bounds_a_kernel(load, headings, figures, limits) -> None:
    counters = script("counters")
    kernels = [{"mlp": "gelu 8×4→16→4", "plan": "back_to_back", **counters.rows(REPORT)[0]}]
    where = {"device": "Some GPU", "torch": "2.11.0"}
    results = {"machine": where, "load": load, "kernels": kernels}
    section = script("sections").counters_section(results)
    assert cells(section, "MLP")[3:-1] == headings
    assert cells(section, "gelu 8×4→16→4") == [
        *("`back_to_back`", "1.23", "56.9"),
        *figures,
        "gmma 1.5, wait 0.5",
    ]
    assert limits in section


def test_page_sets_the_ways_to_run_a_norm_side_by_side() -> None:
    case = {"mlp": "4096×768", "us": {"inductor": 138.6, "epilogue": 93.9, "products": 58.4}}
    before = {"mlp": "layer norm, 1×4→8→4", "us": {"inductor": 9.0, "fused": 6.0, "mlp": 5.0}}
    where = {"device": "Some GPU", "torch": "2.11.0"}
    results = {"machine": where, "between": [case], "before": [before]}
    section = script("sections").norms_section(results)
    assert cells(section, "4096×768") == ["139", "93.9", "–", "58.4"]
    assert cells(section, "layer norm, 1×4→8→4")[:3] == ["9", "6", "5"]


def test_page_sets_a_sum_within_beside_one_that_follows() -> None:
    us = {"mlp": 240.8, "sum": 263.5, "within": 245.9, "sum; norm": 271.6, "within; norm": 256.4}
    us |= {"norm alone": 260.1, "within; norm alone": 258}
    case = {"mlp": "16384×768", "tiles": 0.97, "us": us}
    results = {"machine": {"device": "Some GPU", "torch": "2.11.0"}, "cases": [case]}
    section = script("sections").sums_section(results)
    assert cells(section, "16384×768") == ["0.97", "241", "264 → 246", "272 → 256", "260 → 258"]


def test_page_sets_convolutions_beside_cudnns() -> None:
    case = {"block": "32×56", "plan": "epilogue", "us": {"eager": 9.1, "inductor": 8, "fused": 7}}
    results = {"machine": {"device": "Some GPU", "torch": "2.11.0"}, "cases": [case]}
    section = script("sections").convolutions_section(results)
    assert cells(section, "32×56") == ["9.1", "8", "7", "epilogue"]


def test_page_sets_training_steps_of_models_side_by_side() -> None:
    ways = ("eager", "inductor", "fusedmlp")
    figures = {
        name: dict(zip(ways, values, strict=True))
        for name, values in {
            "us": (9e3, 8e3, 4e3),
            "gpu_us": (8e3, 7e3, 3e3),
            "mb": (900.4, 80, 40),
            "kernels": (30, 20, 10),
            "losses": ([1.0, 2.0], [1.0, 2.5], [1.0, 1.75]),
        }.items()
    }
    case = {"model": "GPT", "batch": "4 rows", "failures": {}, "sites": "1 of 1", **figures}
    case |= {"plans": ["epilogue"], "reasons": []}
    late = {"model": "ViT", "batch": "1 image", "failures": {"all": "out of time"}}
    results = {"machine": {"device": "Some GPU", "torch": "2.11.0"}, "cases": [case, late]}
    section = script("sections").training_models_section(results)
    assert cells(section, "GPT, 4 rows") == [
        *("1 of 1, epilogue", "9 / 8 / 4", "2.00", "8 / 7 / 3", "900 / 80 / 40"),
        *("30 / 20 / 10", "5.0e-01 / 2.5e-01"),
    ]
    assert cells(section, "ViT, 1 image")[0] == "failed: out of time"


def trained(parallel: str, ranks: int, rows: int, tokens: float, **others: Any) -> dict[str, Any]:
    """A run of the training example in which Inductor failed."""
    results = [
        {
            "backend": way,
            "step": rows / tokens,
            "tokens_per_second": tokens * faster,
            "peak": 10.0,
            "kernels": 3,
            "sites": others.get("sites", ranks * ["1 of 1"]),
            "collectives": [0.25] * ranks if ranks > 1 else [],
            "exposed": [0.125, 0.375] if ranks > 1 else [],
            "losses": [1.0],
        }
        for way, faster in (("eager", 1), ("fusedmlp", 2))
    ]
    run = {"parallel": parallel, "ranks": ranks, "tensor": others.get("tensor", 1), "rows": rows}
    return {**run, "results": results, "failures": {"inductor": "out of time"}}


def test_page_sets_ways_to_spread_a_model_side_by_side() -> None:
    runs = [
        trained("none", 1, 2, 1000.0),
        trained("none", 1, 4, 1250.0),
        trained("tp", 2, 4, 1500.0, tensor=2, sites=["1 of 1", "0 of 1"]),
        trained("tp-fsdp", 4, 8, 2000.0, tensor=2),
    ]
    results = {"machine": {"device": "Some GPU", "torch": "2.11.0"}, "gpus": 4, "runs": runs}
    section = script("sections").many_gpus_section(results)
    assert cells(section, "TP 2") == [
        *("2", "4", "2.67 / – / 2.67", "–", "1.5 / – / 3", "10 / – / 10"),
        *("25% (25%) / – / 25% (25%)", "3 / – / 3", "1 of 1, 0 of 1", "1.0000", "– / 0.0e+00"),
        *("2", "4", "75% / – / 75%", "1.20 / – / 1.20"),
    ]
    assert cells(section, "TP 2 × FSDP2 2")[-2:] == ["50% / – / 50%", "– / – / –"]
    assert "- TP 2 on 2, 4 rows, inductor: out of time" in section


TRAINER = """
import json, sys, time
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
backends = options["--backends"].split(",")
for number, backend in enumerate(backends):
    if backend == "inductor" and options["--batch"] == "2":
        raise RuntimeError("no memory")
    if options["--batch"] == "3":
        time.sleep(60)
    found = [{"backend": each} for each in backends[: number + 1]]
    open(options["--json"], "w").write(json.dumps({"setting": {}, "results": found}))
"""


def test_runs_on_many_gpus_go_on_after_failures_and_time_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many_gpus, results = script("many_gpus"), tmp_path / "results.json"
    put(tmp_path / "trainer.py", TRAINER)
    monkeypatch.setattr(many_gpus, "EXAMPLE", tmp_path / "trainer.py")
    chosen = [many_gpus.Run("none", 1, 1, rows) for rows in (1, 2, 3)]
    monkeypatch.setattr(many_gpus, "runs", lambda ranks, rows: chosen)
    monkeypatch.setattr(sys, "argv", ["", str(results), "--ranks", "2", "--limit", "5"])
    assert many_gpus.main() == 0
    written = json.loads(results.read_text())["runs"]
    found = [[each["backend"] for each in run["results"]] for run in written]
    assert found == [["eager", "inductor", "fusedmlp"], ["eager", "fusedmlp"], []]
    assert [run["failures"] for run in written] == [
        {},
        {"inductor": "RuntimeError: no memory"},
        {"eager": "out of time"},
    ]
    put(tmp_path / "trainer.py", TRAINER.replace("RuntimeError", "MemoryError").replace("60", "0"))
    many_gpus.main()  # tries again what there was no time for, and nothing else
    written = json.loads(results.read_text())["runs"]
    assert [len(run["results"]) for run in written] == [3, 2, 3]
    assert [run["failures"] for run in written] == [{}, {"inductor": "RuntimeError: no memory"}, {}]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_many_gpus_train_each_way_on_all_ranks_and_alone(ranks: int) -> None:
    runs = script("many_gpus").runs(ranks, 2)
    on_all = [(run.parallel, run.tensor) for run in runs if run.ranks == ranks]
    within = [("tp-fsdp", tensor) for tensor in (2, 4) if tensor < ranks]
    assert on_all == [("ddp", 1), ("fsdp", 1), ("tp", ranks), *within]
    assert {run.rows for run in runs if run.ranks == 1} == {2, 2 * ranks}
    assert all(run.rows % (run.ranks // run.tensor) == 0 for run in runs)


def test_random_mlps_are_summed_up_by_seed():
    def row(width, inductor, ours, family):
        return {"width": width, "us": {"inductor": inductor, "fusedmlp": ours, "stream": family}}

    rows = [row(64, 8.0, 2.0, 2.0), row(1024, 9.7, 10.0, 5.0)]
    run = {"seed": 7, "drawn": 3, "training": False, "rows": rows}
    machine = {"torch": "2.11.0", "triton": "3.6.0"}
    section = script("sections").random_mlps_section({"machine": machine, "runs": [run]})
    expected = ["7", "2 of 3", "1.97", "4.00", "0.97", "1", "41.4%"]
    assert cells(section, "inference") == expected


def test_random_mlps_are_measured_once(tmp_path):
    random_mlps, file = script("random_mlps"), tmp_path / "random.jsonl"
    cells = random_mlps.chosen(5, 7, False)
    assert random_mlps.unmeasured(cells, False, file) == cells
    rows = [random_mlps.case_of(cell, False).row() for cell in (cells[0], cells[3])]
    measured = {"us": {"inductor": 8.0}, "spread": {}, "auto": ["inductor", "as fast"]}
    file.write_text("".join(json.dumps(row | measured) + "\n" for row in rows))
    assert random_mlps.unmeasured(cells, False, file) == [cells[1], cells[2], cells[4]]


def test_deep_mlps_have_their_kernels():
    model = {"model": "a tower", "rows": 8, "widths": [4, 16, 4], "us": {}}
    model |= {"inductor kernels": 3, "fusedmlp kernels": 2}
    model["us"] = {"inductor": 30.0, "fusedmlp": 20.0}
    machine = {"device": "a GPU", "torch": "2.11.0", "fusedmlp": "0.1.0"}
    section = script("sections").deep_mlps_section({"machine": machine, "models": [model]})
    assert cells(section, "a tower, 4→16→4") == ["8", "3 → 2", "30", "20", "1.50"]
