"""Runs a program of ``distributed_training.py`` as several ranks, which are processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from processes import Children

_PROGRAM = """
import os, sys, traceback

folder, name, world, store = sys.argv[1:]
sys.path.insert(0, folder)
ranks = []
for rank in range(int(world)):
    child = os.fork()
    if not child:
        code = 1
        try:
            import distributed_training
            distributed_training.main(name, rank, int(world), store)
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)
    ranks.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
sys.exit(f"the ranks ended with {codes}" if any(codes) else 0)
"""


def check_on_ranks(
    children: Children, name: str, world: int, folder: Path, *, on_gpus: bool = False
) -> None:
    """Run a case on some ranks, which meet in a file of ``folder``; an error on any is raised."""
    arguments = (str(Path(__file__).parent), name, str(world), f"file://{folder / 'store'}")
    if on_gpus:  # what has imported PyTorch's compiler uses a GPU, and its children then cannot
        variables = os.environ | {"OMP_NUM_THREADS": "1", "FUSEDMLP_TEST_ON_GPUS": "1"}
        command = [sys.executable, "-c", _PROGRAM, *arguments]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    else:
        done = children.run(_PROGRAM, arguments, environment={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-8000:]
