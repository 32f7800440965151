"""Which cases of a test run at once, and which are repetitions for a long run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Any

import pytest


def slow_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases as parameters, all slow but some. Of a tuple each element is a parameter."""
    return [
        pytest.param(
            *(case if type(case) is tuple else (case,)),
            marks=[] if case in quick else pytest.mark.slow,
        )
        for case in cases
    ]


def telling(
    cases: Iterable[Any], shows: Callable[[Any], Iterable[Hashable]] = enumerate
) -> list[Any]:
    """The cases that show something that none before them shows.

    Args:
        cases: values, or tuples of them.
        shows: what is to be seen in one case at least. By default, each value of each parameter.
    """
    seen: set[Hashable] = set()
    found = []
    for case in cases:
        shown = {*shows(case)}
        if shown - seen:
            found.append(case)
        seen |= shown
    return found


def each_once(*parameters: Iterable[Any]) -> list[Any]:
    """All combinations of parameters' values, slow but for those with a value not met before."""
    cases = [*itertools.product(*map(list, parameters))]
    return slow_but(telling(cases), cases)


def walked(*parameters: Iterable[Any]) -> list[Any]:
    """All combinations of parameters' values, slow but for a walk that meets each value."""
    values = [[*each] for each in parameters]
    return slow_but([*_walk(values)], itertools.product(*values))


def _walk(values: list[list[Any]]) -> Iterator[tuple[Any, ...]]:
    """The first parameter changes with every step; each other one more slowly than that before."""
    unseen = {(i, j) for i, each in enumerate(values) for j in range(len(each))}
    for step in itertools.count():
        pace, places = 1, [step % len(values[0])]
        for each in values[1:]:
            places.append(step // pace % len(each))
            pace *= len(each)
        if not unseen:
            return
        unseen -= {*enumerate(places)}
        yield tuple(each[place] for each, place in zip(values, places, strict=True))
