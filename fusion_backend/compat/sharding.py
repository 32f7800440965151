"""Sharded tensors (DTensor), and the calls that make and open them, torch 2.11 to 2.14."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def is_sharded(value: Any) -> bool:
    """Whether a value is a DTensor."""
    module: Any = sys.modules.get("torch.distributed.tensor")  # who has one has imported it
    return module is not None and isinstance(value, module.DTensor)


def options_of(target: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a call in a graph of Dynamo is given by name, beside tensors.

    Until 2.13, placements and options stood in the closure of a function made for the call.
    """
    options = dict(arguments)
    if getattr(target, "__name__", "").startswith("prim_"):
        for value in inspect.getclosurevars(target).nonlocals.values():
            options |= value if isinstance(value, dict) else {}
    return options


def opening(gradient: Sequence[Any] | None) -> tuple[Callable[..., Any] | str, dict[str, Any]]:
    """A call of ``to_local`` as a graph has it: a target and arguments by name.

    Args:
        gradient: placements of the gradient, where they are not those of the tensor.
    """
    if gradient is None:
        return "to_local", {}
    placements = tuple(gradient)
    if _graphs_print_placements():
        return "to_local", {"grad_placements": placements}

    def prim_to_local(tensor: Any) -> Any:
        return tensor.to_local(grad_placements=placements)

    return prim_to_local, {}


def closing(placements: Sequence[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A call of ``from_local`` as a graph has it: a target, and what follows tensor and mesh."""
    from torch.distributed.tensor import DTensor

    placed = tuple(placements)
    if _graphs_print_placements():
        return DTensor.from_local, (placed,)

    def prim_from_local(tensor: Any, mesh: Any) -> Any:
        return DTensor.from_local(tensor, mesh, placed, run_check=False)

    return prim_from_local, ()


def _graphs_print_placements() -> bool:
    return torch.__version__ >= "2.14"
