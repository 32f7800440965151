"""Processes that start with empty caches."""

from __future__ import annotations

import os
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
