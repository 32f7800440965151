"""A graph before and after the rewrite, cut into blocks that are looked at one by one.

A block is what one module of the model runs, such as ``h.3``. Blocks that repeat are kept once. A
site is never cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusion_backend.fusion.nested_graphs import nested_graphs
from fusion_backend.fusion.sites import REPLACES, Site, by_call
from fusion_backend.fusion.views.names import module_stack, parameter_path
from fusion_backend.fusion.views.node import value_of
from fusion_backend.instruments.graph_text import callee, statement, with_short_names

# Blocks that are repeated as a group: so many at most, one after the other.
_LONGEST_PERIOD = 4

_INPUTS = "inputs"


@dataclass(frozen=True)
class NodeView:
    """A node as it is shown.

    Attributes:
        name: in its graph.
        label: what it calls.
        shape: of its value, such as ``[8, 64]``; empty where that is no tensor.
        text: the whole statement.
        inputs: names of nodes that it reads, parameters aside.
        site: the number of the site that it belongs to, in the report; ``None`` for none.
        changed: whether it is in one of the two graphs only.
    """

    name: str
    label: str
    shape: str
    text: str
    inputs: tuple[str, ...]
    site: int | None = None
    changed: bool = False


@dataclass
class Block:
    """A part of a graph before and after.

    Attributes:
        title: path of the module; empty for calls of the model itself.
        before: nodes in program order.
        after: likewise.
        like: further blocks with the same nodes.
    """

    title: str
    before: list[NodeView] = field(default_factory=list)
    after: list[NodeView] = field(default_factory=list)
    like: list[Block] = field(default_factory=list)

    @property
    def sites(self) -> list[int]:
        """Numbers of the sites in it."""
        return sorted({n.site for n in (*self.before, *self.after) if n.site is not None})

    @property
    def changed(self) -> bool:
        """Whether before and after differ."""
        return any(node.changed for node in (*self.before, *self.after))


@dataclass(frozen=True)
class ShownGraph:
    """A graph as blocks, and the same changes as text for whoever cannot see the drawing.

    Attributes:
        name: of a nested graph; empty for that of the model.
        blocks: in program order, repeated ones once.
        nodes_before: how many nodes there are, parameters aside.
        nodes_after: likewise.
    """

    name: str
    blocks: tuple[Block, ...]
    nodes_before: int
    nodes_after: int


def shown_graphs(
    before: GraphModule, after: GraphModule, sites: Sequence[Site], first: int
) -> list[ShownGraph]:
    """A pair of graphs and those nested in them, as blocks.

    Args:
        before: the graph as it was captured.
        after: the graph as it was rewritten.
        sites: those of this pair.
        first: the number of the first of them, in the report.
    """
    pairs = list(zip(nested_graphs(before), nested_graphs(after), strict=False))
    names = {module: name for name, module in before.named_modules()}
    pending = list(enumerate(sites, first))
    found = []
    for old, new in pairs:
        here = _taken(pending, {node.name for node in old.graph.nodes})
        shown = _shown(names[old], old, new, here)
        if old is before or here:
            found.append(shown)
    return found


def _taken(pending: list[tuple[int, Site]], names: set[str]) -> dict[int, Site]:
    """The sites of the next graph, removed from those that are left.

    Nodes of graphs that are nested beside each other can have the same names; sites come graph by
    graph.
    """
    here: dict[int, Site] = {}
    for number, site in list(pending):
        known = names.issuperset(site.nodes)
        if known and site.nodes and any(site.nodes == each.nodes for each in here.values()):
            break
        if known:
            here[number] = site
            pending.remove((number, site))
    return here


def _shown(name: str, old: GraphModule, new: GraphModule, sites: Mapping[int, Site]) -> ShownGraph:
    before, after = _drawn(old.graph), _drawn(new.graph)
    keys = _keys(before, sites)
    numbers = list(sites)
    by_nodes = {
        tuple(name for place in call for name in sites[numbers[place]].nodes): numbers[call[0]]
        for call in by_call(sites.values())
    }
    site_of = {node: number for number, site in sites.items() for node in site.nodes}
    blocks, block_of = _cut(before, keys, sites)
    views = _views(old, before, {node.name for node in after}, site_of)
    for node in before:
        block_of[node.name].before.append(views[node.name])
    old_names = {node.name for node in before}
    after_sites = _sites_after(after, by_nodes, site_of, old_names)
    views = _views(new, after, old_names, after_sites)
    for node, block in _placed(after, block_of).items():
        block.after.append(views[node.name])
    return ShownGraph(name, tuple(folded(blocks)), len(before), len(after))


def _sites_after(
    nodes: Sequence[Node],
    by_nodes: Mapping[tuple[str, ...], int],
    site_of: Mapping[str, int],
    old: set[str],
) -> dict[str, int]:
    """The site of each node after the rewrite: new calls, and the views that they read."""
    known = dict(site_of)
    for node in reversed(nodes):
        replaced = by_nodes.get(node.meta.get(REPLACES, ()))
        if replaced is not None:
            known[node.name] = replaced
            read = (n for n in node.all_input_nodes if n.name not in old and REPLACES not in n.meta)
            known.update((view.name, replaced) for view in read)
    return known


def _drawn(graph: Graph) -> list[Node]:
    """All nodes but parameters and buffers, which would hide everything else."""
    return [node for node in graph.nodes if not _is_parameter(node)]


def _is_parameter(node: Node) -> bool:
    if node.op == "get_attr":
        return True
    return node.op == "placeholder" and (
        parameter_path(node) != node.name or isinstance(value_of(node), torch.nn.Parameter)
    )


def _keys(nodes: Sequence[Node], sites: Mapping[int, Site]) -> dict[str, str]:
    """Which module's block each node is in: the outermost of a numbered list that has parts."""
    stacks = {node.name: tuple(module_stack(node)) for node in nodes}
    with_parts = {stack[:i] for stack in stacks.values() for i in range(1, len(stack))}
    keys = {name: _key(stack, with_parts) for name, stack in stacks.items()}
    keys |= {node.name: _INPUTS for node in nodes if node.op == "placeholder"}
    for site in sites.values():
        whole = {keys[name] for name in site.nodes if name in keys}
        if len(whole) > 1:  # a site is not cut
            one = min(whole)
            keys = {name: one if key in whole else key for name, key in keys.items()}
    return keys


def _key(stack: Sequence[str], with_parts: set[tuple[str, ...]]) -> str:
    for i, name in enumerate(stack, 1):
        if name.isdigit() and tuple(stack[:i]) in with_parts:
            return ".".join(stack[:i])
    return ""


def _cut(
    nodes: Sequence[Node], keys: Mapping[str, str], sites: Mapping[int, Site]
) -> tuple[list[Block], dict[str, Block]]:
    """Runs of nodes of one module, with the block of each node; runs that share a site are one."""
    runs: list[list[Node]] = []
    for node in nodes:
        if not runs or (node.op != "output" and keys[runs[-1][0].name] != keys[node.name]):
            runs.append([])
        runs[-1].append(node)
    at = {node.name: i for i, run in enumerate(runs) for node in run}
    goes_on = [False] * len(runs)
    for site in sites.values():
        touched = [at[name] for name in site.nodes if name in at]
        for i in range(min(touched, default=0) + 1, max(touched, default=0) + 1):
            goes_on[i] = True
    blocks: list[Block] = []
    block_of: dict[str, Block] = {}
    for run, joined in zip(runs, goes_on, strict=True):
        if not joined:
            blocks.append(Block(_title(run, keys)))
        block_of.update((node.name, blocks[-1]) for node in run)
    return blocks, block_of


def _title(run: Sequence[Node], keys: Mapping[str, str]) -> str:
    """The module of a run, or the modules that the model itself calls in it."""
    key = keys[run[0].name]
    if key:
        return key
    names = dict.fromkeys(stack[0] for stack in map(module_stack, run) if stack)
    return ", ".join(names)


def _views(
    graph_module: GraphModule,
    nodes: Sequence[Node],
    others: set[str],
    site_of: Mapping[str, int],
) -> dict[str, NodeView]:
    drawn = {node.name for node in nodes}
    lines = with_short_names(graph_module, "\n".join(map(statement, nodes))).split("\n")
    return {
        node.name: NodeView(
            name=node.name,
            label=_label(node),
            shape=_shape(node),
            text=line,
            inputs=tuple(n.name for n in node.all_input_nodes if n.name in drawn),
            site=site_of.get(node.name),
            changed=node.name not in others,
        )
        for node, line in zip(nodes, lines, strict=True)
    }


def _label(node: Node) -> str:
    if node.op == "placeholder":
        return f"input {node.name}"
    if node.op == "output":
        return "return"
    name = callee(node)
    if name.startswith("fusedmlp."):
        return f"{name.removesuffix('.default')} · {_plan(node)}"
    return name.removeprefix("aten.").removesuffix(".default")


def _plan(node: Node) -> str:
    """The last text that a fused call is given: its plan."""
    texts = [argument for argument in node.args if isinstance(argument, str)]
    return texts[-1] if texts else ""


def _shape(node: Node) -> str:
    value: Any = value_of(node)
    if not isinstance(value, torch.Tensor):
        return ""
    return f"[{', '.join(map(str, value.shape))}]"


def _placed(nodes: Sequence[Node], block_of: Mapping[str, Block]) -> dict[Node, Block]:
    """The block of each node after the rewrite: that of the nodes that it takes the place of."""
    placed: dict[Node, Block] = {}
    for node in reversed(nodes):
        replaced = [name for name in node.meta.get(REPLACES, ()) if name in block_of]
        users = [placed[user] for user in node.users if user in placed]
        if node.name in block_of:
            placed[node] = block_of[node.name]
        elif replaced:
            placed[node] = block_of[replaced[-1]]
        elif users:
            placed[node] = users[0]
    last = next(iter(block_of.values()), Block(""))
    ordered = {}
    for node in nodes:
        last = ordered[node] = placed.get(node, last)
    return ordered


def folded(blocks: Sequence[Block]) -> list[Block]:
    """Each block once of those that repeat one after the other, alone or as a short sequence."""
    kinds = [_kind(block) for block in blocks]
    found: list[Block] = []
    i = 0
    while i < len(blocks):
        period, times = _repetition(kinds[i:])
        for offset in range(period):
            like = [blocks[i + offset + n * period] for n in range(1, times)]
            found.append(replace(blocks[i + offset], like=like))
        i += period * times
    return found


def _repetition(kinds: Sequence[Any]) -> tuple[int, int]:
    """How long the sequence is that is repeated at the start, and how often it stands there."""
    for period in range(1, _LONGEST_PERIOD + 1):
        times = 1
        while kinds[times * period : (times + 1) * period] == kinds[:period] and kinds[:period]:
            times += 1
        if times > 1:
            return period, times
    return 1, 1


def _kind(block: Block) -> tuple[Any, ...]:
    """What two blocks have in common of which one need be shown."""
    numbers = {site: i for i, site in enumerate(block.sites)}
    return tuple(
        (side, *_relative(nodes, numbers))
        for side, nodes in (("before", block.before), ("after", block.after))
    )


def _relative(nodes: Sequence[NodeView], sites: Mapping[int, int]) -> list[Any]:
    at = {node.name: i for i, node in enumerate(nodes)}
    return [
        (
            node.label if not node.label.startswith("input ") else "input",
            node.shape,
            node.changed,
            None if node.site is None else sites[node.site],
            tuple(at.get(name, "outside") for name in node.inputs),
        )
        for node in nodes
    ]
