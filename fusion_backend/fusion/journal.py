"""What a running process says of each graph: in PyTorch's logs, counters, traces and folders."""

from __future__ import annotations

import logging
from contextlib import suppress

from torch.fx import GraphModule

from fusion_backend.compat import logs
from fusion_backend.fusion.sites import Site


def record(before: GraphModule, after: GraphModule, sites: tuple[Site, ...]) -> None:
    """Tell what became of a graph: of each site in a line, and both graphs where that is asked for.

    Args:
        before: the graph as it came.
        after: what is compiled.
        sites: of the graph.
    """
    _count(sites)
    report = _report(sites)
    logs.LOGGER.info(report)
    if logs.LOGGER.isEnabledFor(logging.DEBUG):
        logs.LOGGER.debug("graph before:\n%s", _code(before))
        logs.LOGGER.debug("graph after:\n%s", _code(after))
        logs.LOGGER.debug("Inductor writes the code of this graph below %s", logs.code_cache())
    logs.trace_artifact("fusedmlp_sites", lambda: report)
    logs.trace_artifact("fusedmlp_before", lambda: _code(before))
    logs.trace_artifact("fusedmlp_after", lambda: _code(after))
    _write_debug_folder(before, after, report)


def _count(sites: tuple[Site, ...]) -> None:
    counters = logs.counters()
    counters["graphs"] += 1
    for site in sites:
        counters["fused" if site.fused else f"not fused: {site.reason}"] += 1


def _report(sites: tuple[Site, ...]) -> str:
    """A sentence, then a line for each site."""
    compilation = logs.compilation()
    graph = f"graph {compilation}" if compilation else "a graph"
    fused = sum(site.fused for site in sites)
    lines = [f"{graph}: {fused} of {len(sites)} MLP{'s' * (len(sites) != 1)} fused"]
    for site in sites:
        what = site.plan if site.fused else f"not fused, {site.reason}"
        name = site.module or "(the model itself)"
        lines.append(f"  {name}: {site.form} {site.activation}, {site.sizes} {site.dtype}: {what}")
        lines.append(f"    {site.detail}")
    return "\n".join(lines)


def _code(graph_module: GraphModule) -> str:
    text: str = graph_module.print_readable(print_output=False)
    return text


def _write_debug_folder(before: GraphModule, after: GraphModule, report: str) -> None:
    folder = logs.debug_folder()
    if folder is None:
        return
    own = folder / "fusedmlp" / (logs.compilation() or "graph").replace("/", "_")
    with suppress(OSError):  # as Inductor's own debug folders: compilation does not depend on them
        own.mkdir(parents=True, exist_ok=True)
        (own / "before.py").write_text(_code(before))
        (own / "after.py").write_text(_code(after))
        (own / "sites.txt").write_text(report + "\n")
