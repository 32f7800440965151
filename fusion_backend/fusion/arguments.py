"""Whether ``fuse`` was given what it takes; each message says what to give instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from fusion_backend.errors import ArgumentError
from fusion_backend.options import Options

_TAKES = "fuse takes a torch.export.ExportedProgram or a torch.fx.GraphModule"


def check_graph(given: Any) -> None:
    """Refuse what is no graph.

    Raises:
        ArgumentError: it is neither a ``GraphModule`` nor an ``ExportedProgram``.
    """
    if not isinstance(given, (GraphModule, ExportedProgram)):
        raise ArgumentError(f"{_TAKES}, got {_named(given)}; {_remedy(given)}")


def check_example_inputs(given: Any) -> None:
    """Refuse what is no sequence of inputs.

    Raises:
        ArgumentError: it is a tensor, a mapping, options or something else.
    """
    if isinstance(given, torch.Tensor):
        raise ArgumentError("example_inputs must be a tuple or list, got one Tensor; pass (x,)")
    if isinstance(given, (Options, Mapping)):
        raise ArgumentError(
            f"example_inputs must be a tuple or list, got {_named(given)}; pass options by name, "
            "as fuse(graph, options=...)"
        )
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ArgumentError(f"example_inputs must be a tuple or list, got {_named(given)}")


def _named(given: Any) -> str:
    if given is None:
        return "None"
    if isinstance(given, nn.Module):
        return f"the module {type(given).__name__}"
    if isinstance(given, type):
        return f"the class {given.__name__}"
    if callable(given) and hasattr(given, "__name__"):
        return f"the function {given.__name__}"
    return f"an object of type {type(given).__name__}"


def _remedy(given: Any) -> str:
    compiles = 'or compile it with torch.compile(..., backend="fusedmlp")'
    if isinstance(given, nn.Module):
        return f"pass torch.export.export(module, args), {compiles}"
    if callable(given) and not isinstance(given, type):
        return f"pass torch.fx.symbolic_trace(function) and example_inputs, {compiles}"
    if isinstance(given, (Options, Mapping)):
        return "options are its third argument, or that of torch.compile(model, options=...)"
    return "pass torch.export.export(module, args)"
