"""The overlapping pair of kernels without a GPU: what it is for, and its machine code."""

from __future__ import annotations

import contextlib
import itertools
import re

import pytest
import torch

pytest.importorskip("triton")

import triton

from fusion_backend.kernels.codegen.specialize import specialize
from fusion_backend.kernels.host.called import PIECE
from fusion_backend.kernels.host.targets import H100, Target
from fusion_backend.kernels.stream import config as stream_configs
from fusion_backend.kernels.stream import kernel_sm90 as stream_hopper
from fusion_backend.kernels.stream import launch_sm90 as stream_launch
from fusion_backend.kernels.stream.config import Half, preferred, row_class
from kernel_cases import (
    GATED,
    PLAIN,
    Case,
    assert_exact,
    compiled,
    eager_mlp,
    interpreted,
    random_case,
    turned,
)
from kernel_compilation import HopperDriver, registers, spilled_bytes
from repetition import slow_but

SMALL, WIDER = (768, 3072, 768), (1024, 4096, 1024)
# Of a multiprocessor, what it keeps of each program's shared memory, and how much of that it has.
REGISTERS, RESERVED, SHARED_MEMORY = 65536, 1024, 233472


@pytest.mark.parametrize(
    ("rows", "widths", "gated", "dtype", "target", "runs"),
    [
        (1, SMALL, False, torch.bfloat16, H100, True),
        (128, SMALL, True, torch.float16, H100, True),
        (129, SMALL, False, torch.bfloat16, H100, False),
        (1, SMALL, False, torch.float32, H100, False),
        (1, (768, 3000, 768), False, torch.bfloat16, H100, False),
        (1, (769, 3072, 768), False, torch.bfloat16, H100, False),
        (1, (1600, 6400, 1600), False, torch.bfloat16, H100, True),
        (2, (1600, 6400, 1600), False, torch.bfloat16, H100, False),
        (1, (4096, 14336, 4096), True, torch.bfloat16, H100, False),
        (16, (256, 1024, 256), False, torch.bfloat16, H100, True),
        (1, (64, 256, 64), False, torch.bfloat16, H100, False),
        (64, (64, 256, 32768), False, torch.bfloat16, H100, True),
        (64, (64, 256, 40000), False, torch.bfloat16, H100, False),
        (1, SMALL, False, torch.bfloat16, H100._replace(capability=100), False),
        (1, SMALL, False, torch.bfloat16, H100._replace(backend="hip"), False),
    ],
)
def test_it_runs_what_it_was_measured_to_be_faster_for(rows, widths, gated, dtype, target, runs):
    assert stream_launch.runs(rows, widths, gated, dtype, False, target) == runs


@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize(("width", "runs"), [(768, True), (1024, True), (1280, False)])
def test_it_runs_smaller_ones_if_weights_are_transposed(rows, width, runs):
    widths = (width, 4 * width, width)
    assert stream_launch.runs(rows, widths, False, torch.bfloat16, True, H100) == runs


def test_x_must_be_aligned_and_its_rows_near_each_other():
    weights = (torch.empty(512, 256), torch.empty(256, 512), None, None, None, None)
    assert stream_launch.suits(torch.empty(9, 264)[:, :256], *weights)
    assert not stream_launch.suits(torch.empty(9, 257)[:, :256], *weights)
    assert not stream_launch.suits(torch.empty(1).expand(9, 256), *weights)
    assert not stream_launch.suits(torch.empty(0, 1 << 24, device="meta")[:, :256], *weights)


def test_weights_may_be_transposed_but_those_of_a_pair_alike():
    x, up, down = torch.empty(9, 256), torch.empty(512, 256), torch.empty(256, 512)
    turned = torch.empty(256, 512).t()
    assert stream_launch.suits(x, turned, down, None, None, turned, None)
    assert stream_launch.suits(x, up, torch.empty(512, 256).t(), None, None, up, None)
    assert not stream_launch.suits(x, up, down, None, None, turned, None)
    assert not stream_launch.suits(x, torch.empty(512, 264)[:, :256], down, None, None, None, None)


@pytest.mark.parametrize(("rows", "expected"), [(1, 1), (2, 16), (17, 32), (33, 64), (128, 128)])
def test_rows_are_classed_by_upper_bounds(rows, expected):
    assert row_class(rows) == expected


def kernels(
    monkeypatch, rows: int, widths: tuple[int, int, int], gated: bool, transposed: bool = False
):
    monkeypatch.setattr(triton.runtime.driver, "_active", HopperDriver(), raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    activation = "silu(g) * u" if gated else "gelu_tanh(x)"
    problem = stream_launch.Problem(
        *(activation, rows, widths, torch.bfloat16, gated, (not gated, not gated, False)),
        (transposed, transposed),
    )
    pair = preferred(rows, *widths, gated, problem.transposed, H100)
    return pair, stream_launch.compiled(problem, pair, 0)


@compiled
@pytest.mark.parametrize(
    ("rows", "widths", "gated", "transposed"),
    slow_but(
        [
            (16, SMALL, False, True),
            (128, SMALL, True, False),
        ],
        [
            (rows, *layers, transposed)
            for rows, layers, transposed in itertools.product(
                stream_configs.ROW_CLASSES,
                ((SMALL, False), (SMALL, True), (WIDER, False)),
                (False, True),
            )
        ],
    ),
)
def test_programs_of_both_kernels_run_beside_each_other_and_none_spills(
    monkeypatch, rows, widths, gated, transposed
):
    pair, both = kernels(monkeypatch, rows, widths, gated, transposed)
    shared, used = 0, 0
    for half, kernel in zip(pair, both, strict=True):
        assert spilled_bytes(kernel) == 0
        assert kernel.metadata.shared <= H100.shared_memory
        assert kernel.metadata.launch_pdl
        shared += kernel.metadata.shared + RESERVED
        used += 32 * half.warps * registers(kernel)
    if max(half.block_m for half in pair) <= 16:
        assert shared <= SHARED_MEMORY
        assert used <= REGISTERS


@compiled
def test_the_first_kernel_waits_before_it_loads_and_lets_the_second_begin(monkeypatch):
    _, (first, second) = kernels(monkeypatch, 1, SMALL, False)
    code = first.asm["ptx"]
    wait, launch = (code.index(f"griddepcontrol.{word}") for word in ("wait", "launch_dependents"))
    assert wait < launch < code.index("ld.global")
    code = second.asm["ptx"]
    before, after = code.split("griddepcontrol.wait")
    assert "ld.global" in before
    assert "ld.global" in after


@compiled
@pytest.mark.parametrize(
    ("rows", "transposed"),
    slow_but([(16, True), (64, False)], itertools.product((16, 64, 128), (False, True))),
)
def test_the_second_kernel_asks_for_its_weights_before_it_waits(monkeypatch, rows, transposed):
    _, (_, second) = kernels(monkeypatch, rows, SMALL, False, transposed)
    before, after = second.asm["ptx"].split("griddepcontrol.wait")
    assert "prefetch.global.L2" in before
    assert "cp.async" not in before
    assert "cp.async" in after
    assert "prefetch.global.L2" not in after


@compiled
@pytest.mark.parametrize("gated", slow_but([True], [False, True]))
def test_rows_of_a_lane_begin_in_different_banks_of_shared_memory(monkeypatch, gated):
    pair, (_, second) = kernels(monkeypatch, 16, SMALL, gated)
    lanes, columns = pair.out.lanes, pair.out.block_k // pair.out.lanes
    assert lanes > 1
    code = second.asm["ttgir"]
    tile = f"memdesc<{lanes}x{columns}x{pair.out.block_m}xbf16, #"
    (layout,) = {rest.split(",")[0] for rest in code.split(tile)[1:]}
    (definition,) = re.findall(rf"^#{layout} = (.*)$", code, re.MULTILINE)
    # A swizzle moves pieces of the dimension that is first by the index along the second.
    assert "maxPhase = 8, order = [1, 2, 0]" in definition


@interpreted
@pytest.mark.parametrize(
    ("rows", "widths", "activation", "transposed"),
    slow_but(
        [(13, (256, 512, 64), PLAIN, True), (16, (128, 256, 72), GATED, False)],
        [
            (1, (256, 512, 64), PLAIN, False),
            (1, (64, 256, 64), GATED, False),
            (13, (256, 512, 64), PLAIN, False),
            (16, (128, 256, 72), GATED, False),
            (13, (256, 512, 64), PLAIN, True),
            (40, (64, 256, 64), GATED, False),
        ],
    ),
)
def test_both_kernels_are_as_exact_as_eager(monkeypatch, rows, widths, activation, transposed):
    # Instructions that the interpreter does not know. It runs one kernel after the other.
    for instruction in ("gdc_wait", "gdc_launch_dependents", "prefetch_share"):
        monkeypatch.setattr(stream_hopper, instruction, lambda *of: None)
    case = random_case(rows, widths, activation, dtype=torch.float16)
    if transposed:
        case = turned(case)
    assert_exact(launched(case, transposed), eager_mlp(case), eager_mlp(case.to(torch.float64)))


def launched(case: Case, transposed: bool) -> torch.Tensor:
    """What the pair of kernels makes of an MLP, launched as ``stream_launch`` does."""
    rows, inner = case.x.shape
    out, hidden = case.weight_down.shape
    gated, bound = case.weight_gate is not None, row_class(rows)
    how = (torch.float16, gated, (True, True, gated), (transposed, transposed))
    problem = stream_launch.Problem(str(case.activation), bound, (inner, hidden, out), *how)
    pair = preferred(bound, inner, hidden, out, gated, problem.transposed, H100)
    of_hidden, of_out = stream_launch.constants(problem, pair)
    kernels = [
        specialize(template, case.activation, torch.float32, own_launch=True)
        for template in (
            stream_hopper.fusedmlp_stream_hopper_hidden,
            stream_hopper.fusedmlp_stream_hopper_out,
        )
    ]
    scratch = torch.zeros(1 << 18) if pair.out.splits > 1 else None
    postact, y = case.x.new_empty(rows, hidden), case.x.new_empty(rows, out)
    grids = [
        -(-features // half.share) * half.splits * -(-rows // half.block_m)
        for features, half in ((hidden, pair.hidden), (out, pair.out))
    ]
    arguments = (*case[:5], postact, scratch, rows, inner // PIECE, *of_hidden)
    kernels[0][(grids[0],)](*arguments)
    kernels[1][(grids[1],)](postact, case.weight_down, case.bias_down, y, scratch, rows, *of_out)
    return y


@pytest.mark.parametrize("multiprocessors", [114, 132])
def test_every_feature_has_a_program_and_every_tile_a_counter(multiprocessors):
    target: Target = H100._replace(multiprocessors=multiprocessors)
    widest = (64, 256, 32768)
    widths = [(64, 256, 8), SMALL, (1600, 6400, 1600), (2048, 2048, 4096), widest]
    for rows, widths_, gated, transposed in itertools.product(
        stream_configs.ROW_CLASSES, widths, (False, True), (False, True)
    ):
        pair = preferred(rows, *widths_, gated, (transposed, transposed), target)
        for half in pair:
            assert isinstance(half, Half)
            assert 1 <= half.share <= half.block_n
        assert widths_[1] % pair.out.splits == 0
        tiles = -(-widths_[2] // pair.out.share) * -(-rows // pair.out.block_m)
        assert pair.out.splits == 1 or tiles <= stream_configs.COUNTERS
