"""Whether a fused program does what eager does: results, strides, aliases, writes, gradients."""

from __future__ import annotations

import argparse
import logging
import time

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from capture import ALWAYS, Recorder
from fusion_backend import Options
from random_programs import SHAPES, Program, random_program

NEVER = Options(policy="never")


class Refused(Exception):
    """Eager PyTorch, or torch.compile without fusion, does not run the program."""


def run(function, program: Program):
    """Results, arguments afterwards, and gradients of the arguments."""
    generator = torch.Generator().manual_seed(program.seed)
    dtype = getattr(torch, program.dtype)
    shapes = {"x": (*program.leading, 8), **SHAPES}
    leaves = [
        (torch.randn(shape, generator=generator) / 2).to(dtype).requires_grad_(program.grad)
        for shape in shapes.values()
    ]
    arguments = [leaf.clone() for leaf in leaves]
    torch.manual_seed(program.seed)
    with torch.set_grad_enabled(program.grad):
        results = function(*arguments)
    gradients = ()
    loss = sum((i + 1) * result.double().sum() for i, result in enumerate(results))
    if program.grad and isinstance(loss, torch.Tensor) and loss.requires_grad:
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return results, arguments, gradients


def eager(program: Program):
    """What the program does without fusion; raises :class:`Refused`."""
    scope = {"torch": torch, "F": F, "checkpoint": checkpoint}
    exec(program.text, scope)
    function = scope["program"]
    try:
        return function, run(function, program)
    except Exception as error:
        raise Refused(str(error)) from error


def difference(program: Program) -> tuple[str | None, int]:
    """What a fused program does differently, if anything, and how many sites were fused in it.

    What torch.compile does differently without fusion as well is not counted.
    """
    function, expected = eager(program)
    found, sites = _compared(function, program, expected, ALWAYS)
    if found is not None and _compared(function, program, expected, NEVER)[0] is not None:
        raise Refused(found)
    return found, sites


def _compared(function, program, expected, options):
    torch._dynamo.reset()
    recorder = Recorder(options)
    compiled = torch.compile(function, backend=recorder, dynamic=program.dynamic or None)
    try:
        mine = run(compiled, program)
    except Exception as error:
        return f"{type(error).__name__}: {error}", 0
    found = _aliases_differ(mine, expected)
    for what, ours, theirs in zip(("result", "argument", "gradient"), mine, expected, strict=True):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            found = found or _values_differ(f"{what} {i}", a, b, program.dtype)
    return found, sum(site.fused for site in recorder.sites)


def _values_differ(name, mine, expected, dtype):
    if (mine.dtype, mine.shape) != (expected.dtype, expected.shape):
        return f"{name} is {mine.dtype} {mine.shape}, not {expected.dtype} {expected.shape}"
    gradient = name.startswith("gradient")  # autograd promises no layout
    if mine.stride() != expected.stride() and mine.numel() > 1 and not gradient:
        return f"{name} has strides {mine.stride()}, not {expected.stride()}"
    if mine.requires_grad != expected.requires_grad:
        return f"{name} requires_grad is {mine.requires_grad}"
    low = dtype != "float32" or mine.dtype != torch.float32
    largest = (
        expected.detach().double().abs().nan_to_num(0, 0, 0).amax().item() if mine.numel() else 0
    )
    bounds = {"rtol": 0.1, "atol": 0.05 * max(1.0, largest)} if low else {}
    bounds = bounds or {"rtol": 1e-3, "atol": 1e-5 * max(1.0, largest)}
    try:
        torch.testing.assert_close(mine, expected, equal_nan=True, **bounds)
    except AssertionError as error:
        return f"{name}: {error}"
    return None


def _aliases_differ(mine, expected):
    def sharing(run):
        storages = [tensor.untyped_storage().data_ptr() for part in run[:2] for tensor in part]
        return [
            (i, j)
            for i, a in enumerate(storages)
            for j, b in enumerate(storages[:i])
            if a == b and a != 0
        ]

    return None if sharing(mine) == sharing(expected) else "results share memory differently"


def shrunk(program: Program) -> Program:
    """A smallest program, made by leaving statements out, that still differs."""
    for smaller in program.smaller():
        try:
            if difference(smaller)[0] is not None:
                return shrunk(smaller)
        except Refused:
            continue
    return program


def main() -> None:
    """Try many programs; print those that differ, shrunk."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--programs", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first one (default 0)")
    options = parser.parse_args()
    logging.disable(logging.ERROR)  # programs that torch.compile refuses are of no interest
    started, ran, fused, failures = time.monotonic(), 0, 0, 0
    for seed in range(options.seed, options.seed + options.programs):
        program = random_program(seed)
        try:
            found, sites = difference(program)
        except Refused:
            continue
        ran, fused = ran + 1, fused + sites
        if found is not None:
            failures += 1
            small = shrunk(program)
            print(f"{small}\n# {difference(small)[0]}\n", flush=True)
    seconds = time.monotonic() - started
    print(f"{ran} programs ran, {fused} sites fused, {failures} differ ({seconds:.0f} s)")
    raise SystemExit(failures > 0)


if __name__ == "__main__":
    main()
