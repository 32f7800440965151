"""Whether a fused program does what eager does: results, strides, aliases, writes, gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch._dynamo import lookup_backend
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from capture import ALWAYS, Recorder
from fusion_backend import Options, fusion
from fusion_backend.backend import backend_with_observer
from fusion_backend.dispatch import PLANS
from random_programs import Program
from rounding import RoundingOtherwise

NEVER = Options(policy="never")
# What runs the rewritten graph. The first tests the rewrite alone and takes a tenth of a second;
# Inductor takes seconds.
COMPILERS = ("none", "aot_eager", "inductor")
# How often eager is asked what else it may give.
ROUNDINGS = 32


class Refused(Exception):
    """Eager PyTorch, or torch.compile without fusion, does not run the program."""


def hook(value: torch.Tensor) -> None:
    """Doubles a gradient on its way."""
    # Eager crashes in register_hook on a view that was written to through another view, unless its
    # grad_fn was asked for before (torch 2.11 to 2.14).
    if value.requires_grad and value.grad_fn is not None:
        value.register_hook(lambda gradient: gradient * 2)


def run(function: Callable[..., Any], program: Program, double: bool = False):
    """Results, arguments afterwards, and gradients of the arguments; ``double``: in float64."""
    generator = torch.Generator().manual_seed(program.seed)
    leaves = {}
    for name, shape in program.shapes.items():
        number = (torch.randn(shape, generator=generator) / 2).to(getattr(torch, program.dtype))
        number = number.double() if double else number
        leaves[name] = number.requires_grad_(program.grad and name not in program.frozen)
    arguments = [leaf.clone() for leaf in leaves.values()]
    arguments[0] = _laid_out(arguments[0], program.layout)
    torch.manual_seed(program.seed)
    with torch.set_grad_enabled(program.grad):
        results = function(*arguments)
    gradients = ()
    loss = sum((i + 1) * result.double().sum() for i, result in enumerate(results))
    if program.grad and isinstance(loss, torch.Tensor) and loss.requires_grad:
        learnt = [leaf for leaf in leaves.values() if leaf.requires_grad]
        gradients = torch.autograd.grad(loss, learnt, allow_unused=True, materialize_grads=True)
    return results, arguments, gradients


def _laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same numbers in other places; ``expanded`` repeats the first row."""
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided":
        return torch.stack([x, x], -1)[..., 1]
    if layout == "expanded" and x.dim() > 1:
        return x[:1].expand_as(x)
    return x


def eager(program: Program):
    """What the program does without fusion; raises :class:`Refused`."""
    scope = {"torch": torch, "F": F, "checkpoint": checkpoint, "hook": hook}
    exec(program.text, scope)
    function = scope["program"]
    try:
        return function, run(function, program)
    except Exception as error:
        raise Refused(str(error)) from error


def difference(program: Program, compiler: str = "none") -> tuple[str | None, int]:
    """What a fused program does differently, if anything, and how many sites were fused in it.

    What torch.compile does differently without fusion as well is not counted.
    """
    function, expected = eager(program)
    found, sites = _compared(function, program, expected, ALWAYS, compiler)
    if found is not None and _compared(function, program, expected, NEVER, compiler)[0] is not None:
        raise Refused(found)
    return found, sites


def _compared(function, program, expected, options, compiler):
    torch._dynamo.reset()
    sites = []
    compiled = _compile(function, program, options, compiler, sites)
    try:
        # On a CPU one family alone does.
        names = ("ADDING_FAMILIES", "NORMALIZING_FAMILIES")
        with mock.patch.multiple(fusion, **dict.fromkeys(names, PLANS)):
            mine = run(compiled, program)
    except Exception as error:
        return f"{type(error).__name__}: {error}", 0
    fused = sum(site.rewritten for site in sites)
    # A fused dropout, and Inductor's, draw other numbers than eager's: only the forms are compared.
    chance = program.is_random and (fused > 0 or compiler == "inductor")
    found = _aliases_differ(mine, expected) or _first(_forms_differ, mine, expected)
    if found is None and not chance:
        found = _first(_values_differ, mine, expected, program)
        if found and (
            _is_as_exact(mine, expected, function, program)
            or _is_at_a_kink(found, mine, expected, program, options, compiler)
        ):
            found = None
    return found, fused


def _is_at_a_kink(found: str, mine, expected, program: Program, options, compiler) -> bool:
    """Whether a rounding decided which slope a gradient took, or on which side of a jump it is.

    In float32 all is right then, and results are among what eager gives if it rounds otherwise.
    """
    if program.dtype == "float32":
        return False
    wide = replace(program, dtype="float32")
    try:
        function, right = eager(wide)
    except Refused:
        return False
    if _compared(function, wide, right, options, compiler)[0] is not None:
        return False
    return found.startswith("gradient") or _is_rounded_otherwise(mine, expected, program)


def _is_rounded_otherwise(mine, expected, program: Program) -> bool:
    """Whether each element is one that eager gives if it rounds otherwise."""
    function, _ = eager(program)
    runs = [expected]
    for seed in range(ROUNDINGS):
        with RoundingOtherwise(seed):
            runs.append(run(function, program))
    for part in range(2):  # results, and arguments
        for i, found in enumerate(mine[part]):
            given = torch.stack([other[part][i].detach().double() for other in runs])
            bounds = _bounds(expected[part][i], program)
            slack = bounds["atol"] + bounds["rtol"] * given[0].abs()
            near = (given - found.detach().double()).abs() <= slack
            if not bool(near.any(0).all()):
                return False
    return True


def _first(differs, mine, expected, *more) -> str | None:
    for what, ours, theirs in zip(("result", "argument", "gradient"), mine, expected, strict=True):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            found = differs(f"{what} {i}", a, b, *more)
            if found is not None:
                return found
    return None


def _is_as_exact(mine, expected, function, program) -> bool:
    """Whether eager itself is about as far from float64: the program blows rounding up."""
    try:
        exact = run(function, program, double=True)
    except Exception:  # it names a dtype
        return False
    for ours, theirs, wanted in zip(mine, expected, exact, strict=True):
        for a, b, c in zip(ours, theirs, wanted, strict=True):
            if c.numel() == 0:
                continue
            far = [float((t - c).detach().abs().nan_to_num(torch.inf).max()) for t in (a, b)]
            if far[0] > 3 * far[1] + 1e-3 * float(c.detach().abs().max()):
                return False
    return True


def _compile(function, program, options, compiler, sites) -> Callable[..., Any]:
    dynamic = program.dynamic or None
    if compiler == "inductor":
        backend = backend_with_observer(lambda before, result: sites.extend(result.sites))
        own = {"fusedmlp.policy": options.policy, "fusedmlp.strict": True}
        return torch.compile(function, backend=backend, dynamic=dynamic, options=own)

    def rewritten(graph_module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        recorder = Recorder(options)
        forward = recorder(graph_module, list(example_inputs))
        sites.extend(recorder.sites)
        if compiler == "none":
            return forward
        return lookup_backend(compiler)(recorder.after[0], example_inputs)

    return torch.compile(function, backend=rewritten, dynamic=dynamic)


def _forms_differ(name, mine, expected):
    if (mine.dtype, mine.shape) != (expected.dtype, expected.shape):
        return f"{name} is {mine.dtype} {mine.shape}, not {expected.dtype} {expected.shape}"
    gradient = name.startswith("gradient")  # autograd promises no layout
    if mine.stride() != expected.stride() and mine.numel() > 1 and not gradient:
        return f"{name} has strides {mine.stride()}, not {expected.stride()}"
    if mine.requires_grad != expected.requires_grad:
        return f"{name} requires_grad is {mine.requires_grad}"
    return None


def _values_differ(name, mine, expected, program):
    try:
        bounds = _bounds(expected, program)
        torch.testing.assert_close(mine, expected, equal_nan=True, **bounds)
    except AssertionError as error:
        return f"{name}: {error}"
    return None


def _bounds(expected: torch.Tensor, program: Program) -> dict[str, float]:
    """How far a value may be from eager's."""
    largest = expected.detach().double().abs().nan_to_num(0, 0, 0)
    scale = max(1.0, largest.amax().item() if expected.numel() else 0.0)
    low = program.is_rounded or expected.dtype != torch.float32
    return {"rtol": 0.1, "atol": 0.05 * scale} if low else {"rtol": 1e-3, "atol": 1e-5 * scale}


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


def shrunk(program: Program, compiler: str = "none") -> Program:
    """A smallest program, made by leaving statements out, that still differs."""
    for smaller in program.smaller():
        try:
            if difference(smaller, compiler)[0] is not None:
                return shrunk(smaller, compiler)
        except Refused:
            continue
    return program
