"""Forms that other packages declare, in the group ``fusedmlp.forms`` of their entry points.

In ``pyproject.toml``: ``[project.entry-points."fusedmlp.forms"]``, and below it a line such as
``my_form = "my_package.my_module:MY_FORM"``.
"""

from __future__ import annotations

import functools
import warnings
from importlib.metadata import EntryPoint, entry_points

from fusion_backend.patterns import ACTIVATED, CHAIN, FORMS
from fusion_backend.patterns.form import Form

GROUP = "fusedmlp.forms"


@functools.cache
def installed_forms() -> tuple[Form, ...]:
    """The forms that installed packages declare, by name; asked for once in a process.

    One that cannot be imported, is no :class:`Form` or has the name of another is left out, with a
    warning: a package that is merely installed must not break others.
    """
    known = {form.name: form for form in (*FORMS, ACTIVATED, CHAIN)}
    own = len(known)
    for entry_point in sorted(
        entry_points(group=GROUP), key=lambda point: (point.name, point.value)
    ):
        form = _loaded(entry_point)
        if form is None:
            continue
        if form.name in known:
            _warn(entry_point, f"there is another form {form.name!r}")
        else:
            known[form.name] = form
    return tuple(known.values())[own:]


def _loaded(entry_point: EntryPoint) -> Form | None:
    try:
        found = entry_point.load()
    except Exception as error:
        _warn(entry_point, f"{type(error).__name__}: {error}")
        return None
    if not isinstance(found, Form):
        _warn(entry_point, f"it must be a Form, got {type(found).__name__}")
        return None
    return found


def _warn(entry_point: EntryPoint, why: str) -> None:
    warnings.warn(
        f"fusedmlp leaves out the form {entry_point.value} of an installed package: {why}",
        stacklevel=2,
    )
