"""The command that tries many random programs, each chunk of them in a process of its own.

Eager PyTorch itself crashes on a few programs, and a process that compiles thousands of them grows:
so a process tries some hundred, tells what it is at, and where it dies or hangs the next one goes
on behind the program that did it.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from random_programs import random_program

CHUNK = 200
SECONDS = 300  # a program that takes longer hangs
SHRINKING = 60  # seconds
SHRUNK = 5  # findings of one kind that a process shrinks
AGREED, DIFFERS = "agreed", "differs"
REFUSED = ("refused by eager", "refused without fusion too")
EAGER_CRASHED = "crashed in eager"
HARMLESS = (AGREED, *REFUSED, EAGER_CRASHED)


class Stage(NamedTuple):
    """What a process is at; where it crashes, that is the outcome."""

    seed: int
    what: str


@dataclass
class Attempt:
    """What became of one program.

    Attributes:
        seed: of the program.
        outcome: "agreed", "differs", why it was refused, or where it crashed or hung.
        compiler: what ran the rewritten graph.
        kind: of the difference, if there is one.
        signature: the kind with the names that the shrunk program calls.
        message: the difference in full.
        program: the program that differs, shrunk.
        sites: how many sites it has, by the reason for which they were left alone, or "fused".
    """

    seed: int
    outcome: str
    compiler: str = ""
    kind: str = ""
    signature: str = ""
    message: str = ""
    program: str = ""
    sites: dict[str, int] = field(default_factory=dict)

    @property
    def is_finding(self) -> bool:
        return self.outcome not in HARMLESS

    def __str__(self) -> str:
        lines = [f"# {self.outcome} with {self.compiler}", self.program]
        if self.kind:
            lines.append(f"# {self.kind}: {self.message}")
        return "\n".join(lines)


@dataclass
class Tally:
    """What became of some programs."""

    outcomes: Counter[str] = field(default_factory=Counter)
    compilers: Counter[str] = field(default_factory=Counter)
    sites: Counter[str] = field(default_factory=Counter)
    findings: list[Attempt] = field(default_factory=list)

    def add(self, attempt: Attempt) -> None:
        self.outcomes[attempt.outcome] += 1
        self.compilers[attempt.compiler] += attempt.outcome in (AGREED, DIFFERS)
        self.sites.update(attempt.sites)
        if attempt.is_finding:
            self.findings.append(attempt)

    def __str__(self) -> str:
        counts = ", ".join(f"{n} {what}" for what, n in self.outcomes.most_common())
        fused, seen = self.sites["fused"], sum(self.sites.values())
        return f"{counts or 'no programs'}; {fused} of {seen} sites fused"

    def summary(self) -> str:
        """By kind: how many findings, and the seeds of the first."""
        lines = [
            str(self),
            "compilers: " + _counts(self.compilers),
            "sites: " + _counts(self.sites),
        ]
        kinds: dict[str, list[Attempt]] = {}
        for finding in self.findings:
            kinds.setdefault(finding.kind or finding.outcome, []).append(finding)
        for kind, found in sorted(kinds.items(), key=lambda item: -len(item[1])):
            lines.append(f"{len(found)} × {kind}")
            named = Counter(finding.signature for finding in found)
            for name, count in named.most_common(10):
                seeds = [finding.seed for finding in found if finding.signature == name][:4]
                lines.append(f"    {count} × {name or '(not shrunk)'}: seeds {seeds}")
        return "\n".join(lines)


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{n} {what}" for what, n in counter.most_common() if n)


def compiler_of(seed: int, compiler: str) -> str:
    """What runs the program of a seed.

    Of "mixed", Triton's interpreter one chunk in 20; of the rest our C++ kernels, AOTAutograd and
    Inductor one in 20 each.
    """
    if compiler != "mixed":
        return compiler
    if seed // CHUNK % 20 == 7:
        return "interpreted"
    return {0: "rows", 5: "aot_eager", 10: "inductor"}.get(seed % 20, "none")


def try_programs(seeds: range, compiler: str, sender: Connection) -> None:
    """Try programs, and send what this is at, a :class:`Stage`, and each :class:`Attempt`.

    Ends early where another process has to go on.
    """
    if compiler_of(seeds.start, compiler) == "interpreted":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    import torch

    from differential import still_compiles

    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # programs that torch.compile refuses are of no interest
    warnings.simplefilter("ignore")
    gc.disable()  # Dynamo makes many objects that live long
    kinds = Counter[str]()
    for seed in seeds:
        attempt = _attempt(seed, compiler_of(seed, compiler), kinds, sender)
        sender.send(attempt)
        if attempt.outcome == REFUSED[1] and not still_compiles():
            return  # torch is in a state in which nothing runs any more
        if seed % 16 == 0:
            gc.collect()


def _attempt(seed: int, compiler: str, kinds: Counter[str], sender: Connection) -> Attempt:
    from differential import difference, shrunk, signature
    from program_runs import Refused, repaired

    sender.send(Stage(seed, EAGER_CRASHED))
    try:
        program = repaired(random_program(seed))
    except Refused:
        return Attempt(seed, REFUSED[0], compiler)
    sender.send(Stage(seed, f"crashed with {compiler}"))
    try:
        compared = difference(program, compiler)
    except Refused as refused:
        return Attempt(seed, REFUSED[1], compiler, message=str(refused))
    attempt = Attempt(seed, AGREED, compiler, program=str(program), sites=dict(compared.sites))
    found = compared.found
    if found is None:
        return attempt
    attempt.outcome, attempt.kind, attempt.message = DIFFERS, found.kind, found.message
    kinds[found.kind] += 1
    if kinds[found.kind] <= SHRUNK:
        sender.send(Stage(seed, f"differed with {compiler}, and crashed when shrunk"))
        program, found = shrunk(program, found, compiler, SHRINKING)
        attempt.message, attempt.program = found.message, str(program)
        attempt.signature = signature(program, found)
    return attempt


def attempts(
    seeds: range, compiler: str, tries: Callable[..., None] = try_programs
) -> Iterator[Attempt]:
    """What became of each program; a crash or a hang is an outcome."""
    context = multiprocessing.get_context("spawn")
    while seeds:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=tries, args=(seeds, compiler, sender), daemon=True)
        process.start()
        sender.close()
        running: Stage | None = Stage(seeds.start, "crashed at its start")
        try:
            while receiver.poll(SECONDS):
                told = receiver.recv()
                running = told if isinstance(told, Stage) else None
                if running is None:
                    seeds = range(told.seed + 1, seeds.stop)
                    yield told
            running = running and running._replace(what=running.what.replace("crashed", "hangs"))
        except EOFError:  # the process ended
            pass
        process.kill()
        process.join()
        if running is not None:
            seeds = range(running.seed + 1, seeds.stop)
            chosen = compiler_of(running.seed, compiler)
            program = str(random_program(running.seed))
            yield Attempt(running.seed, running.what, chosen, program=program)


def _chunks(first: int, count: int) -> list[range]:
    """Seeds in chunks that begin at multiples of their size: each has one kind of process."""
    starts = [first, *range((first // CHUNK + 1) * CHUNK, first + count, CHUNK)]
    return [range(a, b) for a, b in zip(starts, [*starts[1:], first + count], strict=True)]


def main() -> None:
    """Try many random programs; print those that differ, shrunk, and a summary by kind."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--programs", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first one (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default 1)")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no chunk after so many")
    parser.add_argument("--json", help="append findings to this file, one JSON object a line")
    parser.add_argument(
        "--compiler",
        default="mixed",
        choices=("mixed", "none", "rows", "aot_eager", "inductor", "interpreted"),
        help="what runs the rewritten graph (default: mostly none, our C++ kernels, AOTAutograd "
        "and Inductor one in 20 each, Triton's interpreter one chunk of 200 in 20)",
    )
    options = parser.parse_args()
    run, end = Run(options.json), time.monotonic() + 60 * options.minutes

    def tried(chunk: range) -> None:
        if time.monotonic() < end:
            for attempt in attempts(chunk, options.compiler):
                run.add(attempt)
            run.tell(f"up to seed {chunk[-1]}", options.jobs)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(tried, _chunks(options.seed, options.programs)))
    print(f"\n{run.total.summary()}")
    raise SystemExit(bool(run.total.findings))


class Run:
    """The programs of all processes: findings are printed, and written to a file, as they come."""

    def __init__(self, path: str | None) -> None:
        self.total, self.path = Tally(), path
        self._started, self._lock = time.monotonic(), threading.Lock()

    def add(self, attempt: Attempt) -> None:
        with self._lock:
            self.total.add(attempt)
            if attempt.is_finding:
                print(attempt, end="\n\n", flush=True)
                self._write(asdict(attempt))

    def tell(self, what: str, jobs: int) -> None:
        with self._lock:
            seconds = time.monotonic() - self._started
            rate = self.total.outcomes.total() / seconds / jobs
            print(f"{what}: {self.total} ({rate:.2f} programs/s a process)", flush=True)
            counted = {
                name: getattr(self.total, name) for name in ("outcomes", "compilers", "sites")
            }
            self._write({"so far": counted, "seconds": seconds})

    def _write(self, record: dict[str, Any]) -> None:
        if self.path is not None:
            with open(self.path, "a") as file:
                file.write(json.dumps(record) + "\n")
