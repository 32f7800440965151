"""What PyTorch has for telling what was compiled: logs, counters, traces, timed events, folders."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

#: ``TORCH_LOGS="fusedmlp"`` shows what it says at level INFO, ``"+fusedmlp"`` also at DEBUG.
LOGGER = logging.getLogger("fusedmlp")


def counters() -> Counter[str]:
    """Those of ``torch._dynamo.utils.counters`` that are ours."""
    from torch._dynamo.utils import counters

    return counters["fusedmlp"]


def timed(event: str) -> AbstractContextManager[Any]:
    """Time something as an event of the compilation, which ``tlparse`` shows."""
    from torch._dynamo.utils import dynamo_timed

    return dynamo_timed(event, log_pt2_compile_event=True)


def is_traced() -> bool:
    """Whether a structured trace is written."""
    from torch._logging._internal import trace_log

    return bool(trace_log.handlers)


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text to the structured trace, if one is written (``TORCH_TRACE``)."""
    from torch._logging._internal import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
        expect_trace_id=False,
    )


def compilation() -> str:
    """Which compilation of Dynamo's this is, such as ``0/0``; empty outside of one."""
    current = torch._guards.CompileContext.current_compile_id()
    return "" if current is None else str(current)


def debug_folder() -> Path | None:
    """Where ``TORCH_COMPILE_DEBUG=1`` lets the parts of this process's compilation be written."""
    from torch._dynamo.utils import get_debug_dir
    from torch._inductor import config

    return Path(get_debug_dir()) if config.trace.enabled else None


def code_cache() -> str:
    """The folder in which Inductor keeps the code that it generates."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder: str = cache_dir()
    return folder
