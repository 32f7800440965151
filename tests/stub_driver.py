"""Programs that launch kernels on a machine without a GPU: a stub takes the place of the driver."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.nvidia.compiler import get_ptxas

from kernel_cases import compiled, with_gluon

KERNELS = Path(__file__).parent / "kernels"
COMPILER = shutil.which("cc") or shutil.which("gcc")

needs_stub = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver to launch with"),
    pytest.mark.skipif(COMPILER is None, reason="needs a C compiler"),
    compiled,
    with_gluon,
]


# Nothing runs the machine code here: other tests assemble these kernels, which takes seconds each.
_ASSEMBLER = """#!/bin/sh
for last; do [ "$last" = --version ] && exec {ptxas} --version; done
while [ "$1" != -o ]; do shift; done
echo "no machine code" > "$2"
"""


def printed(program: str, folder: Path) -> Any:
    """What a program in ``kernels/`` prints as JSON; the stubs are made in the folder."""
    assembler = folder / "ptxas"
    assembler.write_text(_ASSEMBLER.format(ptxas=get_ptxas(90).path))
    assembler.chmod(0o755)
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    library = folder / "libcuda.so.1"
    build = [COMPILER, "-shared", "-fPIC", f"-I{include}", KERNELS / "driver_stub.c", "-o", library]
    subprocess.run(build, check=True)
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")]))
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": paths,
        "TRITON_LIBCUDA_PATH": str(folder),
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "TRITON_PTXAS_PATH": str(assembler),
        "DISABLE_LLVM_OPT": "1",
    }
    command = [sys.executable, KERNELS / program, folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)
