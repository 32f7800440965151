"""Training on many GPUs: `examples/train_gpt.py` in each way to spread a model over ranks.

    python benchmarks/many_gpus.py benchmarks/results/many-gpus/h200-4.json
    python benchmarks/page.py

The first command measures on all GPUs of the machine, the second publishes. Eager, Inductor and
fusedmlp train one after the other in the same processes, by DDP, FSDP2, tensor parallel and tensor
parallel within FSDP2: on all GPUs, then on fewer, with as many rows a rank (weak scaling) or in all
(strong scaling). Runs on fewer GPUs share the machine, each with GPUs of its own.

Each run has a time limit. Results are written after every run, also of one that failed or was cut
short after some backends. After a failure the backends that are left are tried; what there was no
time for is measured when the same command is given again. Each run's output is kept in a folder
beside the results. On a machine without a GPU, --ranks says for how many processes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fusion_backend.bench.results import machine, write

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_gpt.py"
BACKENDS = ("eager", "inductor", "fusedmlp")
LATE = "out of time"


class Run(NamedTuple):
    """One way to spread a model over ranks.

    Attributes:
        parallel: as the example calls it.
        ranks: processes, each with a GPU.
        tensor: how many of them split each layer.
        rows: of a batch, all ranks together.
    """

    parallel: str
    ranks: int
    tensor: int
    rows: int

    @property
    def name(self) -> str:
        """For tables and files."""
        split = f"-{self.tensor}" if self.tensor > 1 else ""
        return f"{self.parallel}{split} on {self.ranks}, {self.rows} rows"


def runs(ranks: int, rows: int) -> list[Run]:
    """All runs, those on all ranks first.

    On all ranks weak and strong scaling meet: there are ``rows`` a rank, and ``rows`` times the
    ranks in all.
    """
    found = ways(ranks, rows * ranks)
    found += [Run("none", 1, 1, rows * ranks), Run("none", 1, 1, rows)]
    fewer = ranks // 2
    while fewer > 1:
        found += [each for in_all in (rows * fewer, rows * ranks) for each in ways(fewer, in_all)]
        fewer //= 2
    return list(dict.fromkeys(found))


def ways(ranks: int, rows: int) -> list[Run]:
    """All ways to spread a model over some ranks."""
    if ranks == 1:
        return []
    within = [tensor for tensor in range(2, ranks // 2 + 1) if ranks % tensor == 0]
    return [
        Run("ddp", ranks, 1, rows),
        Run("fsdp", ranks, 1, rows),
        Run("tp", ranks, ranks, rows),
        *(Run("tp-fsdp", ranks, tensor, rows) for tensor in within),
    ]


@dataclass
class Job:
    """A run that waits, is under way or has ended.

    Attributes:
        run: what it is.
        backends: those that are left.
        results: of the others, as the example writes them.
        failures: why there are none.
        gpus: those that it has.
        process: while it is under way.
        started: when, of the monotonic clock, in seconds.
    """

    run: Run
    backends: list[str]
    content: dict[str, Any] = field(default_factory=dict)
    results: list[dict[str, Any]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    gpus: list[int] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0

    @property
    def line(self) -> dict[str, Any]:
        """What is written."""
        setting = self.content.get("setting", {})
        found = {"results": self.results, "failures": self.failures, "setting": setting}
        return {**self.run._asdict(), **found}


class Machine:
    """Runs jobs on the GPUs of this machine, as many at a time as fit."""

    def __init__(self, arguments: argparse.Namespace, jobs: Sequence[Job]) -> None:
        self.arguments, self.jobs = arguments, jobs
        self.free = list(range(arguments.ranks))
        self.folder: Path = arguments.results.with_suffix("")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.deadline = time.monotonic() + arguments.seconds

    def path(self, job: Job, suffix: str) -> Path:
        """A file of a job."""
        return self.folder / f"{job.run.name.replace(', ', ' ').replace(' ', '_')}{suffix}"

    def do(self, jobs: Sequence[Job]) -> None:
        """Do all jobs, or what there is time for."""
        waiting, running = list(jobs), list[Job]()
        while waiting or running:
            fitting = [job for job in waiting if job.run.ranks <= len(self.free)]
            if time.monotonic() > self.deadline:
                waiting = fitting = []
            if fitting:
                waiting.remove(fitting[0])
                self.start(fitting[0])
                running.append(fitting[0])
                continue
            ended = [job for job in running if self.has_ended(job)]
            for job in ended:
                running.remove(job)
                self.finish(job)
                if job.backends:
                    waiting.insert(0, job)
                self.write()
            time.sleep(0.1)

    def start(self, job: Job) -> None:
        """Start a job on GPUs that are free."""
        run, ranks = job.run, job.run.ranks
        job.gpus, self.free = self.free[:ranks], self.free[ranks:]
        launcher = [sys.executable]
        if ranks > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [*launcher, str(EXAMPLE), "--parallel", run.parallel, "--tp", str(run.tensor)]
        command += ["--scaling", "strong", "--batch", str(run.rows), "--preset"]
        command += [self.arguments.preset, "--steps", str(self.arguments.steps)]
        command += ["--backends", ",".join(job.backends), "--json", str(self.path(job, ".json"))]
        command += shlex.split(self.arguments.example)
        self.path(job, ".json").unlink(missing_ok=True)
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, job.gpus))}
        threads = max(1, min(8, (os.cpu_count() or 1) // self.arguments.ranks))
        environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
        with self.path(job, ".txt").open("ab") as log:
            job.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        job.started = time.monotonic()

    def has_ended(self, job: Job) -> bool:
        """Whether a job has ended, or was made to after its time."""
        assert job.process is not None
        if job.process.poll() is not None:
            return True
        now = time.monotonic()
        if now < min(self.deadline, job.started + self.arguments.limit):
            return False
        job.process.terminate()  # torchrun ends its processes then
        try:
            job.process.wait(15)
        except subprocess.TimeoutExpired:
            job.process.kill()
        return True

    def finish(self, job: Job) -> None:
        """Take what a job has written; what is left after a failure waits for another try."""
        assert job.process is not None
        code, took = job.process.wait(), time.monotonic() - job.started
        self.free = sorted([*self.free, *job.gpus])
        path = self.path(job, ".json")
        if path.is_file():
            job.content = json.loads(path.read_text())
            job.results += job.content["results"]
        left = job.backends[len(job.content.get("results", ())) if path.is_file() else 0 :]
        job.backends = left[1:] if code else []
        if left:
            late = took >= self.arguments.limit or time.monotonic() >= self.deadline
            why = LATE if late else last_error(self.path(job, ".txt"))
            job.failures[left[0]] = why
            job.backends = [] if late else job.backends
        names = ", ".join(each["backend"] for each in job.results) or "nothing"
        print(f"{job.run.name}: {names} after {took:.0f} s {job.failures or ''}", flush=True)

    def write(self) -> None:
        """Write what there is so far."""
        content = heading(self.arguments)
        content["runs"] = [job.line for job in self.jobs if job.results or job.failures]
        write(content, self.arguments.results)


def last_error(log: Path) -> str:
    """The last error that a log tells of."""
    lines = log.read_text(errors="replace").splitlines()
    told = [line.partition("]: ")[2] or line for line in lines if "Error: " in line]
    told = [line for line in told if not line.startswith("torch.distributed.elastic")]
    return told[-1][:500] if told else "ended without an error, see its log"


def main() -> int:
    arguments = parse_arguments()
    jobs = earlier(arguments)
    wanted = arguments.only or [""]
    chosen = [job for job in jobs if any(text in job.run.name for text in wanted)]
    Machine(arguments, jobs).do([job for job in chosen if job.backends])
    return 0


def earlier(arguments: argparse.Namespace) -> list[Job]:
    """All jobs, with the results of an earlier call, which this one continues."""
    jobs = {run: Job(run, list(BACKENDS)) for run in runs(arguments.ranks, arguments.rows)}
    if not arguments.results.is_file():
        return list(jobs.values())
    content = json.loads(arguments.results.read_text())
    own = {**heading(arguments), "runs": content["runs"]}
    if content != own:
        different = [key for key in own if content.get(key) != own[key]]
        sys.exit(f"{arguments.results} differs in {', '.join(different)}: move it away")
    for line in content["runs"]:
        job = jobs[Run(*(line[name] for name in Run._fields))]
        job.results, job.content = line["results"], {"setting": line["setting"]}
        job.failures = {way: why for way, why in line["failures"].items() if why != LATE}
        done = {each["backend"] for each in job.results} | job.failures.keys()
        job.backends = [way for way in BACKENDS if way not in done]
    return list(jobs.values())


def heading(arguments: argparse.Namespace) -> dict[str, Any]:
    """What all runs of a file have in common."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = {"rows": arguments.rows, "preset": arguments.preset, "steps": arguments.steps}
    return {"machine": machine(device), "gpus": arguments.ranks, **sizes}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path, help="JSON file to write")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--rows", type=int, default=2, help="rows of each rank (2)")
    parser.add_argument("--preset", default="llama-1b", help="of the example (llama-1b)")
    parser.add_argument("--steps", type=int, default=12, help="of each backend (12)")
    parser.add_argument("--seconds", type=float, default=900, help="for all runs (900)")
    parser.add_argument("--limit", type=float, default=180, help="seconds of a run (180)")
    text = "only runs with TEXT in their name, such as 'tp-2 on 4'; may be repeated"
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help=text)
    parser.add_argument("--example", default="", help='more for it: --example="--layers 2"')
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
