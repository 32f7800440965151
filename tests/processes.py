"""Processes that start with empty caches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def with_empty_caches(folder: Path) -> dict[str, str]:
    """The environment of a process whose compile caches are in a folder.

    It compiles little. Inductor then loses more than it gains by trying instruction sets out, which
    are taken as the processor names them, and by compiling its headers once for all.
    """
    return {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    }


# A child has imported what a process of its own would, and compiled nothing.
_CHILDREN = """
import json, os, sys
import torch, torch._dynamo, torch._inductor.compile_fx

for program in json.load(sys.stdin):
    if not os.fork():
        exec(program, {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    if os.wait()[1]:
        sys.exit("a child failed")
"""


def printed_by_children(programs: Sequence[str], folder: Path) -> list[str]:
    """The line that each program prints, one after the other.

    Each runs in a process of its own, the child of one that has imported PyTorch. Their compile
    caches are in the folder.
    """
    done = subprocess.run(
        [sys.executable, "-c", _CHILDREN],
        input=json.dumps(programs),
        env=with_empty_caches(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
