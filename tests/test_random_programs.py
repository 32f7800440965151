"""Fused programs do what eager does: results, strides, aliases, writes to arguments, gradients.

`python tests/random_programs.py --programs 5000` tries as many.
"""

from __future__ import annotations

import pytest
import torch

import differential
from crashing import crash_at_seed_two
from differential import Refused, difference, shrunk
from fuzzing import EAGER_CRASHED, outcomes
from random_programs import Program, random_program

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


# t is 0, or as much as one of its terms is rounded by: eager may give 0.5 as well.
JUMP = Program(
    statements=("t = F.linear(x, up)", "t = t - t * torch.ones_like(t)"),
    results=("t.masked_fill(t < 0, 0.5)",),
    seed=0,
    leading=(5,),
    widths=(8, 16),
    layout="contiguous",
    dtype="bfloat16",
    grad=False,
    frozen=(),
    dynamic=False,
)


@pytest.mark.parametrize(
    ("given", "wrong_in", "is_told"),
    [
        (0.5, (torch.bfloat16,), False),
        (0.5, (torch.bfloat16, torch.float32), True),
        (0.3, (torch.bfloat16,), True),
        (-0.5, (torch.bfloat16,), True),
    ],
)
def test_a_value_is_told_unless_a_rounding_decides_it(monkeypatch, given, wrong_in, is_told):
    def compiled(function, program, options, compiler, sites):
        def call(*arguments):
            (result,) = function(*arguments)
            if options.policy == "always" and result.dtype in wrong_in:
                result[0, 0] = given
            return (result,)

        return call

    monkeypatch.setattr(differential, "_compile", compiled)
    assert (difference(JUMP)[0] is not None) == is_told


def test_programs_behind_one_that_crashes_are_tried_all_the_same():
    found = [(seed, what) for seed, what, *_ in outcomes(range(5), "none", crash_at_seed_two)]
    assert found == [(i, EAGER_CRASHED if i == 2 else "agreed") for i in range(5)]
