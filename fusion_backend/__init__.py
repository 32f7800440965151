"""fusedmlp: a torch.compile backend that fuses every Linear → activation → Linear of a model.

``torch.compile(model, backend="fusedmlp")`` needs no import of this package. What it offers beside
the backend (:func:`fuse`, :func:`explain`, :func:`profile`, :func:`watch`, :func:`history`,
:class:`Options`) is imported on first use, so that ``import fusion_backend`` stays cheap and never
imports Triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusion_backend.backend import fusedmlp
    from fusion_backend.errors import FusedMLPError
    from fusion_backend.fusion.fuse import FuseResult, fuse
    from fusion_backend.fusion.journal import CompiledGraph, history
    from fusion_backend.fusion.sites import Site, SiteShape
    from fusion_backend.instruments.backend_rows import KernelCounts
    from fusion_backend.instruments.comparison import Comparison
    from fusion_backend.instruments.explanation import Explanation, explain
    from fusion_backend.instruments.profiler import profile
    from fusion_backend.instruments.watching import Watch, watch
    from fusion_backend.options import Options

__version__ = "0.1.0"

__all__ = [
    "Comparison",
    "CompiledGraph",
    "Explanation",
    "FuseResult",
    "FusedMLPError",
    "KernelCounts",
    "Options",
    "Site",
    "SiteShape",
    "Watch",
    "explain",
    "fuse",
    "fusedmlp",
    "history",
    "profile",
    "watch",
]

_HOME = {
    "Comparison": "instruments.comparison",
    "CompiledGraph": "fusion.journal",
    "Explanation": "instruments.explanation",
    "FuseResult": "fusion.fuse",
    "FusedMLPError": "errors",
    "KernelCounts": "instruments.backend_rows",
    "Options": "options",
    "Site": "fusion.sites",
    "SiteShape": "fusion.sites",
    "Watch": "instruments.watching",
    "explain": "instruments.explanation",
    "fuse": "fusion.fuse",
    "fusedmlp": "backend",
    "history": "fusion.journal",
    "profile": "instruments.profiler",
    "watch": "instruments.watching",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fusion_backend' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fusion_backend.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
