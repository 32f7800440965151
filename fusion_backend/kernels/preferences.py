"""Which configurations to take: for each kind of problem a list, best first.

Lists know of rows no more than the class. Where their number is known, a model that knows tiles,
turns and what they wait for (``config_times``) may be sure that another configuration is faster.

- Few rows: reading the weights is all the work, so tiles are narrow (many programs, to fill all
  multiprocessors) and deep (many bytes in flight).
- Many rows: a tile of m×n results reads m+n values for m·n products, so tiles are as large as the
  registers allow: 128×256 fp32 accumulators for eight warps, shared by both of a gated pair.
- fp32 without TF32 has no matrix unit, and its operands stand in registers: tiles are small.

The lists of a GPU end with those of older ones, which ask for less shared memory. None spills
registers in bfloat16 or float16; the tests compile them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fusion_backend.kernels.host.candidates import faster
from fusion_backend.kernels.host.config_times import predicted, speaks_of
from fusion_backend.kernels.host.configs import (
    NARROW_SMALL,
    Config,
    Kernel,
    fits,
    padded,
    shared_memory,
)
from fusion_backend.kernels.host.problems import MANY_ROWS, Problem
from fusion_backend.kernels.host.targets import Target

_ByRows = dict[int, Config]

_HOPPER: _ByRows = {
    16: Config(16, 32, 128, num_stages=5),
    64: Config(64, 32, 128, num_stages=4),
    1024: Config(64, 128, 64, parts=2, num_stages=4),
    MANY_ROWS: Config(128, 256, 64, parts=4, num_warps=8),
}
_HOPPER_GATED: _ByRows = {
    16: Config(16, 32, 128, num_stages=4),
    64: Config(64, 32, 64, num_stages=4),
    1024: Config(64, 64, 64, parts=2, num_stages=4),
    MANY_ROWS: Config(128, 128, 64, parts=4, num_warps=8),
}
# Where weights are so wide that large tiles leave no multiprocessor idle, also for few rows.
_WIDE = 8192
_HOPPER_WIDE = Config(128, 128, 64, parts=4, num_warps=8)
_HOPPER_WIDEST = Config(128, 256, 64, parts=4, num_warps=8, num_stages=4)
_GATED_WIDE = 4096
_HOPPER_GATED_WIDE = Config(128, 128, 64, parts=4, num_warps=8, num_stages=4)
# Loaded by tensor descriptors, where operands are laid out for that: two small tiles at a time of
# which one is finished while the other is summed, or for a pair one large tile.
_HOPPER_TMA = Config(128, 128, 64, group_m=4, parts=4, programs=2, tma=True, flatten=True)
_HOPPER_GATED_TMA = Config(128, 128, 64, parts=4, num_warps=8, num_stages=4, programs=1, tma=True)
# Where so little is summed that starting and ending a tile shows, smaller ones overlap better.
_SHORT_SUM = 1024
_AMPERE: _ByRows = {
    16: Config(16, 32, 64, num_stages=5),
    64: Config(64, 32, 64),
    1024: Config(64, 64, 64, parts=2),
    MANY_ROWS: Config(128, 128, 32, parts=2, num_warps=8, num_stages=4),
}
_AMPERE_GATED: _ByRows = {
    16: Config(16, 32, 64, num_stages=4),
    64: Config(64, 32, 64),
    1024: Config(64, 64, 32, parts=2),
    MANY_ROWS: Config(128, 64, 32, parts=2, num_warps=8, num_stages=4),
}
# AMD has registers enough for whole tiles, and 64 KiB of shared memory.
_CDNA: _ByRows = {
    16: Config(16, 32, 64, num_stages=2),
    64: Config(64, 32, 64, num_stages=2),
    1024: Config(64, 64, 64, num_stages=2),
    MANY_ROWS: Config(128, 128, 64, num_warps=8, num_stages=2),
}
_CDNA_GATED: _ByRows = {
    **_CDNA,
    MANY_ROWS: Config(128, 64, 64, num_warps=8, num_stages=2),
}
_NO_MATRIX_UNITS: _ByRows = {
    16: Config(16, 32, 32, num_stages=2),
    64: Config(32, 32, 32, num_stages=2),
    1024: Config(64, 32, 32, num_stages=2),
    MANY_ROWS: Config(64, 64, 32, parts=2, num_warps=8, num_stages=2),
}

# The most features that a program of stream owns, and of a single row on Hopper: tiles of 64 took
# up to 2.4 times as long there (5120/20480/5120: 240 µs, and 101 in shares of 32).
_WIDEST_SHARE = 128
_WIDEST_SHARE_OF_A_ROW = 32

# Bytes of narrow weights that lie in enough lines of the L2 cache for a program on each
# multiprocessor: 1587 rows of 24/48/24 took 1.2 times as long in 100 programs as in 25.
_SPREAD_WEIGHTS = 8192


def chosen(
    kernel: Kernel, problem: Problem, target: Target, config: Config | None = None
) -> Config:
    """The configuration to launch a kernel with: ``config`` if there is one, else the best known.

    That is the :func:`listed` one, or one of which the model is sure that it is faster.

    Raises:
        ValueError: ``config`` cannot run, or nothing can: layers are too wide for back_to_back, or
            the GPU has too little shared memory.
    """
    if config is not None:
        if not fits(kernel, config, problem, target):
            raise ValueError(f"{config} cannot run {kernel} for {problem} on {target}")
        return config
    return faster(kernel, problem, target, listed(kernel, problem, target))


def listed(kernel: Kernel, problem: Problem, target: Target) -> Config:
    """The first configuration of a problem's list that fits.

    Raises:
        ValueError: none does.
    """
    for preferred in preferences(kernel, problem, target):
        if fits(kernel, preferred, problem, target):
            return preferred
    raise ValueError(f"{kernel} has no configuration for {problem} on {target}; use another plan")


def lost_to_class(problem: Problem, target: Target) -> float:
    """Microseconds that ``epilogue`` takes longer where only the class of its rows is known.

    By the model of configurations; 0 where that does not speak of the problem, of known rows.
    """
    kernel: Kernel = "epilogue"
    if not speaks_of(kernel, problem, target):
        return 0.0
    configs = listed(kernel, problem, target), chosen(kernel, problem, target)
    by_class, by_rows = (predicted(kernel, config, problem, target) for config in configs)
    return by_class - by_rows


def has_any(kernel: Kernel, problem: Problem, target: Target) -> bool:
    """Whether there is a configuration with which a kernel can run."""
    return any(
        fits(kernel, config, problem, target) for config in preferences(kernel, problem, target)
    )


def preferences(kernel: Kernel, problem: Problem, target: Target) -> tuple[Config, ...]:
    """Configurations for a problem, best first; not all need fit."""
    if kernel == "back_to_back":
        return _narrow(problem, target)
    if kernel in ("stream_hidden", "stream_out"):
        return tuple(_shares(kernel, problem, target))
    if not problem.matrix_units:
        return (_NO_MATRIX_UNITS[problem.rows],)
    gated = problem.gated and kernel == "epilogue"
    if target.backend == "hip":
        tables = [_CDNA_GATED if gated else _CDNA]
    elif target.multiplies_shared_memory and not problem.splits_operands:
        return tuple(_in_bytes(config, problem) for config in _hopper(kernel, problem, gated))
    else:
        tables = [_AMPERE_GATED if gated else _AMPERE]
    return tuple(_in_bytes(table[problem.rows], problem) for table in tables)


def _hopper(kernel: Kernel, problem: Problem, gated: bool) -> Iterator[Config]:
    """Measured on an H100 in bfloat16."""
    if kernel == "epilogue" and problem.rows >= 1024:
        long = problem.in_features > _SHORT_SUM
        if gated and long and problem.hidden_features >= _WIDE:
            yield _HOPPER_GATED_TMA
        if not gated and problem.rows == MANY_ROWS:
            yield _HOPPER_TMA
    if problem.rows == 1024 and gated and problem.hidden_features >= _GATED_WIDE:
        yield _HOPPER_GATED_WIDE
    if problem.rows == 1024 and not gated and problem.hidden_features >= _WIDE:
        yield _HOPPER_WIDEST if problem.hidden_features >= 2 * _WIDE else _HOPPER_WIDE
    if problem.rows == MANY_ROWS and not gated:
        short = kernel == "epilogue" and problem.in_features <= _SHORT_SUM
        yield _HOPPER_WIDE if short else _HOPPER_WIDEST
    yield (_HOPPER_GATED if gated else _HOPPER)[problem.rows]
    yield (_AMPERE_GATED if gated else _AMPERE)[problem.rows]


def _in_bytes(config: Config, problem: Problem) -> Config:
    """Blocks of fp32 (as TF32) half as deep: as many bytes."""
    return replace(config, block_k=config.block_k * 2 // problem.dtype.itemsize)


def _shares(kernel: Kernel, problem: Problem, target: Target) -> Iterator[Config]:
    """Ever smaller blocks for shares of features: the first that fits is the best."""
    features = problem.hidden_features if kernel == "stream_hidden" else problem.out_features
    depth = problem.in_features if kernel == "stream_hidden" else problem.hidden_features
    weights = 2 if kernel == "stream_hidden" and problem.gated else 1
    block_m = 1 if problem.rows == 1 else 16 if problem.rows == 16 else 64
    if target.backend == "cuda" and target.capability // 10 == 9 and problem.dtype.itemsize == 2:
        yield from _hopper_share(kernel, features, depth, weights, block_m, target)
    programs = _programs(features, _WIDEST_SHARE, target)
    block_n = min(_WIDEST_SHARE, _padded_share(features, programs, block_m, target))
    warps = 8 if weights * block_n * max(block_m, 16) >= 2048 else 4
    for stage_bytes, num_stages in ((32768, 5), (16384, 4), (8192, 3), (4096, 2)):
        block_k = stage_bytes // (weights * block_n * problem.dtype.itemsize)
        block_k = max(32, min(256, block_k, padded(depth)))
        yield Config(
            block_m,
            block_n,
            block_k,
            num_warps=warps,
            num_stages=num_stages,
            programs=programs,
        )


def _hopper_share(
    kernel: Kernel, features: int, depth: int, weights: int, block_m: int, target: Target
) -> Iterator[Config]:
    """Measured on an H100 and an H200 in bfloat16, plain and gated, at 768/3072 to 8192/28672.

    The first kernel likes several small programs on a multiprocessor, whose loads overlap without
    a pipeline or with a short one. The second sums over more and reads more of its input: one
    program, and a deep pipeline.
    """
    programs, pairs_of_tiles = 1, block_m == 64 and weights == 2
    if kernel == "stream_hidden":
        widest = {1: 8, 16: 32, 64: 64}[block_m]
        programs = _programs(features, widest, target, most=3 if pairs_of_tiles else 2)
    while block_m == 1 and features > programs * target.multiprocessors * _WIDEST_SHARE_OF_A_ROW:
        programs *= 2
    block_n = _padded_share(features, programs, block_m, target)
    if kernel == "stream_hidden":
        stage = 16384 if block_m == 64 else 8192
        block_k = min(256, stage // (weights * block_n))
        num_stages = {1: (1, 1), 16: (5, 3), 64: (4, 2)}[block_m][weights - 1]
        if pairs_of_tiles and block_n == 64 and programs <= 3:  # as deep as all of them have room
            block_k, num_stages = 64, 6 - programs
    elif block_m == 64:
        block_k, num_stages = (256, 4) if block_n < 64 else (128, 5)
    else:
        block_k = min(512, 8192 // block_n) if block_m == 1 else 256
        num_stages = 5 if block_m == 1 and block_n > 16 else 7
    if block_n <= _WIDEST_SHARE:
        block_k = min(block_k, padded(depth))
        yield Config(block_m, block_n, block_k, num_stages=num_stages, programs=programs)


def _programs(features: int, widest: int, target: Target, most: int = 2) -> int:
    """Programs on a multiprocessor, as few as have shares no wider than that; four if not so many.

    With more than run at one time, what the last of them leave idle is a small part.
    """
    fewest = -(-features // (target.multiprocessors * widest))
    return fewest if fewest <= most else 4


def _padded_share(features: int, programs: int, block_m: int, target: Target) -> int:
    """The power of two that a share of features is padded to; matrix units want 16 at least."""
    share = -(-features // (programs * target.multiprocessors))
    return max(8 if block_m == 1 else 16, 1 << (share - 1).bit_length())


def _narrow(problem: Problem, target: Target) -> tuple[Config, ...]:
    if not problem.matrix_units:
        return (Config(32, 32, num_warps=8, num_stages=1), Config(16, 16, num_stages=1))
    if problem.splits_operands:
        return (Config(32, 32, num_stages=2), Config(16, 16, num_stages=1))
    if problem.rows != MANY_ROWS or _has_a_program_each(problem, target):
        return (*_narrow_few(problem), *NARROW_SMALL)
    return (*_narrow_many(problem, target), *NARROW_SMALL)


def _has_a_program_each(problem: Problem, target: Target) -> bool:
    """Whether programs of few rows are no more than multiprocessors.

    They take no longer together than one alone; unless weights lie in so few lines of the L2 cache
    that programs wait for each other there.
    """
    weights = (2 if problem.gated else 1) * problem.in_features + problem.out_features
    size = weights * problem.hidden_features * problem.dtype.itemsize
    return 0 < problem.exact_rows <= 16 * target.multiprocessors and size >= _SPREAD_WEIGHTS


def _narrow_few(problem: Problem) -> list[Config]:
    """Configurations for few rows: a program takes one block of hidden features after the other.

    So blocks are wide, but what pads the last one is loaded and computed, too.
    """
    hidden = problem.hidden_features
    small = Config(16, 32, num_stages=2)
    if hidden <= 32:
        return [small]
    first = Config(16, 64) if problem.gated else Config(16, 128, num_stages=2)
    width = padded(max(problem.in_features, problem.out_features))
    if width == 64 and 128 < hidden <= 256 and not problem.gated:
        first = Config(16, 256, num_stages=1)  # all weights at once: nothing to wait for twice
    elif 0 < hidden % first.block_n <= 64:
        first = Config(16, 64)
    return [first, small]


def _narrow_many(problem: Problem, target: Target) -> list[Config]:
    """Configurations with as many rows as fit in registers, beside what waits to be multiplied.

    On Hopper nothing does: wgmma reads shared memory. Before it, operands pass through registers;
    after it, results do.
    """
    width = padded(max(problem.in_features, problem.out_features))
    hopper = target.backend == "cuda" and target.capability // 10 == 9
    small = Config(64, 64, num_stages=2)
    # No more programs than multiprocessors: loads may as well run further ahead, and tiles half as
    # tall keep twice as many busy.
    alone = hopper and 0 < problem.exact_rows <= small.block_m * target.multiprocessors
    two_each = 0 < problem.exact_rows <= 2 * small.block_m * target.multiprocessors
    if width > 128:
        if alone:
            return [Config(64, 32)]
        if hopper:
            wide = Config(128, 64, num_warps=8, num_stages=2)
            return [Config(128, 32, num_warps=8)] if problem.gated else [wide]
        return [Config(32, 32, num_stages=2)] if problem.gated else []
    # Loads run further ahead, and of a bias, too. Where tiles are narrow and many, programs that
    # share a multiprocessor hide its load better than a buffer more does.
    ahead = Config(64, 64, late_bias=hopper and not problem.gated and (width > 64 or two_each))
    if width > 64:
        if hopper:
            return [small] if problem.gated and not alone else [ahead, small]
        return [] if problem.gated else [Config(128, 64, num_warps=8, num_stages=2)]
    if problem.gated and problem.exchanged and not hopper:
        small = replace(small, num_warps=8)  # with four, what is added to a pair's values spills
    resident = replace(small, num_stages=1, programs=3, resident=True)
    if _is_resident(resident, problem, target):
        return [resident, small]
    return [ahead, small] if hopper and (alone or not problem.gated) else [small]


def _is_resident(config: Config, problem: Problem, target: Target) -> bool:
    """Whether weights are to stay in shared memory.

    There must be room for all programs, rows so many that loading the weights costs little, and
    blocks so few that the loop over them can be unrolled.
    """
    memory = config.programs * shared_memory("back_to_back", config, problem, target)
    return (
        problem.rows == MANY_ROWS
        and target.backend == "cuda"
        and memory <= target.shared_memory
        and problem.hidden_features <= 8 * config.block_n
    )
