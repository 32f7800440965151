"""How MLPs look in graphs: one declaration a file, listed in the order in which they are tried.

The matcher tries three of them not: a chain is made of sites of other forms, so are towers, and
``ACTIVATED`` is the part of a site of another form that is fused where the whole cannot be.
"""

from __future__ import annotations

from fusion_backend.patterns.activated import ACTIVATED
from fusion_backend.patterns.chain import CHAIN
from fusion_backend.patterns.form import Form
from fusion_backend.patterns.gated import GATED
from fusion_backend.patterns.packed import PACKED
from fusion_backend.patterns.plain import PLAIN
from fusion_backend.patterns.sliced import SLICED
from fusion_backend.patterns.towers import TOWERS

FORMS: tuple[Form, ...] = (PLAIN, GATED, PACKED, SLICED)

__all__ = ["ACTIVATED", "CHAIN", "FORMS", "GATED", "PACKED", "PLAIN", "SLICED", "TOWERS"]
