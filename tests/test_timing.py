"""Timing: who takes turns with whom, on which operands, and what the samples say."""

from __future__ import annotations

import math
import time

import pytest
import torch

from fusion_backend.timing import Times, distinct_sets, interleaved, issue, rotated, turns, wall

CPU = torch.device("cpu")


def test_each_round_begins_with_the_next_name() -> None:
    assert list(turns(["a", "b"], 3)) == ["a", "b", "b", "a", "a", "b"]


def test_timers_take_turns_and_the_first_rounds_do_not_count() -> None:
    order: list[str] = []

    def timer(name: str) -> float:
        order.append(name)
        return float(len(order))

    times = interleaved({name: (lambda name=name: timer(name)) for name in "ab"}, rounds=2)
    assert order == list("abbaabba")
    assert times == {"a": Times((5.0, 8.0)), "b": Times((6.0, 7.0))}


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
