"""The cost model: it grows with the work, and fitting finds what made the times."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, median

import pytest

from fusion_backend.bench.fitting import Sample, errors, fitted, samples
from fusion_backend.planning.cost_model import FITTED, Work, predicted
from fusion_backend.planning.gpus import gpu_named
from fusion_backend.planning.measurements import INDUCTOR, shipped

H100, H200 = gpu_named("h100"), gpu_named("h200")


@pytest.mark.parametrize("name", FITTED)
def test_more_work_takes_longer(name):
    widths = (64, 256, 64) if name == "back_to_back" else (768, 3072, 768)
    times = [predicted([name], Work(rows, widths), H200)[name] for rows in (1, 64, 4096, 65536)]
    assert times == sorted(times)
    assert times[-1] > 4 * times[0]
    gated = predicted([name], Work(4096, widths, gated=True), H200)[name]
    assert gated > times[2]


def test_a_faster_gpu_takes_less():
    for work in (Work(16, (4096, 16384, 4096)), Work(65536, (64, 256, 64))):
        slow, fast = (predicted(FITTED, work, gpu_named(name)) for name in ("l4", "h200"))
        assert all(slow[name] > fast[name] for name in (INDUCTOR, "epilogue", "back_to_back"))


def test_fitting_finds_the_factors_that_made_the_times():
    true = {
        INDUCTOR: replace(FITTED[INDUCTOR], start=3.1, memory=0.6, products=0.5),
        "library": replace(FITTED["library"], start=1.2, products=0.45),
    }
    sizes = [(rows, width) for rows in (1, 64, 512, 4096) for width in (64, 512, 2048)]
    found = []
    for rows, width in sizes:
        work = Work(rows, (width, 4 * width, width))
        found.append(Sample(work, H200, predicted(["library"], work, H200, true)))
    factors = fitted(found[::2], rounds=14)
    for name in true:
        assert fmean(map(abs, errors(name, found[1::2], factors))) < 0.05
        assert fmean(map(abs, errors(name, found[1::2], FITTED))) > 0.1


@pytest.mark.parametrize(
    ("name", "off"),
    [
        (INDUCTOR, 0.1),
        ("epilogue", 0.1),
        ("library", 0.08),
        ("stream", 0.15),
        ("back_to_back", 0.2),
    ],
)
def test_it_is_near_on_a_gpu_that_it_was_not_fitted_to(name, off):
    """Fitted to the H200, held to the H100: the median of what it is off by."""
    own = [m for m in shipped(H100) if "H100" in m.source]
    found = errors(name, samples(own, H100), FITTED)
    assert len(found) > 30
    assert median(map(abs, found)) < off
    assert median(map(abs, found)) < FITTED[name].deviation
