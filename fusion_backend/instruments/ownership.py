"""Which MLP each launch of a profiled step belongs to, under eager PyTorch, Inductor and fusedmlp.

- Fusedmlp's own kernels, and the operators that stand for them, are those that ``claims`` finds. A
  product of a library that follows them is theirs, too, where the plan has one more launch.
- Eager PyTorch calls its products of matrices as the linear layers of the captured graph follow
  each other. What it launches between two products of one MLP is that MLP's. Autograd numbers what
  it records, so a launch of the backward pass belongs to where its forward operator does.
- Inductor names, above each product in the code that it writes, the nodes of the captured graph
  that it computes. Where that code is not to be had, its products are taken to be in program order.

Where the numbers do not agree no launch is given to an MLP: rather none than a wrong one.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch.fx import Graph, Node

from fusion_backend.fusion.journal import numbered
from fusion_backend.fusion.sites import Site
from fusion_backend.fusion.views.node import operation, value_of
from fusion_backend.instruments.claims import (
    Claim,
    claims_of,
    graph_runs,
    is_launch,
    launches_by_claim,
)
from fusion_backend.instruments.cpu_operators import Call, operators_in
from fusion_backend.instruments.profiler_trace import CPU_OPERATOR, KERNEL, Event, Step
from fusion_backend.instruments.timelines import Issued, Owners, backward_passes
from fusion_backend.kernels import registry

_LINEAR = frozenset({"linear", "addmm", "mm", "conv1d", "conv2d"})
# Operators, and templates of Inductor's, that multiply by a matrix of weights.
_PRODUCT = re.compile(
    r"(bias_)?addmm|mm|linear|_linear_pointwise|_mkl_linear|_addmm_activation|\w*convolution\w*"
    r"|triton_(tem|mm)_\w+"
)
_NODES = re.compile(r"#.* Source Nodes: \[(?P<nodes>[^\]]*)\]")
# A call in what Inductor writes: of a library, of an operator, or of a kernel.
_CALLED = re.compile(
    r"\bextern_kernels\.(\w+)\(|\btorch\.ops\.\w+\.(\w+)\.|\b(triton_\w+)\.run\(|\b(cpp_\w+)\("
)

Owner = TypeVar("Owner")


class Found(NamedTuple):
    """A graph as it was captured, and its sites."""

    graph: Graph
    sites: tuple[Site, ...]


def by_claims(graphs: Sequence[Found]) -> Owners:
    """Owners of what fusedmlp launches."""
    first = dict(zip((id(found.sites) for found in graphs), _first_numbers(graphs), strict=True))

    def owners(step: Step, launches: Sequence[Issued]) -> list[int | None]:
        claimed, trained = [], []
        compiled = {graph.compilation: graph.sites for graph in numbered()}
        for run in graph_runs([*step.cpu, *step.launches, *step.gpu]):
            sites = compiled.get(run.compilation, ())
            if id(sites) not in first:
                continue
            claims = claims_of(sites)
            for claim, found in zip(claims, launches_by_claim(claims, run), strict=True):
                number = first[id(sites)] + claim.site
                claimed += [(event, number) for event in found or ()]
                trained.append((claim, number))
        claimed += backward_launches(trained, step)
        owner = _owner_of(claimed, launches)
        return _with_products(owner, launches, step, graphs)

    return owners


def _first_numbers(graphs: Iterable[Found]) -> Iterator[int]:
    """The number of the first site of each graph."""
    number = 0
    for found in graphs:
        yield number
        number += len(found.sites)


def backward_launches(
    trained: Sequence[tuple[Claim, Owner]], step: Step
) -> Iterator[tuple[Event, Owner]]:
    """Launches of backward passes: those of the last MLP come first, as many for each.

    Args:
        trained: claims in the order in which their graphs ran, each with whose it is.
        step: what was recorded.
    """
    for mark in dict.fromkeys(claim.gradient_mark for claim, _ in trained if claim.gradient_mark):
        owners = [owner for claim, owner in trained if claim.gradient_mark == mark]
        events = sorted(
            (event for event in (*step.gpu, *step.cpu) if is_launch(event, mark)),
            key=lambda event: event.start,
        )
        each, left = divmod(len(events), len(owners))
        if not left:
            for i, event in enumerate(events):
                yield event, owners[-1 - i // each]


def _owner_of(claimed: Sequence[tuple[Event, int]], launches: Sequence[Issued]) -> list[int | None]:
    """Of each launch, whose it is: itself claimed, or launched within an operator that is."""
    kernels = {id(event): number for event, number in claimed if event.category == KERNEL}
    within = [each for each in claimed if each[0].category == CPU_OPERATOR]
    return [
        kernels[id(launch.event)]
        if id(launch.event) in kernels
        else next((n for event, n in within if event.start <= launch.at <= event.end), None)
        for launch in launches
    ]


def _with_products(
    owner: list[int | None], launches: Sequence[Issued], step: Step, graphs: Sequence[Found]
) -> list[int | None]:
    """The same with products of a library that follow first layers in a plan of two launches."""
    sites = [site for found in graphs for site in found.sites]
    own = Counter(owner)
    waiting: int | None = None
    product: Call | None = None
    for (i, _), call in zip(_in_order(launches), _callers(step, launches), strict=True):
        number = owner[i]
        if number is not None:
            waiting = number if _launches(sites[number]) > own[number] else None
            product = None
        elif waiting is not None and product is None and _product(call.name):
            product = call
        if waiting is not None and call is product:
            owner[i] = waiting
        elif product is not None:
            waiting, product = None, None
    return owner


def _launches(site: Site) -> int:
    """How many kernels the plan of a fused site is; one where it ends with the hidden value."""
    alone = site.plan is None or site.form == "activated"
    return 1 if alone else registry.named(str(site.plan)).launches


def _in_order(launches: Sequence[Issued]) -> list[tuple[int, Issued]]:
    """Launches with their indices, as the CPU made them."""
    return sorted(enumerate(launches), key=lambda each: each[1].at)


def _callers(step: Step, launches: Sequence[Issued]) -> list[Call]:
    """Of each launch, as the CPU made them, the operator that did, or itself."""
    calls = sorted(operators_in(step.cpu), key=lambda call: call.start)
    starts = [call.start for call in calls]
    found = []
    for _, launch in _in_order(launches):
        index = bisect_right(starts, launch.at) - 1
        if index >= 0 and launch.at <= calls[index].end:
            found.append(calls[index])
        else:
            found.append(Call(launch.name, launch.at, launch.at))
    return found


def _product(name: str) -> str | None:
    """What a product is called, in a trace and in written code alike; ``None`` for all else."""
    name = name.rpartition("::")[2]
    if _PRODUCT.fullmatch(name) is None:
        return None
    return "convolution" if "convolution" in name else name.removeprefix("bias_")


def by_order(graphs: Sequence[Found]) -> Owners:
    """Owners of what eager PyTorch launches."""

    def owners(step: Step, launches: Sequence[Issued]) -> list[int | None]:
        passes = backward_passes(step)
        callers = _callers(step, launches)
        forward = [call for call in callers if _around(passes, call.start) is None]
        site = _between(forward, [list(_products(graphs))])
        recorded = {call.sequence: site.get(id(call)) for call in forward if call.sequence >= 0}
        found: list[int | None] = [None] * len(launches)
        for (i, _), call in zip(_in_order(launches), callers, strict=True):
            node = _around(passes, call.start)
            found[i] = site.get(id(call)) if node is None else recorded.get(node.sequence)
        return found

    return owners


def by_code(graphs: Sequence[Found], code: Sequence[str]) -> Owners:
    """Owners of what Inductor launches.

    Args:
        graphs: those that were captured, in the order in which they run.
        code: what Inductor wrote, in the order in which it is run: the graphs' forward passes, then
            their backward passes.
    """
    written = [_written(text) for text in code]
    names = [name for each in written for name, _ in each]
    whole = len(code) in (len(graphs), 2 * len(graphs))

    def owners(step: Step, launches: Sequence[Issued]) -> list[int | None]:
        callers = _callers(step, launches)
        ran = list({id(call): call for call in callers}.values())
        if whole and names == [name for call in ran if (name := _product(call.name))]:
            site = _between(callers, _owners_in(graphs, written))
        else:
            passes = backward_passes(step)
            forward = [call for call in callers if _around(passes, call.start) is None]
            site = _between(forward, [list(_products(graphs))])
        found: list[int | None] = [None] * len(launches)
        for (i, _), call in zip(_in_order(launches), callers, strict=True):
            found[i] = site.get(id(call))
        return found

    return owners


def _around(events: Sequence[Event], at: float) -> Event | None:
    """The event that was under way at a time."""
    return next((event for event in events if event.start <= at <= event.end), None)


def _between(callers: Sequence[Call], passes: Sequence[Sequence[int | None]]) -> dict[int, int]:
    """From the first product of each site to its last: sites by the identity of calls.

    There is none where there are more or fewer products than owners.

    Args:
        callers: of launches, as the CPU made them.
        passes: whose each product is, apart for what is not looked across: forward and backward.
    """
    calls = list({id(call): call for call in callers}.values())
    products = [i for i, call in enumerate(calls) if _product(call.name)]
    owners = [(number, site) for number, each in enumerate(passes) for site in each]
    if len(products) != len(owners):
        return {}
    found: dict[int, int] = {}
    for (i, own), (j, following) in pairwise([*zip(products, owners, strict=True), (-1, None)]):
        _, site = own or (0, None)
        if site is not None:
            last = j if following == own else i
            found.update((id(call), site) for call in calls[i : last + 1])
    return found


def _products(graphs: Sequence[Found]) -> Iterator[int | None]:
    """Whose each product of the captured graphs is."""
    for first, (graph, sites) in zip(_first_numbers(graphs), graphs, strict=True):
        owner = {name: first + i for i, site in enumerate(sites) for name in site.nodes}
        for node in graph.nodes:
            if _is_product(node):
                yield owner.get(node.name)


def _is_product(node: Node) -> bool:
    if operation(node) == "matmul":  # of more than one matrix it is another operator
        factor = value_of(node.args[1]) if len(node.args) > 1 else None
        return isinstance(factor, torch.Tensor) and factor.dim() == 2
    return operation(node) in _LINEAR


def _written(code: str) -> list[tuple[str, frozenset[str]]]:
    """The products that Inductor's code calls, each with the nodes that it says it computes."""
    found = []
    nodes: frozenset[str] = frozenset()
    for line in code.splitlines():
        if comment := _NODES.search(line):
            nodes = frozenset(comment["nodes"].split(", "))
        elif called := _CALLED.search(line):
            name = _product(next(group for group in called.groups() if group))
            if name:
                found.append((name, nodes))
            nodes = frozenset()
    return found


def _owners_in(
    graphs: Sequence[Found], written: Sequence[Sequence[tuple[str, frozenset[str]]]]
) -> list[list[int | None]]:
    """Whose each written product is, module by module: by the last linear layer that it names.

    Inputs that are computed within come before it.
    """
    found = []
    first = list(_first_numbers(graphs))
    for i, products in enumerate(written):
        place = i if i < len(graphs) else 2 * len(graphs) - 1 - i
        graph, sites = graphs[place]
        owner = {name: first[place] + n for n, site in enumerate(sites) for name in site.nodes}
        layers = [node.name for node in graph.nodes if _is_product(node)]
        last = (
            max((n for n in nodes if n in layers), key=layers.index, default=None)
            for _, nodes in products
        )
        found.append([None if name is None else owner.get(name) for name in last])
    return found
