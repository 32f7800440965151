"""What is known of a CPU's speed: how it is measured, kept and read between what was measured."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from fusion_backend.kernels.cpu_rows.compiling import CompilationError
from fusion_backend.planning import cpu_model, cpu_rates, undisturbed
from fusion_backend.planning.cpu_rates import Cell, Rates
from fusion_backend.planning.user_table import UserTable, content_hash

TURNS = undisturbed.BRIEFLY
CELLS = (Cell(64, 16, {"unfused": 3.0, "rows": 2.0}), Cell(256, 16, {"unfused": 4.0, "rows": 4.0}))


@pytest.fixture
def measurements(monkeypatch, tmp_path):
    """How often a calibration measured, of a machine that is made up."""
    monkeypatch.setenv("FUSEDMLP_CACHE_DIR", str(tmp_path))
    done = []

    def measured(dtype, training):
        done.append((dtype, training))
        yield from CELLS

    monkeypatch.setattr(cpu_rates, "measured", measured)
    cpu_rates.calibration.cache_clear()
    yield done
    cpu_rates.calibration.cache_clear()


def test_a_calibration_is_kept_between_processes(measurements):
    first = cpu_rates.rates(torch.float32, may_measure=True)
    assert (first.cells, len(measurements)) == (CELLS, 1)
    cpu_rates.calibration.cache_clear()  # as in another process
    assert cpu_rates.rates(torch.float32, may_measure=True) == first
    assert len(measurements) == 1
    cpu_rates.rates(torch.bfloat16, may_measure=True)
    assert len(measurements) == 2


def test_training_is_calibrated_by_itself_and_once(measurements):
    for _ in range(2):
        assert cpu_rates.rates(torch.float32, may_measure=True, training=True).cells == CELLS
    cpu_rates.rates(torch.float32, may_measure=True)
    assert measurements == [(torch.float32, True), (torch.float32, False)]
    unmeasured = cpu_rates.rates(torch.float32, may_measure=False, training=True)
    assert unmeasured is cpu_rates.DEFAULT_TRAINING


def test_half_a_file_is_measured_again(measurements, tmp_path):
    cpu_rates.rates(torch.float32, may_measure=True)
    (path,) = tmp_path.rglob("*.json")
    path.write_text(path.read_text()[:20])
    cpu_rates.calibration.cache_clear()
    with pytest.warns(UserWarning, match="is no table of measurements"):
        assert cpu_rates.rates(torch.float32, may_measure=True).cells == CELLS
    assert len(measurements) == 2


def test_what_others_disturbed_is_not_kept_and_is_measured_again_later(measurements, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(cpu_rates.time, "monotonic", lambda: clock[0])
    disturbed = (Cell(64, 1, {"unfused": 3.0, "rows": 2.0}), Cell(64, 16, {}))

    def measured(dtype, training):
        measurements.append((dtype, training))
        yield from disturbed if len(measurements) < 3 else CELLS

    monkeypatch.setattr(cpu_rates, "measured", measured)
    first = cpu_rates.rates(torch.float32, may_measure=True)
    known = {(cell.width, cell.rows): cell for cell in first.cells}
    defaults = {(cell.width, cell.rows): cell for cell in cpu_rates.DEFAULT.cells}
    assert known == {**defaults, (64, 1): disturbed[0]}
    assert "others used" in first.source
    assert cpu_rates.rates(torch.float32, may_measure=True) == first
    assert len(measurements) == 1  # not at every plan
    cpu_rates.calibration.cache_clear()  # as in another process
    assert cpu_rates.rates(torch.float32, may_measure=True).cells == first.cells
    assert len(measurements) == 2
    clock[0] += 3600.0
    assert cpu_rates.rates(torch.float32, may_measure=True).cells == CELLS
    cpu_rates.calibration.cache_clear()
    assert cpu_rates.rates(torch.float32, may_measure=True).cells == CELLS
    assert len(measurements) == 3


class Machine:
    """A clock, and runs that take what is said, of which threads have waited for a part."""

    def __init__(self, monkeypatch, counts_waiting):
        self.now, self.waited = 0.0, 0.0
        monkeypatch.setattr(undisturbed.time, "perf_counter", lambda: self.now)
        waited = (lambda: self.waited) if counts_waiting else (lambda: None)
        monkeypatch.setattr(undisturbed, "waited_seconds", waited)

    def runs(self, *times):
        """A way that takes these seconds, (seconds, waited), in turns, the last for ever."""
        left = list(times)

        def run():
            seconds, waited = left.pop(0) if len(left) > 1 else left[0]
            self.now += seconds
            self.waited += waited

        return run


def test_a_run_that_waited_for_a_core_is_not_believed(monkeypatch):
    machine = Machine(monkeypatch, counts_waiting=True)
    shorter_but_waited = machine.runs((0.5, 0.1), (2.0, 0.5), (1.0, 0.0))
    ways = {"rows": shorter_but_waited, "unfused": machine.runs((3.0, 0.0))}
    assert undisturbed.least_seconds(ways, math.inf, TURNS) == pytest.approx(
        {"rows": 1.0, "unfused": 3.0}
    )


def test_runs_that_all_waited_are_given_up(monkeypatch):
    machine = Machine(monkeypatch, counts_waiting=True)
    assert undisturbed.least_seconds({"rows": machine.runs((1.0, 0.5))}, math.inf, TURNS) is None
    assert machine.now == TURNS.most


def test_a_time_that_was_found_once_is_not_believed(monkeypatch):
    machine = Machine(monkeypatch, counts_waiting=False)
    growing = machine.runs(*((1.5**i, 0.0) for i in range(TURNS.most)))
    assert undisturbed.least_seconds({"rows": growing}, math.inf, TURNS) is None


def test_disagreeing_runs_are_repeated_until_two_agree(monkeypatch):
    machine = Machine(monkeypatch, counts_waiting=False)
    times = [(1.0, 0.0), *((2.0 + i, 0.0) for i in range(6)), (1.05, 0.0)]
    found = undisturbed.least_seconds({"rows": machine.runs(*times)}, math.inf, TURNS)
    assert found == pytest.approx({"rows": 1.0})


def test_after_the_deadline_only_the_fewest_turns_are_made(monkeypatch):
    machine = Machine(monkeypatch, counts_waiting=True)
    assert undisturbed.least_seconds({"rows": machine.runs((1.0, 0.5))}, 2.0, TURNS) is None
    assert machine.now == TURNS.fewest


def test_linux_counts_how_long_threads_waited():
    waited = undisturbed.waited_seconds()
    if sys.platform == "linux":
        assert waited is not None
        assert waited >= 0.0


def test_a_cache_that_cannot_be_written_to_is_no_obstacle(measurements, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSEDMLP_CACHE_DIR", str(tmp_path / "file"))
    assert cpu_rates.rates(torch.float32, may_measure=True).cells == CELLS


def test_without_leave_to_measure_another_machine_is_believed(measurements):
    assert cpu_rates.rates(torch.float32, may_measure=False) is cpu_rates.DEFAULT
    assert not measurements
    assert len(cpu_rates.DEFAULT.cells) == sum(map(len, cpu_rates.GRID.values()))


def test_a_kernel_that_cannot_be_compiled_is_not_timed(measurements, monkeypatch):
    def refuse(dtype, training):
        raise CompilationError("no compiler")
        yield

    monkeypatch.setattr(cpu_rates, "measured", refuse)
    assert cpu_rates.rates(torch.float32, may_measure=True) == cpu_rates.DEFAULT


def tuned(sizes, **us):
    """Put what ``fusedmlp tune`` measures into the table."""
    table = UserTable.of_cpu(torch.get_num_threads())
    for width, rows in sizes:
        case = cpu_rates.case_of(width, rows, torch.float32, training=False)
        table.add({**cpu_rates.tuned_line(case), "us": us})


def cell_of(width, rows, **conditions):
    known = cpu_rates.rates(torch.float32, may_measure=True, **conditions).cells
    return next((c.seconds for c in known if (c.width, c.rows) == (width, rows)), None)


def test_what_was_tuned_takes_the_place_of_the_calibration(measurements):
    assert cell_of(64, 16) == CELLS[0].seconds
    tuned([(64, 16), (64, 4)], inductor=30.0, rows=20.0)
    assert cell_of(64, 16) == pytest.approx({"unfused": 30e-6, "rows": 20e-6})
    assert cell_of(64, 4) == cell_of(64, 16)
    assert cell_of(256, 16) == CELLS[1].seconds
    assert cell_of(64, 16, tuned=False) == CELLS[0].seconds
    assert cell_of(64, 4, tuned=False) is None
    assert cell_of(64, 4, training=True) is None
    assert len(measurements) == 2  # of inference, and of training


def test_a_width_that_was_tuned_in_part_does_not_count(measurements):
    """With few rows an operation takes longer, and beyond the last the rate would be kept."""
    first, *others = ((32, rows) for rows in cpu_rates.FINER_GRID[32])
    tuned([first], inductor=30.0, rows=20.0)
    assert cell_of(*first) is None
    tuned(others, inductor=30.0, rows=20.0)
    assert cell_of(*first) is not None


def test_where_the_whole_grid_was_tuned_nothing_is_calibrated(measurements):
    sizes = [(width, rows) for width, each in cpu_rates.GRID.items() for rows in each]
    tuned(sizes[:-1], inductor=30.0, rows=20.0)
    tuned(sizes[-1:], inductor=30.0, rows=20.0)
    assert len(cpu_rates.rates(torch.float32, may_measure=True).cells) == len(sizes)
    assert not measurements


def test_what_is_tuned_takes_at_most_as_many_operations_as_what_is_calibrated():
    def most(grid):
        return max(width**2 * max(rows) for width, rows in grid.items())

    assert most(cpu_rates.FINER_GRID) <= most(cpu_rates.GRID)
    assert all(set(rows) <= set(cpu_rates.FINER_GRID[w]) for w, rows in cpu_rates.GRID.items())


def test_tuning_changes_the_identity_of_what_plans_depend_on(measurements):
    before = content_hash()
    cpu_rates.rates(torch.float32, may_measure=True)
    assert content_hash() == before  # what was planned before was planned by it
    tuned([(64, 16)], inductor=30.0, rows=20.0)
    assert content_hash() != before


def test_rates_are_interpolated_in_logarithms_and_kept_beyond_the_grid():
    rates = Rates(CELLS, "made up")

    def of_an_operation(width, rows):
        return rates.seconds("rows", rows, width, 4 * width) / (8.0 * rows * width**2)

    narrow, wide = 2.0 / (16 * 16 * 64**2), 4.0 / (16 * 16 * 256**2)
    assert of_an_operation(64, 16) == pytest.approx(narrow)
    assert of_an_operation(16, 9000) == pytest.approx(narrow)
    assert of_an_operation(128, 16) == pytest.approx((narrow * wide) ** 0.5)
    assert of_an_operation(1024, 1) == pytest.approx(wide)
    assert rates.seconds("onednn", 16, 64, 64) is None


def test_a_function_that_both_compute_makes_ratios_smaller():
    rates = Rates((Cell(64, 1024, {"unfused": 2e-3, "rows": 1e-3}),), "made up")
    sizes = (1024, (64, 256, 64), False)
    cheap, dear = (
        cpu_model.speedup("rows", rates, *sizes, (activation,), 1)
        for activation in ("relu(x)", "log1p(exp2(x))")
    )
    assert 1.0 < dear < cheap < 2.0


def test_functions_that_are_faster_here_make_ratios_larger():
    rates = Rates((Cell(64, 1024, {"unfused": 1e-3, "rows": 1e-3}),), "made up")
    sizes = (1024, (64, 256, 64), False)
    relu, silu, by_tanh = (
        cpu_model.speedup("rows", rates, *sizes, (activation,), 1)
        for activation in ("relu(x)", "silu(x)", "gelu_tanh(x)")
    )
    assert relu == pytest.approx(1.0)
    assert relu < silu < by_tanh


def test_a_chain_of_little_work_is_not_expected_to_lose_threads_that_none_would_use():
    rates = Rates((Cell(64, 1, {"unfused": 2e-3, "rows": 1e-3}),), "made up")
    activations = ("relu(x)", "relu(x)")
    one, two = (
        cpu_model.speedup("rows", rates, 1, (348, 64, 64, 17), False, activations, threads)
        for threads in (1, 2)
    )
    assert one == pytest.approx(two, rel=1e-4)


def test_a_training_step_of_a_gated_mlp_is_expected_to_gain_less():
    rates = Rates((Cell(64, 1024, {"unfused": 2e-3, "rows": 1e-3}),), "made up")
    plain, gated = (
        cpu_model.speedup("rows", rates, 1024, (64, 256, 64), gated, (text,), 1, training=True)
        for gated, text in ((False, "relu(x)"), (True, "relu(g) * u"))
    )
    assert 1.0 < gated < plain < 2.0


def test_of_small_mlps_those_are_left_alone_that_save_no_call():
    saves_none = cpu_model.saves_no_time_of_calls
    assert saves_none(1, (64, 64, 64), products=2, biases=False)
    assert not saves_none(1, (64, 64, 64), products=2, biases=True)
    assert not saves_none(1, (64, 64, 64), products=3, biases=False)
    assert not saves_none(100, (64, 64, 64), products=2, biases=False)


def test_sums_of_gradients_are_small_where_rows_are_many_and_threads_are_few():
    small = cpu_model.sums_are_small
    assert small(4096, (256, 1024, 256), False, 2)
    assert small(2**18, (32, 128, 32), True, 64)
    assert not small(64, (768, 3072, 768), False, 64)
