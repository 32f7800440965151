"""Configurations: how rows are classed, which run where, and what there is to time."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fusion_backend.compat import tf32
from fusion_backend.kernels.host.configs import Config
from fusion_backend.kernels.host.problems import MANY_ROWS, Problem, precision, row_class
from fusion_backend.kernels.host.targets import H100, INTERPRETER, Target
from fusion_backend.kernels.invocations import is_wide, row_units
from fusion_backend.kernels.preferences import chosen, preferences

A100 = Target("cuda", 80, 166912, 108)
FAMILIES = ("epilogue", "hidden_gradient", "back_to_back")


def problem_of(rows: int, gated: bool, dtype=torch.bfloat16, width: int = 128) -> Problem:
    return Problem(rows, width, 512, width, gated, dtype)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(1, 16), (16, 16), (17, 64), (64, 64), (65, 1024), (1024, 1024), (1025, MANY_ROWS)],
)
def test_rows_are_classed_by_upper_bounds(rows, expected):
    assert row_class(rows) == expected


def test_fewer_bytes_of_shared_memory_mean_smaller_tiles():
    problem = problem_of(MANY_ROWS, False, width=4096)
    small = H100._replace(shared_memory=101376)
    assert chosen("epilogue", problem, H100) != chosen("epilogue", problem, small)


def test_a_configuration_asked_for_is_taken_or_refused():
    problem = problem_of(MANY_ROWS, False)
    config = Config(64, 64)
    assert chosen("epilogue", problem, H100, config) == config
    with pytest.raises(ValueError, match="cannot run epilogue"):
        chosen("epilogue", problem, H100, Config(128, 256, 256, num_stages=8))


def test_blocks_of_tf32_are_as_many_bytes_as_blocks_of_bfloat16():
    (half,) = preferences("epilogue", problem_of(MANY_ROWS, False), A100)
    tf32 = problem_of(MANY_ROWS, False, torch.float32)._replace(precision="tf32x3")
    (single,) = preferences("epilogue", tf32, A100)
    assert single.block_k * 4 == half.block_k * 2


def test_tensor_descriptors_ask_for_a_gpu_and_for_operands_laid_out_for_them():
    config = Config(128, 128, tma=True)
    problem = problem_of(MANY_ROWS, False)._replace(tma=True)
    assert chosen("epilogue", problem, H100, config) == config
    for other, target in ((problem, A100), (problem._replace(tma=False), H100)):
        with pytest.raises(ValueError, match="cannot run epilogue"):
            chosen("epilogue", other, target, config)


@pytest.mark.parametrize("gated", [False, True])
def test_tensor_descriptors_are_taken_for_many_rows_where_they_can_be(gated):
    problem = Problem(MANY_ROWS, 4096, 16384, 0, gated, torch.bfloat16)
    assert chosen("epilogue", problem._replace(tma=True), H100).tma
    assert not chosen("epilogue", problem, H100).tma
    assert not chosen("epilogue", problem._replace(tma=True), A100).tma


def test_results_are_stored_by_tensor_descriptors_only_in_rows_of_whole_units():
    problem = Problem(MANY_ROWS, 4096, 16384, 0, False, torch.bfloat16, tma=True)
    assert chosen("epilogue", problem, H100).flatten
    assert not chosen("epilogue", problem._replace(hidden_features=16385), H100).flatten


@pytest.mark.parametrize("allowed", [True, False])
def test_float32_is_multiplied_in_tf32_if_and_only_if_it_is_allowed(allowed):
    with tf32.multiplying_in_tf32(allowed):
        assert precision(torch.float32, H100) == ("tf32x3" if allowed else "ieee")
        assert precision(torch.bfloat16, H100) == "ieee"
        assert precision(torch.float32, INTERPRETER) == "ieee"


def test_offsets_within_a_tile_are_wide_only_if_a_stride_is_huge_or_unknown():
    assert not is_wide(((4096, 1), (128, 64)))
    assert is_wide(((1 << 25, 1), (128, 64)))
    assert is_wide(((4096, 1), (128, 64)), ((1, 1 << 26), (64, 128)))


@pytest.mark.parametrize(("stride", "expected"), [(64, (4, 16)), (24, (3, 8)), (7, (7, 1))])
def test_row_strides_are_split_into_a_unit_and_a_multiple(stride, expected):
    assert row_units(torch.empty_strided((5, 4), (stride, 1))) == expected


def test_a_single_row_has_the_stride_of_a_matrix():
    assert row_units(torch.empty_strided((1, 32), (12345, 1))) == (2, 16)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("width", [768, 4096, 5120, 8192, 16384])
def test_programs_that_stream_a_single_row_share_its_features_in_narrow_parts(width, gated):
    hidden = Problem(1, width, 4 * width, 0, gated, torch.bfloat16)
    out = Problem(1, 0, 4 * width, width, False, torch.bfloat16)
    assert chosen("stream_hidden", hidden, H100).block_n <= 32
    assert chosen("stream_out", out, H100).block_n <= 32


def narrow(rows: int, widths: tuple[int, int, int], gated: bool = False, exact: bool = True):
    of_rows = {"exact_rows": rows} if exact else {}
    return Problem(row_class(rows), *widths, gated, torch.bfloat16, **of_rows)


@pytest.mark.parametrize(
    ("hidden", "block"), [(16, 32), (32, 32), (48, 64), (128, 128), (160, 64), (384, 128)]
)
def test_blocks_of_hidden_features_are_wide_but_not_half_empty(hidden, block):
    assert chosen("back_to_back", narrow(64, (96, hidden, 96)), H100).block_n == block


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_tiles_have_few_rows_while_each_program_has_a_multiprocessor(width, gated):
    widths = (width, 4 * width, width)
    most = 16 * H100.multiprocessors
    assert chosen("back_to_back", narrow(most, widths, gated), H100).block_m == 16
    assert chosen("back_to_back", narrow(most + 1, widths, gated), H100).block_m == 64


def test_programs_that_would_wait_for_the_same_lines_of_the_cache_are_few():
    assert chosen("back_to_back", narrow(1587, (24, 48, 24)), H100).block_m == 64
    assert chosen("back_to_back", narrow(1587, (48, 96, 48)), H100).block_m == 16


def test_tall_tiles_of_wide_rows_are_taken_when_smaller_ones_are_more_than_multiprocessors():
    widths, most = (256, 1024, 256), 64 * H100.multiprocessors
    assert chosen("back_to_back", narrow(most, widths), H100).block_m == 64
    assert chosen("back_to_back", narrow(most + 1, widths), H100).block_m == 128


def test_loads_run_further_ahead_where_no_other_program_shares_the_memory():
    widths, most = (96, 256, 96), 64 * H100.multiprocessors
    alone = chosen("back_to_back", narrow(most, widths, True), H100)
    assert (
        alone.num_stages > chosen("back_to_back", narrow(most + 1, widths, True), H100).num_stages
    )


@pytest.mark.parametrize(
    ("rows", "widths", "gated", "late"),
    [
        (65536, (128, 512, 128), False, True),
        (65536, (128, 512, 128), True, False),
        (8192, (64, 1024, 64), False, True),
        (65536, (64, 1024, 64), False, False),  # four programs of a multiprocessor hide the load
        (65536, (64, 256, 64), False, False),  # weights, and with them biases, stay on the chip
    ],
)
def test_biases_are_loaded_ahead_where_nothing_else_hides_it(rows, widths, gated, late):
    assert chosen("back_to_back", narrow(rows, widths, gated), H100).late_bias == late


@pytest.mark.parametrize("rows", [1500, 5000])
def test_rows_of_which_the_class_is_known_are_many(rows):
    unknown = narrow(rows, (256, 1024, 256), exact=False)
    assert chosen("back_to_back", unknown, H100).block_m == 128
