"""For the site: docstrings are written with Sphinx's roles, and Markdown shows them as code."""

from __future__ import annotations

import re
from typing import Any

import griffe

#: ``:class:`~package.module.Name` ``: the name is shown, and its path where there is no tilde.
ROLE = re.compile(r":(?:py:)?(?:class|func|meth|mod|data|attr):`(~?)([\w.]+)`")


def without_roles(text: str) -> str:
    """A docstring with code in place of roles."""
    return ROLE.sub(lambda role: f"`{role[2].rpartition('.')[2] if role[1] else role[2]}`", text)


class Roles(griffe.Extension):
    """Takes the roles out of every docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called once for each module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = without_roles(obj.docstring.value)
