"""What every test starts from, and which tests a process can run."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from processes import Children

GPU_TESTS = Path(__file__).parent / "gpu"
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ

# As many threads as there are processors are too many where two processes share them.
if IS_WORKER:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Each process would try out the instruction sets that the processor names.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Nobody looks up lines of what Inductor compiles, and g++ takes less time without them.
os.environ.setdefault("AOT_INDUCTOR_ENABLE_LINE_TABLES", "0")
# Dynamo would collect garbage after each graph. Below it is collected every few tests.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")


@functools.cache
def has_gpu() -> bool:
    """Whether there is a GPU. The process that hands tests out need not import PyTorch for it."""
    import torch

    return torch.cuda.is_available()


def pytest_configure(config: pytest.Config) -> None:
    """Choose the linker, and, without a GPU, how many processes Inductor starts for kernels.

    It would give them nothing to do there.
    """
    if not IS_WORKER:
        _link_quickly(config)
    hands_out = getattr(config.option, "numprocesses", 0) and not IS_WORKER
    if not hands_out and not has_gpu():
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def _link_quickly(config: pytest.Config) -> None:
    """Let g++ link with gold, where it is installed.

    GNU's ld reads all symbols of libtorch for each of the hundreds of programs of Inductor's: a
    third of what compiling one takes. g++ looks for its ``ld`` in COMPILER_PATH first. Inductor's
    command lines, and so the keys of its cache, stay the same.
    """
    gold = shutil.which("ld.gold")
    if gold is None or "COMPILER_PATH" in os.environ:
        return
    folder = tempfile.TemporaryDirectory()
    Path(folder.name, "ld").symlink_to(gold)
    os.environ["COMPILER_PATH"] = folder.name

    def clean_up() -> None:
        del os.environ["COMPILER_PATH"]
        folder.cleanup()

    config.add_cleanup(clean_up)


@functools.cache
def of_other_processes() -> frozenset[str]:
    """The marks of tests that this process does not run.

    Triton reads TRITON_INTERPRET when it is imported, so one process either interprets or compiles.
    A GPU runs what is compiled.
    """
    from fusion_backend.compat.triton_features import triton_is_interpreted

    interprets = triton_is_interpreted()
    without_gpu = {"gpu"} if interprets or not has_gpu() else set[str]()
    return frozenset({"compiled" if interprets else "interpreted"} | without_gpu)


def pytest_collection_finish() -> None:
    """Collect garbage every few tests only: PyTorch has millions of objects that live on.

    Looking through them took a quarter of the time of all tests.
    """
    gc.collect()
    gc.freeze()
    gc.disable()


TESTS_BETWEEN_COLLECTIONS = 32
_ENDED = itertools.count(1)


def pytest_runtest_teardown() -> None:
    """Collect garbage, now and then; what has survived is not looked through again."""
    if next(_ENDED) % TESTS_BETWEEN_COLLECTIONS == 0:
        gc.collect()
        gc.freeze()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave ``tests/gpu`` out where there is none, as what is there imports what a GPU has."""
    return True if collection_path == GPU_TESTS and not has_gpu() else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what another process runs: skips would be reported for each of hundreds."""
    others = [item for item in items if _marks(item) & of_other_processes()]
    if others:
        config.hook.pytest_deselected(items=others)
        left_out = set(others)
        items[:] = [item for item in items if item not in left_out]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what the long run asks for beside ``-m ""``."""
    parser.addoption(
        "--cpp", action="store_true", help="compile the CPU's kernel of every activation in C++"
    )


def _marks(item: pytest.Item) -> set[str]:
    # Those in tests/gpu are collected without a GPU, too, where that folder is asked for by name.
    marks = {mark.name for mark in item.iter_markers()}
    return marks | {"gpu"} if GPU_TESTS in item.path.parents else marks


UNHEARD = logging.Logger("torch's structured trace")  # has no handlers, and no logger is above it


@pytest.fixture(autouse=True)
def fresh_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same random numbers whatever ran before, and nothing compiled by another test.

    What is fused does not depend on how fast the machine is. Dynamo neither times the guards of a
    graph, for which it empties the processor's caches, nor writes graphs and code to its structured
    trace, whose logger pytest would capture: a quarter of the time of tests of graphs. Nor does it
    write all settings as JSON for each graph. Nor does it forget, as it does when it is reset since
    torch 2.14, which metadata an operator gives for which metadata: a third of the time of those
    tests.
    """
    import torch
    from torch._dynamo import utils as dynamo_utils
    from torch._logging import _internal as torch_logging
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setenv("FUSEDMLP_CALIBRATE", "0")
    monkeypatch.setenv("FUSEDMLP_MEASURE", "0")
    monkeypatch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *_: 0.0)
    for of in ("_scrubbed_inductor_config", "_get_dynamo_config"):
        monkeypatch.setattr(dynamo_utils, f"{of}_for_logging", lambda: None)
    monkeypatch.setattr(torch_logging, "trace_log", UNHEARD)
    monkeypatch.setattr(FakeTensorMode, "cache_clear", lambda: None)
    if has_gpu():
        torch.manual_seed(0)
    else:  # that function formats the stack for each kind of device that there is not
        torch.default_generator.manual_seed(0)
    torch._dynamo.reset()


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> Iterator[None]:
    """In the process that interprets kernels, the interpreter loses no time."""
    from fusion_backend.compat.triton_features import triton_is_interpreted

    if not triton_is_interpreted():
        yield
        return
    from interpreting import losing_no_time

    with losing_no_time():
        yield


@pytest.fixture(scope="session")
def children() -> Iterator[Children]:
    """Starts processes that have imported PyTorch and nothing of ours."""
    started = Children()
    yield started
    started.close()


@pytest.fixture
def rows_by_reference(request: pytest.FixtureRequest) -> Iterator[None]:
    """The CPU's kernels are planned and called, but PyTorch computes what they would.

    Each activation would be compiled in C++, where graphs are tested. With ``--cpp`` it is.
    """
    from capture import with_rows_by_reference

    with nullcontext() if request.config.getoption("cpp") else with_rows_by_reference():
        yield


@pytest.fixture
def no_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What our backend makes of a graph runs as it is, where only that is looked at."""
    from fusion_backend.compat import inductor

    monkeypatch.setattr(inductor, "compiled_within", lambda compiler, graph, *_: graph)


@pytest.fixture(scope="session")
def cpp_compiler() -> None:
    """Leaves a test out where C++ cannot be compiled; that is tried when a test first needs it."""
    import torch

    from fusion_backend.kernels.cpu_rows import support

    if support.why_not_compiled(torch.float32, ("gelu_tanh(x)",), False, ()) is not None:
        pytest.skip("there is no C++ compiler")


@pytest.fixture
def no_cpp_compiler() -> Iterator[None]:
    """Sites and chains on a CPU are planned as on a machine without a C++ compiler."""
    from capture import without_cpp_compiler

    with without_cpp_compiler():
        yield
