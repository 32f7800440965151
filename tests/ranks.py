"""Runs a program of ``distributed_training.py`` as several ranks, which are processes."""

from __future__ import annotations

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
    variables = {"OMP_NUM_THREADS": "1"} | ({"FUSEDMLP_TEST_ON_GPUS": "1"} if on_gpus else {})
    done = children.run(_PROGRAM, arguments, environment=variables)
    assert done.returncode == 0, done.stderr[-8000:]
