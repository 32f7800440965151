"""``fuse``: the rewrite by itself, a pure function of graph modules.

A site goes through matching, legality, planning and rewriting; the first that refuses gives the
reason. ``decisions`` does the first three for all sites of a graph. ``overlaps`` chooses among
those that share a layer, ``neighbours`` adds the norms and sums around them, and ``shared_calls``
puts several into one call. Nested graphs (activation checkpointing, ``cond``, autocast regions) go
the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from fusion_backend.compat.checkpointing import recompute_in_backward
from fusion_backend.compat.dynamo import copy_of
from fusion_backend.fusion.arguments import check_example_inputs, check_graph
from fusion_backend.fusion.context import PassContext
from fusion_backend.fusion.decisions import decisions
from fusion_backend.fusion.deep_mlps import with_parts
from fusion_backend.fusion.description import describe, names_of, nondescript
from fusion_backend.fusion.encoder_layers import TakenApart, is_encoder_layer, take_apart
from fusion_backend.fusion.example_values import with_example_values
from fusion_backend.fusion.exported import keep_names, with_graph
from fusion_backend.fusion.failures import Failures
from fusion_backend.fusion.forms import forms_of
from fusion_backend.fusion.neighbours import Chosen, with_neighbours
from fusion_backend.fusion.nested_graphs import copy_graphs, nested_graphs
from fusion_backend.fusion.opaque import opaque_site
from fusion_backend.fusion.overlaps import overlapping
from fusion_backend.fusion.rewriting import rewrite, rewrite_together
from fusion_backend.fusion.sharded_layers import has_sharded_layers, localize
from fusion_backend.fusion.shared_calls import with_shared_calls
from fusion_backend.fusion.sites import REPLACES, Site, numbered_apart
from fusion_backend.fusion.views.dependence import Dependence
from fusion_backend.fusion.views.observation import Observer
from fusion_backend.options import Options, own_options
from fusion_backend.planning.gpus import Gpu, gpu_named
from fusion_backend.planning.planner import Plan
from fusion_backend.reasons import Refusal


@dataclass(frozen=True)
class FuseResult:
    """A rewritten graph and what was found in it.

    Attributes:
        graph_module: the graph with its fused sites, which runs as it is. Of an exported program
            it is ``exported_program.module()``.
        sites: every place where an activation joins two linear layers, in program order.
        exported_program: where an exported program was given, the same with its sites fused.
    """

    graph_module: GraphModule
    sites: tuple[Site, ...]
    exported_program: ExportedProgram | None = None


def fuse(
    graph: GraphModule | ExportedProgram,
    example_inputs: Sequence[Any] = (),
    options: Options | Mapping[str, Any] | None = None,
    *,
    target: str | None = None,
) -> FuseResult:
    """Fuse the MLPs of a graph.

    Args:
        graph: a program of ``torch.export``, or a graph as Dynamo hands it to a backend or as
            ``torch.fx.symbolic_trace`` makes it. It is not changed; parameters are shared.
        example_inputs: inputs of the graph, for their shapes and dtypes. Needed only where the
            graph carries no example values of its own, as after ``symbolic_trace``.
        options: an :class:`Options`, or a mapping with keys such as ``"fusedmlp.policy"``; the rest
            is that of :meth:`Options.from_environment`.
        target: plan for this GPU, such as ``"h100"`` or ``"sm_90"``, instead of the device that the
            tensors are on; the result runs only there.

    Returns:
        The rewritten graph, which runs without ``torch.compile`` as well, and its sites. Of an
        exported program there is also ``exported_program``, of the same signature, parameters and
        ranges of sizes, which can be saved, and compiled ahead of time.

    Raises:
        ArgumentError: the graph is neither, or the inputs are no sequence.
        FusionError: the graph cannot be traced with these inputs.
        OptionError: an option is unknown or has a wrong value, or the target is not known.
    """
    check_graph(graph)
    check_example_inputs(example_inputs)
    options = own_options(options)
    gpu = None if target is None else gpu_named(target)
    if isinstance(graph, ExportedProgram):
        copied = copy_graphs(graph.graph_module)
        keep_names(graph.graph, copied.graph)
        found = fuse_in_place(copied, options, gpu)
        program = with_graph(graph, found.graph_module)
        return FuseResult(program.module(), found.sites, program)
    traced = with_example_values(copy_graphs(graph), example_inputs)
    return fuse_in_place(traced, options, gpu)


def fuse_in_place(
    graph_module: GraphModule, options: Options, target: Gpu | None = None
) -> FuseResult:
    """:func:`fuse` on a graph that carries example values and that the caller gives away."""
    failures, observer = Failures(options.strict), Observer()
    graphs = nested_graphs(graph_module)
    found = [_fuse_graph(graph, options, target, failures, observer) for graph in graphs]
    failures.warn()
    sites = (site for sites in numbered_apart(found) for site in sites)
    return FuseResult(graph_module, tuple(sites))


class _Fused(NamedTuple):
    """What was found in a graph, and the layers and operands of sites that may be fused."""

    sites: list[Site]
    nodes: frozenset[Node]


def _fuse_graph(
    graph_module: GraphModule,
    options: Options,
    target: Gpu | None,
    failures: Failures,
    observer: Observer,
) -> list[Site]:
    """Fuse one graph, without those that it calls."""

    def fused() -> _Fused:
        return _fuse_local_graph(graph_module, options, target, failures, observer)

    if not has_sharded_layers(graph_module.graph):
        return fused().sites
    return _fuse_sharded(graph_module, failures, observer, fused)


def _fuse_sharded(
    graph_module: GraphModule,
    failures: Failures,
    observer: Observer,
    fuse_local: Callable[[], _Fused],
) -> list[Site]:
    """Fuse a graph with its sharded layers made local, in the end only those of legal sites.

    Whether they are fused does not matter: ranks may plan differently, and all must communicate
    alike.
    """
    given = copy_of(graph_module.graph)
    layers = failures.attempt(localize, graph_module.graph, observer)
    if isinstance(layers, Refusal):
        graph_module.graph = given
        return fuse_local().sites
    found = first = fuse_local()
    wanted, legal = frozenset(layers.values()), _names_of_legal(layers, found)
    while legal != wanted:
        graph_module.graph, wanted = copy_of(given), legal
        layers = localize(graph_module.graph, observer, wanted)
        found = fuse_local()
        legal = _names_of_legal(layers, found)
    graph_module.graph.lint()
    graph_module.recompile()
    counts = [sum(site.rewritten for site in each.sites) for each in (first, found)]
    return first.sites if counts[0] == counts[1] else found.sites


def _names_of_legal(layers: Mapping[Node, str], found: _Fused) -> frozenset[str]:
    return frozenset(name for layer, name in layers.items() if layer in found.nodes)


def _fuse_local_graph(
    graph_module: GraphModule,
    options: Options,
    target: Gpu | None,
    failures: Failures,
    observer: Observer,
) -> _Fused:
    """Decide for every site of a graph, then rewrite those that are fused."""
    graph = graph_module.graph
    layers = {node: failures.attempt(take_apart, node) for node in _encoder_layers(graph)}
    opaque = [
        opaque_site(node, parts)
        for node, parts in layers.items()
        if not isinstance(parts, TakenApart)
    ]
    apart = [parts for parts in layers.values() if isinstance(parts, TakenApart)]
    dependence = Dependence(graph, observer)
    context = PassContext(graph, dependence, options, target, failures, forms_of(options))
    alone = decisions(context)
    decided = alone | overlapping(alone)
    chosen = [*with_neighbours(context, decided, {parts.parts[-1] for parts in apart})]
    chosen = with_parts(context, alone, with_shared_calls(context, chosen))
    sites = {site.match: _described(context, site) for site in chosen}
    fused = [site for site in chosen if isinstance(site.decision, Plan)]
    fused = [site for site in fused if sites[site.match].rewritten]
    # Last first, so that no match refers to an erased node.
    for call in sorted(_by_call(fused), key=_place_of_call, reverse=True):
        region = dependence.position[_place_of_call(call)] if options.recompute else None
        failed = failures.attempt(_rewritten, graph, call, region)
        if isinstance(failed, Refusal):
            for site in call:
                sites[site.match] = _described(context, Chosen(site.match, failed))
    rewritten = [match for match, site in sites.items() if site.rewritten]
    ends = {match.down.node for match in rewritten}
    for layer in apart:
        layer.finish() if layer.down in ends else layer.put_back()
    if fused or layers:
        graph.lint()
        graph_module.recompile()
    legal = [match for match, site in sites.items() if site.legal and options.policy != "never"]
    nodes = {layer.node for match in legal for layer in match.layers}
    entering = {operand.node for match in legal for operand in match.operands}
    return _Fused([*opaque, *sites.values()], frozenset(nodes | entering))


def _encoder_layers(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if is_encoder_layer(node)]


def _described(context: PassContext, site: Chosen) -> Site:
    """The record of a site; one that cannot be described is not fused."""
    found = context.failures.attempt(
        describe, site.match, site.decision, context.target, site.residual, site.prenorm
    )
    return replace(found, call=site.call) if isinstance(found, Site) else nondescript(found)


def _by_call(fused: Sequence[Chosen]) -> list[list[Chosen]]:
    """Sites, those together that share a call."""
    found: dict[object, list[Chosen]] = {}
    for site in fused:
        found.setdefault(site.call or site.match, []).append(site)
    return [*found.values()]


def _place_of_call(sites: Sequence[Chosen]) -> Node:
    """The node at which the call of a site, or of several, comes to stand."""
    return min(site.match.result for site in sites)


def _rewritten(graph: Graph, sites: Sequence[Chosen], region: int | None) -> None:
    """Rewrite a site, or those that share a call; with a region, what it saves is made again."""
    (site, *others), plan = sites, sites[0].decision
    assert isinstance(plan, Plan)
    replaced = [name for s in sites for name in names_of(s.match, s.residual, s.prenorm)]
    if others:
        call = rewrite_together(graph, [each.match for each in sites], plan.family)
    else:
        call = rewrite(graph, site.match, plan.family, site.residual, site.prenorm)
    call.meta[REPLACES] = tuple(replaced)
    if region is not None:
        recompute_in_backward(call, region)
