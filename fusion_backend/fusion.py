"""``fuse``: the rewrite by itself, a pure function of graph modules.

A site goes through matching, legality, planning and rewriting; the first that refuses gives the
reason. Nested graphs (activation checkpointing, ``cond``, autocast regions) go the same way.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusion_backend import reasons
from fusion_backend.chain_planner import plan_chain
from fusion_backend.chains import Chain, formed, runs_of
from fusion_backend.dependence import Dependence
from fusion_backend.description import describe
from fusion_backend.encoder_layers import is_encoder_layer, take_apart
from fusion_backend.gpus import Gpu, gpu_named
from fusion_backend.legality import refusal
from fusion_backend.matching import Match, find_matches
from fusion_backend.observation import Observer
from fusion_backend.opaque import opaque_site
from fusion_backend.options import Options
from fusion_backend.partial import part_of
from fusion_backend.patterns import FORMS
from fusion_backend.planner import Plan, plan, takes_norm, takes_residual
from fusion_backend.prenorms import NORMALIZING_FAMILIES, Prenorm, prenorm_of
from fusion_backend.reasons import Refusal
from fusion_backend.residuals import ADDING_FAMILIES, Residual, residual_of
from fusion_backend.rewriting import rewrite
from fusion_backend.selection import heaviest_independent
from fusion_backend.setting import Setting
from fusion_backend.sites import Site
from fusion_backend.tracing import with_example_values


@dataclass(frozen=True)
class FuseResult:
    """A rewritten graph and what was found in it.

    Attributes:
        graph_module: the graph with its fused sites.
        sites: every place where an activation joins two linear layers, in program order.
    """

    graph_module: GraphModule
    sites: tuple[Site, ...]


def fuse(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    options: Options | None = None,
    *,
    target: str | None = None,
) -> FuseResult:
    """Fuse the MLPs of a graph.

    Args:
        graph_module: a graph as Dynamo hands it to a backend, ``exported_program.module()``, or
            the result of ``torch.fx.symbolic_trace``. It is not changed; parameters are shared.
        example_inputs: inputs of the graph, for their shapes and dtypes. Needed only where the
            graph carries no example values of its own, as after ``symbolic_trace``.
        options: defaults to :meth:`Options.from_environment`.
        target: plan for this GPU, such as ``"h100"`` or ``"sm_90"``, instead of the device that the
            tensors are on; the result runs only there.

    Returns:
        The rewritten graph, which runs without ``torch.compile`` as well, and its sites.

    Raises:
        FusionError: the graph cannot be traced with these inputs.
        OptionError: the target is not known.
    """
    options = Options.from_environment() if options is None else options
    gpu = None if target is None else gpu_named(target)
    traced = with_example_values(copy_graphs(graph_module), example_inputs)
    return fuse_in_place(traced, options, gpu)


def fuse_in_place(
    graph_module: GraphModule, options: Options, target: Gpu | None = None
) -> FuseResult:
    """:func:`fuse` on a graph that carries example values and that the caller gives away."""
    graphs, observer = nested_graphs(graph_module), Observer()
    sites = [site for graph in graphs for site in _fuse_graph(graph, options, target, observer)]
    return FuseResult(graph_module, tuple(sites))


def copy_graphs(graph_module: GraphModule) -> GraphModule:
    """A graph module with graphs of its own, at all levels, and the same tensors."""
    tensors = [*graph_module.parameters(), *graph_module.buffers()]
    for module in graph_module.modules():
        tensors.extend(v for v in vars(module).values() if isinstance(v, torch.Tensor))
    return copy.deepcopy(graph_module, {id(tensor): tensor for tensor in tensors})


def nested_graphs(graph_module: GraphModule) -> tuple[GraphModule, ...]:
    """A graph module, and those that it calls (checkpointed regions, branches, loop bodies).

    Dynamo leaves graphs behind that nothing calls any more: those of regions that it inlines.
    """
    found, pending = dict.fromkeys([graph_module]), [graph_module]
    while pending:
        caller = pending.pop()
        nodes = caller.graph.find_nodes
        for node in (*nodes(op="get_attr"), *nodes(op="call_module")):
            nested = operator.attrgetter(str(node.target))(caller)
            if isinstance(nested, GraphModule) and nested not in found:
                found[nested] = None
                pending.append(nested)
    return tuple(found)


def legal_settings(graph_module: GraphModule) -> Iterator[Setting]:
    """The settings of sites, or parts of them, that may be fused; the graph carries examples."""
    for nested in nested_graphs(graph_module):
        dependence = Dependence(nested.graph)
        grad_mode = torch.is_grad_enabled() or bool(dependence.mode_changes)
        for match in find_matches(nested.graph, FORMS):
            refused = refusal(match, dependence)
            legal = part_of(match, refused, dependence) if refused is not None else match
            if legal is not None:
                yield Setting.of(legal, grad_mode)


def _fuse_graph(
    graph_module: GraphModule, options: Options, target: Gpu | None, observer: Observer
) -> list[Site]:
    graph = graph_module.graph
    layers = {node: take_apart(node) for node in list(graph.nodes) if is_encoder_layer(node)}
    opaque = [opaque_site(node) for node, parts in layers.items() if parts is None]
    dependence = Dependence(graph, observer)
    grad_mode = torch.is_grad_enabled() or bool(dependence.mode_changes)
    decided = _decisions(graph, dependence, options, grad_mode, target)
    decided |= _neighbours_of_fused(decided)
    fused = {match: choice for match, choice in decided.items() if isinstance(choice, Plan)}
    # The norm that ends an encoder layer goes where the layer is put back.
    ending = {parts.parts[-1] for parts in layers.values() if parts is not None}
    norms = _prenorms(fused, dependence, options, grad_mode, target)
    prenorms = {match: norm for match, norm in norms.items() if norm.node not in ending}
    residuals = _residuals(fused, dependence, options, grad_mode, target)
    sites = [
        describe(match, decision, target, residuals.get(match), prenorms.get(match))
        for match, decision in decided.items()
    ]
    last_first = sorted(fused, key=lambda match: match.result, reverse=True)
    for match in last_first:  # so that no match refers to an erased node
        rewrite(graph, match, fused[match].family, residuals.get(match), prenorms.get(match))
    ends = {match.down.node for match in fused}
    for layer in filter(None, layers.values()):
        layer.finish() if layer.down in ends else layer.put_back()
    if fused or layers:
        graph.lint()
        graph_module.recompile()
    return [*opaque, *sites]


def _decisions(
    graph: Graph, dependence: Dependence, options: Options, grad_mode: bool, target: Gpu | None
) -> dict[Match, Plan | Refusal]:
    """Every site in program order, with what is decided for it; chains before their links."""
    refused = {match: refusal(match, dependence) for match in find_matches(graph, FORMS)}

    def plan_legal(chain: Chain) -> Plan | None:
        choice = plan_chain(chain, options, grad_mode, target)
        return choice if choice is None or refusal(chain, dependence) is None else None

    runs = runs_of([match for match, reason in refused.items() if reason is None])
    chains = {chain: choice for run in runs for chain, choice in formed(run, plan_legal)}
    ends = {chain.links[-1]: chain for chain in chains}
    links = {link for chain in chains for link in chain.links}
    taken = {layer.node for chain in chains for layer in chain.layers}
    decided: dict[Match, Plan | Refusal] = {}
    for match, reason in refused.items():
        if match in ends:
            decided[ends[match]] = chains[ends[match]]
        elif match in links:
            continue
        elif reason is not None:
            part = part_of(match, reason, dependence)
            choice = None if part is None else plan(part, options, grad_mode, target)
            if part is None or not isinstance(choice, Plan) or _shares_layer(part, taken):
                decided[match] = reason
            else:
                decided[part] = choice
        elif _shares_layer(match, taken):
            decided[match] = Refusal(reasons.OVERLAPS)
        else:
            decided[match] = plan(match, options, grad_mode, target)
    return decided


def _prenorms(
    fused: Mapping[Match, Plan],
    dependence: Dependence,
    options: Options,
    grad_mode: bool,
    target: Gpu | None,
) -> dict[Match, Prenorm]:
    """The norms that fused sites compute before their first layers."""
    able = [match for match, plan in fused.items() if plan.family in NORMALIZING_FAMILIES]
    found = {match: prenorm_of(match, dependence, grad_mode) for match in able}
    return {
        match: prenorm
        for match, prenorm in found.items()
        if prenorm is not None and takes_norm(match, prenorm, options, grad_mode, target)
    }


def _residuals(
    fused: Mapping[Match, Plan],
    dependence: Dependence,
    options: Options,
    grad_mode: bool,
    target: Gpu | None,
) -> dict[Match, Residual]:
    """What fused sites add to their results."""
    nodes = frozenset().union(*(match.nodes for match in fused))
    able = [match for match, plan in fused.items() if plan.family in ADDING_FAMILIES]
    found = {match: residual_of(match, dependence, grad_mode, nodes) for match in able}
    return {
        match: residual
        for match, residual in found.items()
        if residual is not None and takes_residual(match, fused[match], options, grad_mode, target)
    }


def _shares_layer(match: Match, taken: set[Node]) -> bool:
    return any(layer.node in taken for layer in match.layers)


def _neighbours_of_fused(decided: Mapping[Match, Plan | Refusal]) -> dict[Match, Refusal]:
    """The sites that cannot be fused as they share a layer with one that saves more."""
    fused = [match for match, choice in decided.items() if isinstance(choice, Plan)]
    by_result = {match.result: match for match in reversed(fused)}  # two may have it in common
    last = {result: by_result[result] for result in sorted(by_result)}
    shared = {
        match: tuple(
            {
                s.linear.node: last[s.linear.node] for s in match.sources if s.linear.node in last
            }.values()
        )
        for match in last.values()
    }
    widths = {match: match.down.in_features for match in last.values()}
    weights = {match: float(w) if isinstance(w, int) else 1.0 for match, w in widths.items()}
    chosen = heaviest_independent(weights, shared)
    return {match: Refusal(reasons.OVERLAPS) for match in fused if match not in chosen}
