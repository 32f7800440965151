"""The backend: ``torch.compile(model, backend="fusedmlp")``.

Nothing stands between the caller and Inductor but the rewrite: ``mode`` and ``options`` are
Inductor's, and Inductor's global configuration is never changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch.fx import GraphModule

from fusion_backend.compat import inductor, logs, patches, triton_features
from fusion_backend.errors import FusionError
from fusion_backend.fingerprint import source_hash
from fusion_backend.fusion import journal
from fusion_backend.fusion.example_values import with_example_values
from fusion_backend.fusion.fuse import FuseResult, fuse_in_place
from fusion_backend.fusion.nested_graphs import copy_graphs
from fusion_backend.operators import cpu_calls, gpu_calls
from fusion_backend.options import Options, split_options
from fusion_backend.planning.gpus import Gpu

Observer = Callable[[GraphModule, FuseResult], None]
Compiled = Callable[..., Any]


def fusedmlp(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """Compile one graph of Dynamo: fuse its MLPs, then let Inductor compile it all.

    Args:
        graph_module: the graph; the backend takes ownership of it.
        example_inputs: its inputs, real or fake.
        mode: as for Inductor: ``"default"``, ``"reduce-overhead"``, ``"max-autotune"``, ...
        options: Inductor's options, and those of :class:`~fusion_backend.options.Options` with
            the prefix ``fusedmlp.``.

    Returns:
        A function that runs the compiled graph.

    Raises:
        OptionError: an option of fusedmlp is unknown or has a wrong value.
        RuntimeError: an option or mode of Inductor's is unknown.
        FusionError: under ``strict``, the rewrite failed.
    """
    return _compile(graph_module, example_inputs, mode, options, observer=None)


def backend_with_observer(observer: Observer, target: Gpu | None = None) -> Callable[..., Compiled]:
    """The backend, reporting every graph to ``observer(before, result)`` before it is compiled.

    With a ``target`` the graph is planned for that GPU, and the observer must not let it run.
    """

    def observed(
        graph_module: GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Compiled:
        return _compile(graph_module, example_inputs, mode, options, observer, target)

    return observed


def _compile(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    mode: str | None,
    options: Mapping[str, Any] | None,
    observer: Observer | None,
    target: Gpu | None = None,
) -> Compiled:
    own, inductor_options = split_options(options)
    compiler = inductor.inductor_compiler(mode, inductor_options)
    with inductor.inductor_options(compiler.config), logs.timed("fusedmlp.fuse"):
        before, result = _fuse_or_leave(graph_module, example_inputs, own, target)
    journal.record(before, result.graph_module, result.sites)
    if observer is not None:
        observer(copy_graphs(before), FuseResult(copy_graphs(result.graph_module), result.sites))
    gpu_calls.install_lowering()
    cpu_calls.install_lowering()
    triton_features.use_torchs_assembler()
    # These are written beside the graph, or read where it is compiled: caches do not look at them.
    how = "-recompute" if own.recompute else ""
    how += "" if inductor.backward_owns_what_is_saved() else "-kept"
    how += "".join(f"-unaligned-{index}" for index in inductor.unaligned_inputs(example_inputs))
    tagged = partial(patches.cache_tag, f"fusedmlp-{source_hash()}{how}.")
    with (
        tagged(),
        patches.analysing_kernels_once(),
        patches.drawing_once(),
        patches.pricing_our_products(),
        patches.paying_for_padding(),
        patches.starting_kernels_early(),
        patches.repros_import("fusion_backend.operators"),
    ):
        graph = result.graph_module
        compiled: Compiled = inductor.compiled_within(compiler, graph, example_inputs, tagged)
        return compiled


def _fuse_or_leave(
    graph_module: GraphModule, example_inputs: Sequence[Any], own: Options, target: Gpu | None
) -> tuple[GraphModule, FuseResult]:
    """The graph as it came, and what became of it: the same graph, where the rewrite fails."""
    before = graph_module
    try:
        before = copy_graphs(graph_module)
        traced = with_example_values(graph_module, example_inputs)
        return before, fuse_in_place(traced, own, target)
    except Exception as error:
        if own.strict and isinstance(error, FusionError):
            raise
        message = f"fusedmlp left a graph as it was: {type(error).__name__}: {error}"
        if own.strict:
            raise FusionError(message) from error
        warnings.warn(f"{message}. Please report it.", stacklevel=2)
        return before, FuseResult(before, ())
