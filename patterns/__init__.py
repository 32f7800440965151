"""How MLPs look in graphs: one declaration a file, listed in the order in which they are tried.

A chain is made of sites of other forms, so the matcher does not try it.
"""

from __future__ import annotations

from fusion_backend.forms import Form
from fusion_backend.patterns.chain import CHAIN
from fusion_backend.patterns.gated import GATED
from fusion_backend.patterns.packed import PACKED
from fusion_backend.patterns.plain import PLAIN
from fusion_backend.patterns.sliced import SLICED

FORMS: tuple[Form, ...] = (PLAIN, GATED, PACKED, SLICED)

__all__ = ["CHAIN", "FORMS", "GATED", "PACKED", "PLAIN", "SLICED"]
