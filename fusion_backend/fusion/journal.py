"""What a running process says of each graph: in PyTorch's logs, counters, traces and folders."""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from torch.fx import GraphModule

from fusion_backend.compat import dynamo, logs
from fusion_backend.fusion.sites import Site, labels

#: So many graphs are remembered.
LONGEST_HISTORY = 1000


@dataclass(frozen=True)
class CompiledGraph:
    """What became of a graph that this process compiled.

    Attributes:
        compilation: Dynamo's name of it: ``"0/0"`` is the first compilation of the first function,
            ``"0/1"`` its recompilation; empty where Dynamo did not compile.
        sites: the MLPs of the graph, as :func:`fusion_backend.explain` lists them.
    """

    compilation: str
    sites: tuple[Site, ...]

    @property
    def fused(self) -> tuple[Site, ...]:
        """The sites that are fused."""
        return tuple(site for site in self.sites if site.fused)

    def __str__(self) -> str:
        """A sentence, then lines for each site."""
        fused, name = len(self.fused), f" {self.compilation}".rstrip()
        lines = [
            f"graph{name}: {fused} of {len(self.sites)} MLP{'s' * (len(self.sites) != 1)} fused"
        ]
        for label, site in zip(labels(self.sites), self.sites, strict=True):
            what = site.plan if site.fused else f"not fused, {site.reason}"
            sizes = f"{site.sizes} {site.dtype}"
            lines.append(f"  {label}: {site.form} {site.activation}, {sizes}: {what}")
            if site.source:
                lines.append(f"    {site.layers} ({site.source})")
            lines.append(f"    {site.detail}")
        return "\n".join(lines)


_history: deque[CompiledGraph] = deque(maxlen=LONGEST_HISTORY)
# Those since Dynamo began to number them: before that, the same name was another graph's.
_numbered: deque[CompiledGraph] = deque(maxlen=LONGEST_HISTORY)


def history() -> tuple[CompiledGraph, ...]:
    """The graphs that this process compiled with fusedmlp, the oldest first, 1000 at most.

    It asks the running process and compiles nothing, unlike :func:`fusion_backend.explain`. What
    ``explain`` and ``profile`` compile is listed, too.
    """
    return tuple(_history)


def numbered() -> tuple[CompiledGraph, ...]:
    """The graphs of :func:`history` whose names are still theirs, the oldest first."""
    if dynamo.numbers_anew():
        _numbered.clear()
    return tuple(graph for graph in _numbered if graph.compilation)


def newest() -> CompiledGraph | None:
    """The graph that was compiled last: whoever asks at every step asks for next to nothing."""
    return _history[-1] if _history else None


def record(before: GraphModule, after: GraphModule, sites: tuple[Site, ...]) -> None:
    """Tell what became of a graph: of each site in a line, and both graphs where that is asked for.

    Args:
        before: the graph as it came; of no interest unless :func:`shows_graphs`.
        after: what is compiled.
        sites: of the graph.
    """
    compiled = CompiledGraph(logs.compilation(), sites)
    numbered()
    _history.append(compiled)
    _numbered.append(compiled)
    _count(sites)
    logs.LOGGER.info("%s", compiled)
    logs.trace_artifact("fusedmlp_sites", lambda: str(compiled))
    if shows_graphs():
        _show(before, after, compiled)


def shows_graphs() -> bool:
    """Whether anybody asked to see graphs: otherwise no copy of one need be kept for it."""
    asked = logs.LOGGER.isEnabledFor(logging.DEBUG) or logs.is_traced()
    return asked or logs.debug_folder() is not None


def _show(before: GraphModule, after: GraphModule, compiled: CompiledGraph) -> None:
    if logs.LOGGER.isEnabledFor(logging.DEBUG):
        logs.LOGGER.debug("graph before:\n%s", _code(before))
        logs.LOGGER.debug("graph after:\n%s", _code(after))
        logs.LOGGER.debug("Inductor writes the code of this graph below %s", logs.code_cache())
    logs.trace_artifact("fusedmlp_before", lambda: _code(before))
    logs.trace_artifact("fusedmlp_after", lambda: _code(after))
    _write_debug_folder(before, after, compiled)


def _count(sites: tuple[Site, ...]) -> None:
    counters = logs.counters()
    counters["graphs"] += 1
    for site in sites:
        counters["fused" if site.fused else f"not fused: {site.reason}"] += 1


def _code(graph_module: GraphModule) -> str:
    text: str = graph_module.print_readable(print_output=False)
    return text


def _write_debug_folder(before: GraphModule, after: GraphModule, compiled: CompiledGraph) -> None:
    folder = logs.debug_folder()
    if folder is None:
        return
    own = folder / "fusedmlp" / (compiled.compilation or "graph").replace("/", "_")
    with suppress(OSError):  # as Inductor's own debug folders: compilation does not depend on them
        own.mkdir(parents=True, exist_ok=True)
        (own / "before.py").write_text(_code(before))
        (own / "after.py").write_text(_code(after))
        (own / "sites.txt").write_text(f"{compiled}\n")
