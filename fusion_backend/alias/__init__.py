"""``import fusedmlp``: everything public of :mod:`fusion_backend`, under the name of the package.

``TORCH_LOGS="fusedmlp"`` needs a module of this name, too: torch looks for it while torch itself is
imported. So nothing is imported here before it is used.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    import fusion_backend

    try:
        return getattr(fusion_backend, name)
    except AttributeError:
        raise AttributeError(f"module 'fusedmlp' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    import fusion_backend

    return dir(fusion_backend)
