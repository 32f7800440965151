"""What raises while a site is looked at or rewritten: it costs that site and no other."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from fusion_backend import reasons
from fusion_backend.errors import FusionError
from fusion_backend.reasons import Refusal

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class Failures:
    """The exceptions that sites raised in one run of the rewrite.

    Args:
        strict: raise a :class:`FusionError` at the first, instead of leaving its site alone.
    """

    def __init__(self, strict: bool = False) -> None:
        self._strict = strict
        self._errors: list[Exception] = []

    def attempt(
        self,
        function: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result | Refusal:
        """What ``function`` returns or, if it raises, the reason to leave the site alone.

        Raises:
            FusionError: it raised, and this is strict.
        """
        try:
            return function(*args, **kwargs)
        except Exception as error:
            return self.refusal(error)

    def refusal(self, error: Exception) -> Refusal:
        """Note an exception; the reason for which its site is left alone.

        Raises:
            FusionError: this is strict.
        """
        if self._strict:
            raise FusionError(f"fusedmlp could not rewrite a site: {_text(error)}") from error
        self._errors.append(error)
        return Refusal(reasons.INTERNAL_ERROR, _text(error))

    def warn(self) -> None:
        """Say what was raised, in one warning."""
        if not self._errors:
            return
        first, *others = dict.fromkeys(map(_text, self._errors))
        more = f" (and {len(others)} more)" if others else ""
        warnings.warn(
            f"fusedmlp left a site as it was: {first}{more}. Please report it.", stacklevel=2
        )


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
