"""Watch a program that runs: whether the fusions that were planned are launched, step by step.

Between the steps that are profiled nothing is recorded: a step costs a comparison of two numbers
and a look at the newest graph that was compiled.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch

from fusion_backend.compat.dispatcher import profiler_is_active
from fusion_backend.compat.sessions import recorded_events
from fusion_backend.errors import WatchError
from fusion_backend.fusion import journal
from fusion_backend.fusion.journal import CompiledGraph
from fusion_backend.fusion.sites import labels
from fusion_backend.instruments.claims import (
    REGION,
    Claim,
    GraphRun,
    SiteLaunches,
    claims_of,
    count_launches,
    gradient_launches,
    graph_runs,
)
from fusion_backend.instruments.cpu_operators import count_operators
from fusion_backend.instruments.profiler_trace import KERNEL, Event
from fusion_backend.instruments.report import bullet, gradients_text, table

# How torch.profiler.profile.step() names what has ended in a trace.
_STEP = "ProfilerStep#"
_HOW_IT_BEGINS = "a watch begins with `with watch:`, around the loop that calls step()"

Kind = Literal["nothing-ran", "not-fired", "recompiled", "more-kernels"]


class Problem(NamedTuple):
    """Something that a :class:`Watch` found.

    Attributes:
        kind: ``nothing-ran``: no graph with a fused MLP ran in a profiled step; ``not-fired``: a
            graph ran and launched fewer kernels than its plans claim; ``recompiled``: a graph was
            compiled again, and an MLP that was fused is fused no more; ``more-kernels``: a graph
            or a step runs more kernels than before, or than allowed.
        step: how many steps had ended when it was found.
        message: a sentence that says what, where, and what to do.
    """

    kind: Kind
    step: int
    message: str


@dataclass(eq=False)
class Watch:
    """Counts the launches of fused MLPs in a program that runs; :func:`watch` makes it.

    It is a context manager around a loop that calls :meth:`step`; its :meth:`on_trace_ready` is a
    handler for a ``torch.profiler.profile`` of your own. Call both from the thread that runs the
    model.

    Attributes:
        steps: how many steps have ended.
        profiled: how many of them were profiled.
        problems: what was found so far, the oldest first, each once.
        kernels: how many kernels (on a CPU: operators) the last profiled step ran, ``None`` before
            the first.
        gradients: how often each fused kernel of backward passes was launched in profiled steps.
    """

    first: int = 3
    every: int = 1000
    on_problem: Literal["warn", "raise"] | Callable[[Problem], None] = "warn"
    most_kernels: int | None = None
    steps: int = 0
    profiled: int = 0
    problems: list[Problem] = field(default_factory=list)
    kernels: int | None = None
    gradients: Counter[str] = field(default_factory=Counter)
    _sites: dict[tuple[str, int], SiteLaunches] = field(default_factory=dict, repr=False)
    _fewest_kernels: dict[tuple[str, bool], int] = field(default_factory=dict, repr=False)
    _newest: CompiledGraph | None = field(default=None, repr=False)
    _next: int = field(default=-1, repr=False)
    _began: bool = field(default=False, repr=False)
    _session: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        given = self.first, self.every
        if not all(isinstance(each, int) and each >= 0 for each in given):
            got = " and ".join(map(repr, given))
            raise WatchError(f"first and every must be whole numbers from 0 on, got {got}")
        if self.on_problem not in ("warn", "raise") and not callable(self.on_problem):
            raise WatchError(
                f"on_problem must be 'warn', 'raise' or a function, got {self.on_problem!r}"
            )
        self._newest = journal.newest()

    def __enter__(self) -> Watch:
        self._next, self._began = self.first, True
        if self.first == 0:
            self._begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        session, self._session, self._next = self._session, None, -1
        if session is not None:  # a step was begun that did not end: it counts for nothing
            session.stop()

    def step(self) -> None:
        """Say that a step of the loop has ended: the next one is profiled if it is its turn.

        Raises:
            WatchError: a problem was found, and ``on_problem`` is ``"raise"``.
        """
        self.steps += 1
        if journal.newest() is not self._newest:
            self._look_at_new_graphs()
        if self._session is not None:
            self._end()
        if self.steps == self._next:
            self._begin()

    def on_trace_ready(self, session: torch.profiler.profile) -> None:
        """Read what a session of ``torch.profiler`` recorded, one or several whole steps.

        Give it to ``torch.profiler.profile(on_trace_ready=...)``. The session must record the CPU.

        Raises:
            WatchError: a problem was found, and ``on_problem`` is ``"raise"``.
        """
        events = [Event(*each) for each in recorded_events(session)]
        steps = {event.name for event in events if event.name.startswith(_STEP)}
        self._look_at_new_graphs()
        self._read(events, max(len(steps), 1))

    @property
    def sites(self) -> tuple[SiteLaunches, ...]:
        """What was seen of each fused MLP whose graph ran in a profiled step."""
        return tuple(self._sites.values())

    def check(self) -> None:
        """Require that no problem was found, and that a step was profiled.

        Raises:
            WatchError: with all problems.
        """
        if not self.profiled and not self._began:
            raise WatchError(f"no step was profiled: {_HOW_IT_BEGINS}")
        if not self.profiled:
            raise WatchError(
                f"no step was profiled: {self.steps} steps have ended, and the first one is "
                f"profiled after {self.first}"
            )
        if self.problems:
            raise WatchError("\n".join(problem.message for problem in self.problems))

    def __str__(self) -> str:
        lines = [
            f"{self.steps} step{'s'[: self.steps != 1]}, {self.profiled} profiled: "
            f"{len(self.sites)} fused MLP{'s'[: len(self.sites) != 1]} ran"
        ]
        if self.steps and not self.profiled and not self._began:
            lines += ["", f"No step was profiled: {_HOW_IT_BEGINS}."]
        if self.sites:
            headers = ["graph", "MLP", "plan", "runs", "claimed", "launched"]
            rows = [[s.graph, s.label, s.plan, s.runs, s.claimed, s.launched] for s in self.sites]
            lines += ["", table(headers, rows)]
        if self.gradients:
            lines += ["", gradients_text(self.gradients)]
        if self.problems:
            lines += ["", "Problems:"]
            lines += [bullet(f"step {p.step}, {p.kind}: {p.message}.") for p in self.problems]
        return "\n".join(lines)

    def _begin(self) -> None:
        if profiler_is_active():  # somebody else's: the next step may be free
            self._next += 1
            return
        self._session = torch.profiler.profile(activities=torch.profiler.supported_activities())
        self._session.start()

    def _end(self) -> None:
        session = self._session
        session.stop()
        self._next = self.steps + self.every if self.every else -1
        try:
            self.on_trace_ready(session)
        finally:
            self._session = None

    def _read(self, events: Sequence[Event], steps: int) -> None:
        self.profiled += steps
        graphs = {graph.compilation: graph for graph in journal.numbered()}
        runs = [run for run in graph_runs(events) if run.compilation in graphs]
        claims = {name: claims_of(graphs[name].sites) for name in {run.compilation for run in runs}}
        self.kernels = _kernels(events) // steps
        self.gradients += gradient_launches((c for each in claims.values() for c in each), events)
        for run in runs:
            count_launches(self._sites, run, claims[run.compilation])
        if not any(graphs[run.compilation].fused for run in runs):
            self._nothing_ran(events)
        for name in sorted(claims):
            self._compare([run for run in runs if run.compilation == name], claims[name])
        if self.most_kernels is not None and self.kernels > self.most_kernels:
            self._found(
                "more-kernels",
                f"a step runs {self.kernels} kernels, and at most {self.most_kernels} are allowed",
            )

    def _compare(self, runs: Sequence[GraphRun], claims: Sequence[Claim]) -> None:
        """Compare the runs of one graph with what its plans claim, and with what ran before."""
        name = runs[0].compilation
        for mark in dict.fromkeys(claim.mark for claim in claims):
            seen = [run for run in runs if not (run.replays_graph and "::" in mark)]
            alike = [claim for claim in claims if claim.mark == mark]
            claimed = len(seen) * sum(claim.fewest for claim in alike)
            launched = sum(len(run.launches(mark)) for run in seen)
            if launched < claimed:
                families = " and ".join(dict.fromkeys(claim.family for claim in alike))
                self._found(
                    "not-fired",
                    f"graph {name} launched {launched} kernels of {families} in {len(seen)} runs, "
                    f"and the plans of its {len(alike)} MLPs claim {claimed}: run it under "
                    f"TORCH_LOGS=fusedmlp, and compare with fusion_backend.profile",
                )
        if any(claim.fewest == 0 for claim in claims):
            return  # runs of no rows launch less than others do
        kernels = min(_kernels(run.events) for run in runs)
        alike_before = _frame(name), any(claim.training for claim in claims)
        fewest = self._fewest_kernels.setdefault(alike_before, kernels)
        if kernels > fewest:
            self._found(
                "more-kernels",
                f"graph {name} runs {kernels} kernels, where the same code ran {fewest} before: "
                f"fusion_backend.history() has both of its graphs",
            )

    def _nothing_ran(self, events: Sequence[Event]) -> None:
        compiled = sorted(
            {e.name.removeprefix(REGION) for e in events if e.name.startswith(REGION)}
        )
        what = f"graphs {', '.join(compiled)} ran" if compiled else "nothing that was compiled ran"
        self._found(
            "nothing-ran",
            f"no graph with a fused MLP ran in a profiled step; {what}. Call the compiled model, "
            f"and see whether Dynamo gave up (TORCH_LOGS=recompiles) and what "
            f"fusion_backend.history() says",
        )

    def _look_at_new_graphs(self) -> None:
        """Compare graphs that were compiled since with the best of the same code before them."""
        graphs = journal.numbered()
        known = [i for i, graph in enumerate(graphs) if graph is self._newest]
        start = known[-1] + 1 if known else 0
        self._newest = journal.newest()
        for index in range(start, len(graphs)):
            graph = graphs[index]
            before = [each for each in graphs[:index] if _same_code(each, graph)]
            if before:
                self._compare_recompiled(max(before, key=lambda each: len(each.fused)), graph)

    def _compare_recompiled(self, before: CompiledGraph, graph: CompiledGraph) -> None:
        fused = {
            label for label, s in zip(labels(before.sites), before.sites, strict=True) if s.fused
        }
        lost = {
            label: site
            for label, site in zip(labels(graph.sites), graph.sites, strict=True)
            if label in fused and not site.fused
        }
        gone = fused - set(labels(graph.sites))
        if not lost and not gone:
            return
        each = [f"{label} ({site.reason})" for label, site in lost.items()]
        each += [f"{label} (no longer found)" for label in sorted(gone)]
        more = f" and {len(each) - 3} more" if len(each) > 3 else ""
        self._found(
            "recompiled",
            f"graph {graph.compilation} was compiled after {before.compilation} from the same "
            f"code and does not fuse {', '.join(each[:3])}{more}. TORCH_LOGS=recompiles says why "
            f"it was compiled again",
        )

    def _found(self, kind: Kind, message: str) -> None:
        if any(known.kind == kind and known.message == message for known in self.problems):
            return
        problem = Problem(kind, self.steps, message)
        self.problems.append(problem)
        if self.on_problem == "raise":
            raise WatchError(message)
        if self.on_problem == "warn":
            message = f"fusedmlp, step {self.steps}: {message}."
            warnings.warn(message, stacklevel=_depth_of_caller())
        elif callable(self.on_problem):
            self.on_problem(problem)


def watch(
    *,
    first: int = 3,
    every: int = 1000,
    on_problem: Literal["warn", "raise"] | Callable[[Problem], None] = "warn",
    most_kernels: int | None = None,
) -> Watch:
    """Watch a training or serving loop: does it launch the kernels that were planned?

    ::

        with fusion_backend.watch(every=1000) as watch:
            for batch in batches:
                train(batch)
                watch.step()
        print(watch)

    One step of so many is profiled by ``torch.profiler``. In the others, :meth:`Watch.step` takes
    less than a microsecond. Graphs that are compiled meanwhile are compared at once.

    Args:
        first: how many steps pass before the first one that is profiled: those that compile.
        every: how many steps lie between two that are profiled; with 0 only one is.
        on_problem: ``"warn"``, ``"raise"`` a :class:`WatchError`, or a function that is called with
            each :class:`Problem`. The same problem is told of once.
        most_kernels: how many kernels (on a CPU: operators) a step may run. Without it, each graph
            is compared with what the same code ran before.

    Raises:
        WatchError: a number is negative, or ``on_problem`` is none of these.
    """
    return Watch(first, every, on_problem, most_kernels)


def _frame(compilation: str) -> str:
    """The code that was compiled, without the number of the compilation: ``0`` of ``0/1``."""
    return compilation.rpartition("/")[0]


def _same_code(before: CompiledGraph, graph: CompiledGraph) -> bool:
    """Whether a graph is a recompilation, for the same purpose: training, or inference."""
    purposes = {any(site.training for site in each.sites) for each in (before, graph)}
    frames = {_frame(each.compilation) for each in (before, graph)}
    return len(purposes) == len(frames) == 1 and frames != {""}


def _depth_of_caller() -> int:
    """How far up the stack the program stands that is watched, as ``warnings`` counts it."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__") == __name__:
        frame, depth = frame.f_back, depth + 1
    return depth


def _kernels(events: Sequence[Event]) -> int:
    """How many kernels ran on GPUs; where none did, how many operators on the CPU."""
    on_gpu = sum(event.category == KERNEL for event in events)
    return on_gpu or sum(count_operators(e for e in events if e.category == "cpu_op").values())
