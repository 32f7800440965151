"""Running a random program: its arguments, what it gives, and what is left of it by eager."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import compiled_autograd

import program_numbers
from program_operators import LOG, scope
from random_programs import BUFFERS, Program

FILE = "<program>"


class Refused(Exception):
    """Eager PyTorch, or torch.compile without fusion, does not run the program."""


@dataclass
class Outcome:
    """What a program gave: each part a list of tensors, or of ``None`` for no gradient."""

    results: list[Tensor]
    arguments: list[Tensor]
    gradients: list[Tensor | None]
    log: list[Tensor]

    def parts(self) -> dict[str, list[Any]]:
        return {
            "result": self.results,
            "argument": self.arguments,
            "gradient": self.gradients,
            "log": self.log,
        }


def function_of(program: Program) -> Callable[..., Any]:
    """The program as a Python function."""
    names = scope()
    exec(compile(program.text, FILE, "exec"), names)
    return names["program"]


def run(
    function: Callable[..., Any],
    program: Program,
    double: bool = False,
    backward: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Outcome:
    """What ``function`` gives of the program's arguments; ``double``: in float64.

    ``backward`` gives a context for the backward pass.
    """
    leaves = {}
    for name, shape in program.shapes.items():
        number = _numbers(name, shape, program).to(getattr(torch, program.dtype))
        number = number.double() if double else number
        leaves[name] = number.requires_grad_(program.grad and name not in program.frozen)
    arguments = [leaf.clone() for leaf in leaves.values()]
    arguments[0] = _laid_out(arguments[0], program.layout)
    torch.manual_seed(program.seed)
    LOG.clear()
    with torch.set_grad_enabled(program.grad):
        results = function(*arguments, *program.scalars.values())
    log = list(LOG)
    gradients: list[Tensor | None] = []
    loss = sum((i + 1) * result.double().sum() for i, result in enumerate(results))
    if program.grad and isinstance(loss, Tensor) and loss.requires_grad:
        learnt = [leaf for leaf in leaves.values() if leaf.requires_grad]
        with backward():
            gradients = list(torch.autograd.grad(loss, learnt, allow_unused=True))
    return Outcome(list(results), arguments, gradients, log)


def compiled_backward() -> AbstractContextManager[Any]:
    """A context in which the backward pass is captured as it runs, and run eagerly."""
    return compiled_autograd._enable(torch.compile(backend="eager"))


def _numbers(name: str, shape: tuple[int, ...], program: Program) -> Tensor:
    # Of an argument's name and the seed alone: a program that is shrunk keeps its numbers.
    generator = torch.Generator().manual_seed(program.seed + zlib.crc32(name.encode()))
    if program.numbers == "normal" or name in BUFFERS:
        return program_numbers.normal(shape, generator)
    if name in ("x", "z"):
        return program_numbers.points(shape, generator)
    return program_numbers.selecting(shape, generator)


def _laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers in other places; ``expanded`` repeats the first row."""
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided":
        return torch.stack([x, x], -1)[..., 1]
    if layout == "expanded" and x.dim() > 1:
        return x[:1].expand_as(x)
    return x


def eager(program: Program) -> tuple[Callable[..., Any], Outcome]:
    """What the program does without fusion; raises :class:`Refused`."""
    try:
        function = function_of(program)
        return function, run(function, program)
    except Exception as error:
        raise Refused(str(error)) from error


def repaired(program: Program) -> Program:
    """The program without the statements that eager refuses; raises :class:`Refused`."""
    for _ in range(len(program.statements)):
        try:
            eager(program)
        except Refused as refused:
            index = _refused_statement(program, refused.__cause__)
            if index is not None:
                smaller = program.without({index})
            elif program.grad:  # no statement, but the backward pass
                smaller = replace(program, grad=False, compiled_autograd=False)
            else:
                raise
            if smaller is None:
                raise
            program = smaller
        else:
            return program
    raise Refused("every statement")


def _refused_statement(program: Program, error: BaseException | None) -> int | None:
    """The statement in which an error was raised."""
    trace, line = error.__traceback__ if error else None, None
    while trace is not None:
        code = trace.tb_frame.f_code
        if (code.co_filename, code.co_name) == (FILE, "program"):
            line = trace.tb_lineno
        trace = trace.tb_next
    if isinstance(error, SyntaxError):
        line = error.lineno
    first = 2
    for index, statement in enumerate(program.statements):
        first += statement.count("\n") + 1
        if line is not None and line < first:
            return index
    return None
