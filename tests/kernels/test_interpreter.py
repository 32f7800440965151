"""Runs the tests marked ``interpreted`` on Triton's interpreter, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from kernel_cases import compiled

TESTS = Path(__file__).parents[1]
PLACES = (TESTS / "kernels", TESTS / "operators", TESTS / "test_fingerprint.py")


@compiled
@pytest.mark.parametrize("chosen", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_numbers_are_right_on_tritons_interpreter(chosen: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, "-m", f"interpreted and {chosen}", *map(str, PLACES)],
        cwd=TESTS.parent,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout
    assert re.search(r"\d+ passed", run.stdout), run.stdout
