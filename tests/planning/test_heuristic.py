"""The heuristic, held to the measurements that ship with the package."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fusion_backend.bench.fitting import of_today
from fusion_backend.planning.cases import is_half
from fusion_backend.planning.cost_model import FITTED
from fusion_backend.planning.gpus import gpu_named
from fusion_backend.planning.heuristic import predicted
from fusion_backend.planning.measurements import INDUCTOR, MAX_AUTOTUNE, WORTHWHILE, Kind, shipped

HALF = Kind("gelu_tanh", training=False, precision="bfloat16")
FAMILIES = ("back_to_back", "epilogue", "library")


# An H100 without kernels made for Hopper, of which its table has few: a GPU like those that nothing
# was measured on.
UNKNOWN = replace(gpu_named("h100"), capability=(9, 1))


def measured(model):
    """What was measured on a GPU in inference in 16 bits, and would run so today."""
    gpu = gpu_named(model)
    for each in shipped(gpu):
        if gpu.name in each.source and is_half(each.kind.precision) and not each.kind.training:
            yield of_today(each, gpu)


def choices(model, gpu):
    """Each MLP measured, and the family that the heuristic would have taken without that."""
    for each in measured(model):
        families = [name for name in each.microseconds if name not in (INDUCTOR, MAX_AUTOTUNE)]
        guess = predicted(families, each.kind, each.rows, each.widths, gpu)
        family = max(families, key=lambda family: guess.speedup(family) or 0.0, default=None)
        worthwhile = family is not None and (guess.speedup(family) or 0.0) >= WORTHWHILE
        yield each, family if worthwhile else None


@pytest.mark.parametrize(("model", "gpu"), [("h100", UNKNOWN), ("h200", gpu_named("h200"))])
def test_all_that_it_would_fuse_was_measured_not_to_be_slower(model, gpu):
    gained, possible = 0.0, 0.0
    for each, family in choices(model, gpu):
        speedup = 1.0 if family is None else each.speedup(family)
        assert speedup >= 0.98, (each, family)
        gained += math.log(speedup)
        possible += math.log(max(map(each.speedup, each.microseconds)))
    assert gained / possible > 0.8, "of the possible gain"


@pytest.mark.parametrize("training", [True, False])
def test_training_and_float32_are_left_alone(training):
    kind = Kind("gelu_tanh", training, "bfloat16" if training else "ieee")
    guess = predicted(FAMILIES, kind, 65536, (64, 256, 64), UNKNOWN)
    assert guess.microseconds.keys() == {INDUCTOR}


@pytest.mark.parametrize("gpu", ["a100", "l40s", "b200", "mi300x"])
def test_a_narrow_mlp_of_many_rows_is_fused_on_every_gpu(gpu):
    guess = predicted(FAMILIES, HALF, 1 << 16, (64, 256, 64), gpu_named(gpu))
    assert guess.speedup("back_to_back") > 1.5
    assert not guess.measured


@pytest.mark.parametrize("gpu", ["a100", "l40s", "b200", "mi300x"])
@pytest.mark.parametrize(
    ("kind", "rows", "widths"),
    [
        (Kind("gelu_tanh", training=True, precision="bfloat16"), 16, (768, 3072, 768)),
        (Kind("gelu_tanh", training=False, precision="ieee"), 16, (768, 3072, 768)),
        (Kind("gelu_tanh", training=False, precision="tf32"), 16, (768, 3072, 768)),
        (Kind("swiglu", training=False, precision="bfloat16"), 4096, (4096, 14336, 4096)),
        (Kind("gelu", training=False, precision="bfloat16"), 1, (768, 3072, 768)),
    ],
)
def test_where_nothing_structural_is_saved_nothing_is_fused(gpu, kind, rows, widths):
    guess = predicted(("back_to_back", "epilogue"), kind, rows, widths, gpu_named(gpu))
    assert all(
        (guess.speedup(family) or 0.0) < WORTHWHILE
        for family in guess.microseconds
        if family != INDUCTOR
    )


def test_only_what_was_fitted_on_a_gpu_is_taken_at_its_word_there():
    a100, families = gpu_named("a100"), ("epilogue", "stream")
    arguments = (families, HALF, 16, (768, 3072, 768), a100)
    ships = predicted(*arguments).microseconds
    own = {**FITTED, "stream": replace(FITTED["stream"])}  # equal factors, fitted here
    found = predicted(*arguments, own).microseconds
    assert found["stream"] < ships["stream"]
    assert found["epilogue"] == ships["epilogue"]


def test_a_plan_that_cannot_run_is_not_predicted():
    guess = predicted(("epilogue",), HALF, 16, (768, 3072, 768), gpu_named("a100"))
    assert set(guess.microseconds) == {INDUCTOR, "epilogue"}
