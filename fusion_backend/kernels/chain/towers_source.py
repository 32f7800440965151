"""Prints one kernel of several chains of the same input, its *towers*: each is a function of it.

A program takes its tiles of rows through one tower. Programs of all towers follow one another, so
those that run at one time read the same rows of x. Towers that are printed alike (an ensemble) have
one function: a program chooses the pointers that it is called with.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fusion_backend.kernels.chain.source import ChainCode, ChainPrinter, jitted
from fusion_backend.mlp.expression import Expression

_SHARED = ("x", "y", "rows", "x_row_units")


@dataclass(frozen=True)
class TowersCode:
    """All that a kernel is printed from.

    Attributes:
        towers: what each is printed from; launched with as many warps and stages.
    """

    towers: tuple[ChainCode, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the kernel's parameters: x, then of each tower its operands and its result."""
        own = [named for i, code in enumerate(self.towers) for named in self.own(i, code)]
        return ("x", *own, "rows", "x_row_units")

    def own(self, tower: int, code: ChainCode) -> list[str]:
        """What the kernel calls the operands and the result of a tower."""
        names = [name for name in code.parameters if name not in _SHARED]
        return [f"{name}_{tower}" for name in (*names, "y")]

    @property
    def alike(self) -> list[list[int]]:
        """Towers that have one function, in the order of the first of each."""
        found: dict[ChainCode, list[int]] = {}
        for tower, code in enumerate(self.towers):
            found.setdefault(code, []).append(tower)
        return list(found.values())


@functools.cache
def towers_kernel(code: TowersCode) -> Any:
    """The kernel, as :func:`source.chain_kernel`."""
    printers = [_TowerPrinter(code.towers[alike[0]], alike[0]) for alike in code.alike]
    functions: dict[str, tuple[Expression, int]] = {}
    lines, names = [], []
    for printer in printers:
        functions |= printer.functions()
        names.append(f"tower_{printer.tower}")
        lines += [*printer.kernel(), ""]
    lines += _kernel(code)
    accuracy = code.towers[0].accuracy
    return jitted(lines, [*names, "fusedmlp_chain_towers"], functions, accuracy)


def _kernel(code: TowersCode) -> Iterator[str]:
    count = len(code.towers)
    yield f"def fusedmlp_chain_towers({', '.join(code.parameters)}):"
    yield f"    tower = tl.program_id(0) % {count}"
    yield f"    program = tl.program_id(0) // {count}"
    yield f"    programs = tl.num_programs(0) // {count}"
    groups = code.alike
    for place, alike in enumerate(groups):
        indent = "    "
        if len(groups) > 1:
            condition = " | ".join(f"(tower == {tower})" for tower in alike)
            last = place + 1 == len(groups)
            yield "    else:" if last else f"    {'elif' if place else 'if'} {condition}:"
            indent += "    "
        yield f"{indent}{_call(code, alike)}"


def _call(code: TowersCode, alike: list[int]) -> str:
    """The function of towers that are alike, called with what the program's tower has."""
    own = [code.own(tower, code.towers[tower]) for tower in alike]
    *operands, result = (_chosen(alike, names) for names in zip(*own, strict=True))
    given = ("x", *operands, result, "rows", "x_row_units", "program", "programs")
    return f"tower_{alike[0]}({', '.join(given)})"


def _chosen(alike: list[int], names: tuple[str, ...]) -> str:
    found = names[0]
    for tower, name in zip(alike[1:], names[1:], strict=True):
        found = f"tl.where(tower == {tower}, {name}, {found})"
    return found


class _TowerPrinter(ChainPrinter):
    """Prints the function of a tower: as a chain's kernel, among other programs."""

    program, programs = "program", "programs"

    def __init__(self, code: ChainCode, tower: int) -> None:
        super().__init__(code)
        self.tower = tower

    def kernel(self) -> Iterator[str]:
        parameters = (*self.code.parameters, "program", "programs")
        yield f"def tower_{self.tower}({', '.join(parameters)}):"
        yield from self.body()

    def functions(self) -> dict[str, tuple[Expression, int]]:
        """As :attr:`ChainCode.functions`, by names that no other tower has."""
        found = self.code.functions.items()
        return {f"{name}_of_{self.tower}": function for name, function in found}

    def function(self, i: int) -> str:
        return f"{super().function(i)}_of_{self.tower}"
