"""What is known of a CPU's speed: how it is measured, kept and read between what was measured."""

from __future__ import annotations

import pytest
import torch

from fusion_backend.kernels.cpu_rows.compiling import CompilationError
from fusion_backend.planning import cpu_profit, cpu_rates
from fusion_backend.planning.cpu_rates import Cell, Rates

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
    cpu_rates._of_this_machine.cache_clear()
    yield done
    cpu_rates._of_this_machine.cache_clear()


def test_a_calibration_is_kept_between_processes(measurements):
    first = cpu_rates.rates(torch.float32, may_measure=True)
    assert (first.cells, len(measurements)) == (CELLS, 1)
    cpu_rates._of_this_machine.cache_clear()  # as in another process
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
    cpu_rates._of_this_machine.cache_clear()
    assert cpu_rates.rates(torch.float32, may_measure=True).cells == CELLS
    assert len(measurements) == 2


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
    assert cpu_rates.rates(torch.float32, may_measure=True) is cpu_rates.DEFAULT


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


def test_a_dear_activation_makes_ratios_smaller():
    rates = Rates((Cell(64, 1024, {"unfused": 2e-3, "rows": 1e-3}),), "made up")
    sizes = (1024, (64, 256, 64), False)
    cheap, dear = (
        cpu_profit.speedup("rows", rates, *sizes, (activation,), 1)
        for activation in ("relu(x)", "mish(x)")
    )
    assert 1.0 < dear < cheap < 2.0


def test_a_training_step_of_a_gated_mlp_is_expected_to_gain_less():
    rates = Rates((Cell(64, 1024, {"unfused": 2e-3, "rows": 1e-3}),), "made up")
    plain, gated = (
        cpu_profit.speedup("rows", rates, 1024, (64, 256, 64), gated, (text,), 1, training=True)
        for gated, text in ((False, "relu(x)"), (True, "relu(g) * u"))
    )
    assert 1.0 < gated < plain < 2.0


def test_sums_of_gradients_are_small_where_rows_are_many_and_threads_are_few():
    small = cpu_profit.sums_are_small
    assert small(4096, (256, 1024, 256), False, 2)
    assert small(2**18, (32, 128, 32), True, 64)
    assert not small(64, (768, 3072, 768), False, 64)
