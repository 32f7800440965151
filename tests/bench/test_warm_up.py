"""Compiling beforehand: what is compiled, and which cell is ready."""

from __future__ import annotations

from typing import Any

import torch

from fusion_backend import compat
from fusion_backend.bench.cells import Cell
from fusion_backend.bench.warm_up import Pending, warming

CELLS = [Cell("gelu", rows, 8, 8, "float32") for rows in (1, 2, 3)]


class Task:
    """Stands for a process's work."""

    def __init__(self, done: bool) -> None:
        self.done = done

    def ready(self) -> bool:
        return self.done


class Candidate:
    """A kernel that max-autotune could choose."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.compiled = fails, False

    def precompile(self) -> None:
        if self.fails:
            raise RuntimeError("too much shared memory")
        self.compiled = True


def pending(*done: bool) -> Pending:
    tasks: Any = {cell: [Task(each)] for cell, each in zip(CELLS, done, strict=True)}
    return Pending(tasks)


def test_the_first_compiled_cell_is_next() -> None:
    assert pending(False, True, True).next_ready(CELLS, float("inf")) == CELLS[1]


def test_nothing_is_next_after_the_deadline() -> None:
    assert pending(False, False, False).next_ready(CELLS, 0.0) is None


def test_without_processes_every_cell_is_ready() -> None:
    with warming(CELLS, (), torch.device("cpu"), 0) as nothing:
        assert nothing.next_ready(CELLS, float("inf")) == CELLS[0]


def test_under_max_autotune_every_candidate_is_compiled_and_none_measured() -> None:
    from torch._inductor import config, select_algorithm

    functions = select_algorithm.get_algorithm_selector_cache().preprocessing_fns
    before, caching = list(functions), config.fx_graph_cache
    candidates = [Candidate(), Candidate(fails=True), Candidate()]
    with compat.compiling_candidates_only():
        assert not config.fx_graph_cache
        assert functions[-1](candidates) == candidates[:1]
    assert [candidate.compiled for candidate in candidates] == [True, False, True]
    assert len(functions) == len(before)
    assert config.fx_graph_cache == caching
