"""How MLPs look in graphs: one declaration a file, listed in the order in which they are tried.

``ACTIVATED`` is the part of an MLP of one of them that is fused where the whole cannot be.
"""

from __future__ import annotations

from fusion_backend.forms import Form
from fusion_backend.patterns.activated import ACTIVATED
from fusion_backend.patterns.gated import GATED
from fusion_backend.patterns.packed import PACKED
from fusion_backend.patterns.plain import PLAIN
from fusion_backend.patterns.sliced import SLICED

FORMS: tuple[Form, ...] = (PLAIN, GATED, PACKED, SLICED)

__all__ = ["ACTIVATED", "FORMS", "GATED", "PACKED", "PLAIN", "SLICED"]
