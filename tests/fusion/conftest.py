"""Here graphs are tested: what they compute, not what their kernels do."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _rows_by_reference(rows_by_reference: None) -> None:
    pass
