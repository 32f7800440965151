"""What a model was compiled with, as far as the result of ``torch.compile`` tells."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch.fx import Graph, Node


class CompileSettings(NamedTuple):
    """How ``torch.compile`` was asked to compile something."""

    options: Mapping[str, Any]
    mode: str | None
    dynamic: bool | None


def kept_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which Dynamo of PyTorch 2.11 calls and does not look into.

    It breaks graphs at ``torch.autograd.grad``, and cannot go on within a function that holds
    objects of its own then. Later releases have no need to.
    """
    import torch

    return torch.compiler.disable(function) if torch.__version__ < "2.12" else function


def graph_breaks() -> Counter[str]:
    """How often Dynamo broke a graph in this process, by the reason."""
    from torch._dynamo.utils import counters

    return Counter(counters["graph_break"])


def copy_of(graph: Graph) -> Graph:
    """A copy of a graph whose inputs say where Dynamo found them, as ahead-of-time autograd asks.

    A copy by itself loses that: it is no part of a node's ``meta``.
    """
    copied = copy.deepcopy(graph)
    for before, after in zip(graph.nodes, copied.nodes, strict=True):
        if hasattr(before, "_dynamo_source"):
            after._dynamo_source = before._dynamo_source
    return copied


def compile_settings(compiled: Callable[..., Any]) -> CompileSettings | None:
    """What ``torch.compile`` was given for what it returned; ``None`` for what is not compiled.

    Options and mode of backends other than fusedmlp and Inductor are theirs alone, and left out. A
    mode of Inductor's is kept as the options that it stands for.
    """
    backend: Any = getattr(_context_of(compiled), "callback", None)
    while backend is not None and not hasattr(backend, "compiler_name"):
        backend = getattr(backend, "_torchdynamo_orig_backend", None)
    if backend is None:
        return None
    if backend.compiler_name == "fusedmlp":
        given = backend.kwargs
        return CompileSettings(given.get("options", {}), given.get("mode"), backend.dynamic)
    options = backend.config if backend.compiler_name == "inductor" else {}
    return CompileSettings(options, None, backend.dynamic)


def _context_of(compiled: Any) -> Any:
    """Dynamo's record of one call of ``torch.compile``: of a module, a function, or a method."""
    found = getattr(compiled, "dynamo_ctx", None)
    in_place = getattr(compiled, "_compiled_call_impl", None)  # of module.compile()
    if found is not None or in_place is not None:
        return found or _context_of(in_place)
    if not hasattr(compiled, "_torchdynamo_orig_callable"):
        return None
    cells = getattr(compiled, "__closure__", None) or ()
    inside = (cell.cell_contents for cell in cells)
    return next((each for each in inside if hasattr(each, "compiler_config")), None)


def source_of(placeholder: Node) -> str | None:
    """The expression by which Dynamo reads an input of a graph, if it made the graph.

    It spells names as the model does; the name of the node has small letters only.
    """
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    name: Any = getattr(source, "name", None)
    found: str | None = name() if callable(name) else name  # a method in 2.11, a property in 2.14
    return found


def numbers_anew() -> bool:
    """Whether Dynamo has begun to number compilations anew since this was asked last.

    ``torch._dynamo.reset`` forgets the numbers of frames, and with them a mark that stands there.
    """
    from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER

    numbers: Any = FRAME_COMPILE_COUNTER
    anew = _MARK not in numbers
    numbers[_MARK] = 0
    return anew


_MARK = "fusedmlp"
