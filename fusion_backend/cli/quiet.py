"""What the command keeps libraries from printing between its own lines."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


def set_log_levels() -> None:
    """Ask libraries for errors only, by variables that they read when they are loaded."""
    if "torch" not in sys.modules:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler logs its starts and stops
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep what torch and transformers log and warn of: errors still arrive as exceptions."""
    loggers = [logging.getLogger(name) for name in ("torch", "transformers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"(torch|transformers)\b")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
