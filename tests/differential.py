"""Whether a fused program does what eager does, and the smallest part of it that does not."""

from __future__ import annotations

import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch._dynamo import lookup_backend
from torch.fx import GraphModule

from capture import ALWAYS, Recorder, without_cpp_compiler
from fusion_backend import Options
from fusion_backend.backend import backend_with_observer
from fusion_backend.fusion import legality, neighbours
from program_comparison import (
    Difference,
    forms_differ,
    is_chaotic,
    is_right_in_float32,
    values_differ,
)
from program_runs import Outcome, Refused, compiled_backward, eager, run
from random_programs import Program

NEVER = Options(policy="never")
# What runs the rewritten graph. The first tests the rewrite alone and takes half a second; "rows"
# runs it with our kernels in C++, which takes twice as long, Inductor many seconds. "interpreted"
# is the first one where TRITON_INTERPRET=1 is set, so that sites are planned for Triton's kernels.
COMPILERS = ("none", "rows", "aot_eager", "inductor", "interpreted")
_COMPILING = ("rows", "inductor")
# Why a site is left alone in which the rewrite raised: right, but nothing that should happen.
INTERNAL_ERROR = "internal-error"


@dataclass
class Comparison:
    """What became of a fused program.

    Attributes:
        found: what differs from eager, if anything does.
        sites: how many sites there were, by the reason for which they were left alone, or "fused".
    """

    found: Difference | None
    sites: Counter[str] = field(default_factory=Counter)

    @property
    def fused(self) -> int:
        return self.sites["fused"]


def difference(program: Program, compiler: str = "none") -> Comparison:
    """What a fused program does differently, if anything.

    What torch.compile does differently without fusion as well is not counted.

    Raises:
        Refused: eager, or torch.compile without fusion, does not run the program.
    """
    function, expected = eager(program)
    calls = [(program, expected)]
    if program.dynamic:  # what was compiled is called with other numbers, too
        with suppress(Exception):
            calls.append((program.again, run(function, program.again)))
    compared = _compared(function, calls, ALWAYS, compiler)
    if compared.found is not None:
        without = _compared(function, calls, NEVER, compiler).found
        if without is not None:
            raise Refused(str(without))
    return compared


def _compared(
    function: Callable[..., Any],
    calls: list[tuple[Program, Outcome]],
    options: Options,
    compiler: str,
) -> Comparison:
    torch._dynamo.reset()
    sites: list[Any] = []
    program = calls[0][0]
    compiled = compile_program(function, program, options, compiler, sites)
    backward = compiled_backward if program.compiled_autograd else nullcontext
    found = None
    for given, expected in calls:
        try:
            compiling = nullcontext if compiler in _COMPILING else without_cpp_compiler
            with compiling(), _all_families(program), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                mine = run(compiled, given, backward=backward)
        except Exception as error:
            found = Difference(f"raises {type(error).__name__}", str(error))
            break
        found = _outcomes_differ(function, mine, expected, given, options, compiler, sites)
        if found is not None:
            break
    raised = [site.detail for site in sites if site.reason == INTERNAL_ERROR]
    if found is None and raised:
        found = Difference("rewrite raised", raised[0])
    return Comparison(found, Counter("fused" if site.rewritten else site.reason for site in sites))


def _outcomes_differ(function, mine, expected, program, options, compiler, sites):
    found = forms_differ(mine, expected, program)
    # A fused dropout, and Inductor's, draw other numbers than eager's: only the forms are compared.
    fused = any(site.rewritten for site in sites)
    if found is not None or (program.is_random and (fused or compiler == "inductor")):
        return found
    found = values_differ(mine, expected, program)
    if found is None:
        return None

    def differs(wide: Program) -> Difference | None:
        return _compared(function, [(wide, run(function, wide))], options, compiler).found

    # A rounding decided which slope a gradient took: in float32 all is right then.
    if found.kind.startswith("gradient") and is_right_in_float32(program, differs):
        return None
    return None if is_chaotic(mine, expected, program, function) else found


@contextmanager
def _all_families(program: Program) -> Iterator[None]:
    """On a CPU one family does all; and float64, which no kernel takes, is let pass.

    In float64 roundings decide nothing, so that the rewrite of an expression is told from a wrong
    one by far smaller differences.
    """
    families = {
        "may_take_residual": lambda choice: True,
        "may_take_norm": lambda choice: program.dtype != "float64",  # computed in float32
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(neighbours, **families))
        if program.dtype == "float64" and not program.is_rounded:
            dtypes = (*legality.SUPPORTED_DTYPES, torch.float64)
            kept = [c for c in legality.CHECKS if c.__name__ != "rounds_between"]
            own = {"SUPPORTED_DTYPES": dtypes, "CHECKS": tuple(kept)}
            stack.enter_context(mock.patch.multiple(legality, **own))
        yield


def compile_program(function, program, options, compiler, sites) -> Callable[..., Any]:
    dynamic = program.dynamic or None
    if compiler == "inductor":
        backend = backend_with_observer(lambda before, result: sites.extend(result.sites))
        own = {"fusedmlp.policy": options.policy, "fusedmlp.strict": True}
        return torch.compile(function, backend=backend, dynamic=dynamic, options=own)

    def rewritten(graph_module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        recorder = Recorder(options)
        forward = recorder(graph_module, list(example_inputs))
        sites.extend(recorder.sites)
        if compiler == "aot_eager":
            return lookup_backend(compiler)(recorder.after[0], example_inputs)
        return forward

    return torch.compile(function, backend=rewritten, dynamic=dynamic)


def still_compiles() -> bool:
    """Whether torch still compiles at all: some programs leave it in a state where it does not."""
    torch._dynamo.reset()
    try:
        return int(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(()))) == 2
    except Exception:
        return False


def shrunk(
    program: Program, found: Difference, compiler: str = "none", seconds: float = 60
) -> tuple[Program, Difference]:
    """A smaller program that still differs in the same way, and how, found within some seconds.

    Statements, results and what is special about the call are left out as far as that goes.
    """
    until, size = time.monotonic() + seconds, len(program.statements)
    while size:
        for smaller in _smaller(program, size):
            if time.monotonic() > until:
                return program, found
            differs = _still_differs(smaller, compiler, found.kind)
            if differs is not None:
                program, found = smaller, differs
                size = min(size, len(program.statements)) * 2  # the same once more
                break
        size //= 2
    return program, found


def _still_differs(program: Program, compiler: str, kind: str) -> Difference | None:
    try:
        found = difference(program, compiler).found
    except Refused:
        return None
    return found if found is not None and found.kind == kind else None


def _smaller(program: Program, size: int) -> Iterator[Program]:
    """The program without ``size`` statements that follow each other, and simpler ones."""
    for stop in range(len(program.statements), 0, -size):
        smaller = program.without(set(range(max(0, stop - size), stop)))
        if smaller is not None:
            yield smaller
    if size > 1:
        return
    for i in range(len(program.results) if len(program.results) > 1 else 0):
        yield replace(program, results=program.results[:i] + program.results[i + 1 :])
    for simpler in ({"dynamic": False}, {"layout": "contiguous"}, {"compiled_autograd": False}):
        if replace(program, **simpler) != program:
            yield replace(program, **simpler)
    if program.grad:
        yield replace(program, grad=False, compiled_autograd=False)


def signature(program: Program, found: Difference) -> str:
    """The kind of a difference with the names that a shrunk program calls, to group findings by."""
    called = set(re.findall(r"[A-Za-z_.]+(?=\()", "\n".join(program.statements)))
    names = {name.rsplit(".", 1)[-1] for name in called}
    signs = set(re.findall(r" (\S{1,2}=|[%&|^]|//|<<|>>) ", "\n".join(program.statements)))
    return f"{found.kind} [{' '.join(sorted(names | signs))}]"
