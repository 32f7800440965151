"""What every test starts from."""

from __future__ import annotations

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
