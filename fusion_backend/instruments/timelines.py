"""When each kernel of one call ran, and which site launched it.

A site's launches are found by their order. Eager's and Inductor's products of matrices follow each
other as the linear layers of the graph do, and calls of fusedmlp's kernels as its sites. Where the
numbers do not agree, no launch is given to a site: rather none than a wrong one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from fusion_backend.fusion.sites import Site
from fusion_backend.fusion.views.node import operation
from fusion_backend.instruments.cpu_operators import operators_in
from fusion_backend.instruments.profiler_trace import Step

_PRODUCTS = frozenset({"linear", "addmm", "mm", "conv1d", "conv2d"})
_PRODUCT_CALL = re.compile(
    r"\b(addmm|mm|linear|_linear_pointwise|_addmm_activation|\w*convolution\w*)$"
)
_OURS = re.compile(r"^fusedmlp(::|_)")


class Launch(NamedTuple):
    """A kernel on a timeline; on a CPU, an operator.

    Attributes:
        name: of the kernel.
        start: microseconds since the first one of the call began.
        duration: in microseconds.
        lane: which of the streams, or threads, it ran on, by their order.
        site: number of the site that launched it, among those of the model; ``None`` where it is
            none's, or not known.
    """

    name: str
    start: float
    duration: float
    lane: int = 0
    site: int | None = None


def timeline(steps: Sequence[Step]) -> tuple[Launch, ...]:
    """The launches of the step that took the median time, in the order in which they began."""
    timed = [each for each in (_launches(step) for step in steps) if each]
    if not timed:
        return ()
    return sorted(timed, key=_length)[len(timed) // 2]


def _launches(step: Step) -> tuple[Launch, ...]:
    found: list[tuple[str, float, float, Any]]
    if step.gpu:
        found = [(event.name, event.start, event.duration, event.thread) for event in step.gpu]
    else:
        calls = operators_in(step.cpu)
        found = [(call.name, call.start, call.end - call.start, None) for call in calls]
    if not found:
        return ()
    found.sort(key=lambda each: each[1])
    lanes = {thread: i for i, thread in enumerate(dict.fromkeys(each[3] for each in found))}
    first = found[0][1]
    return tuple(
        Launch(name, start - first, duration, lanes[thread])
        for name, start, duration, thread in found
    )


def _length(launches: Sequence[Launch]) -> float:
    return max(launch.start + launch.duration for launch in launches)


def with_sites(
    launches: Sequence[Launch], graphs: Iterable[tuple[Graph, Sequence[Site]]]
) -> tuple[Launch, ...]:
    """The launches of a forward pass with the sites that they belong to.

    Args:
        launches: on one timeline.
        graphs: each graph as it was captured, in the order in which they run, and its sites.
    """
    graphs = list(graphs)
    sites = [site for _, found in graphs for site in found]
    if any(_OURS.match(launch.name) for launch in launches):
        return _by_calls(launches, sites)
    return _by_products(launches, graphs)


def _by_calls(launches: Sequence[Launch], sites: Sequence[Site]) -> tuple[Launch, ...]:
    """Fusedmlp's own: each fused site has the same number of them, one after the other."""
    ours = [i for i, launch in enumerate(launches) if _OURS.match(launch.name)]
    fused = [number for number, site in enumerate(sites) if site.fused]
    if not fused or len(ours) % len(fused):
        return tuple(launches)
    each = len(ours) // len(fused)
    owner = {i: fused[n // each] for n, i in enumerate(ours)}
    return tuple(launch._replace(site=owner.get(i)) for i, launch in enumerate(launches))


def _by_products(
    launches: Sequence[Launch], graphs: Sequence[tuple[Graph, Sequence[Site]]]
) -> tuple[Launch, ...]:
    """From a site's first product to its last."""
    products = [i for i, launch in enumerate(launches) if _PRODUCT_CALL.search(launch.name)]
    owners: list[int | None] = []
    number = 0
    for graph, sites in graphs:
        owner = {name: number + i for i, site in enumerate(sites) for name in site.nodes}
        owners += [owner.get(node.name) for node in graph.nodes if _is_product(node)]
        number += len(sites)
    if len(owners) != len(products):
        return tuple(launches)
    found: dict[int, int] = {}
    for (one, site), (other, next_site) in pairwise(zip(products, owners, strict=True)):
        if site is not None:
            found[one] = site
            if next_site == site:
                found.update(dict.fromkeys(range(one, other + 1), site))
    if owners and owners[-1] is not None:
        found[products[-1]] = owners[-1]
    return tuple(launch._replace(site=found.get(i)) for i, launch in enumerate(launches))


def _is_product(node: Node) -> bool:
    return operation(node) in _PRODUCTS


def time_by_site(launches: Iterable[Launch]) -> Mapping[int, float]:
    """Microseconds of the launches of each site."""
    times: dict[int, float] = {}
    for launch in launches:
        if launch.site is not None:
            times[launch.site] = times.get(launch.site, 0.0) + launch.duration
    return times
