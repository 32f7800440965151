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


def name_of(target: Any) -> str:
    """The name of what a node calls, of ``from_local``, ``to_local`` and ``redistribute`` theirs.

    Until 2.13 a function made for the call stands in the graph, named ``prim_to_local`` or, of
    ``from_local`` in 2.11, with a space.
    """
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return str(name).removeprefix("prim").lstrip("_ ") if _is_made(target) else str(name)


def options_of(target: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a call in a graph of Dynamo is given by name, beside tensors.

    Until 2.13, placements and options stood in the closure of a function made for the call. What
    it is given there by position, after a mesh and placements, has its position as its name.
    """
    options = dict(arguments)
    if _is_made(target):
        for value in inspect.getclosurevars(target).nonlocals.values():
            options |= value if isinstance(value, dict) else {}
            if isinstance(value, list):
                options |= {str(place): each for place, each in enumerate(value) if place > 1}
    return options


def _is_made(target: Any) -> bool:
    return getattr(target, "__name__", "").startswith(("prim_", "prim "))


def opening(gradient: Sequence[Any] | None) -> tuple[Callable[..., Any] | str, dict[str, Any]]:
    """A call of ``to_local`` as a graph has it: a target and arguments by name.

    Args:
        gradient: placements of the gradient, where they are not those of the tensor.
    """
    if gradient is None:
        return "to_local", {}
    options = {"grad_placements": tuple(gradient)}
    if _graphs_print_placements():
        return "to_local", options

    def prim_to_local(tensor: Any) -> Any:
        return tensor.to_local(**options)

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
