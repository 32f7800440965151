"""fusedmlp: a torch.compile backend that fuses every Linear → activation → Linear of a model.

``torch.compile(model, backend="fusedmlp")`` needs no import of this package. What it offers beside
the backend (:func:`fuse`, :func:`explain`, :func:`profile`, :class:`Options`) is imported on first
use, so that ``import fusion_backend`` stays cheap and never imports Triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusion_backend.backend import fusedmlp
    from fusion_backend.errors import FusedMLPError
    from fusion_backend.explanation import Explanation, explain
    from fusion_backend.fusion import FuseResult, fuse
    from fusion_backend.options import Options
    from fusion_backend.profiler import Comparison, KernelCounts, profile
    from fusion_backend.sites import Site, SiteShape

__version__ = "0.1.0"

__all__ = [
    "Comparison",
    "Explanation",
    "FuseResult",
    "FusedMLPError",
    "KernelCounts",
    "Options",
    "Site",
    "SiteShape",
    "explain",
    "fuse",
    "fusedmlp",
    "profile",
]

_HOME = {
    "Comparison": "profiler",
    "Explanation": "explanation",
    "FuseResult": "fusion",
    "FusedMLPError": "errors",
    "KernelCounts": "profiler",
    "Options": "options",
    "Site": "sites",
    "SiteShape": "sites",
    "explain": "explanation",
    "fuse": "fusion",
    "fusedmlp": "backend",
    "profile": "profiler",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fusion_backend' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fusion_backend.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
