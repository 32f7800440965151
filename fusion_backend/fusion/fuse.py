"""``fuse``: the rewrite by itself, a pure function of graph modules.

A site goes through matching, legality, planning and rewriting; the first that refuses gives the
reason. Nested graphs (activation checkpointing, ``cond``, autocast regions) go the same way.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from fusion_backend import reasons
from fusion_backend.compat.checkpointing import recompute_in_backward
from fusion_backend.compat.dynamo import copy_of
from fusion_backend.fusion.arguments import check_example_inputs, check_graph
from fusion_backend.fusion.chains import Chain, Link, can_be_link, formed, links_of, runs_of
from fusion_backend.fusion.description import describe, names_of, nondescript
from fusion_backend.fusion.encoder_layers import TakenApart, is_encoder_layer, take_apart
from fusion_backend.fusion.example_values import with_example_values
from fusion_backend.fusion.exported import keep_names, with_graph
from fusion_backend.fusion.failures import Failures
from fusion_backend.fusion.forms import UNWANTED, Forms, forms_of, left_out
from fusion_backend.fusion.legality import refusal
from fusion_backend.fusion.matching import Match, find_matches
from fusion_backend.fusion.opaque import opaque_site
from fusion_backend.fusion.overlaps import heaviest_independent
from fusion_backend.fusion.partial import part_of
from fusion_backend.fusion.prenorms import Prenorm, prenorm_of
from fusion_backend.fusion.residuals import Residual, residual_of
from fusion_backend.fusion.rewriting import rewrite, rewrite_together
from fusion_backend.fusion.settings import records_gradients, setting_of
from fusion_backend.fusion.sharded_layers import has_sharded_layers, localize
from fusion_backend.fusion.sites import REPLACES, Site, numbered_apart
from fusion_backend.fusion.towers import can_be_tower
from fusion_backend.fusion.towers import formed as formed_towers
from fusion_backend.fusion.views.dependence import Dependence
from fusion_backend.fusion.views.node import tensor_of
from fusion_backend.fusion.views.observation import Observer
from fusion_backend.options import Options, own_options
from fusion_backend.patterns import ACTIVATED, CHAIN, TOWERS
from fusion_backend.planning.gpus import Gpu, gpu_named
from fusion_backend.planning.planner import (
    Plan,
    may_take_norm,
    may_take_residual,
    may_take_steps,
    plan,
    plan_together,
    takes_norm,
    takes_residual,
)
from fusion_backend.planning.setting import Setting
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
    """The settings of sites, or parts of them, that may be fused; the graph carries examples.

    The options are those of the environment.
    """
    failures, options = Failures(), Options.from_environment()
    forms = forms_of(options)
    for nested in nested_graphs(graph_module):
        dependence = Dependence(nested.graph)
        for match in find_matches(nested.graph, forms.tried, failures.refusal):
            if left_out(match, forms, options):
                continue
            legal = failures.attempt(_legal_part, match, dependence, forms)
            if isinstance(legal, Match):
                yield setting_of(legal)


def _legal_part(match: Match, dependence: Dependence, forms: Forms) -> Match | None:
    """A site, or the part of it, that may be fused."""
    refused = refusal(match, dependence)
    return match if refused is None else _part(match, refused, dependence, forms)


def _part(match: Match, refused: Refusal, dependence: Dependence, forms: Forms) -> Match | None:
    """The part of a refused site that may be fused, unless the user wants none to be."""
    off = ACTIVATED.name in forms.off or refused.reason in UNWANTED
    return None if off else part_of(match, refused, dependence, forms.tried)


class _Run(NamedTuple):
    """What all sites of a graph have in common."""

    graph: Graph
    dependence: Dependence
    options: Options
    target: Gpu | None
    failures: Failures
    forms: Forms

    def setting(self, match: Match) -> Setting:
        """What the planner is told of a site."""
        return setting_of(match, self.target)

    def takes_steps(self, node: Node) -> bool:
        """Whether a chain that computes a node may have norms and sums between its layers."""
        result = tensor_of(node)
        on = "cuda" if self.target is not None or result is None else result.device.type
        return may_take_steps(on)

    def without_measuring(self) -> _Run:
        """The same, but for sites that are not worth the time."""
        return self._replace(options=replace(self.options, measure=False))


class _Chosen(NamedTuple):
    """A site with what was decided for it, and with what is computed within beside it.

    ``call`` numbers the calls that several sites of the graph share; 0 is a call of its own.
    """

    match: Match
    decision: Plan | Refusal
    residual: Residual | None = None
    prenorm: Prenorm | None = None
    call: int = 0


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
    graph = graph_module.graph
    layers = {node: failures.attempt(take_apart, node) for node in _encoder_layers(graph)}
    opaque = [
        opaque_site(node, parts)
        for node, parts in layers.items()
        if not isinstance(parts, TakenApart)
    ]
    apart = [parts for parts in layers.values() if isinstance(parts, TakenApart)]
    dependence = Dependence(graph, observer)
    run = _Run(graph, dependence, options, target, failures, forms_of(options))
    decided = _decisions(run)
    decided |= _neighbours_of_fused(decided)
    chosen = list(_with_neighbours(run, decided, {parts.parts[-1] for parts in apart}))
    chosen = _with_towers(run, chosen)
    sites = {site.match: _described(run, site) for site in chosen}
    fused = [site for site in chosen if isinstance(site.decision, Plan)]
    fused = [site for site in fused if sites[site.match].rewritten]
    # Last first, so that no match refers to an erased node.
    for call in sorted(_by_call(fused), key=_place_of_call, reverse=True):
        region = dependence.position[_place_of_call(call)] if options.recompute else None
        failed = failures.attempt(_rewritten, graph, call, region)
        if isinstance(failed, Refusal):
            for site in call:
                sites[site.match] = _described(run, _Chosen(site.match, failed))
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


def _described(run: _Run, site: _Chosen) -> Site:
    """The record of a site; one that cannot be described is not fused."""
    found = run.failures.attempt(
        describe, site.match, site.decision, run.target, site.residual, site.prenorm
    )
    return replace(found, call=site.call) if isinstance(found, Site) else nondescript(found)


def _by_call(fused: Sequence[_Chosen]) -> list[list[_Chosen]]:
    """Sites, those together that share a call."""
    found: dict[object, list[_Chosen]] = {}
    for site in fused:
        found.setdefault(site.call or site.match, []).append(site)
    return [*found.values()]


def _place_of_call(sites: Sequence[_Chosen]) -> Node:
    """The node at which the call of a site, or of several, comes to stand."""
    return min(site.match.result for site in sites)


def _rewritten(graph: Graph, sites: Sequence[_Chosen], region: int | None) -> None:
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


def _decisions(run: _Run) -> dict[Match, Plan | Refusal]:
    """Every site in program order, with what is decided for it; chains before their links."""
    attempt, dependence, forms = run.failures.attempt, run.dependence, run.forms
    refused: dict[Match, Refusal | None] = {
        match: left_out(match, forms, run.options) or attempt(refusal, match, dependence)
        for match in find_matches(run.graph, forms.tried, run.failures.refusal)
    }

    declined: dict[Node, Refusal] = {}

    def plan_legal(chain: Chain, is_longest: bool) -> Plan | None:
        if left_out(chain, forms, run.options) or attempt(refusal, chain, dependence) is not None:
            return None
        # Of the many parts of a long chain none is timed.
        choice = _planned(run if is_longest else run.without_measuring(), chain)
        if isinstance(choice, Refusal) and choice.reason is reasons.NOT_FASTER:
            for link in chain.links:
                declined.setdefault(link.down.node, choice)
        if not isinstance(choice, Plan) or (chain.steps and choice.refusal is not None):
            return None  # what no kernel runs must not take the place of pairs that some do
        return choice

    links = attempt(links_of, run.graph, refused, run.takes_steps)
    runs = runs_of(() if isinstance(links, Refusal) else links)
    chains = {chain: choice for links in runs for chain, choice in formed(links, plan_legal)}
    ends = {chain.down.node: chain for chain in chains}
    within = {link.down.node for chain in chains for link in chain.links}
    taken = {layer.node for chain in chains for layer in chain.layers}
    decided: dict[Match, Plan | Refusal] = {}
    for match, reason in refused.items():
        if (chain := ends.pop(match.down.node, None)) is not None:
            decided[chain] = chains[chain]
        elif match.down.node in within:
            continue
        elif reason is not None:
            part = attempt(_part, match, reason, dependence, forms)
            choice = _planned(run, part) if isinstance(part, Match) else None
            if isinstance(part, Refusal):
                decided[match] = part
            elif part is None or not isinstance(choice, Plan) or _shares_layer(part, taken):
                # What stands in the way of a site need not stand in that of a chain.
                decided[match] = declined.get(match.down.node, reason)
            else:
                decided[part] = choice
        elif _shares_layer(match, taken):
            decided[match] = Refusal(reasons.OVERLAPS)
        else:
            decided[match] = _planned(run, match)
    decided |= {chain: chains[chain] for chain in ends.values()}  # their last layers end no site
    return dict(sorted(decided.items(), key=lambda item: item[0].down.node))


def _planned(run: _Run, match: Match) -> Plan | Refusal:
    outside = "" if match.part is None else match.part.outside.detail
    return run.failures.attempt(lambda: plan(run.setting(match), run.options, outside))


def _with_neighbours(
    run: _Run, decided: Mapping[Match, Plan | Refusal], ending: AbstractSet[Node]
) -> Iterator[_Chosen]:
    """Sites with the norms and sums that they compute themselves.

    The norm that ends an encoder layer, one of ``ending``, goes where the layer is put back.
    """
    fused = [match for match, choice in decided.items() if isinstance(choice, Plan)]
    nodes = frozenset[Node]().union(*(match.nodes for match in fused))
    for match, choice in decided.items():
        if isinstance(choice, Refusal):
            yield _Chosen(match, choice)
            continue
        norm = run.failures.attempt(_prenorm, run, match, choice)
        residual = run.failures.attempt(_residual, run, match, choice, nodes)
        if isinstance(norm, Refusal) or isinstance(residual, Refusal):
            failed = norm if isinstance(norm, Refusal) else residual
            assert isinstance(failed, Refusal)
            yield _Chosen(match, failed)
        else:
            norm = None if norm is None or norm.node in ending else norm
            yield _Chosen(match, choice, residual, norm)


def _with_towers(run: _Run, chosen: list[_Chosen]) -> list[_Chosen]:
    """The sites, with one plan for those that are to share a call."""
    if TOWERS.name in run.forms.off:
        return chosen
    found = run.failures.attempt(_towers, run, chosen)
    return chosen if isinstance(found, Refusal) else found


def _towers(run: _Run, chosen: list[_Chosen]) -> list[_Chosen]:
    decisions = {site.match: site.decision for site in chosen}
    legal = [site for site in chosen if _is_legal(run, site)]
    chains = {} if CHAIN.name in run.forms.off else _chains_of_pairs(run, legal)
    pairs = {link for links in chains.values() for link in links}
    alone = [match for match in _without_neighbours(legal) if match not in pairs]

    def decide(matches: Sequence[Match]) -> Plan | None:
        choices = [decisions.get(match, Refusal(reasons.NOT_FASTER)) for match in matches]
        return plan_together([*map(run.setting, matches)], choices, run.options)

    candidates = [match for match in (*alone, *chains) if can_be_tower(match)]
    groups = [*formed_towers(candidates, run.dependence, decide)]
    joined: dict[Match, _Chosen] = {}  # a chain in the place of its last link
    for number, (matches, choice) in enumerate(groups, 1):
        for match in matches:
            place = chains[match][-1] if match in chains else match
            joined[place] = _Chosen(match, _shared(choice, decisions.get(match)), call=number)
    links = {link for chain in chains if chains[chain][-1] in joined for link in chains[chain]}
    return [
        joined.get(site.match, site)
        for site in chosen
        if site.match in joined or site.match not in links
    ]


def _is_legal(run: _Run, site: _Chosen) -> bool:
    """Whether a site is fused, or might be: one of a chain that is not faster need not be legal."""
    if isinstance(site.decision, Plan):
        return True
    if site.decision.reason not in (reasons.NOT_FASTER, reasons.OVERLAPS):
        return False
    return run.failures.attempt(refusal, site.match, run.dependence) is None


def _chains_of_pairs(run: _Run, chosen: Sequence[_Chosen]) -> dict[Match, tuple[Match, ...]]:
    """Chains that are not one kernel alone but may be with what reads the same; their links."""
    found: dict[Match, tuple[Match, ...]] = {}
    for run_of_links in runs_of([Link.of(site.match) for site in chosen if _may_be_a_link(site)]):
        links = tuple(link.match for link in run_of_links if link.match is not None)
        chain, others = Chain.of(run_of_links), [s for s in chosen if s.match not in links]
        if chain is None:
            continue
        x = chain.sources[0].linear.input
        has_others = any(s.linear.input is x for site in others for s in site.match.sources)
        fused = (site.match for site in others if isinstance(site.decision, Plan))
        taken = {layer.node for match in fused for layer in match.layers}
        if not has_others or _shares_layer(chain, taken):
            continue
        if run.failures.attempt(refusal, chain, run.dependence) is None:
            found[chain] = links
    return found


def _may_be_a_link(site: _Chosen) -> bool:
    """Whether a legal site of two layers has nothing beside, fused or not."""
    if isinstance(site.match, Chain) or site.match.part is not None:
        return False
    if not can_be_link(site.match):
        return False
    if isinstance(site.decision, Plan):
        return site.decision.refusal is None and site.residual is None and site.prenorm is None
    return site.decision.reason in (reasons.NOT_FASTER, reasons.OVERLAPS)


def _without_neighbours(sites: Sequence[_Chosen]) -> Iterator[Match]:
    """Sites that run by themselves, with nothing beside: fused, or legal and not faster so."""
    slow = [site for site in sites if _is_slow(site.decision)]
    fused = [site for site in sites if isinstance(site.decision, Plan)]
    uses = Counter(layer.node for site in (*fused, *slow) for layer in site.match.layers)
    for site in sites:
        if isinstance(site.decision, Plan):
            if site.residual is None and site.prenorm is None:
                yield site.match
        elif _is_slow(site.decision) and all(uses[n.node] == 1 for n in site.match.layers):
            yield site.match


def _is_slow(decision: Plan | Refusal) -> bool:
    return isinstance(decision, Refusal) and decision.reason is reasons.NOT_FASTER


def _shared(plan: Plan, alone: Plan | Refusal | None) -> Plan:
    """The plan that sites share, for one of them: so much faster than the plan that it had."""
    if plan.refusal is not None:  # no kernels run it, together or alone
        assert isinstance(alone, Plan)
        return alone
    before = alone.expected_speedup if isinstance(alone, Plan) else 1.0
    if before is None or plan.expected_speedup is None:
        return replace(plan, expected_speedup=None)
    return replace(plan, expected_speedup=before * plan.expected_speedup)


def _prenorm(run: _Run, match: Match, choice: Plan) -> Prenorm | None:
    """The norm that a fused site computes before its first layers."""
    if not may_take_norm(choice):
        return None
    norm = prenorm_of(match, run.dependence, records_gradients(match))
    if norm is None or not takes_norm(run.setting(match), norm.saves_a_pass, run.options):
        return None
    return norm


def _residual(run: _Run, match: Match, choice: Plan, fused: AbstractSet[Node]) -> Residual | None:
    """What a fused site adds to its result."""
    if not may_take_residual(choice):
        return None
    found = residual_of(match, run.dependence, records_gradients(match), fused)
    taken = found is not None and takes_residual(run.setting(match), choice, run.options)
    return found if taken else None


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
