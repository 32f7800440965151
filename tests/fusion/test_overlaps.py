"""Of sites that share a layer, those that save most in total."""

from __future__ import annotations

import itertools
import random

from fusion_backend.fusion.overlaps import heaviest_independent


def chain(*weights):
    shared = {i: [i - 1] for i in range(1, len(weights))}
    return heaviest_independent(dict(enumerate(map(float, weights))), shared)


def test_sites_that_share_nothing_are_all_chosen():
    assert heaviest_independent({"a": 1.0, "b": 2.0}, {}) == {"a", "b"}


def test_of_two_the_heavier_one():
    assert chain(1, 2) == {1}
    assert chain(2, 1) == {0}


def test_two_light_ones_may_outweigh_the_one_between():
    assert chain(2, 3, 2) == {0, 2}
    assert chain(1, 3, 1) == {1}


def test_a_site_may_follow_two():
    weights = {"gate": 2.0, "up": 2.0, "down": 3.0}
    assert heaviest_independent(weights, {"down": ["gate", "up"]}) == {"gate", "up"}


def test_chains_are_chosen_as_by_trying_all():
    choose = random.Random(0)
    for _ in range(50):
        weights = [choose.randint(1, 9) for _ in range(choose.randint(1, 9))]
        best = max(
            sum(weights[i] for i in subset)
            for count in range(len(weights) + 1)
            for subset in itertools.combinations(range(len(weights)), count)
            if all(b - a > 1 for a, b in itertools.pairwise(subset))
        )
        assert sum(weights[i] for i in chain(*weights)) == best
