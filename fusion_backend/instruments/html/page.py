"""The report of a model as one HTML file that needs no network, and its parts for notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusion_backend.fusion.nested_graphs import nested_graphs
from fusion_backend.fusion.sites import REPLACES, Site, by_call, labels
from fusion_backend.instruments.backend_rows import baseline_of, runs_same_program
from fusion_backend.instruments.graph_text import diff_text
from fusion_backend.instruments.html import charts
from fusion_backend.instruments.html.blocks import ShownGraph, shown_graphs
from fusion_backend.instruments.html.kernels import launches_of
from fusion_backend.instruments.html.memory import memory_of
from fusion_backend.instruments.html.pictures import around_changes, whole
from fusion_backend.instruments.html.rendering import microseconds, rendered
from fusion_backend.instruments.html.results import Compared, Explained
from fusion_backend.instruments.html.roofline import Roof, roof_of
from fusion_backend.instruments.html.site_rows import site_rows
from fusion_backend.instruments.kernel_counts import CPU_OPERATORS
from fusion_backend.instruments.report import comparison_cells, gradients_text, sites_cells, summary
from fusion_backend.instruments.timelines import Launch, time_by_site
from fusion_backend.planning.gpus import Gpu, gpu_named, gpu_of, known_gpus

_OURS, _THEIRS = "fusedmlp", "inductor"

# What two measurements of one call may differ by; calls shorter than this differ by more.
_ALIKE, _SHORTEST_US = 1.3, 1000.0


def report_html(
    explanation: Explained | None,
    comparison: Compared | None = None,
    title: str = "",
    roof: Roof | None = None,
    kernels: bool = True,
) -> str:
    """A whole page, of what is there.

    Args:
        explanation: what became of the MLPs of a model, or ``None``.
        comparison: what was measured of the same model, or ``None``.
        title: what the model is called.
        roof: what the device reaches; a GPU that was planned for has that of its data sheet.
        kernels: whether to show the kernels: for a GPU they are compiled for that, which takes
            some seconds each.
    """
    sites = () if explanation is None else explanation.sites
    timelines = _timelines(explanation, comparison)
    gpu = None if explanation is None else _gpu(explanation)
    if roof is None and gpu is not None and sites:
        roof = roof_of(gpu, sites[0].dtype)
    times = {name: time_by_site(found) for name, found in timelines.items()}
    calls = [] if explanation is None or not kernels else list(_fused_calls(explanation))
    launches, without = launches_of(calls, gpu)
    return rendered(
        "page.html",
        title=title or "fusedmlp",
        summary=_sentence(explanation, comparison),
        explanation=explanation,
        comparison=comparison,
        rows=site_rows(sites, times.get(_OURS, {}), times.get(_THEIRS, {})),
        sites=sites,
        graphs=[] if explanation is None else _graphs(explanation),
        launches=launches,
        without_kernels=without,
        table=None if comparison is None else comparison_cells(comparison.rows, comparison.counted),
        claims=sites_cells(comparison.sites) if comparison and comparison.sites else None,
        gradients=gradients_text(comparison.gradients)
        if comparison and comparison.gradients
        else "",
        timelines=charts.timelines(timelines, _labels(explanation, comparison)),
        disturbed=_disturbance(comparison),
        on_gpu=gpu is not None,
        roofline=charts.roofline(sites, timelines, roof, gpu),
        device=_device(explanation, comparison),
        torch_version=str(torch.__version__),
        tiles=_tiles(explanation, comparison),
    )


def explanation_fragment(explanation: Explained) -> str:
    """The sites of an explanation, for a notebook."""
    found = summary(explanation.sites, explanation.target)
    return rendered("explanation.html", summary=found, rows=site_rows(explanation.sites, {}, {}))


def comparison_fragment(comparison: Compared) -> str:
    """The table of a comparison, for a notebook."""
    table, names = comparison_cells(comparison.rows, comparison.counted), _labels(None, comparison)
    shown = charts.timelines(comparison.timelines, names)
    return rendered("comparison.html", table=table, comparison=comparison, timelines=shown)


def graph_fragment(before: GraphModule, after: GraphModule) -> str:
    """A graph before and after, for a notebook."""
    shown = [_pictured(graph) for graph in shown_graphs(before, after, (), 0)]
    return rendered("graph.html", graphs=[(shown, None, "")])


def _sentence(explanation: Explained | None, comparison: Compared | None) -> str:
    """What was found and what it gained."""
    parts = []
    if explanation is not None:
        parts.append(summary(explanation.sites, explanation.target).rstrip("."))
    known = {} if comparison is None else {row.backend: row for row in comparison.rows}
    if comparison is not None and {_OURS, _THEIRS} <= known.keys():
        ours, theirs = known[_OURS], known[_THEIRS]
        if runs_same_program(ours, baseline_of(comparison.rows)):
            parts.append("it runs the same program as Inductor")
        else:
            parts.append(
                f"a call takes {microseconds(ours.wall_us)}, with Inductor "
                f"{microseconds(theirs.wall_us)}, in {ours.kernels} instead of {theirs.kernels} "
                f"{comparison.counted}"
            )
    return f"{': '.join(parts)}." if parts else ""


@dataclass(frozen=True)
class Tile:
    """A number that is seen first."""

    figure: str
    caption: str


def _tiles(explanation: Explained | None, comparison: Compared | None) -> list[Tile]:
    tiles = []
    fused = [] if explanation is None else [site for site in explanation.sites if site.fused]
    if explanation is not None:
        figure = f"{len(fused)} of {len(explanation.sites)}"
        tiles.append(Tile(figure, "MLPs fused"))
    known = {} if comparison is None else {row.backend: row for row in comparison.rows}
    if comparison is not None and {_OURS, _THEIRS} <= known.keys():
        ours, theirs = known[_OURS], known[_THEIRS]
        speedup = theirs.wall_us / ours.wall_us
        tiles.append(Tile(f"{speedup:.2f}×", "as fast as Inductor, whole model"))
        tiles.append(Tile(f"{theirs.kernels} → {ours.kernels}", comparison.counted))
        if ours.error is not None:
            eager = known.get("eager")
            of_eager = f"; eager {eager.error:.1e}" if eager and eager.error is not None else ""
            tiles.append(Tile(f"{ours.error:.1e}", f"error against float64{of_eager}"))
        return tiles
    known_gains = [site.expected_speedup for site in fused if site.expected_speedup]
    if known_gains:
        low, high = min(known_gains), max(known_gains)
        figure = f"{low:.2f}×" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f}–{high:.2f}×"
        tiles.append(Tile(figure, "as fast as Inductor, by MLP, expected"))
    return tiles


def _device(explanation: Explained | None, comparison: Compared | None) -> str:
    if explanation is not None and explanation.target:
        return f"planned for {explanation.target}"
    if comparison is not None:
        return "CPU" if comparison.device == "cpu" else comparison.device
    devices = {site.device for site in explanation.sites} if explanation is not None else set()
    return ", ".join(sorted(devices))


def _timelines(
    explanation: Explained | None, comparison: Compared | None
) -> Mapping[str, Sequence[Launch]]:
    """The launches of each backend; with their sites where the explanation has the same ones."""
    if comparison is None:
        return {}
    if explanation is None or _names(explanation.sites) == _names(comparison.mlps):
        return comparison.timelines
    return {
        name: tuple(launch._replace(site=None) for launch in found)
        for name, found in comparison.timelines.items()
    }


def _labels(explanation: Explained | None, comparison: Compared | None) -> list[str]:
    """A name for each MLP that launches may be of."""
    if explanation is not None:
        return labels(explanation.sites)
    return [] if comparison is None else labels(comparison.mlps)


def _names(sites: Sequence[Site]) -> list[tuple[object, ...]]:
    """What two captures of one program have in common."""
    return [(site.module, site.nodes, site.plan) for site in sites]


def _disturbance(comparison: Compared | None) -> str:
    """A sentence where the profiled call of a CPU and the timed ones took different times."""
    if comparison is None or comparison.counted != CPU_OPERATORS:
        return ""
    for row in comparison.rows:
        found = comparison.timelines.get(row.backend, ())
        profiled = max((launch.start + launch.duration for launch in found), default=row.wall_us)
        shorter, longer = sorted((profiled, row.wall_us))
        if shorter > _SHORTEST_US and longer > _ALIKE * shorter:
            return (
                f"The profiled call of {row.backend} took {microseconds(profiled)}, the timed ones "
                f"{microseconds(row.wall_us)}. That is a sign of other programs on this machine: "
                "measure again when it is idle."
            )
    return ""


def _gpu(explanation: Explained) -> Gpu | None:
    """The GPU that was planned for, or that the model is on."""
    if explanation.target is not None:
        known = (gpu_named(name) for name in known_gpus())
        return next(gpu for gpu in known if gpu.name == explanation.target)
    if any(site.device == "cuda" for site in explanation.sites) and torch.cuda.is_available():
        return gpu_of(torch.device("cuda"))
    return None


def _fused_calls(explanation: Explained) -> Iterator[tuple[int, Node]]:
    """Each fused site's number with the call that takes its place, or that of several."""
    first = 0
    for (_, after), sites in zip(explanation.graphs, explanation.sites_by_graph, strict=False):
        by_nodes = {
            tuple(name for i in call for name in sites[i].nodes): [first + i for i in call]
            for call in by_call(sites)
        }
        for graph_module in nested_graphs(after):
            for node in graph_module.graph.nodes:
                for number in by_nodes.get(node.meta.get(REPLACES, ()), ()):
                    if explanation.sites[number].fused:
                        yield number, node
        first += len(sites)


def _graphs(explanation: Explained) -> list[tuple[Any, ...]]:
    """Each pair of graphs: blocks with their pictures, memory, and the difference as text."""
    found, first = [], 0
    for (before, after), sites in zip(explanation.graphs, explanation.sites_by_graph, strict=False):
        shown = [_pictured(graph) for graph in shown_graphs(before, after, sites, first)]
        memory = charts.memory_chart(memory_of(before.graph), memory_of(after.graph))
        found.append((shown, memory, diff_text(before, after)))
        first += len(sites)
    return found


def _pictured(graph: ShownGraph) -> tuple[ShownGraph, list[tuple[Any, ...]]]:
    """A graph with two pairs of pictures of each block."""
    return graph, [
        (
            block,
            [number for each in (block, *block.like) for number in each.sites],
            (around_changes(block.before), around_changes(block.after)),
            (whole(block.before), whole(block.after)),
        )
        for block in graph.blocks
    ]
