"""Say of every MLP of a model whether it is fused, on which plan, or why not."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TextIO

import torch
from torch.fx import GraphModule

from fusion_backend.backend import backend_with_observer
from fusion_backend.compat.dynamo import CompileSettings, graph_breaks
from fusion_backend.errors import ExplainError
from fusion_backend.fusion.fuse import FuseResult
from fusion_backend.fusion.sites import Site, labels, numbered_apart
from fusion_backend.instruments.compiled_calls import as_compiled, failure, mode_or_options
from fusion_backend.instruments.graph_text import diff_text, graph_text
from fusion_backend.instruments.isolation import (
    Inputs,
    modules_of,
    original,
    preserved,
    private_frame,
)
from fusion_backend.instruments.report import (
    bullet,
    explanation_cells,
    meanings,
    places,
    refusals,
    summary,
    table,
    together,
)
from fusion_backend.instruments.workload import devices_of
from fusion_backend.options import Options, checked_mapping, split_options
from fusion_backend.planning.gpus import Gpu, gpu_named


class GraphPair(NamedTuple):
    """A graph as Dynamo captured it, and as it goes to Inductor."""

    before: GraphModule
    after: GraphModule

    def _repr_html_(self) -> str:
        from fusion_backend.instruments.html.page import graph_fragment

        return graph_fragment(*self)


@dataclass(frozen=True)
class Explanation:
    """What the backend does with a model.

    Attributes:
        sites: every MLP found, graph by graph in program order.
        graphs: the graphs before and after the rewrite, more than one where Dynamo breaks the
            model's graph.
        graph_breaks: why, and where known in which line, one sentence each. After a graph break
            a module path begins at the module whose ``forward`` the graph belongs to.
        target: the name of the GPU that was planned for, if it was asked for by ``target``.
        sites_by_graph: the same sites, apart by graph.
    """

    sites: tuple[Site, ...]
    graphs: tuple[GraphPair, ...]
    graph_breaks: tuple[str, ...] = ()
    target: str | None = None
    sites_by_graph: tuple[tuple[Site, ...], ...] = ()

    @property
    def fused(self) -> tuple[Site, ...]:
        """The sites that are fused."""
        return tuple(site for site in self.sites if site.fused)

    @property
    def left_alone(self) -> tuple[Site, ...]:
        """The sites that are not fused; each has a ``reason`` and a ``detail``."""
        return tuple(site for site in self.sites if not site.fused)

    def graph_diff(self, index: int = 0) -> str:
        """What the rewrite changes in one graph, as a unified diff; empty where nothing."""
        return diff_text(*self.graphs[index])

    def print_graphs(self, file: TextIO | None = None) -> None:
        """Print every graph before and after the rewrite."""
        for index, (before, after) in enumerate(self.graphs):
            for moment, graph_module in (("before", before), ("after", after)):
                print(f"# graph {index}, {moment}", file=file or sys.stdout)
                print(graph_text(graph_module), end="\n\n", file=file or sys.stdout)

    def to_json(self, indent: int | None = 2) -> str:
        """The explanation as JSON.

        One object with ``sites``, ``graphs`` (their number), ``graph_breaks`` (strings) and
        ``target`` (a string or null). Each site has the fields of :class:`Site`, ``label`` (a
        name that no other site has) and ``legal`` (true where a rewrite is the same program, fused
        or not); ``shape`` is an object with
        ``rows`` (a number, or a string where symbolic), ``in_features``, ``hidden_features`` and
        ``out_features``; ``operands`` is a list of strings.
        """
        content = {
            "sites": [
                {"label": label, **site.as_dict()}
                for label, site in zip(labels(self.sites), self.sites, strict=True)
            ],
            "graphs": len(self.graphs),
            "graph_breaks": list(self.graph_breaks),
            "target": self.target,
        }
        return json.dumps(content, indent=indent, ensure_ascii=False)

    def to_html(self, title: str = "", *, kernels: bool = True) -> str:
        """The explanation as a page: one HTML file, which needs nothing from elsewhere.

        Args:
            title: what the model is called.
            kernels: whether to show generated kernels. Those of a GPU are compiled for that, in
                some seconds each; a GPU need not be there.
        """
        from fusion_backend.instruments.html.page import report_html

        return report_html(self, title=title, kernels=kernels)

    def _repr_html_(self) -> str:
        from fusion_backend.instruments.html.page import explanation_fragment

        return explanation_fragment(self)

    def __str__(self) -> str:
        lines = [summary(self.sites, self.target)]
        named = list(zip(labels(self.sites), self.sites, strict=True))
        if named:
            lines += ["", table(*explanation_cells(named))]
        for title, sentences in (
            ("In one kernel:", together(named)),
            ("In the source:", places(named)),
            ("In the activations:", meanings(named)),
            ("Not fused:", refusals(named)),
        ):
            if sentences:
                lines += ["", title, *map(bullet, sentences)]
        if self.graph_breaks:
            count = len(self.graphs)
            was = f"Graph breaks; the model was captured as {count} graph{'s'[: count != 1]}:"
            lines += ["", was, *map(bullet, self.graph_breaks)]
        return "\n".join(lines)


def explain(
    model: Callable[..., Any],
    *args: Any,
    options: Options | Mapping[str, Any] | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    target: str | None = None,
    **kwargs: Any,
) -> Explanation:
    """Report what ``torch.compile(model, backend="fusedmlp")`` does with a call of the model.

    Dynamo captures the graphs and the backend rewrites them, in the grad mode and autocast of the
    caller. The call is then completed without Inductor, which changes nothing in the report and
    takes most of the time. Inputs are copied; buffers, random number generators and the caller's
    compiled code are left as they were. (Attributes that a model sets on itself are set.)

    Args:
        model: a module or function, or what ``torch.compile`` returned for one: it is explained
            with the options, mode and ``dynamic`` that it was compiled with.
        args: its positional arguments.
        options: as for ``torch.compile``, such as ``{"fusedmlp.policy": "always"}``, or an
            :class:`Options`; of a compiled model, these replace those of the same names.
        mode: as for ``torch.compile``.
        dynamic: as for ``torch.compile``.
        target: plan for this GPU, such as ``"h100"`` or ``"sm_90"``, which need not be in this
            machine; the model runs where its tensors are all the same, and unfused.
        kwargs: keyword arguments of the model.

    Raises:
        ExplainError: the model fails under ``torch.compile``, or Dynamo captures nothing of it.
        OptionError: an option of fusedmlp is unknown or has a wrong value, or the target is not
            known.
    """
    settings = as_compiled(model, CompileSettings(checked_mapping(options), mode, dynamic))
    own, _ = split_options(settings.options)  # raises here, not from within Dynamo
    gpu = None if target is None else gpu_named(target)
    model = original(model)
    warn_of_unknown(own.exclude, model)
    inputs = Inputs(args, kwargs)
    recorder = Recorder(gpu)
    mode, chosen = mode_or_options(settings.mode, settings.options)
    compiled = torch.compile(
        private_frame(model),
        backend=recorder.backend,
        mode=mode,
        options=chosen or None,
        dynamic=settings.dynamic,
    )
    breaks_before = graph_breaks()
    with preserved(modules_of(model), devices_of(model, inputs)):
        copy = inputs.copy()
        try:
            compiled(*copy.args, **copy.kwargs)
        except Exception as error:
            raise ExplainError(f"the model fails under torch.compile: {failure(error)}") from error
    if not recorder.graphs:
        raise ExplainError(
            "Dynamo captured no graph: the model must run torch operations, it must be no "
            "ScriptModule, and compilation must not be disabled (by TORCHDYNAMO_DISABLE, "
            "torch.compiler.disable or set_stance)"
        )
    # A break in a loop leaves no graph that could tell of it, only a count.
    recorder.add_breaks(graph_breaks() - breaks_before)
    return recorder.explanation()


def warn_of_unknown(patterns: Iterable[str], model: Callable[..., Any]) -> None:
    """Warn of patterns of modules to exclude that name none of a model: likely a slip."""
    if not isinstance(model, torch.nn.Module):
        return
    paths = [path for path, _ in model.named_modules()]
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            warnings.warn(
                f"fusedmlp.exclude has {pattern!r}, which names no module of the model; it has "
                f"{', '.join(map(repr, paths[1:4]))}, …",
                stacklevel=3,
            )


class Seen(Exception):
    """No error: the backend has done its part, and Inductor's would follow."""


@dataclass
class Recorder:
    """Keeps what the backend does with each graph of one model."""

    target: Gpu | None = None
    graphs: list[GraphPair] = field(default_factory=list)
    sites: list[tuple[Site, ...]] = field(default_factory=list)
    graph_breaks: list[str] = field(default_factory=list)

    def backend(
        self, graph_module: GraphModule, example_inputs: Sequence[Any], **settings: Any
    ) -> Callable[..., Any]:
        """The backend up to Inductor; the graph then runs as it was captured."""
        reason = getattr(graph_module, "compile_subgraph_reason", None)
        if reason is not None and reason.graph_break:
            self.graph_breaks.append(break_text(reason))
        with contextlib.suppress(Seen):
            backend_with_observer(self.observe, self.target)(
                graph_module, example_inputs, **settings
            )
        return self.graphs[-1].before.forward

    def observe(self, before: GraphModule, result: FuseResult) -> None:
        """Keep the graphs and sites, and leave the backend."""
        self.graphs.append(GraphPair(before, result.graph_module))
        self.sites.append(result.sites)
        raise Seen

    def add_breaks(self, reasons: Iterable[str]) -> None:
        """Add the breaks that none of the graphs has told of."""
        for reason in map(first_line, reasons):
            if not any(known.startswith(reason) for known in self.graph_breaks):
                self.graph_breaks.append(reason)

    def explanation(self) -> Explanation:
        """All that was kept."""
        target = None if self.target is None else self.target.name
        sites_by_graph = tuple(numbered_apart(self.sites))
        return Explanation(
            sites=tuple(site for sites in sites_by_graph for site in sites),
            graphs=tuple(self.graphs),
            graph_breaks=tuple(self.graph_breaks),
            target=target,
            sites_by_graph=sites_by_graph,
        )


def break_text(reason: Any) -> str:
    """Why a graph ended where it did, and the line of the user's code."""
    if not reason.user_stack:
        return first_line(reason.reason)
    frame = reason.user_stack[-1]
    return f"{first_line(reason.reason)} ({frame.filename}:{frame.lineno})"


def first_line(text: object) -> str:
    """The first line of one of Dynamo's messages; the others explain and advise."""
    return str(text).strip().partition("\n")[0]
