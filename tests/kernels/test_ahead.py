"""Kernels that are compiled in threads, with functions in the place of Triton."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

triton = pytest.importorskip("triton")

from fusion_backend.kernels.host.ahead import Ahead

KERNEL = SimpleNamespace(src="source", metadata="metadata")


@pytest.fixture
def launchers(monkeypatch):
    """What launchers were compiled of."""
    found = []
    active = SimpleNamespace(launcher_cls=lambda *of: found.append(of))
    monkeypatch.setattr(triton.runtime.driver, "_active", active, raising=False)
    return found


def test_what_was_started_is_compiled_once_in_a_thread_and_waited_for(launchers):
    compiled, may_finish = [], threading.Event()

    @Ahead
    def compiling(name: str):
        compiled.append((name, threading.current_thread()))
        assert may_finish.wait(60)
        return KERNEL

    compiling.start("a")
    compiling.start("a")
    threading.Timer(0.1, may_finish.set).start()
    assert compiling("a") is KERNEL
    ((name, thread),) = compiled
    assert name == "a"
    assert thread is not threading.current_thread()
    assert launchers == [("source", "metadata")]


def test_what_was_not_started_is_compiled_by_the_call(launchers):
    compiling = Ahead(lambda name: (name, threading.current_thread()))
    assert compiling("a") == ("a", threading.current_thread())
    assert launchers == []


def test_a_call_raises_what_went_wrong_in_the_thread(launchers):
    @Ahead
    def compiling(name: str):
        raise ValueError(f"{name} cannot be compiled")

    compiling.start("a")
    with pytest.raises(ValueError, match="a cannot be compiled"):
        compiling("a")
