"""A layered drawing of a directed acyclic graph: where boxes stand, and how lines run.

The steps are those of Sugiyama, Tagawa and Toda (1981): nodes in layers, by the longest path that
leads to them; a stop in each layer that an edge crosses; an order within each layer that leaves few
crossings; and a place beside the neighbours.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import networkx

GAP_X, GAP_Y = 14.0, 16.0
_STOP_WIDTH = 6.0
# Passes down and up: more move hardly anything.
_ORDERINGS, _PLACINGS = 6, 8


@dataclass(frozen=True)
class Box:
    """A rectangle; ``x`` and ``y`` are those of its upper left corner, in pixels."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Drawing:
    """Where everything is.

    Attributes:
        boxes: one a node.
        lines: of each edge, the path as SVG writes it.
        width: of all, in pixels.
        height: of all, in pixels.
    """

    boxes: Mapping[Hashable, Box]
    lines: Mapping[tuple[Hashable, Hashable], str]
    width: float
    height: float


def laid_out(graph: networkx.DiGraph, widths: Mapping[Hashable, float], height: float) -> Drawing:
    """Lay out a graph from top to bottom.

    Args:
        graph: acyclic; nodes are added in the order in which they run.
        widths: of each node's box, in pixels.
        height: of all boxes, in pixels.
    """
    layer = _layers(graph)
    stops, links = _with_stops(graph, layer)
    rows = _ordered(stops, links)
    room = {node: widths.get(node, _STOP_WIDTH) for row in rows for node in row}
    x = _placed(rows, links, room)
    left = min((x[node] - room[node] / 2 for node in x), default=0.0)
    pitch = height + GAP_Y
    boxes = {
        node: Box(x[node] - room[node] / 2 - left, layer[node] * pitch, room[node], height)
        for node in graph
    }
    centre = {node: (x[node] - left, i * pitch) for i, row in enumerate(rows) for node in row}
    lines = {edge: _path([centre[stop] for stop in way], height) for edge, way in links.items()}
    right = max((centre[node][0] + room[node] / 2 for node in centre), default=0.0)
    return Drawing(boxes, lines, right, len(rows) * pitch - GAP_Y)


def _layers(graph: networkx.DiGraph) -> dict[Hashable, int]:
    """The longest path that leads to each node; what nothing leads to stands above its user."""
    layer: dict[Hashable, int] = {}
    for number, generation in enumerate(networkx.topological_generations(graph)):
        layer.update(dict.fromkeys(generation, number))
    for node in graph:
        users = [layer[user] for user in graph.successors(node)]
        if users and not graph.in_degree(node):
            layer[node] = min(users) - 1
    return layer


Ways = Mapping[tuple[Hashable, Hashable], Sequence[Hashable]]
Neighbours = dict[Hashable, list[Hashable]]


def _with_stops(
    graph: networkx.DiGraph, layer: Mapping[Hashable, int]
) -> tuple[list[list[Hashable]], Ways]:
    """The nodes of each layer with the stops of edges that cross it, and the way of each edge."""
    rows: list[list[Hashable]] = [[] for _ in range(max(layer.values(), default=-1) + 1)]
    for node in graph:
        rows[layer[node]].append(node)
    ways = {}
    for source, target in graph.edges:
        stops = [("stop", source, i) for i in range(layer[source] + 1, layer[target])]
        for i, stop in enumerate(stops, layer[source] + 1):
            if stop not in rows[i]:  # edges from one node run together
                rows[i].append(stop)
        ways[source, target] = [source, *stops, target]
    return rows, ways


def _neighbours(ways: Ways) -> tuple[Neighbours, Neighbours]:
    """Of each node those in the layer above, and those in the layer below."""
    above: Neighbours = {}
    below: Neighbours = {}
    for upper, lower in dict.fromkeys(step for way in ways.values() for step in pairwise(way)):
        above.setdefault(lower, []).append(upper)
        below.setdefault(upper, []).append(lower)
    return above, below


def _ordered(rows: list[list[Hashable]], ways: Ways) -> list[list[Hashable]]:
    """Each layer sorted by the mean place of its neighbours, down and up in turn."""
    above, below = _neighbours(ways)
    numbers = range(len(rows))
    for turn in range(_ORDERINGS):
        down = turn % 2 == 0
        for i in numbers[1:] if down else numbers[-2::-1]:
            near = rows[i - 1] if down else rows[i + 1]
            rows[i] = _sorted(rows[i], above if down else below, near)
    return rows


def _sorted(
    row: Sequence[Hashable],
    neighbours: Mapping[Hashable, Sequence[Hashable]],
    near: Sequence[Hashable],
) -> list[Hashable]:
    """A layer in the order of its neighbours; a node without any keeps its place."""
    place = {node: (n + 0.5) / len(near) for n, node in enumerate(near)}
    mean = {
        node: fmean([place[other] for other in neighbours[node]])
        if node in neighbours
        else (n + 0.5) / len(row)
        for n, node in enumerate(row)
    }
    return sorted(row, key=mean.__getitem__)


def _placed(
    rows: Sequence[Sequence[Hashable]], ways: Ways, room: Mapping[Hashable, float]
) -> dict[Hashable, float]:
    """The middle of each node, near those of its neighbours, with a gap to the next."""
    above, below = _neighbours(ways)
    x: dict[Hashable, float] = {}
    for row in rows:
        wanted = [0.0] * len(row)
        x.update(zip(row, _apart(wanted, [room[node] for node in row]), strict=True))
    for turn in range(_PLACINGS):
        neighbours = above if turn % 2 == 0 else below
        for row in rows if turn % 2 == 0 else reversed(rows):
            wanted = [
                fmean([x[other] for other in neighbours[node]]) if node in neighbours else x[node]
                for node in row
            ]
            x.update(zip(row, _apart(wanted, [room[node] for node in row]), strict=True))
    return x


def _apart(wanted: Sequence[float], widths: Sequence[float]) -> list[float]:
    """Places in the same order, with gaps, that are as near as may be to those that are wanted.

    It joins neighbours that would overlap to a group, which stands at the mean of what its members
    want (pool adjacent violators).
    """
    offsets = [0.0]
    for one, other in pairwise(widths):
        offsets.append(offsets[-1] + (one + other) / 2 + GAP_X)
    groups: list[tuple[float, int]] = []
    for place, offset in zip(wanted, offsets, strict=False):
        mean, count = place - offset, 1
        while groups and groups[-1][0] > mean:
            before, size = groups.pop()
            mean, count = (before * size + mean * count) / (size + count), size + count
        groups.append((mean, count))
    means = [mean for mean, count in groups for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=False)]


def _path(points: Sequence[tuple[float, float]], height: float) -> str:
    """From the lower edge of the first to the upper edge of the last, straight through stops."""
    x, y = points[0]
    path, y = f"M{x:.0f} {y + height:.0f}", y + height
    for i, (next_x, next_y) in enumerate(points[1:], 1):
        middle = (y + next_y) / 2
        if next_x == x:
            path += f"V{next_y:.0f}"
        else:
            path += f"C{x:.0f} {middle:.0f} {next_x:.0f} {middle:.0f} {next_x:.0f} {next_y:.0f}"
        x, y = next_x, next_y
        if i < len(points) - 1:
            y = next_y + height
            path += f"V{y:.0f}"
    return path
