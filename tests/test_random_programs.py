"""Fused programs do what eager does: results, strides, aliases, writes to arguments, gradients.

`python tests/random_programs.py --programs 5000` tries as many.
"""

from __future__ import annotations

import os

import pytest

from differential import Refused, difference, shrunk
from fuzzing import EAGER_CRASHED, outcomes
from random_programs import random_program

BUDGET = 150


def test_random_programs_do_what_eager_does():
    ran = fused = 0
    for seed in range(BUDGET):
        program = random_program(seed)
        try:
            found, sites = difference(program)
        except Refused:
            continue
        assert found is None, f"{found}\n{shrunk(program)}"
        ran, fused = ran + 1, fused + sites
    assert ran > BUDGET // 2
    assert fused > BUDGET // 5


@pytest.mark.parametrize("seed", [0, 1])
def test_a_program_depends_on_its_seed_only(seed):
    assert random_program(seed) == random_program(seed)
    assert random_program(seed) != random_program(seed + 2)


def _crash_at_seed_two(seeds, compiler, results):
    for seed in seeds:
        results.send((seed, EAGER_CRASHED))
        if seed == 2:
            os.abort()
        results.send((seed, "agreed", "", 1))


def test_programs_behind_one_that_crashes_are_tried_all_the_same():
    found = [(seed, what) for seed, what, *_ in outcomes(range(5), "none", _crash_at_seed_two)]
    assert found == [(i, EAGER_CRASHED if i == 2 else "agreed") for i in range(5)]
