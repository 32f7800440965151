"""Compiling in parallel: processes that fill the caches on disk before the timing.

Compilation is most of a benchmark's time, and nearly all of it is done by the CPU. Each process
compiles one cell for one peer after the other, so that the process which measures finds code and
kernels in the caches of Inductor and Triton. Under max-autotune the processes only compile the
candidates: which is the fastest, the measuring process finds out, alone on the GPU.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.pool import AsyncResult
from time import monotonic, sleep

import torch

from fusion_backend.bench.cells import Cell, operands
from fusion_backend.bench.peer import Peer
from fusion_backend.bench.peers import chosen
from fusion_backend.bench.precision import products_in
from fusion_backend.compat import inductor

POLL_SECONDS = 0.05
#: A process that died never answers: its cell is then compiled by the process that measures.
PATIENCE_SECONDS = 240.0


@contextmanager
def warming(
    cells: Sequence[Cell], peers: Sequence[Peer], device: torch.device, jobs: int
) -> Iterator[Pending]:
    """Start compiling; at the end of the context stop what is not yet compiled.

    Args:
        cells: in the order in which they are wanted.
        peers: those that compile are warmed up.
        device: where the cells will run.
        jobs: number of processes; 0 for none.
    """
    if not jobs:
        yield Pending({})
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, initializer=_alone) as pool:
        # The shortest first: they run what they compiled, and so would disturb what is measured.
        by_cost = sorted(peers, key=lambda peer: peer.name == "max-autotune")
        tasks: dict[Cell, list[AsyncResult[None]]] = {cell: [] for cell in cells}
        for peer in by_cost:
            for cell in cells:
                if peer.compiles and peer.absence(cell, device) is None:
                    task = pool.apply_async(_compile, (cell, peer.name, device.type))
                    tasks[cell].append(task)
        yield Pending(tasks)


class Pending:
    """Cells that are being compiled."""

    def __init__(self, tasks: dict[Cell, list[AsyncResult[None]]]) -> None:
        self._tasks = tasks
        self._started = monotonic()

    def next_ready(self, cells: Sequence[Cell], deadline: float) -> Cell | None:
        """The first of ``cells`` that is compiled; waits for one until the deadline, else none."""
        end = min(deadline, self._started + PATIENCE_SECONDS)
        while True:
            for cell in cells:
                if self._is_ready(cell):
                    return cell
            if monotonic() > end:
                return None if monotonic() > deadline else cells[0]
            sleep(POLL_SECONDS)

    def wait(self, cells: Collection[Cell], deadline: float) -> None:
        """Wait until all cells are compiled."""
        end = min(deadline, self._started + PATIENCE_SECONDS)
        while monotonic() < end and not all(map(self._is_ready, cells)):
            sleep(POLL_SECONDS)

    def _is_ready(self, cell: Cell) -> bool:
        return all(task.ready() for task in self._tasks.get(cell, ()))


def _alone() -> None:
    """Set a process up to compile one thing at a time."""
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    inductor.compile_in_this_process()


def _compile(cell: Cell, peer_name: str, device_type: str) -> None:
    """Compile one cell for one peer; a failure shows again where the cell is measured."""
    (peer,) = chosen([peer_name])
    device = torch.device(device_type)
    torch.compiler.reset()
    candidates_only: AbstractContextManager[None] = (
        inductor.compiling_candidates_only()
        if peer.name == "max-autotune"
        else contextlib.nullcontext()
    )
    with (
        contextlib.suppress(Exception),
        torch.no_grad(),
        products_in(cell.precision),
        candidates_only,
    ):
        x, sets = operands(cell, 1, device)
        runner = peer.build(cell)
        runner.function(*runner.operands(x, sets[0]))
    if device.type == "cuda":
        torch.cuda.empty_cache()
