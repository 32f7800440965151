"""Compiling beforehand: what is compiled, and which cell is ready."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusion_backend.bench import warm_up
from fusion_backend.bench.cells import Cell
from fusion_backend.bench.peers import PEERS
from fusion_backend.bench.warm_up import Pending, warming
from fusion_backend.compat import inductor

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


def test_max_autotune_is_compiled_last(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    class Pool:
        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None: ...

        def apply_async(self, _: object, arguments: tuple[Any, str, str]) -> Task:
            started.append(arguments[1])
            return Task(True)

    context = SimpleNamespace(Pool=lambda jobs, initializer: Pool())
    monkeypatch.setattr(warm_up.multiprocessing, "get_context", lambda method: context)
    peers = [peer for peer in PEERS if peer.compiles and peer.name not in ("b2b", "cutlass")]
    with warming(CELLS[:2], peers, torch.device("cuda"), 3):
        pass
    assert started == 2 * ["inductor"] + 2 * ["fusedmlp"] + 2 * ["max-autotune"]


def test_under_max_autotune_every_candidate_is_compiled_and_none_measured() -> None:
    from torch._inductor import config, select_algorithm

    functions = select_algorithm.get_algorithm_selector_cache().preprocessing_fns
    before, caching = list(functions), config.fx_graph_cache
    candidates = [Candidate(), Candidate(fails=True), Candidate()]
    with inductor.compiling_candidates_only():
        assert not config.fx_graph_cache
        assert functions[-1](candidates) == candidates[:1]
    assert [candidate.compiled for candidate in candidates] == [True, False, True]
    assert len(functions) == len(before)
    assert config.fx_graph_cache == caching
