"""Random programs around MLPs: shared values, writes in place, views, extra users, several results.

A program is a function of tensors as Python text, so that a failure can be read; a failing one is
shrunk to the statements it needs. Whatever it does to its arguments, eager PyTorch says what is
right. ``python tests/random_programs.py --programs 1000 --seed 7`` tries as many.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import program_statements as templates

LEADING = ((5,), (5,), (2, 3), (2, 3), (1,), (0,), (), (3, 1, 2), (2, 0, 3), (33,))
WIDTHS = ((8, 16), (8, 16), (8, 16), (8, 16), (7, 12), (5, 13), (1, 4), (16, 16))
# How x lies in memory.
LAYOUTS = ("contiguous",) * 5 + ("transposed", "strided", "expanded")


@dataclass(frozen=True)
class Program:
    """A function ``program`` as text, and how it is called.

    Attributes:
        statements: its body, one statement an entry.
        results: names of the values it returns.
        seed: of the numbers in its arguments.
        leading: leading dimensions of ``x``.
        widths: features outside and inside of the MLPs.
        layout: how ``x`` lies in memory, one of :data:`LAYOUTS`.
        dtype: name of the dtype of all arguments.
        grad: whether gradients are computed.
        frozen: names of the arguments that require no gradient all the same.
        dynamic: whether sizes are symbolic.
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

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each argument."""
        sizes = dict(zip("DH", self.widths, strict=True))
        shapes = {
            name: tuple(eval(size, {}, sizes) for size in shape)
            for name, shape in templates.ARGUMENTS.items()
        }
        return {"x": (*self.leading, self.widths[0]), **shapes}

    @property
    def text(self) -> str:
        lines = [f"def program({', '.join(self.shapes)}):", *self.statements]
        return "\n    ".join([*lines, f"return {', '.join(self.results)},"])

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers: active dropout with p other than 0 and 1."""
        return re.search(r"dropout\([^\n]*(0\.5\)|p=0\.1)", self.text) is not None

    @property
    def is_rounded(self) -> bool:
        """Whether it computes some values in a dtype narrower than float32."""
        return self.dtype != "float32" or any(
            word in self.text for word in ("bfloat16", "half", "autocast")
        )

    def __str__(self) -> str:
        call = f"x of shape {self.shapes['x']}, {self.layout}, {self.dtype}, hidden width"
        call += (
            f" {self.widths[1]}, gradients {self.grad} except of {', '.join(self.frozen) or '-'}"
        )
        return f"# seed {self.seed}: {call}, dynamic {self.dynamic}\n{self.text}"

    def smaller(self) -> Iterator[Program]:
        """The same program without one of its statements or results."""
        for i in reversed(range(len(self.statements))):
            yield replace(self, statements=self.statements[:i] + self.statements[i + 1 :])
        for i in range(len(self.results) if len(self.results) > 1 else 0):
            yield replace(self, results=self.results[:i] + self.results[i + 1 :])


class _Writer:
    """Writes the statements of one program."""

    def __init__(self, choose: random.Random, widths: tuple[int, int]) -> None:
        self.choose = choose
        self.sizes = dict(zip("DH", widths, strict=True))
        self.statements: list[str] = []
        self.inputs, self.hidden, self.results = ["x"], list[str](), list[str]()
        self.named = 0

    def assign(self, expression: str, count: int = 1) -> list[str]:
        names = [f"t{self.named + i}" for i in range(count)]
        self.named += count
        self.statements.append(f"{', '.join(names)} = {expression}")
        return names

    def fill(self, template: str, **values: str) -> str:
        return template.format(**self.sizes, **values)

    def input(self) -> str:
        return self.choose.choice(self.inputs[-3:])

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
        some = self.choose.choice((templates.ACTIVATIONS[:8], templates.ACTIVATIONS))
        self.hidden += self.assign(self.fill(self.choose.choice(some), h=self.recent()))

    def mlp(self) -> None:
        """A linear layer, what is made of it right behind, and the last layer."""
        self.choose.choice((self.product, self.normed, self.packed))()
        self.hidden = self.hidden[-1:]
        for _ in range(self.choose.choice((1, 1, 2))):
            self.activation()
            self.hidden = self.hidden[-1:]
        self.choose.choice((self.down, self.residual))()

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
        h, template = self.choose.choice(self.hidden), self.choose.choice(templates.WRITES)
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
    *("mlp",) * 10,
    *("chain",) * 4,
    *("product",) * 8,
    *("activation",) * 12,
    *("down",) * 10,
    *("packed",) * 4,
    *("join",) * 4,
    *("reshape",) * 3,
    *("square", "square", "block", "block", "convolution", "region", "region"),
)


def random_program(seed: int) -> Program:
    """The program of a seed."""
    choose = random.Random(seed)
    widths = choose.choice(WIDTHS)
    writer = _Writer(choose, widths)
    steps = (*_STEPS, *("write",) * choose.choice((0, 0, 2, 6)))
    if choose.random() < 0.2:
        writer.packed()
    for _ in range(choose.randint(3, 13)):
        writer.step(steps)
    writer.mlp()
    extra = writer.hidden[-1:] if choose.random() < 0.2 else []
    freezes = choose.random() < 0.3
    return Program(
        statements=tuple(writer.statements),
        results=(*writer.results, *extra),
        seed=seed,
        leading=choose.choice(LEADING),
        widths=widths,
        layout=choose.choice(LAYOUTS),
        dtype=choose.choice(("float32",) * 4 + ("bfloat16", "float16")),
        grad=choose.random() < 0.5,
        frozen=tuple(a for a in ("x", *templates.ARGUMENTS) if freezes and choose.random() < 0.5),
        dynamic=choose.random() < 0.2,
    )


if __name__ == "__main__":
    from fuzzing import main

    main()
