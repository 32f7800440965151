"""What a process that is to crash does: a module, so that processes that are spawned find it."""

from __future__ import annotations

import os

from fuzzing import EAGER_CRASHED


def crash_at_seed_two(seeds, compiler, results):
    for seed in seeds:
        results.send((seed, EAGER_CRASHED))
        if seed == 2:
            os.abort()
        results.send((seed, "agreed", "", 1))
