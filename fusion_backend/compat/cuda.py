"""The CUDA runtime, as Inductor's code asks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def current_raw_stream() -> Callable[[int], int]:
    """The function that gives the current stream of a GPU as an address, in a tenth of the time.

    A build of torch without CUDA does not have it, so it is asked for when it is needed.
    """
    private: Any = torch._C
    function: Callable[[int], int] = private._cuda_getCurrentRawStream
    return function


def pause(cycles: int) -> None:
    """Let the current stream of the current GPU wait for so many of its clock's cycles."""
    private: Any = torch.cuda
    private._sleep(cycles)
