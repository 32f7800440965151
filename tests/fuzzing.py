"""The command that tries many random programs, each chunk of them in a process of its own.

Eager PyTorch itself crashes on a few programs, and a process that compiles thousands of them grows:
so a process tries some hundred, tells what it is at, and where it dies or hangs the next one goes
on behind the program that did it.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from random_programs import random_program

CHUNK = 200
SECONDS = 300  # a program that takes longer hangs
AGREED, DIFFER = "agreed", "differ"
REFUSED = ("refused by eager", "refused without fusion too")
EAGER_CRASHED = "crashed in eager"


@dataclass
class Tally:
    """What became of some programs."""

    programs: Counter[str] = field(default_factory=Counter)
    sites: int = 0
    reports: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.programs += other.programs
        self.sites += other.sites
        self.reports += other.reports

    def __str__(self) -> str:
        counts = ", ".join(f"{n} {what}" for what, n in sorted(self.programs.items()))
        return f"{counts or 'no programs'}; {self.sites} sites fused"


def compiler_of(seed: int, compiler: str) -> str:
    """What runs the program of a seed; of "mixed", one in 10 AOTAutograd, one in 50 Inductor."""
    if compiler != "mixed":
        return compiler
    return "inductor" if seed % 50 == 0 else "aot_eager" if seed % 10 == 5 else "none"


def try_programs(seeds: range, compiler: str, results: Connection) -> None:
    """Try programs, and send what each does: (seed, stage), then (seed, outcome, text, sites).

    Ends early where another process has to go on.
    """
    from differential import Refused, difference, eager, shrunk

    logging.disable(logging.ERROR)  # programs that torch.compile refuses are of no interest
    warnings.simplefilter("ignore")
    for seed in seeds:
        program, chosen = random_program(seed), compiler_of(seed, compiler)
        results.send((seed, EAGER_CRASHED))
        try:
            eager(program)
        except Refused:
            results.send((seed, REFUSED[0], "", 0))
            continue
        results.send((seed, f"crashed with {chosen}"))
        try:
            found, sites = difference(program, chosen)
        except Refused:
            results.send((seed, REFUSED[1], "", 0))
            return  # torch may be left in a state in which nothing runs any more
        if found is None:
            results.send((seed, AGREED, "", sites))
            continue
        results.send((seed, f"differed with {chosen}, and crashed when shrunk"))
        small = shrunk(program, chosen)
        text = f"{small}\n# with {chosen}: {difference(small, chosen)[0]}"
        results.send((seed, DIFFER, text, sites))


def outcomes(
    seeds: range, compiler: str, attempt: Callable[..., None] = try_programs
) -> Iterator[tuple[int, str, str, int]]:
    """What became of each program; a crash or a hang is an outcome."""
    context = multiprocessing.get_context("spawn")
    while seeds:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=attempt, args=(seeds, compiler, sender), daemon=True)
        process.start()
        sender.close()
        running = (seeds.start, "crashed at its start")
        try:
            while receiver.poll(SECONDS):
                seed, *told = receiver.recv()
                running = (seed, *told) if len(told) == 1 else None
                if running is None:
                    seeds = range(seed + 1, seeds.stop)
                    yield seed, *told
            running = running and (running[0], running[1].replace("crashed", "hangs"))
        except EOFError:  # the process ended
            pass
        process.kill()
        process.join()
        if running is not None:
            seed, stage = running
            seeds = range(seed + 1, seeds.stop)
            yield seed, stage, str(random_program(seed)), 0


def tally(seeds: range, compiler: str) -> Tally:
    """Try programs in processes of their own."""
    total = Tally()
    for seed, outcome, text, sites in outcomes(seeds, compiler):
        total.programs[outcome] += 1
        total.sites += sites
        if outcome not in (AGREED, *REFUSED):
            total.reports.append(f"# seed {seed}: {outcome}\n{text}\n")
    return total


def main() -> None:
    """Try many random programs; print those that differ, shrunk."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--programs", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first one (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default 1)")
    parser.add_argument(
        "--compiler",
        default="mixed",
        choices=("mixed", "none", "aot_eager", "inductor"),
        help="what runs the rewritten graph (default: mostly none, one in 10 AOTAutograd, "
        "one in 50 Inductor)",
    )
    options = parser.parse_args()
    everything = range(options.seed, options.seed + options.programs)
    chunks = [everything[i : i + CHUNK] for i in range(0, options.programs, CHUNK)]
    started, total = time.monotonic(), Tally()
    with ThreadPoolExecutor(options.jobs) as pool:
        found = pool.map(lambda chunk: tally(chunk, options.compiler), chunks)
        for chunk, part in zip(chunks, found, strict=True):
            total.add(part)
            print(*part.reports, sep="\n", end="", flush=True)
            minutes = (time.monotonic() - started) / 60
            rate = (chunk.stop - options.seed) / minutes
            print(f"up to seed {chunk.stop}: {total} ({rate:.0f} a minute)", flush=True)
    raise SystemExit(any(w not in (AGREED, *REFUSED, EAGER_CRASHED) for w in total.programs))
