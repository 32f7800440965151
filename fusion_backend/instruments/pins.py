"""What a test expects of the MLPs of a model, and how what was found differs from that."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from fusion_backend.errors import PinError
from fusion_backend.fusion.sites import Site, labels
from fusion_backend.instruments.report import site_cells, table
from fusion_backend.kernels import registry
from fusion_backend.patterns import ACTIVATED, FORMS
from fusion_backend.patterns.installed import installed_forms
from fusion_backend.reasons import REASONS

#: What a pin may say of a site.
KEYS = ("form", "activation", "plan", "reason", "fused", "training")
_FLAGS = ("fused", "training")
Pin = str | Mapping[str, Any]


@dataclass(frozen=True)
class Difference:
    """A line of the table: a site or a pin, and what is wrong with it; ``""`` where nothing is."""

    site: Site | None
    label: str
    expected: str
    wrong: str


def checked(pins: Mapping[str, Pin], forms: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """The pins, each as a mapping of what it says.

    A text alone is the code of a reason, the name of a family of kernels or of a form, or
    ``"fused"``. Each but a reason says that the site is fused.

    Args:
        pins: by path of a module, or by label; ``*`` stands for any text.
        forms: names of further forms.

    Raises:
        PinError: there is no such reason, family, form or key, or what is no bool must be one.
    """
    return {pattern: _checked(pattern, pin, frozenset(forms)) for pattern, pin in pins.items()}


def _checked(pattern: str, pin: Pin, further: frozenset[str]) -> dict[str, Any]:
    names = {
        "reason": known_reasons(),
        "plan": known_families(),
        "form": known_forms() | further,
    }
    if isinstance(pin, str):
        if pin == "fused":
            return {"fused": True}
        for key, known in names.items():
            if pin in known:
                return {"fused": False, key: pin} if key == "reason" else {"fused": True, key: pin}
        check_known(pin, {"fused"}.union(*names.values()), f"what is pinned of {pattern!r}")
    if not isinstance(pin, Mapping):
        raise PinError(f"what is pinned of {pattern!r} must be a text or a dict, got {pin!r}")
    for key, value in pin.items():
        check_known(key, KEYS, f"a key of what is pinned of {pattern!r}")
        if key in names and value is not None:
            check_known(value, names[key], f"the {key} that is pinned of {pattern!r}")
        if key in _FLAGS and not isinstance(value, bool):
            raise PinError(f"{key} that is pinned of {pattern!r} must be a bool, got {value!r}")
    return dict(pin)


def check_known(name: Any, known: Iterable[str], what: str) -> None:
    """Refuse a name that does not exist, and say which one may have been meant.

    Raises:
        PinError: it is none of the known ones.
    """
    names = sorted(known)
    if name in names:
        return
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
    raise PinError(f"{what} must be one that there is, got {name!r}; {hint}")


def known_reasons() -> set[str]:
    """The codes of all reasons."""
    return {reason.code for reason in REASONS}


def known_families() -> set[str]:
    """The names of all families of kernels."""
    return {family.name for family in registry.FAMILIES}


def known_forms() -> set[str]:
    """The names of all forms."""
    return {form.name for form in (*FORMS, ACTIVATED, *installed_forms())} | {
        "encoder_layer", "unknown",
    }  # fmt: skip


def differences(
    sites: Sequence[Site], pins: Mapping[str, Mapping[str, Any]], others: bool
) -> list[Difference]:
    """Each site beside its pin, then the pins that no site has.

    Args:
        sites: what was found.
        pins: as :func:`checked` returns them; of several that name a site, the first holds.
        others: whether there may be sites that no pin names.
    """
    found, used = [], set()
    for label, site in zip(labels(sites), sites, strict=True):
        pattern = next((each for each in pins if _names(each, label, site)), None)
        if pattern is None:
            found.append(Difference(site, label, "–", "" if others else "no pin names it"))
            continue
        used.add(pattern)
        pin = pins[pattern]
        wrong = [
            f"{key} is {getattr(site, key)!r}"
            for key, value in pin.items()
            if getattr(site, key) != value
        ]
        found.append(Difference(site, label, described(pin), "; ".join(wrong)))
    found += [
        Difference(None, pattern, described(pin), "there is no such MLP")
        for pattern, pin in pins.items()
        if pattern not in used
    ]
    return found


def _names(pattern: str, label: str, site: Site) -> bool:
    return any(fnmatchcase(name, pattern) for name in (label, site.module))


def described(pin: Mapping[str, Any]) -> str:
    """A pin as a person writes it."""
    texts: list[str] = []
    for key, value in pin.items():
        if key == "fused":
            texts.insert(0, "fused" if value else "not fused")
        else:
            texts.append(f"{value}" if key in ("form", "plan", "reason") else f"{key} {value}")
    return ", ".join(texts)


def differences_text(found: Sequence[Difference]) -> str:
    """The table of sites with what was expected, those that differ marked."""
    headers = [
        "", "module", "form", "activation", "rows × widths", "dtype", "plan or reason", "pinned",
        "difference",
    ]  # fmt: skip
    rows = []
    for each in found:
        cells = site_cells(each.site)[:-1] if each.site is not None else [None] * 5
        rows.append(["✗" if each.wrong else " ", each.label, *cells, each.expected, each.wrong])
    return table(headers, rows)
