"""Processes of their own, for what is to happen in a new one.

Importing PyTorch and its compiler takes as long as many tests. So one process imports both, and the
others are its children: they have imported nothing of ours, and compiled nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Answers each line, a request, with the exit code of the child that fulfilled it.
_PARENT = """
import gc, json, os, signal, sys, traceback
import torch, torch._dynamo, torch._inductor.compile_fx, setuptools
from torch._inductor import codecache
from torch._inductor.runtime import triton_compat

# What each child would do first to use a compile cache: hash the sources of PyTorch and Triton.
codecache.torch_key()
if triton_compat.HAS_TRITON:
    triton_compat.triton_key()
gc.collect()
gc.freeze()  # else each child would look through all of PyTorch's objects, and copy their pages

def fulfil(program, arguments, environment, folder, streams):
    signal.alarm(300)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv[1:] = arguments
    for number, path in enumerate(streams):
        os.dup2(os.open(path, os.O_RDWR), number)
    try:
        exec(program, {"__name__": "__main__"})
        return 0
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()

for line in sys.stdin:
    child = os.fork()
    if not child:
        os._exit(fulfil(*json.loads(line)))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Children:
    """Starts children of a process that has imported PyTorch, one at a time."""

    def __init__(self) -> None:
        self._parent: subprocess.Popen[str] | None = None

    def run(
        self,
        program: str,
        arguments: Sequence[str] = (),
        *,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        given: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """What a program did.

        Args:
            program: Python source.
            arguments: those of the command line.
            folder: where it runs; by default in this process's.
            environment: what is set beside this process's variables.
            given: its standard input.
        """
        if self._parent is None:
            self._parent = subprocess.Popen(
                [sys.executable, "-c", _PARENT],
                env={
                    **os.environ,
                    "TORCHINDUCTOR_COMPILE_THREADS": "1",
                    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # nothing of ours is imported
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        with tempfile.TemporaryDirectory() as streams:
            paths = [Path(streams, name) for name in ("stdin", "stdout", "stderr")]
            for path in paths:
                path.write_text(given if path is paths[0] else "")
            variables = {**os.environ, **(environment or {})}
            where, files = str(folder or Path.cwd()), [*map(str, paths)]
            request = json.dumps((program, [*arguments], variables, where, files))
            print(request, file=self._parent.stdin, flush=True)
            code = int(self._parent.stdout.readline())
            return subprocess.CompletedProcess(program, code, *(p.read_text() for p in paths[1:]))

    def printed(self, program: str, **how: Any) -> str:
        """What a program prints that succeeds; ``how`` as for :meth:`run`."""
        done = self.run(program, **how)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def close(self) -> None:
        """End the process; there are no children any more."""
        if self._parent is not None:
            self._parent.communicate()


def own_graphs() -> str:
    """How programs begin that take no graph from a compile cache but from one another.

    C++ is known by its source, whoever compiled it: these processes need not compile it again.
    """
    tag = uuid.uuid4().hex
    return f"import torch.compiler.config as config; config.cache_key_tag = {tag!r}\n"


def caches_in(folder: Path) -> dict[str, str]:
    """The variables of a process whose compile caches are in a folder."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FUSEDMLP_CACHE_DIR")
    return dict.fromkeys(names, str(folder))
