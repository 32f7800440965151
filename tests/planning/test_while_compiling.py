"""Measuring while a graph is compiled, with a clock and kernels of the tests' own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusion_backend.compat.tf32 import multiplying_in_tf32
from fusion_backend.kernels.reference import forward
from fusion_backend.mlp.expression import parse
from fusion_backend.planning import profit, while_compiling
from fusion_backend.planning.cases import Case
from fusion_backend.planning.cost_model import FITTED
from fusion_backend.planning.gpus import gpu_named
from fusion_backend.planning.rivals import Rivals, bytes_of_values, bytes_of_weights, number_of_sets
from fusion_backend.planning.stopwatch import Candidate, compared
from fusion_backend.planning.user_table import UserTable
from settings import SETTING, symbolic

H100 = gpu_named("h100")
HERE = replace(SETTING, rows=100, in_features=800, hidden_features=3200, target=None)
CPU = torch.device("cpu")


class World:
    """A clock, and a stopwatch of kernels that take a given time; measuring moves the clock."""

    def __init__(self, **microseconds):
        self.microseconds, self.seconds, self.calls = microseconds, 0.0, []

    def clock(self):
        return self.seconds

    def stopwatch(self, candidate, calls):
        self.calls.append((candidate.function, calls))
        took = self.microseconds[candidate.function]
        self.seconds += 1e-6 * took * calls + 1e-3
        return took

    def compared(self, seconds):
        candidates = {name: Candidate(name, [()]) for name in self.microseconds}
        return compared(candidates, self.stopwatch, seconds, self.clock)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with a GPU of which nothing is known; what is measured there, and how often."""
    measured = []

    def timed(setting, families, seconds):
        measured.append(families)
        return {"inductor": 10.0, **dict.fromkeys(families, 8.0), "epilogue": 5.0}

    while_compiling.measured_once.cache_clear()
    monkeypatch.setenv("FUSEDMLP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("fusion_backend.planning.setting.gpu_of", lambda device: H100)
    monkeypatch.setattr(profit, "shipped", lambda gpu: ())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", torch.device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 36, 1 << 36))
    monkeypatch.setattr(while_compiling, "cache_of", lambda device: 50 << 20)
    monkeypatch.setattr(while_compiling, "timed", timed)
    yield measured
    while_compiling.measured_once.cache_clear()


def best(setting=HERE, may_time=True, families=("epilogue",)):
    return profit.best(families, setting, may_time=may_time)


def test_the_factors_of_this_gpu_take_the_place_of_those_that_ship(machine):
    families = ("epilogue", "library", "stream", "back_to_back")
    before = profit.rivals(families, HERE)
    assert "epilogue" in before
    slow = {"epilogue": replace(FITTED["epilogue"], start=500.0)}
    UserTable.of(H100).keep_factors(slow)
    assert profit.rivals(families, HERE) == [name for name in before if name != "epilogue"]
    elsewhere = replace(HERE, target=H100)  # a GPU that is not there has no table of the user's
    assert profit.rivals(families, elsewhere) == before


def test_candidates_take_turns_until_the_time_is_up():
    world = World(slow=900.0, fast=300.0)
    assert world.compared(0.12) == {"slow": 900.0, "fast": 300.0}
    assert world.seconds <= 0.12
    assert {name for name, _ in world.calls} == {"slow", "fast"}
    assert len(world.calls) == 2 * (1 + 9)


def test_a_slow_candidate_is_measured_once_and_a_fast_one_by_many_calls():
    world = World(inductor=90e3, fused=60e3)
    world.compared(0.12)
    assert len(world.calls) == 2
    world = World(inductor=9.0, fused=2.0)
    world.compared(0.12)
    assert {calls for _, calls in world.calls[2:]} == {11, 12}


def test_the_faster_family_is_taken_and_the_grounds_have_the_times(machine):
    verdict = best()
    assert verdict.family == "epilogue"
    assert verdict.expected_speedup == pytest.approx(2.0)
    assert "measured here for this MLP: epilogue 5.0 µs" in verdict.grounds


def test_what_one_process_measured_another_reads(machine):
    best()
    while_compiling.measured_once.cache_clear()
    assert best().family == "epilogue"
    assert len(machine) == 1
    assert UserTable.of(H100).measurements() == ()  # it speaks for no other MLP


def test_it_speaks_for_no_neighbour(machine):
    best()
    best(replace(HERE, rows=101))
    best(replace(HERE, has_bias_up=False))
    best(replace(HERE, activations=(parse("relu(x)"),)))
    assert len(machine) == 4


def test_a_family_that_has_no_kernel_after_all_is_not_taken(machine):
    best()
    assert best(families=("library",)).family is None


@pytest.mark.parametrize(
    "changes",
    [
        {"target": H100},
        {"training": True},
        {"operands": ("vector",)},
        {"strided": True},
        {"convolution": True},
        {"dtype": torch.float32},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_of_other_sites_nothing_is_measured(machine, changes):
    best(replace(HERE, **changes))
    assert machine == []


def test_symbolic_rows_are_planned_by_tables(machine):
    best(replace(HERE, rows=symbolic(100)[1]))
    assert machine == []


def test_of_float32_narrow_layers_are_measured_for_each_way_to_multiply(machine):
    narrow = replace(HERE, in_features=16, hidden_features=64, dtype=torch.float32)
    narrow = replace(narrow, further_features=(16,))
    families = ("epilogue", "back_to_back")
    best(narrow, families=families)
    assert machine == [("back_to_back",)]
    with multiplying_in_tf32(True):
        best(narrow, families=families)
    assert machine == [("back_to_back",)] * 2


def test_the_option_switches_it_off(machine):
    best(may_time=False)
    assert machine == []


def test_deterministic_algorithms_are_planned_by_the_model_alone(machine):
    best()
    torch.use_deterministic_algorithms(True)
    try:
        verdict = best()
    finally:
        torch.use_deterministic_algorithms(False)
    assert "measured here" not in verdict.grounds
    assert len(machine) == 1


def test_processes_of_a_distributed_job_choose_alike(machine, monkeypatch):
    best()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert "measured here" not in best().grounds
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert "measured here" in best().grounds


def test_nothing_is_measured_while_a_cuda_graph_is_recorded(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    best()
    assert machine == []


def test_nothing_is_measured_where_memory_is_short(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 36))
    best()
    assert machine == []


def test_what_a_table_has_of_the_very_mlp_is_not_measured_again(machine, monkeypatch):
    measured = Case.of_setting(HERE, 100).measurement
    times = {"inductor": 10.0, "epilogue": 9.0}
    same = replace(measured, microseconds=times, source=f"on an {H100.name}")
    monkeypatch.setattr(profit, "shipped", lambda gpu: (same,))
    assert best().expected_speedup == pytest.approx(10 / 9)
    assert machine == []
    best(replace(HERE, activations=(parse("tanh(x)"),)))
    assert len(machine) == 1


def test_what_cannot_be_measured_is_a_warning_and_is_tried_once(machine, monkeypatch):
    attempts = []

    def fails(*arguments):
        attempts.append(arguments)
        raise torch.OutOfMemoryError("3 GiB")

    monkeypatch.setattr(while_compiling, "timed", fails)
    with pytest.warns(UserWarning, match=r"could not measure.*3 GiB.*FUSEDMLP_MEASURE=0"):
        best()
    best()
    assert len(attempts) == 1


def test_only_what_may_be_fastest_is_compiled():
    target = replace(
        SETTING, rows=1 << 15, in_features=24, hidden_features=96, further_features=(24,)
    )
    assert profit.rivals(("back_to_back", "epilogue"), target) == ["back_to_back"]
    families = ("stream", "back_to_back", "epilogue", "library")
    assert len(profit.rivals(families, replace(SETTING, rows=16))) <= 3


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("layout", ["plain", "transposed", "packed"])
def test_what_stands_for_inductor_multiplies_as_the_mlp_does(gated, layout):
    """All but the activation is the MLP's own: GELU stands for one value, a product for two."""
    setting = replace(
        Case("g * u" if gated else "gelu_tanh(x)", 7, 10, 24, 5).setting(CPU),
        dtype=torch.float32,
        transposed=layout == "transposed",
        plain_layout=layout == "plain",
    )
    rivals = Rivals.of(setting, cache=10_000)
    weights = rivals.sets[-1]
    (given,) = rivals.candidates([], setting.activation)["inductor"].operands[-1]
    assert given is weights
    zero = weights._replace(
        bias_gate=None if weights.bias_gate is None else weights.bias_gate.zero_(),
        bias_up=weights.bias_up.zero_(),
    )
    expected = forward(rivals.x, zero, parse(setting.activation))
    for pads in (False, True):
        torch.testing.assert_close(rivals.unfused(zero, pads), expected, rtol=1e-4, atol=1e-4)
    assert all(w.data_ptr() % 64 == 0 for w in weights if w is not None and w.is_contiguous())


@pytest.mark.parametrize(
    ("form", "hidden", "of_all"),
    [("gelu_tanh", 64, 1), ("gelu_tanh", 600, 0.5), ("swiglu", 600, 2 / 3), ("swiglu", 1200, 0.5)],
)
def test_large_weights_share_memory_that_has_left_the_cache(form, hidden, of_all):
    """A cache of 64 KiB is renewed by 96 KiB: 49,152 elements."""
    setting, cache = Case.of_form(form, 7, 96, hidden).setting(CPU), 1 << 16
    weights = Rivals.of(setting, cache).sets[0]
    matrices = [w for w in weights if w is not None and w.dim() == 2]
    start = min(w.data_ptr() for w in matrices)
    taken = max(w.data_ptr() + w.nbytes for w in matrices) - start
    assert taken == pytest.approx(of_all * sum(w.nbytes for w in matrices), rel=0.01)
    if weights.weight_gate is not None:
        between = weights.weight_up.data_ptr() - weights.weight_gate.data_ptr()
        assert min(2 * between, weights.weight_gate.nbytes) >= 1.5 * cache
        assert between <= weights.weight_gate.nbytes
    vectors = [w for w in weights if w is not None and w.dim() == 1]
    assert all(v.data_ptr() >= start + taken for v in vectors[:-1]) or of_all == 1


@pytest.mark.parametrize(("out", "kernels"), [(8, [3]), (10, [3, 5])])
def test_inductor_may_pad_a_width_that_is_no_whole_number_of_pieces(out, kernels):
    rivals = Rivals.of(Case("gelu_tanh(x)", 7, 16, 24, out).setting(CPU), cache=10_000)
    names = rivals.candidates([], "gelu_tanh(x)")
    assert [rivals.kernels_of(name) for name in names] == kernels


def test_weights_leave_the_cache_and_memory_is_foreseen():
    setting = Case.of_form("gelu_tanh", 16, 768, 3072).setting(CPU)
    cache = 50 << 20
    rivals = Rivals.of(setting, cache)
    held = rivals.x.nbytes + sum(w.nbytes for each in rivals.sets for w in each if w is not None)
    assert len(rivals.sets) == number_of_sets(setting, cache) == 9
    foreseen = bytes_of_weights(setting, cache) + bytes_of_values(setting)
    assert 1.4 * cache <= held <= foreseen * 1.01


def test_the_programs_random_numbers_are_not_drawn():
    before = torch.get_rng_state()
    Rivals.of(Case.of_form("swiglu", 7, 10, 24).setting(CPU), 1000)
    assert torch.equal(torch.get_rng_state(), before)
