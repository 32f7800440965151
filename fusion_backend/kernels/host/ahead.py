"""Kernels that are compiled in threads while Inductor compiles the rest of a graph.

What generated code calls would else be compiled by the first call, when nothing else is left to do.
Triton computes without Python's lock for nine tenths of that time.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

# More would keep Inductor's own compiling from the processors.
_AT_ONCE = threading.BoundedSemaphore(4)


class Ahead:
    """A function of hashable arguments that compiles a kernel (``triton.CompiledKernel``).

    A call waits for the kernel if it was started, and compiles it here and now if it was not.

    Attributes:
        compiling: the function itself.
        started: what is compiled for arguments of which no call took the kernel yet.
    """

    def __init__(self, compiling: Callable[..., Any]) -> None:
        functools.update_wrapper(self, compiling)
        self.compiling = compiling
        self.started: dict[tuple[Any, ...], Future[Any]] = {}

    def start(self, *arguments: Any) -> None:
        """Compile in a thread; an error is raised by the call with these arguments."""
        if arguments in self.started:
            return
        future: Future[Any] = Future()
        self.started[arguments] = future
        # A thread of its own, because those of a pool are missing in a process that was forked.
        threading.Thread(target=self._compile, args=(future, arguments)).start()

    def __call__(self, *arguments: Any) -> Any:
        future = self.started.pop(arguments, None)
        return self.compiling(*arguments) if future is None else future.result()

    def _compile(self, future: Future[Any], arguments: tuple[Any, ...]) -> None:
        try:
            with _AT_ONCE:
                kernel = self.compiling(*arguments)
                _compile_launcher(kernel)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(kernel)


def _compile_launcher(kernel: Any) -> None:
    """Leave the function that launches a kernel, which Triton 3.6 writes in C, in Triton's cache.

    The kernel is not loaded: that would disturb a CUDA graph that another thread captures.
    """
    from triton.runtime.driver import driver

    driver.active.launcher_cls(kernel.src, kernel.metadata)
