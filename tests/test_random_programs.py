"""Fused programs do what eager does: results, strides, aliases, writes to arguments, gradients.

`python tests/random_programs.py --programs 5000` tries as many.
"""

from __future__ import annotations

import pytest

from differential import Refused, difference, shrunk
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
