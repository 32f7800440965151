"""The model of configurations: what it says takes longer, when it is asked, and what it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fusion_backend.kernels.host.candidates import candidates, surely_fastest
from fusion_backend.kernels.host.config_times import FITTED, predicted, programs_at_once
from fusion_backend.kernels.host.configs import Config, fits
from fusion_backend.kernels.host.problems import Problem, measured_kind, row_class
from fusion_backend.kernels.host.targets import H100
from fusion_backend.kernels.preferences import chosen, listed

TILE = Config(64, 64, 64, num_stages=5)


def problem(rows: int, gated: bool = False, **more: Any) -> Problem:
    known = {"exact_rows": rows, **more}
    return Problem(row_class(rows), 3072, 12288, 0, gated, torch.bfloat16)._replace(**known)


def time(config: Config, of: Problem) -> float:
    return predicted("epilogue", config, of, H100)


def test_more_work_takes_longer():
    for more in ({"exact_rows": 256}, {"in_features": 6144}, {"gated": True}):
        assert time(TILE, problem(64)._replace(**more)) > time(TILE, problem(64))
    exact = problem(4096, exact_functions=2)
    assert time(TILE, exact) > time(TILE, problem(4096))


def test_rows_that_a_tile_does_not_have_cost_as_much_as_those_that_it_has():
    one = problem(1, hidden_features=64 * 132)
    assert time(TILE, one._replace(exact_rows=64)) < 1.05 * time(TILE, one)
    assert time(TILE, one._replace(exact_rows=65)) > 1.1 * time(TILE, one)


def test_loads_further_ahead_are_waited_for_less_where_tiles_are_few():
    few = problem(16, hidden_features=1024)
    deep, shallow = (replace(TILE, num_stages=stages) for stages in (5, 2))
    assert time(deep, few) < 0.7 * time(shallow, few)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Config(64, 64, 64, num_stages=3), 4),  # 48 KiB each
        (Config(16, 16, 32, num_stages=2), 8),  # 58 registers of a thread
        (Config(16, 16, 32, num_warps=1, num_stages=2), 32),  # 64 registers, fewer threads
        (Config(128, 128, 32, num_warps=4, num_stages=2), 2),  # 184 registers of a thread
        (Config(64, 64, 64, num_stages=3, programs=1), 1),
    ],
)
def test_registers_and_memory_limit_how_many_programs_run_at_once(config, expected):
    assert programs_at_once("epilogue", config, problem(64), H100) == expected


def test_persistent_programs_give_way_where_there_is_little_to_compute():
    short = problem(1881, in_features=192, hidden_features=768, tma=True)
    assert listed("epilogue", short, H100).flatten
    assert not chosen("epilogue", short, H100).flatten


def test_tiles_shrink_where_they_are_too_few_for_the_card():
    few = problem(200, in_features=1024, hidden_features=512)
    taken, of_class = chosen("epilogue", few, H100), listed("epilogue", few, H100)
    assert taken.block_m * taken.block_n < of_class.block_m * of_class.block_n


@pytest.mark.parametrize(
    ("other", "target"),
    [
        (problem(20, exact_rows=0), H100),
        (problem(20, dtype=torch.float32), H100),
        (problem(20), H100._replace(capability=80)),
        (problem(20), H100._replace(capability=100)),
    ],
    ids=["rows unknown", "float32", "Ampere", "Blackwell"],
)
def test_the_listed_one_is_taken_of_what_was_not_measured(other, target):
    assert chosen("epilogue", other, target) == listed("epilogue", other, target)


def test_the_listed_one_is_taken_in_doubt():
    first, other = Config(64, 64, 64, num_stages=4), TILE
    of = problem(64)
    assert time(other, of) < time(first, of)
    unsure = {"epilogue": replace(FITTED["epilogue"], deviation=1.0)}
    sure = {"epilogue": replace(FITTED["epilogue"], deviation=0.0)}
    assert surely_fastest("epilogue", of, H100, first, [other], unsure) == first
    assert surely_fastest("epilogue", of, H100, first, [other], sure) == other


@pytest.mark.parametrize("gated", [False, True])
def test_candidates_fit_on_hopper(gated):
    many = problem(4096, gated)
    assert len(candidates("epilogue", many)) > 5
    for config in candidates("epilogue", many):
        assert fits("epilogue", config, many, H100)


def test_rows_are_known_where_sizes_are_numbers_and_weights_lie_as_measured():
    x, weight = torch.empty(20, 64), torch.empty(256, 64)
    unknown = problem(20, exact_rows=0)
    assert measured_kind(unknown, x, 1, None, weight) == problem(20, exact_functions=1)
    assert measured_kind(unknown, x, 1, None, torch.empty(64, 256).t()) == unknown
    assert measured_kind(unknown, torch.empty(64, 20).t(), 1, None, weight) == unknown
