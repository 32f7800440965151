"""Fitting the model of configurations, and holding what ships to what was measured."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch

pytest.importorskip("triton")

from fusion_backend.bench.config_fitting import Sample, choice, errors, fitted, samples
from fusion_backend.kernels.host.candidates import candidates
from fusion_backend.kernels.host.config_times import FITTED, predicted
from fusion_backend.kernels.host.problems import Problem, row_class
from fusion_backend.kernels.host.targets import H100

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "configurations.json"


@pytest.mark.parametrize("kernel", FITTED)
def test_what_is_taken_was_measured_to_be_no_slower_than_what_is_listed(kernel):
    """An H200 has the multiprocessors and the shared memory of an H100."""
    choices = [choice(sample) for sample in samples(kernel, MEASURED, H100)]
    assert len(choices) > 100
    assert max(each.taken / each.listed for each in choices) < 1.03
    listed = fmean(math.log(each.listed / each.fastest) for each in choices)
    taken = fmean(math.log(each.taken / each.fastest) for each in choices)
    assert taken < 0.08 < 0.15 < listed


def test_fitting_finds_the_factors_that_made_the_times():
    true = {"epilogue": replace(FITTED["epilogue"], latency=1.4, products=500.0, memory=2.5)}

    def made(rows: int, width: int) -> Sample:
        problem = Problem(row_class(rows), width, 4 * width, 0, False, torch.bfloat16)
        problem = problem._replace(exact_rows=rows)
        configs = candidates("epilogue", problem)
        times = {each: predicted("epilogue", each, problem, H100, true) for each in configs}
        return Sample("epilogue", problem, H100, times)

    found = [made(rows, width) for rows in (8, 60, 300, 2000) for width in (256, 1024, 4096)]
    factors = fitted(found[::2], rounds=18)

    def off(by):
        return fmean(abs(e) for each in found[1::2] for e in errors(each, by, each.microseconds))

    assert off(factors) < 0.05 < 0.1 < off(FITTED)
