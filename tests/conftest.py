"""What every test starts from."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_start() -> None:
    """The same random numbers whatever ran before, and nothing compiled by another test."""
    torch.manual_seed(0)
    torch._dynamo.reset()
