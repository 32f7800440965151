"""The Gluon kernel without a GPU: what it is chosen for, and its machine code."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
import triton

from fusion_backend.kernels.back_to_back import launch_sm90 as hopper
from fusion_backend.kernels.host import called
from fusion_backend.kernels.host.problems import MANY_ROWS, Problem
from fusion_backend.kernels.host.targets import H100
from kernel_cases import compiled, with_gluon
from kernel_compilation import HopperDriver, products_and_waits, registers, spilled_bytes
from repetition import slow_but

NARROW = Problem(MANY_ROWS, 256, 1024, 256, False, torch.bfloat16)


@with_gluon
@pytest.mark.parametrize(
    ("problem", "rows", "runs"),
    [
        (NARROW, 4096, True),
        (NARROW, 4095, False),
        (NARROW._replace(hidden_features=1000), 4096, False),
        (NARROW._replace(gated=True), 4096, False),
        (NARROW._replace(hidden_features=256), 4096, False),
        (NARROW._replace(hidden_features=512), 1 << 15, False),
        (NARROW._replace(hidden_features=512), 1 << 16, True),
        (NARROW._replace(dtype=torch.float16), 4096, True),
        (NARROW._replace(out_features=128), 4096, False),
        (NARROW._replace(in_features=128, out_features=128), 1 << 20, False),
        (NARROW._replace(in_features=64, hidden_features=256, out_features=64), 1 << 18, True),
        (NARROW._replace(in_features=64, hidden_features=256, out_features=64), 1 << 17, False),
    ],
)
def test_it_runs_what_it_was_measured_to_be_faster_for(problem, rows, runs):
    assert hopper.runs(problem, rows, H100) == runs


@pytest.mark.parametrize("target", [H100._replace(capability=100), H100._replace(backend="hip")])
def test_it_runs_on_hopper_only(target):
    assert not hopper.runs(NARROW, 4096, target)


def test_operands_must_be_aligned_and_contiguous():
    x, weight = torch.empty(9, 256), torch.empty(512, 256)
    assert called.suits(x, weight, None)
    assert called.suits(torch.empty(9, 264)[:, :256], weight)
    assert not called.suits(torch.empty(9, 257)[:, :256], weight)
    assert not called.suits(x, weight.t())
    assert not called.suits(x.flatten()[1:257].view(1, 256), weight)


# The one that is missing takes x for another residual.
KERNELS = [
    (norm, adds, *widths)
    for norm, adds, widths in itertools.product(
        ("", "layer_norm(1e-05)", "rms_norm(1e-06)"),
        ("nothing", "residual", "x"),
        ((64, 256), (256, 1024), (64, 192)),
    )
    if (norm, adds, *widths) != ("layer_norm(1e-05)", "x", 256, 1024)
]


QUICK = [("layer_norm(1e-05)", "residual", 64, 256)]


@compiled
@with_gluon
@pytest.mark.parametrize(("norm", "adds", "width", "hidden"), slow_but(QUICK, KERNELS))
def test_products_stay_in_flight_and_nothing_spills(monkeypatch, norm, adds, width, hidden):
    monkeypatch.setattr(triton.runtime.driver, "_active", HopperDriver(), raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    present = (True, True, adds == "residual", bool(norm), norm.startswith("layer"))
    shape = (width, hidden, torch.bfloat16)
    kernel = hopper.compiled("gelu(x)", *shape, present, 0, norm, adds == "x")
    assert spilled_bytes(kernel) == 0
    assert registers(kernel) == 168
    assert kernel.metadata.shared <= H100.shared_memory
    products, waits = products_and_waits(kernel)
    assert waits < products / 2  # the assembler gives each its own where it cannot keep them apart
