"""Measuring on a GPU: times, and what `max-autotune` measures while it compiles."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

import fusion_backend
from fusion_backend.bench.tuning import measure
from fusion_backend.instruments.timing import interleaved, replays, rotated
from fusion_backend.planning import on_the_spot, profit
from fusion_backend.planning.cases import Case
from fusion_backend.planning.gpus import gpu_of
from fusion_backend.planning.user_table import UserTable

GPU = torch.device("cuda", 0)


def test_a_replay_takes_as_long_as_the_memory_it_copies():
    sizes = {"small": 1 << 22, "large": 1 << 26}
    timers = {
        name: replays(torch.clone, rotated([(torch.empty(n, device=GPU),)]))
        for name, n in sizes.items()
    }
    times = interleaved(timers)
    assert times["large"].median > 4 * times["small"].median
    assert all(each.spread < 0.5 for each in times.values())


@pytest.mark.parametrize("form", ["gelu_tanh", "swiglu"])
@pytest.mark.parametrize("training", [False, True])
def test_every_plan_is_timed_and_right(form, training):
    row = measure(Case.of_form(form, 256, 64, 256, training=training), GPU)
    assert {"inductor", "epilogue"} <= row["us"].keys()
    assert "failures" not in row
    assert all(0 < time < 1000 for time in row["us"].values())
    assert all(error <= 1.1 * row["error"]["inductor"] for error in row["error"].values())


def test_max_autotune_measures_an_unknown_mlp_once_and_disturbs_nothing(tmp_path, monkeypatch):
    on_the_spot.measure_once.cache_clear()
    monkeypatch.setenv("FUSEDMLP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(profit, "shipped", lambda architecture: ())
    layers = nn.Linear(64, 256), nn.GELU("tanh"), nn.Linear(256, 64)
    model = nn.Sequential(*layers).to(GPU, torch.bfloat16)
    x = torch.randn(256, 64, device=GPU, dtype=torch.bfloat16)
    random, memory = torch.cuda.get_rng_state(GPU), torch.cuda.memory_allocated(GPU)
    with torch.no_grad():
        (site,) = fusion_backend.explain(model, x, mode="max-autotune").sites
        table = UserTable.of(gpu_of(GPU))
        written = table.path.stat().st_mtime_ns
        (again,) = fusion_backend.explain(model, x, mode="max-autotune").sites
    assert table.path.stat().st_mtime_ns == written
    (measured,) = table.measurements()
    assert {"inductor", "max_autotune", "epilogue"} <= measured.microseconds.keys()
    assert "at 256 rows of 64→256→64" in site.detail
    assert again == site
    assert torch.equal(torch.cuda.get_rng_state(GPU), random)
    assert torch.cuda.memory_allocated(GPU) == memory
