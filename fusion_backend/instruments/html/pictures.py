"""Blocks of a graph as drawings: boxes, labels and lines, for a template to write as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import networkx

from fusion_backend.instruments.html.blocks import NodeView
from fusion_backend.instruments.html.layout import Box, laid_out

# Of the monospaced font, in pixels, at its size in the style sheet.
_CHARACTER, _PADDING = 6.7, 9.0
_HEIGHT = 24.0
_LONGEST_LABEL, _LONGEST_SHAPE = 26, 20
_MARGIN = 4.0


@dataclass(frozen=True)
class DrawnNode:
    """A box.

    Attributes:
        label: what stands in it.
        shape: what stands behind that, paler.
        text: the whole statement, or which nodes a box stands for.
        kind: ``same``, ``changed``, ``site`` (of a site left alone), ``outside`` or ``many``.
        site: the number of the site, or ``None``.
        box: where it is.
    """

    label: str
    shape: str
    text: str
    kind: str
    site: int | None
    box: Box


@dataclass(frozen=True)
class Picture:
    """A drawing; sizes in pixels.

    Attributes:
        width: of all.
        height: of all.
        nodes: boxes.
        lines: paths, as SVG writes them.
    """

    width: float
    height: float
    nodes: tuple[DrawnNode, ...]
    lines: tuple[str, ...]


def whole(nodes: Sequence[NodeView]) -> Picture:
    """Every node of a block."""
    return _picture([(node,) for node in nodes])


def around_changes(nodes: Sequence[NodeView]) -> Picture:
    """The nodes of sites with their neighbours; of all others how many there are, run by run."""
    by_name = {node.name: node for node in nodes}
    near = {node.name for node in nodes if _matters(node)}
    near |= {name for node in nodes if _matters(node) for name in node.inputs if name in by_name}
    near |= {node.name for node in nodes if any(_matters_name(n, by_name) for n in node.inputs)}
    groups: list[tuple[NodeView, ...]] = []
    for is_near, run in groupby(nodes, lambda node: node.name in near):
        members = tuple(run)
        groups += [(node,) for node in members] if is_near else [members]
    return _picture(groups)


def _matters(node: NodeView) -> bool:
    return node.changed or node.site is not None


def _matters_name(name: str, known: dict[str, NodeView]) -> bool:
    return name in known and _matters(known[name])


def _picture(groups: Sequence[tuple[NodeView, ...]]) -> Picture:
    """Groups of nodes that follow each other, each as one box."""
    graph = networkx.DiGraph()
    home = {node.name: i for i, group in enumerate(groups) for node in group}
    for i, group in enumerate(groups):
        for node in group:
            for name in node.inputs:
                if home.get(name, name) != i:
                    graph.add_edge(home.get(name, name), i)
        graph.add_node(i)
    labels = {key: _label(key, groups) for key in graph}
    widths = {
        key: 2 * _PADDING + _CHARACTER * (len(label) + len(shape) + bool(shape))
        for key, (label, shape) in labels.items()
    }
    drawing = laid_out(graph, widths, _HEIGHT)
    nodes = tuple(_drawn(key, groups, labels[key], drawing.boxes[key]) for key in graph)
    size = (drawing.width + 2 * _MARGIN, max(drawing.height, 0) + 2 * _MARGIN)
    return Picture(*size, nodes, tuple(drawing.lines.values()))


def _label(key: int | str, groups: Sequence[tuple[NodeView, ...]]) -> tuple[str, str]:
    if isinstance(key, str):
        return _shortened(key, _LONGEST_LABEL), ""
    group = groups[key]
    if len(group) > 1:
        return f"{len(group)} nodes, unchanged", ""
    return _shortened(group[0].label, _LONGEST_LABEL), _shortened(group[0].shape, _LONGEST_SHAPE)


def _drawn(
    key: int | str,
    groups: Sequence[tuple[NodeView, ...]],
    label: tuple[str, str],
    box: Box,
) -> DrawnNode:
    box = Box(box.x + _MARGIN, box.y + _MARGIN, box.width, box.height)
    if isinstance(key, str):
        return DrawnNode(*label, f"{key}, of another block", "outside", None, box)
    group = groups[key]
    if len(group) > 1:
        text = "\n".join(node.text for node in group)
        return DrawnNode(*label, text, "many", None, box)
    (node,) = group
    kind = "changed" if node.changed else "same" if node.site is None else "site"
    return DrawnNode(*label, node.text, kind, node.site, box)


def _shortened(text: str, length: int) -> str:
    """A text with its middle left out where it is long."""
    if len(text) <= length:
        return text
    half = (length - 1) // 2
    return f"{text[:half]}…{text[-half:]}"
