"""The families of kernels: the one place that lists them.

A new family is a folder here, with a class in its ``family.py``, and its place in this list.
"""

from __future__ import annotations

from fusion_backend.errors import PlanError
from fusion_backend.kernels.back_to_back.family import BackToBack
from fusion_backend.kernels.chain.family import Chain
from fusion_backend.kernels.cpu_rows.family import Rows
from fusion_backend.kernels.epilogue.family import Epilogue
from fusion_backend.kernels.family import Family
from fusion_backend.kernels.library import Library
from fusion_backend.kernels.onednn import OneDnn
from fusion_backend.kernels.reference_family import Reference
from fusion_backend.kernels.stream.family import Stream

# Of these, rules of planning speak by name.
BACK_TO_BACK, STREAM, EPILOGUE, LIBRARY = BackToBack(), Stream(), Epilogue(), Library()
ROWS, ONEDNN, CHAIN, REFERENCE = Rows(), OneDnn(), Chain(), Reference()

#: In the order in which they are offered, most fused first.
FAMILIES: tuple[Family, ...] = (
    BACK_TO_BACK,
    STREAM,
    EPILOGUE,
    LIBRARY,
    CHAIN,
    ROWS,
    ONEDNN,
    REFERENCE,
)


def of_mlps() -> tuple[Family, ...]:
    """Those that run whole MLPs."""
    return tuple(family for family in FAMILIES if family.mlps)


def of_first_layers() -> tuple[Family, ...]:
    """Those that run the first layers of an MLP and its activation."""
    return tuple(family for family in FAMILIES if family.first_layers)


def of_chains() -> tuple[Family, ...]:
    """Those that run three and more layers."""
    return tuple(family for family in FAMILIES if family.chains)


def of_towers() -> tuple[Family, ...]:
    """Those that run several chains of one input at once."""
    return tuple(family for family in FAMILIES if family.towers)


def named(name: str, among: tuple[Family, ...] | None = None, of: str = "plan") -> Family:
    """The family of a name.

    Args:
        name: as in a graph, a report or a table.
        among: which; ``None`` for all.
        of: what the name is, for the error.

    Raises:
        PlanError: there is none.
    """
    known = FAMILIES if among is None else among
    for family in known:
        if family.name == name:
            return family
    names = ", ".join(family.name for family in known)
    raise PlanError(f"{of} must be one of {names}, got {name!r}")
