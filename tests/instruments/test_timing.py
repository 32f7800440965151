"""Timing: who takes turns with whom, on which operands, and what the samples say."""

from __future__ import annotations

import math
import time
from itertools import pairwise, permutations

import pytest
import torch

from fusion_backend.instruments.timing import (
    Times,
    distinct_sets,
    interleaved,
    issue,
    rotated,
    turns,
    wall,
)

CPU = torch.device("cpu")


def test_all_take_a_turn_each_round_and_come_after_all_others() -> None:
    names = list("abcd")
    order = list(turns(names, 30))
    assert all(sorted(order[first : first + 4]) == names for first in range(0, 120, 4))
    assert {*pairwise(order)} >= {*permutations(names, 2)}
    assert list(turns(names, 30)) == order


def test_timers_take_turns_and_the_first_rounds_do_not_count() -> None:
    order: list[str] = []

    def timer(name: str) -> float:
        order.append(name)
        return float(len(order))

    times = interleaved({name: (lambda name=name: timer(name)) for name in "ab"}, rounds=2)
    assert order == list(turns(["a", "b"], 4))
    places = {name: [i + 1.0 for i, each in enumerate(order) if each == name] for name in "ab"}
    assert times == {name: Times(tuple(places[name][2:])) for name in "ab"}


def test_median_and_spread_of_samples() -> None:
    assert Times((4.0, 1.0, 2.0, 3.0, 5.0)).median == 3.0
    assert math.isclose(Times((4.0, 1.0, 2.0, 3.0, 5.0)).spread, 2 / 3)
    assert Times((4.0,)).spread == 0.0


def test_sets_rotate_until_there_are_calls_enough() -> None:
    sets = [(0,), (1,), (2,)]
    assert [i for (i,) in rotated(sets, at_least=5)] == [0, 1, 2, 0, 1]
    assert rotated(sets, at_least=1) == sets
    assert distinct_sets(1 << 20, CPU) == 2


@pytest.mark.parametrize("timer", [wall, issue])
def test_the_time_is_that_of_one_call_in_microseconds(timer) -> None:
    microseconds = timer(time.sleep, [(0.001,), (0.003,)], CPU)()
    assert 2000 <= microseconds < 20000
