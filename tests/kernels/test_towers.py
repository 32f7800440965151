"""The numbers of several chains of one input in one launch, on Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from chain_cases import eager_chain, random_towers
from fusion_backend.kernels.chain.config import ChainProblem
from fusion_backend.kernels.chain.family import can_tower
from fusion_backend.kernels.chain.towers_config import MOST_TOWERS, are_best_alone, chosen
from fusion_backend.kernels.chain.towers_launch import towers
from fusion_backend.kernels.host.configs import Config
from fusion_backend.kernels.host.problems import MANY_ROWS
from fusion_backend.kernels.host.targets import H100
from fusion_backend.mlp.weights import Tower
from kernel_cases import any_strides, assert_exact, interpreted, loops_are_broken
from repetition import each_once

RESIDENT = Config(16, 16, num_stages=1, programs=1, resident=True)
STREAMED = Config(16, 16, num_stages=1)
DIFFERENT = ((13, 40, 65, 9), (13, 40, 1))
ALIKE = ((13, 20, 20, 1),) * 3
MIXED = ((13, 20, 20, 1), (13, 33, 4), (13, 20, 20, 1))
WIDE = ((300, 20, 33, 5), (300, 20, 290))


def runs(test):
    return interpreted(loops_are_broken(test))


def check(cases, configs=None):
    found = towers(cases[0].x, [Tower(*case[1:]) for case in cases], configs)
    for result, case in zip(found, cases, strict=True):
        assert_exact(result, eager_chain(case), eager_chain(case.to(torch.float64)))


@runs
@pytest.mark.parametrize(
    ("widths", "config", "rows", "dtype"),
    each_once(
        [DIFFERENT, ALIKE, MIXED, WIDE],
        [RESIDENT, STREAMED, None, STREAMED],
        [37, 1, 70, 16],
        [torch.float16, torch.float32, torch.float16, torch.float32],
    ),
)
def test_each_tower_is_as_exact_as_eager(widths, config, rows, dtype):
    cases = random_towers(rows, widths, ("tanh(x)", "silu(x)"), dtype=dtype)
    check(cases, None if config is None else [config] * len(widths))


@runs
def test_towers_that_are_alike_but_for_activations_or_biases_keep_them():
    cases = random_towers(17, ALIKE, ("tanh(x)",))
    cases[1] = cases[1]._replace(activations=cases[1].activations[::-1], biases=[None] * 3)
    cases[2] = cases[2]._replace(biases=[cases[2].biases[0], None, None])
    check(cases)


@runs
@pytest.mark.parametrize("programs", [0, 1, 3])
def test_tiles_of_different_heights_cover_all_rows(programs):
    configs = [
        Config(height, 16, num_stages=1, programs=programs, resident=programs > 0)
        for height in (16, 64)
    ]
    check(random_towers(150, DIFFERENT), configs)


@runs
@any_strides
def test_rows_may_have_any_strides(view):
    cases = random_towers(17, MIXED)
    x = view(cases[0].x)
    check([case._replace(x=x) for case in cases])


@runs
def test_weights_may_be_transposed_in_one_tower():
    cases = random_towers(17, ALIKE)
    turned = [weight.t().contiguous().t() for weight in cases[1].weights]
    cases[1] = cases[1]._replace(weights=turned)
    check(cases)


@runs
def test_no_rows_give_no_rows():
    cases = random_towers(0, DIFFERENT)
    found = towers(cases[0].x, [Tower(*case[1:]) for case in cases])
    assert [tuple(y.shape) for y in found] == [(0, 9), (0, 1)]


def problems(*all_widths, rows=1024, dtype=torch.bfloat16, precision="ieee"):
    return [ChainProblem(rows, widths, dtype, precision) for widths in all_widths]


POLICY_AND_VALUE = ((348, 64, 64, 17), (348, 64, 64, 1))


@pytest.mark.parametrize("rows", [1024, 4096, MANY_ROWS])
@pytest.mark.parametrize("all_widths", [POLICY_AND_VALUE, [(393, 256, 256, 1)] * 2])
def test_towers_of_a_kind_are_launched_as_each_alone(all_widths, rows):
    given = problems(*all_widths, rows=rows)
    configs = chosen(given, H100)
    assert len({(c.num_warps, c.num_stages, c.programs, c.resident) for c in configs}) == 1
    assert are_best_alone(configs, given, H100)


def test_a_tower_takes_the_second_best_where_the_others_need_it():
    given = problems((64, 64, 64, 1), (64, 128, 128, 1), (64, 256, 256, 1))
    configs = chosen(given, H100)
    assert not are_best_alone(configs, given, H100)
    assert not any(config.resident for config in configs)


@pytest.mark.parametrize(
    ("all_widths", "possible"),
    [
        (POLICY_AND_VALUE, True),
        ([(64, 64, 1), (64, 64, 4)], True),
        ([(64, 64, 64, 1)] * MOST_TOWERS, True),
        ([(64, 64, 64, 1)] * (MOST_TOWERS + 1), False),
        ([(64, 64, 64, 1), (64, 512, 512, 64)], False),
        ([(64, 64, 64, width) for width in range(1, 10)], False),
    ],
)
def test_it_is_possible_for_narrow_layers_and_not_too_many(all_widths, possible):
    assert can_tower(all_widths, MANY_ROWS, torch.bfloat16, H100) is possible
