"""Random programs around MLPs: shared values, writes, views, masks, extra users, several results.

A program is a function of tensors and numbers as Python text, so that a failure can be read; a
failing one is shrunk to the statements it needs. Whatever it does to its arguments, eager PyTorch
says what is right. ``python tests/random_programs.py --programs 1000 --seed 7`` tries as many.
"""

from __future__ import annotations

import functools
import random
import re
from dataclasses import dataclass, replace

import program_activations as activations
import program_effects as effects
import program_statements as templates

LEADING = ((5,), (5,), (5,), (2, 3), (2, 3), (1,), (0,), (), (3, 1, 2), (2, 0, 3), (33,))
WIDTHS = ((8, 16), (8, 16), (8, 16), (8, 16), (7, 12), (5, 13), (1, 4), (16, 16), (1, 1))
# How x lies in memory.
LAYOUTS = ("contiguous",) * 5 + ("transposed", "strided", "expanded")
# What numbers the arguments have: normal ones, or those at which functions change their ways, with
# layers that select them.
NUMBERS = ("normal",) * 3 + ("points",) * 2
DTYPES = ("float32",) * 5 + ("float64", "bfloat16", "float16")
BUFFERS = ("kept", "total")

_VALUE = re.compile(r"\bt\d+\b")
_MADE = re.compile(r"^\s*(t\d+(?:, t\d+)*) = ", re.MULTILINE)


@dataclass(frozen=True)
class Program:
    """A function ``program`` as text, and how it is called.

    Attributes:
        statements: its body, one statement an entry.
        results: names of the values it returns.
        seed: of the numbers in its arguments.
        leading: leading dimensions of ``x``, and of the buffers.
        widths: features outside and inside of the MLPs.
        layout: how ``x`` lies in memory, one of :data:`LAYOUTS`.
        dtype: name of the dtype of all arguments.
        grad: whether gradients are computed.
        frozen: names of the arguments that require no gradient all the same.
        dynamic: whether sizes and numbers are symbolic.
        second: leading dimensions of ``z``; ``None``: those of ``x``.
        numbers: one of :data:`NUMBERS`.
        compiled_autograd: whether the backward pass is compiled as it runs.
    """

    statements: tuple[str, ...]
    results: tuple[str, ...]
    seed: int
    leading: tuple[int, ...]
    widths: tuple[int, int]
    layout: str
    dtype: str
    grad: bool
    frozen: tuple[str, ...]
    dynamic: bool
    second: tuple[int, ...] | None = None
    numbers: str = "normal"
    compiled_autograd: bool = False

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor that the program is given: ``x``, and what it uses."""
        outside, inside = self.widths
        sizes = {"D": outside, "H": inside}
        shapes = {
            "x": (*self.leading, outside),
            "z": (*(self.leading if self.second is None else self.second), outside),
            "kept": (*self.leading, inside),
            "total": (*self.leading, outside),
        }
        for name, shape in templates.ARGUMENTS.items():
            shapes[name] = tuple(eval(size, {}, sizes) for size in shape)
        return {name: shape for name, shape in shapes.items() if name == "x" or self.uses(name)}

    @property
    def scalars(self) -> dict[str, float]:
        """The Python numbers that it is given."""
        choose = random.Random(self.seed)
        values = {"s": choose.choice((0.25, 0.7)), "r": choose.random(), "n": choose.choice((2, 3))}
        return {name: value for name, value in values.items() if self.uses(name)}

    def without(self, left_out: set[int]) -> Program | None:
        """The program without some statements and what reads them; ``None`` if nothing is left."""
        missing, statements = set[str](), list[str]()
        for index, statement in enumerate(self.statements):
            read = set(_VALUE.findall(statement))
            made = {name for names in _MADE.findall(statement) for name in _VALUE.findall(names)}
            if index in left_out or read & missing:
                missing |= made
            else:
                statements.append(statement)
                missing -= made
        results = tuple(name for name in self.results if name not in missing)
        return replace(self, statements=tuple(statements), results=results) if results else None

    def uses(self, name: str) -> bool:
        return re.search(rf"\b{name}\b", self._body) is not None

    @property
    def again(self) -> Program:
        """The same program with other numbers, and other sizes where they are symbolic."""
        more = tuple(
            size + 2 if i == 0 and size > 1 else size for i, size in enumerate(self.leading)
        )
        return replace(self, seed=self.seed + 1, leading=more)

    @property
    def _body(self) -> str:
        return "\n    ".join([*self.statements, f"return {', '.join(self.results)},"])

    @property
    def text(self) -> str:
        return f"def program({', '.join((*self.shapes, *self.scalars))}):\n    {self._body}"

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers: active dropout with p other than 0 and 1."""
        return re.search(r"dropout\([^\n]*(0\.5\)|p=0\.1)", self.text) is not None

    @property
    def is_rounded(self) -> bool:
        """Whether it computes some values in a dtype narrower than float32."""
        return self.dtype in ("bfloat16", "float16") or any(
            word in self.text for word in ("bfloat16", "half", "autocast")
        )

    def __str__(self) -> str:
        call = f"x of shape {self.shapes['x']}, {self.layout}, {self.dtype}, {self.numbers} numbers"
        call += f", widths {self.widths}"
        if "z" in self.shapes:
            call += f", z of shape {self.shapes['z']}"
        if self.scalars:
            call += f", {self.scalars}"
        frozen = [name for name in self.frozen if name in self.shapes]
        call += f", gradients {self.grad}" + (f" except of {', '.join(frozen)}" if frozen else "")
        call += ", compiled autograd" * self.compiled_autograd + ", dynamic" * self.dynamic
        return f"# seed {self.seed}: {call}\n{self.text}"


class _Writer:
    """Writes the statements of one program.

    Args:
        choose: what chooses.
        widths: features outside and inside of the MLPs.
        converts: whether values may be converted to another dtype.
        eccentric: how many of the activations are expressions, guards or masks.
    """

    def __init__(
        self, choose: random.Random, widths: tuple[int, int], converts: bool, eccentric: float
    ) -> None:
        self.choose, self.eccentric = choose, eccentric
        self.activations = activations.ACTIVATIONS + activations.CONVERSIONS * converts
        self.sizes = dict(zip("DH", widths, strict=True))
        self.statements: list[str] = []
        self.inputs, self.hidden, self.results = ["x"], list[str](), list[str]()
        self.masks = list[str]()
        self.named = 0

    def assign(self, expression: str, count: int = 1) -> list[str]:
        names = [f"t{self.named + i}" for i in range(count)]
        self.named += count
        self.statements.append(f"{', '.join(names)} = {expression}")
        return names

    def fill(self, template: str, **values: str) -> str:
        return template.format(**self.sizes, **values)

    def input(self) -> str:
        return "z" if self.choose.random() < 0.05 else self.choose.choice(self.inputs[-3:])

    def recent(self) -> str:
        """A value of H features; mostly nothing else will read it, as in an MLP."""
        value = self.choose.choice(self.hidden[-2:])
        if self.choose.random() < 0.7:
            self.hidden.remove(value)
        return value

    def product(self) -> None:
        weight = self.choose.choice(templates.WEIGHTS)
        template = self.choose.choice(templates.PRODUCTS)
        self.hidden += self.assign(self.fill(template, v=self.input(), w=weight))

    def normed(self) -> None:
        """A layer of a norm, now and then a write between, and another reader of the norm."""
        (norm,) = self.assign(self.fill(self.choose.choice(templates.NORMS), v=self.input()))
        if self.hidden and self.choose.random() < 0.2:
            self.write()
        inputs, self.inputs = self.inputs, [norm]
        self.choose.choice((self.product, self.product, self.packed))()
        self.inputs = [*inputs, norm] if self.choose.random() < 0.2 else inputs

    def packed(self) -> None:
        bias = self.choose.choice(("", ", bias.repeat(2)"))
        (packed,) = self.assign(f"F.linear({self.input()}, packed{bias})")
        if self.choose.random() < 0.2:
            self.hidden += self.assign(f"F.glu({packed})")
            return
        parts = self.assign(self.fill(self.choose.choice(templates.SPLITS), p=packed), 2)
        self.hidden += parts
        if self.choose.random() < 0.8:
            a, b = self.choose.sample(parts, 2)
            self.hidden += self.assign(self.fill(self.choose.choice(templates.JOINS), a=a, b=b))
        if self.choose.random() < 0.1:
            self.results += self.assign(f"F.linear({packed}.tanh(), packed.t())")

    def activation(self) -> None:
        if self.choose.random() < self.eccentric:
            self.choose.choice((self.expression, self.expression, self.guard, self.masked))()
            return
        kinds = (self.activations[:8], self.activations, self.activations, activations.SYMBOLIC)
        self.hidden += self.assign(
            self.fill(self.choose.choice(self.choose.choice(kinds)), h=self.recent())
        )

    def expression(self) -> None:
        """A function that nobody has a name for, of one or two values."""
        leaves = [self.recent()]
        if self.hidden and self.choose.random() < 0.2:
            leaves.append(self.recent())
        depth = self.choose.choice((1, 2, 2, 3, 4))
        self.hidden += self.assign(activations.random_expression(self.choose, leaves, depth))

    def guard(self) -> None:
        self.hidden += self.assign(
            self.fill(self.choose.choice(activations.GUARDS), h=self.recent())
        )

    def masked(self) -> None:
        """A mask, now and then a write to it, and a value made with it."""
        value, other = self.choose.choice(self.hidden[-2:]), self.choose.choice(self.hidden[-2:])
        mask = self.fill(self.choose.choice(activations.MASKS), a=value, b=other)
        if self.choose.random() < 0.5:
            (mask,) = self.assign(mask)
            self.masks.append(mask)
            if self.choose.random() < 0.3:
                self.mask_write()
        else:
            mask = f"({mask})"
        template = self.choose.choice(activations.MASKED)
        self.hidden += self.assign(self.fill(template, h=value, m=mask))

    def mask_write(self) -> None:
        if self.masks:
            template = self.choose.choice(effects.OF_MASKS)
            mask, value = self.choose.choice(self.masks[-2:]), self.choose.choice(self.hidden)
            self.statements.append(self.fill(template, m=mask, h=value))

    def effect(self) -> None:
        """A value that some call writes, logs or computes in a nested body."""
        template = self.choose.choice(effects.WRITING_VALUES)
        self.hidden += self.assign(self.fill(template, h=self.recent(), v=self.input()))

    def written_result(self) -> None:
        template = self.choose.choice(effects.WRITING_RESULTS)
        self.end(self.fill(template, h=self.recent(), v=self.input()))

    def mlp(self) -> None:
        """A linear layer, what is made of it right behind, and the last layer."""
        self.choose.choice((self.product, self.normed, self.packed))()
        self.hidden = self.hidden[-1:]
        for _ in range(self.choose.choice((1, 1, 2))):
            self.choose.choice((self.activation,) * 9 + (self.effect,))()
            self.hidden = self.hidden[-1:]
            if self.choose.random() < 0.1:
                self.write()
        self.choose.choice((self.down,) * 5 + (self.residual,) * 4 + (self.written_result,))()

    def chain(self) -> None:
        """Three and more layers, and now and then a write between two of them."""
        self.product()
        for _ in range(self.choose.choice((1, 1, 2, 3))):
            self.hidden = self.hidden[-1:]
            self.activation()
            if self.choose.random() < 0.1:
                self.write()
            self.hidden = self.hidden[-1:]
            self.square()
        self.hidden = self.hidden[-1:]
        self.activation()
        self.hidden = self.hidden[-1:]
        self.down()

    def towers(self) -> None:
        """MLPs and chains of one value side by side, and now and then a write between two."""
        value = self.input()
        for _ in range(self.choose.choice((2, 2, 3))):
            last, weight = "", self.choose.choice(templates.WEIGHTS)
            template = self.fill(self.choose.choice(templates.PRODUCTS[:3]), v=value, w=weight)
            for square in self.choose.sample(templates.SQUARES[:4], self.choose.choice((0, 1, 2))):
                (last,) = self.assign(template)
                (last,) = self.assign(self.fill(self.choose.choice(self.activations[:8]), h=last))
                template = self.fill(square, h=last)
            (last,) = self.assign(template)
            self.hidden += self.assign(self.fill(self.choose.choice(self.activations[:8]), h=last))
            if self.choose.random() < 0.1:
                self.write()
            self.end(self.fill(self.choose.choice(templates.DOWN[:4]), h=self.hidden.pop()))
            if self.choose.random() < 0.1 and self.hidden:
                self.write()

    def square(self) -> None:
        template = self.choose.choice(templates.SQUARES)
        self.hidden += self.assign(self.fill(template, h=self.recent()))

    def join(self) -> None:
        a, b = self.choose.choice(self.hidden[-3:]), self.choose.choice(self.hidden[-3:])
        self.hidden += self.assign(self.fill(self.choose.choice(templates.JOINS), a=a, b=b))

    def reshape(self) -> None:
        template = self.choose.choice(templates.RESHAPES)
        self.hidden += self.assign(self.fill(template, h=self.recent()))

    def write(self) -> None:
        kind = self.choose.choice((effects.WRITES, self.choose.choice(effects.STATEMENTS)))
        h, template = self.choose.choice(self.hidden), self.choose.choice(kind)
        self.statements.append(self.fill(template, h=h, v=self.input()))

    def down(self) -> None:
        template = self.choose.choice(templates.DOWN)
        self.end(self.fill(template, h=self.recent(), v=self.input()))

    def residual(self) -> None:
        """A last layer, now and then a write, and a sum with what was there before."""
        template, value = self.choose.choice(templates.DOWN[:6]), self.input()
        (result,) = self.assign(self.fill(template, h=self.recent(), v=value))
        if self.hidden and self.choose.random() < 0.2:
            self.write()
        self.end(self.fill(self.choose.choice(templates.SUMS), y=result, v=value))

    def block(self) -> None:
        self.end(self.fill(self.choose.choice(templates.BLOCKS), v=self.input()))

    def gradient(self) -> None:
        self.end(self.fill(self.choose.choice(templates.GRADIENTS), v=self.input()))

    def convolution(self) -> None:
        value = self.input()
        (image,) = self.assign(self.fill(self.choose.choice(templates.IMAGES), v=value))
        trailing = {"k": "[:, :, None, None]", "c": "[:, None, None]"}
        template = self.choose.choice(templates.CONVOLUTIONS)
        (image,) = self.assign(self.fill(template, i=image, **trailing))
        self.end(self.fill(self.choose.choice(templates.PIXELS), i=image, v=value))

    def end(self, expression: str) -> None:
        """A value of D features: a result, and the input of later layers."""
        self.results += self.assign(expression)
        self.inputs.append(self.results[-1])

    def region(self) -> None:
        """Some statements within autocast or another grad mode."""
        first = len(self.statements)
        for _ in range(self.choose.randint(1, 3)):
            self.step(("product", "activation", "down"))
        body = [line for text in self.statements[first:] for line in text.split("\n")]
        lines = [self.choose.choice(templates.REGIONS), *(f"    {line.strip()}" for line in body)]
        self.statements[first:] = ["\n    ".join(lines)]

    def step(self, steps: tuple[str, ...]) -> None:
        getattr(self, self.choose.choice(steps) if self.hidden else "product")()


_STEPS = (
    *("mlp",) * 12,
    *("chain",) * 4,
    *("towers",) * 4,
    *("product",) * 8,
    *("activation",) * 12,
    *("down",) * 10,
    *("packed",) * 4,
    *("join",) * 4,
    *("reshape",) * 3,
    *("effect", "effect", "written_result"),
    *("square", "square", "block", "block", "convolution", "region", "region"),
)


def random_program(seed: int) -> Program:
    """The program of a seed."""
    choose = random.Random(seed)
    numbers, dtype, grad = choose.choice(NUMBERS), choose.choice(DTYPES), choose.random() < 0.5
    widths, leading = choose.choice(WIDTHS), choose.choice(LEADING)
    if numbers == "points" and choose.random() < 0.6:
        widths, leading = (1, 1), (33,)
    converts = dtype != "float64"  # a narrower value would bound what can be told
    writer = _Writer(choose, widths, converts, choose.choice((0.1, 0.5)))
    steps = (*_STEPS, *("write",) * choose.choice((0, 0, 4, 12)))
    if choose.random() < 0.1:
        steps = (*steps, "gradient", "gradient")
    if choose.random() < 0.2:
        writer.packed()
    for _ in range(choose.randint(1, 8)):
        writer.step(steps)
    writer.mlp()
    extra = writer.hidden[-1:] if choose.random() < 0.2 else []
    freezes = choose.random() < 0.3
    learnt = ("x", "z", *templates.ARGUMENTS)
    return Program(
        statements=tuple(writer.statements),
        results=(*writer.results, *extra),
        seed=seed,
        leading=leading,
        widths=widths,
        layout=choose.choice(LAYOUTS),
        dtype=dtype,
        grad=grad,
        frozen=(*BUFFERS, *(a for a in learnt if freezes and choose.random() < 0.5)),
        dynamic=choose.random() < 0.1,
        second=_second(choose, leading),
        numbers=numbers,
        compiled_autograd=grad and choose.random() < 0.1,
    )


def _second(choose: random.Random, leading: tuple[int, ...]) -> tuple[int, ...]:
    """Leading dimensions that are those of ``x``, or are broadcast with them."""
    ones = tuple(1 if choose.random() < 0.5 else size for size in leading)
    return choose.choice((leading, leading, ones, (), (2, *leading), (1, *leading)))


if __name__ == "__main__":
    from fuzzing import main

    main()
