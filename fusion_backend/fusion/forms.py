"""Which forms there are, and which sites the user wants to be left alone."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

from fusion_backend import reasons
from fusion_backend.fusion.match import Match
from fusion_backend.fusion.views.names import module_stack
from fusion_backend.options import Options
from fusion_backend.patterns import FORMS
from fusion_backend.patterns.form import Form
from fusion_backend.patterns.installed import installed_forms
from fusion_backend.reasons import Refusal

#: For these reasons sites are left alone whatever could be fused of them.
UNWANTED = (reasons.EXCLUDED, reasons.FORM_OFF)


class Forms(NamedTuple):
    """The forms that are matched.

    Attributes:
        tried: in the order in which they are tried; those that are switched off come last, so that
            a site that has such a form and no other can be told.
        off: the names of those of which nothing is fused.
    """

    tried: tuple[Form, ...]
    off: frozenset[str]


def forms_of(options: Options) -> Forms:
    """The forms of the package, of other packages and of the options."""
    known = (*FORMS, *installed_forms(), *options.forms)
    off = frozenset(options.disable_forms)
    return Forms(tuple(sorted(known, key=lambda form: form.name in off)), off)


def left_out(match: Match, forms: Forms, options: Options) -> Refusal | None:
    """Why the user wants a site to be left alone, or ``None``."""
    for layer in dict.fromkeys((*match.layers, match.down)):
        stack = module_stack(layer.node)
        inside = [".".join(stack[:depth]) for depth in range(len(stack) + 1)]
        for pattern in options.exclude:
            if any(fnmatchcase(path, pattern) for path in inside):
                return Refusal(reasons.EXCLUDED, repr(pattern))
    if match.form is not None and match.form.name in forms.off:
        return Refusal(reasons.FORM_OFF, repr(match.form.name))
    return None
