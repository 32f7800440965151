"""What a process that is to crash does: a module, so that processes that are spawned find it."""

from __future__ import annotations

import os

from fuzzing import AGREED, EAGER_CRASHED, Attempt, Stage


def crash_at_seed_two(seeds, compiler, sender):
    for seed in seeds:
        sender.send(Stage(seed, EAGER_CRASHED))
        if seed == 2:
            os.abort()
        sender.send(Attempt(seed, AGREED))
