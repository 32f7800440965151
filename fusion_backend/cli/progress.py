"""What a long command says on stderr while it works."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


@contextmanager
def step(text: str) -> Iterator[None]:
    """Print `text` on stderr, and beside it how long the block took once it is done.

    What the block prints, as a model may, goes there too: stdout is for results.
    """
    start = time.perf_counter()
    print(f"{text} …", end="", file=sys.stderr, flush=True)
    try:
        with redirect_stdout(sys.stderr):
            yield
    except BaseException as error:
        what = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        print(f" {what}", file=sys.stderr, flush=True)
        raise
    print(f" {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
