"""What every test starts from, and which tests a process can run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

# As many threads as there are processors are too many where two processes share them. Without a
# GPU, Inductor gives the processes that it starts for kernels nothing to do.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from fusion_backend.compat.triton_features import triton_is_interpreted

HAS_GPU = torch.cuda.is_available()
GPU_TESTS = Path(__file__).parent / "gpu"
collect_ignore = [] if HAS_GPU else [str(GPU_TESTS)]
if not HAS_GPU:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Triton reads TRITON_INTERPRET when it is imported, so one process either interprets or compiles.
# A GPU runs what is compiled.
_OF_OTHER_PROCESSES = {"compiled"} if triton_is_interpreted() else {"interpreted"}
if triton_is_interpreted() or not HAS_GPU:
    _OF_OTHER_PROCESSES.add("gpu")


def pytest_report_header() -> list[str]:
    """What is left out on this machine."""
    return [] if HAS_GPU else ["no GPU: tests/gpu and tests marked gpu are left out"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what another process runs: skips would be reported for each of hundreds."""
    others = [item for item in items if _marks(item) & _OF_OTHER_PROCESSES]
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


@pytest.fixture(autouse=True)
def fresh_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same random numbers whatever ran before, and nothing compiled by another test.

    What is fused does not depend on how fast the machine is.
    """
    monkeypatch.setenv("FUSEDMLP_CALIBRATE", "0")
    monkeypatch.setenv("FUSEDMLP_MEASURE", "0")
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.fixture
def rows_by_reference(request: pytest.FixtureRequest) -> Iterator[None]:
    """The CPU's kernels are planned and called, but PyTorch computes what they would.

    Each activation would be compiled in C++, where graphs are tested. With ``--cpp`` it is.
    """
    from capture import with_rows_by_reference

    with nullcontext() if request.config.getoption("cpp") else with_rows_by_reference():
        yield


@pytest.fixture
def no_cpp_compiler() -> Iterator[None]:
    """Sites and chains on a CPU are planned as on a machine without a C++ compiler."""
    from capture import without_cpp_compiler

    with without_cpp_compiler():
        yield
