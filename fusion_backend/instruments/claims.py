"""What the plans of fused sites claim to launch, and which launches in a trace are theirs.

Dynamo names each run of a compiled graph in a trace by the compilation that made it, as the journal
does, and our kernels have stable names: so launches belong to graphs, and families, for certain.
Sites of one graph and one family get their launches in program order. That is the order in which
Inductor runs them, unless they are independent of each other.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from fusion_backend.fusion.sites import Site, by_call, labels
from fusion_backend.instruments.profiler_trace import (
    CPU_OPERATOR,
    KERNEL,
    LAUNCH,
    ON_GPU,
    Event,
)
from fusion_backend.kernels import registry

#: What Dynamo calls the run of a compiled graph in a trace; the compilation's name follows.
REGION = "Torch-Compiled Region: "
#: How one operator stands for an MLP where nothing launches kernels of a family by its name.
_OPERATORS = r"fusedmlp::(mlp|activated_linear|chain|towers)"
# A symbolic size that is known when the graph runs, and not before: torch calls it u0, u1, ...
_HANGS_ON_DATA = re.compile(r"\bu\d+\b")


class Claim(NamedTuple):
    """What one fused site, or sites that share a call, launch each time their graph runs.

    Attributes:
        label: of the site; of several with ``+`` between.
        family: that its plan names.
        mark: a pattern of the names of its launches.
        fewest: of these launches; 0 where there may be no rows.
        most: of these launches.
        gradient_mark: the same pattern for the backward pass; empty where nothing is claimed.
        training: whether it was planned for training.
        site: its place among the sites of its graph; of several the first.
    """

    label: str
    family: str
    mark: str
    fewest: int
    most: int
    gradient_mark: str
    training: bool
    site: int = 0


@dataclass
class GraphRun:
    """One run of a compiled graph, with the events that began within it."""

    compilation: str
    thread: object
    start: float
    end: float
    events: list[Event] = field(default_factory=list)
    replays_graph: bool = False

    def launches(self, mark: str) -> list[Event]:
        """The launches, or calls of operators, of this name; what one calls in turn is part of it.

        They are in the order in which they began.
        """
        found: list[Event] = []
        for event in self.events:
            if not is_launch(event, mark):
                continue
            last = found[-1] if found and event.category == CPU_OPERATOR else None
            if last is None or last.thread != event.thread or event.start >= last.end:
                found.append(event)
        return found


@dataclass
class SiteLaunches:
    """What was launched of one fused MLP, beside what its plan claims.

    Attributes:
        label: of the site, as :func:`fusion_backend.explain` prints it.
        graph: the compilation whose graph it is in, such as ``"0/0"``.
        plan: the family of kernels that it is planned for.
        runs: how often its graph ran, backward passes aside.
        claimed: how many launches its plan claims for these runs, at least.
        launched: how many there were; ``None`` where they cannot be seen: operators, in the replay
            of a CUDA graph. Sites that share graph and family get theirs in program order.
        kernels: how often each of them was launched, by name.
        time_us: how long they took in microseconds, on a GPU or, where operators are counted, on
            the CPU; the profiler's own work is in it.
    """

    label: str
    graph: str
    plan: str
    runs: int = 0
    claimed: int = 0
    launched: int | None = 0
    kernels: Counter[str] = field(default_factory=Counter)
    time_us: float = 0.0


@cache
def _compiled(mark: str) -> re.Pattern[str]:
    return re.compile(mark)


def named(name: str, mark: str) -> bool:
    """Whether a kernel has the name that a mark describes."""
    return bool(mark) and _compiled(mark).fullmatch(name) is not None


def is_launch(event: Event, mark: str) -> bool:
    """Whether an event is a launch that a mark describes: a kernel, or a call of an operator.

    While it is profiled Inductor's launcher calls a range of the CPU by the name of the kernel.
    """
    category = CPU_OPERATOR if "::" in mark else KERNEL
    return event.category == category and named(event.name, mark)


def claims_of(sites: Iterable[Site]) -> list[Claim]:
    """The claims of the fused sites of a graph, in program order.

    There is none of a site whose family launches nothing that could be told by its name.
    """
    sites = tuple(sites)
    names, found = labels(sites), []
    for place, *others in by_call(sites):
        site, label = sites[place], " + ".join(names[each] for each in (place, *others))
        if not site.fused or site.plan is None:
            continue
        family = registry.named(site.plan)
        fewest, most = family.marked_launches
        mark, gradient_mark = family.mark, family.gradient_mark
        if family.launches_triton and site.device == "cpu":  # in Triton's interpreter
            mark, gradient_mark, fewest, most = _OPERATORS, "", 1, 1
        if site.training:  # the first launch keeps the pre-activations, a product follows
            fewest = 1
        if not site.training or site.chain or site.call:
            gradient_mark = ""
        if _may_have_no_rows(site):  # and nothing is launched for none
            fewest = 0
        if mark:
            shares = mark, fewest, most, gradient_mark
            found.append(Claim(label, site.plan, *shares, site.training, place))
    return found


def _may_have_no_rows(site: Site) -> bool:
    """Whether a run may be of no rows: sizes that hang on data can be 0, other symbols cannot."""
    rows = site.shape.rows
    return rows == 0 or (isinstance(rows, str) and _HANGS_ON_DATA.search(rows) is not None)


def graph_runs(events: Iterable[Event]) -> list[GraphRun]:
    """The runs of compiled graphs in a trace, each with what was called and launched within it.

    Work on a GPU belongs to the run in which the CPU launched it. Of kernels whose launch was not
    recorded, nothing is known.
    """
    events = sorted(events, key=lambda event: (event.start, -event.duration))
    runs: dict[object, list[GraphRun]] = {}
    for event in events:
        if event.name.startswith(REGION):
            run = GraphRun(event.name.removeprefix(REGION), event.thread, event.start, event.end)
            runs.setdefault(event.thread, []).append(run)
    starts = {thread: [run.start for run in each] for thread, each in runs.items()}

    def around(event: Event) -> GraphRun | None:
        index = bisect_right(starts.get(event.thread, ()), event.start) - 1
        run = runs[event.thread][index] if index >= 0 else None
        return run if run is not None and event.start <= run.end else None

    launched: dict[int, GraphRun | None] = {}
    for event in events:
        if event.category in LAUNCH:
            owner = launched[event.correlation] = around(event)
            if owner is not None and "GraphLaunch" in event.name:
                owner.replays_graph = True
    for event in events:
        on_gpu = event.category in ON_GPU
        owner = launched.get(event.correlation) if on_gpu else around(event)
        if owner is not None and (on_gpu or event.category == CPU_OPERATOR):
            owner.events.append(event)
    return sorted((run for each in runs.values() for run in each), key=lambda run: run.start)


def launches_by_claim(claims: Sequence[Claim], run: GraphRun) -> list[list[Event] | None]:
    """Which launches of a run are those of each claim; ``None`` where that cannot be seen.

    Operators cannot be seen where a CUDA graph is replayed.
    """
    found: list[list[Event] | None] = [None] * len(claims)
    for mark in dict.fromkeys(claim.mark for claim in claims):
        if run.replays_graph and "::" in mark:
            continue
        indices = [i for i, claim in enumerate(claims) if claim.mark == mark]
        launches = run.launches(mark)
        for i, share in zip(indices, _shares(claims, indices, len(launches)), strict=True):
            found[i], launches = launches[:share], launches[share:]
    return found


def _shares(claims: Sequence[Claim], indices: Sequence[int], total: int) -> list[int]:
    """How many of the launches each claim gets, in order: its fewest, unless all have their most.

    Where there are too few the last ones go without; what is left over is the last one's.
    """
    most = sum(claims[i].most for i in indices)
    shares = []
    for i in indices:
        share = claims[i].most if total >= most else claims[i].fewest
        shares.append(share)
    left = total
    for position, share in enumerate(shares):
        shares[position] = min(share, left)
        left -= shares[position]
    if shares:
        shares[-1] += left
    return shares


def count_launches(
    sites: dict[tuple[str, int], SiteLaunches], run: GraphRun, claims: Sequence[Claim]
) -> None:
    """Add one run of a graph to what was seen of its sites, by compilation and place."""
    found = launches_by_claim(claims, run)
    for index, (claim, launches) in enumerate(zip(claims, found, strict=True)):
        new = SiteLaunches(claim.label, run.compilation, claim.family)
        site = sites.setdefault((run.compilation, index), new)
        site.runs += 1
        site.claimed += claim.fewest
        if launches is None or site.launched is None:
            site.launched = None
            continue
        site.launched += len(launches)
        site.kernels.update(launch.name for launch in launches)
        site.time_us += sum(launch.duration for launch in launches)


def gradient_launches(claims: Iterable[Claim], events: Iterable[Event]) -> Counter[str]:
    """How often each kernel of backward passes was launched, by its name."""
    marks = {claim.gradient_mark for claim in claims if claim.gradient_mark}
    return Counter(event.name for event in events if any(is_launch(event, mark) for mark in marks))
