"""Measuring while a graph is compiled, on a GPU: what it finds, and that it disturbs nothing."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

import fusion_backend
from fusion_backend.instruments.timing import interleaved, replays, rotated
from fusion_backend.planning import while_compiling
from fusion_backend.planning.cases import Case
from fusion_backend.planning.gpus import gpu_of
from fusion_backend.planning.measurements import WORTHWHILE
from fusion_backend.planning.stopwatch import Candidate, GpuStopwatch, compared
from fusion_backend.planning.user_table import UserTable

GPU = torch.device("cuda", 0)
# Of no table: no grid of MLPs has such widths.
WIDTH, HIDDEN = 72, 208


@pytest.fixture
def measuring(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDMLP_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FUSEDMLP_MEASURE", "1")
    while_compiling.measured_once.cache_clear()
    return UserTable.of(gpu_of(GPU))


def model_and_input(rows=4096):
    layers = nn.Linear(WIDTH, HIDDEN), nn.GELU("tanh"), nn.Linear(HIDDEN, WIDTH)
    model = nn.Sequential(*layers).to(GPU, torch.bfloat16)
    return model, torch.randn(rows, WIDTH, device=GPU, dtype=torch.bfloat16)


def test_a_stopwatch_agrees_with_replayed_graphs():
    calls = [(torch.randn(2048, 2048, device=GPU, dtype=torch.bfloat16),) for _ in range(4)]

    def squared(x):
        return x @ x

    candidates = {"squared": Candidate(squared, calls)}
    squared(*calls[0])
    quick = compared(candidates, GpuStopwatch(), 0.1)["squared"]
    slow = interleaved({"squared": replays(squared, rotated(calls))})["squared"].median
    assert 0.8 < quick / slow < 1.25


def test_a_site_is_measured_once_and_nothing_is_disturbed(measuring):
    model, x = model_and_input()
    random, stream = torch.cuda.get_rng_state(GPU), torch.cuda.current_stream()
    memory = torch.cuda.memory_allocated(GPU)
    with torch.no_grad():
        compiled = torch.compile(model, backend="fusedmlp")
        y = compiled(x)
        (name,) = measuring.sites()
        written = measuring.path.stat().st_mtime_ns
        torch._dynamo.reset()
        (site,) = fusion_backend.explain(model, x).sites
        torch.testing.assert_close(y, model(x), rtol=2e-2, atol=2e-2)
        del y
    assert measuring.path.stat().st_mtime_ns == written
    assert "4096×72→208→72" in name
    assert "measured here for this MLP" in site.detail
    assert torch.equal(torch.cuda.get_rng_state(GPU), random)
    assert torch.cuda.current_stream() == stream
    del compiled
    torch._dynamo.reset()
    assert torch.cuda.memory_allocated(GPU) <= memory + (1 << 20)


def test_the_family_that_was_faster_is_taken(measuring):
    model, x = model_and_input()
    with torch.no_grad():
        (site,) = fusion_backend.explain(model, x).sites
    (times,) = measuring.sites().values()
    best = min(times, key=lambda name: times[name])
    worth = times["inductor"] / times[best] >= WORTHWHILE
    assert site.plan == (best if worth else None)


@pytest.mark.parametrize("rows", [16, 512, 16384])
@pytest.mark.parametrize("form", ["gelu_tanh", "swiglu"])
@pytest.mark.parametrize("widths", [(64, 256), (768, 3072)])
def test_measuring_takes_as_long_as_promised(measuring, rows, form, widths):
    setting = Case.of_form(form, rows, *widths).setting(GPU)
    families = ["epilogue", *(["back_to_back"] if widths[0] == 64 else [])]
    while_compiling.times(setting, families)  # compiles
    while_compiling.measured_once.cache_clear()
    measuring.path.unlink()
    torch.cuda.synchronize()
    began = time.perf_counter()
    assert while_compiling.times(setting, families) is not None
    torch.cuda.synchronize()
    assert time.perf_counter() - began < 0.2


def test_under_deterministic_algorithms_nothing_is_measured(measuring):
    model, x = model_and_input()
    torch.use_deterministic_algorithms(True)
    try:
        with torch.no_grad():
            fusion_backend.explain(model, x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert measuring.sites() == {}


def test_where_the_option_says_so_nothing_is_measured(measuring):
    model, x = model_and_input()
    with torch.no_grad():
        fusion_backend.explain(model, x, options={"fusedmlp.measure": False})
    assert measuring.sites() == {}


def test_within_a_capture_nothing_is_measured(measuring):
    setting = Case.of_form("gelu_tanh", 512, WIDTH, HIDDEN).setting(GPU)
    x = torch.zeros(1, device=GPU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        assert while_compiling.times(setting, ["epilogue"]) is None
    graph.replay()
    assert measuring.sites() == {}
