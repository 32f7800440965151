"""What every test starts from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same random numbers whatever ran before, and nothing compiled by another test.

    What is fused does not depend on how fast the machine is.
    """
    monkeypatch.setenv("FUSEDMLP_CALIBRATE", "0")
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.fixture
def no_cpp_compiler() -> Iterator[None]:
    """Sites and chains on a CPU are planned as on a machine without a C++ compiler."""
    from capture import without_cpp_compiler

    with without_cpp_compiler():
        yield
