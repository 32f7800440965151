"""Fused programs do what eager does: results, writes to arguments, and gradients.

`FUSEDMLP_RANDOM_PROGRAMS=5000 pytest tests/test_random_programs.py` tries as many programs.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F

from capture import Recorder
from random_programs import random_program

BUDGET = int(os.environ.get("FUSEDMLP_RANDOM_PROGRAMS", "120"))
SHAPES = ((5, 8), (16, 8), (16, 8), (8, 16), (16,))


def run(function, seed, grad):
    """(results, arguments afterwards, gradients) of a program on the numbers of a seed."""
    generator = torch.Generator().manual_seed(seed)
    leaves = [torch.randn(shape, generator=generator) / 2 for shape in SHAPES]
    leaves = [leaf.requires_grad_(grad) for leaf in leaves]
    arguments = [leaf.clone() for leaf in leaves]
    with torch.set_grad_enabled(grad):
        results = function(*arguments)
    gradients = ()
    if grad:
        loss = sum((i + 1) * result.sum() for i, result in enumerate(results))
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return results, arguments, gradients


def assert_equal(mine, theirs):
    for ours, expected in zip(mine, theirs, strict=True):
        scale = max(1.0, expected.abs().max().item())
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-5 * scale, equal_nan=True)


def check(seed):
    """Number of fused sites of a program; ``None`` for one that eager itself refuses."""
    text = random_program(seed)
    scope = {"torch": torch, "F": F}
    exec(text, scope)
    grad = seed % 2 == 1
    try:
        expected = run(scope["program"], seed, grad)
    except RuntimeError:
        return None
    torch._dynamo.reset()
    recorder = Recorder()
    try:
        mine = run(torch.compile(scope["program"], backend=recorder), seed, grad)
        for ours, theirs in zip(mine, expected, strict=True):
            assert_equal(ours, theirs)
    except Exception as error:
        raise AssertionError(f"seed {seed}, gradients {grad}:\n{text}") from error
    return sum(site.fused for site in recorder.sites)


def test_random_programs_do_what_eager_does():
    fused = [check(seed) for seed in range(BUDGET)]
    ran = [count for count in fused if count is not None]
    assert len(ran) > BUDGET // 2
    assert sum(ran) > BUDGET // 20
