"""Triton's interpreter, without what it does again and again, and without what nobody reads.

It gives the functions of ``triton.language`` another meaning while a kernel runs. It does so anew
whenever that kernel calls another function, which took a third of the time of interpreted tests.
Another third went into whether sums and products of integers overflow: it computes them once more
in 64 bits, and then asserts nothing, as it asserts only under an option that it never sets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any
from unittest import mock


@contextmanager
def losing_no_time() -> Iterator[None]:
    """All that follows: what kernels compute, and what they assert, stays the same."""
    with language_patched_once_a_launch(), no_overflow_computed_in_vain():
        yield


@contextmanager
def no_overflow_computed_in_vain() -> Iterator[None]:
    """Overflows are not looked for, as in what Triton compiles."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "the interpreter asserts that nothing overflows"
    options = replace(builder.options, sanitize_overflow=False)
    with mock.patch.object(builder, "options", options):
        yield


@contextmanager
def language_patched_once_a_launch() -> Iterator[None]:
    """A launch patches each module of the language that its functions see once, not at each call.

    As in Triton 3.6 to 3.8: a launch restores what it patched, and calls within restore nothing.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[ModuleType] = set()

    @functools.cache
    def languages(function: FunctionType) -> frozenset[ModuleType]:
        return frozenset(each for each in (tl, tl.core) if each in _modules(function))

    def patch_others(function: FunctionType) -> Any:
        if languages(function) <= patched:
            return None
        patched.update(languages(function))
        return patch(function)

    def launch_unpatched(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            patched.clear()

    with (
        mock.patch.object(interpreter, "_patch_lang", patch_others),
        mock.patch.object(interpreter.GridExecutor, "__call__", launch_unpatched),
    ):
        yield


def _modules(function: Callable[..., Any]) -> list[ModuleType]:
    """The modules that a function sees by name."""
    return [each for each in function.__globals__.values() if isinstance(each, ModuleType)]
