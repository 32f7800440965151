"""Random programs around MLPs: shared values, writes in place, views, extra users, several results.

A program is a function of tensors as Python text, so that a failure can be read; a failing one is
shrunk to the statements it needs. Whatever it does to its arguments, eager PyTorch says what is
right. ``python tests/random_programs.py --programs 1000 --seed 7`` tries as many.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

SIGNATURE = "def program(x, up, other, packed, down, bias, scale):"
SHAPES = {
    "up": (16, 8),
    "other": (16, 8),
    "packed": (32, 8),
    "down": (8, 16),
    "bias": (16,),
    "scale": (16,),
}
LEADING = ((5,), (5,), (2, 3), (2, 3), (1,), (0,), (), (3, 1, 2))

ACTIVATIONS = (
    "F.gelu({h})",
    "F.gelu({h}, approximate='tanh')",
    "F.silu({h})",
    "F.relu({h}) ** 2",
    "torch.sigmoid({h}) * {h}",
    "{h} * torch.sigmoid(1.702 * {h})",
    "{h} ** 2",
    "torch.where({h} > 0, {h}, 0.1 * {h})",
    "torch.where({h} > torch.zeros_like({h}), {h}, torch.zeros_like({h}))",
    "torch.max({h}, torch.tensor(0.1, dtype={h}.dtype))",
    "{h}.masked_fill({h} < 0, 0.5)",
    "{h}.clamp(-1, 1)",
    "F.softshrink({h}, 0.2)",
    "F.hardshrink({h}, 0.2)",
    "F.elu({h}, inplace=True)",
    "F.relu({h}, inplace=True)",
    "{h}.tanh_()",
    "F.leaky_relu_({h})",
    "{h}.mul_(0.5)",
    "{h} * 2",
    "-{h}",
    "{h} + bias",
    "{h} * scale",
    "{h} + {h}.mean()",
    "F.dropout({h}, 0.5, training=False)",
    "F.dropout({h}, 0.5)",
    "F.layer_norm({h}, (16,))",
    "{h}.detach()",
    "{h}.clone()",
    "{h}.double().to({h}.dtype)",
    "{h}.float().to({h}.dtype)",
    "{h}.bfloat16().to({h}.dtype)",
    "F.gelu({h}.float()).type_as({h})",
    "checkpoint(F.gelu, {h}, use_reentrant=False)",
)
PRODUCTS = (
    "F.linear({v}, {w})",
    "F.linear({v}, {w}, bias)",
    "{v} @ {w}.t()",
    "{v} @ {w}.T + bias",
    "F.linear({v}, {w}).add_(bias)",
    "bias + torch.matmul({v}, {w}.transpose(0, 1))",
    "torch.einsum('...i,oi->...o', {v}, {w})",
    "torch.einsum('...i,io->...o', {v}, {w}.t()) + bias",
    "torch.addmm(bias, {v}, {w}.t())",
    "torch.addmm(bias, {v}.reshape(-1, 8), {w}.t()).view(*{v}.shape[:-1], 16)",
    "F.linear({v}, {w} * 0.5)",
    "F.linear({v}, {w}.t().contiguous().t(), bias)",
)
WEIGHTS = ("up", "up", "other")
SPLITS = (
    "{p}.chunk(2, -1)",
    "{p}.chunk(2, dim=-1)[::-1]",
    "{p}.split(16, -1)",
    "torch.split({p}, [16, 16], dim=-1)",
    "{p}[..., :16], {p}[..., 16:]",
    "{p}[..., ::2], {p}[..., 1::2]",
    "{p}.narrow(-1, 0, 16), {p}.narrow(-1, 16, 16)",
    "{p}.unflatten(-1, (2, 16)).unbind(-2)",
    "{p}.view(*{p}.shape[:-1], 16, 2).unbind(-1)",
    "{p}.view(*{p}.shape[:-1], 2, 16)[..., 0, :], {p}.view(*{p}.shape[:-1], 2, 16)[..., 1, :]",
    "{p}.reshape(-1, 16, 2)[..., 1], {p}.reshape(-1, 16, 2)[..., 0]",
    "{p}[..., 8:24], {p}[..., :16]",
)
JOINS = ("{a} * {b}", "{a} + {b}", "F.silu({a}) * {b}", "{b} * F.gelu({a})", "{a} - 2 * {b}")
DOWN = (
    "F.linear({h}, down)",
    "F.linear({h}, down)",
    "{h} @ down.t()",
    "{h} @ down.t() + bias[:8]",
    "F.linear({h}, down, bias[:8])",
    "F.linear({h}, up.t())",
    "torch.einsum('...i,oi->...o', {h}, down)",
    "checkpoint(lambda v: F.linear(F.gelu(F.linear(v, up)), down), {v}, use_reentrant=False)",
)
WRITES = (
    "{h}.add_(1.0)",
    "{h}[..., 0] = 1.0",
    "{h}[:1].zero_()",
    "{h}.view(-1).mul_(2)",
    "{h}.copy_({h} + 1)",
    "{v}.mul_(0.9)",
    "{v}[..., :1].add_(1)",
    "down.mul_(1.01)",
    "bias.add_(0.1)",
    "{h}.register_hook(lambda gradient: gradient * 2) if {h}.requires_grad else None",
)
RESHAPES = (
    "{h}[..., :8].repeat(*[1] * ({h}.dim() - 1), 2)",
    "{h}.reshape(-1, 16)",
    "{h}.reshape(*x.shape[:-1], 16)",
    "{h}.unflatten(-1, (4, 4)).flatten(-2)",
    "{h}.reshape(*{h}.shape[:-1], 4, 4)",
    "{h}.flatten()",
    "{h}.unsqueeze(0)",
    "{h}.squeeze(0)",
    "{h}.transpose(0, -1).contiguous().transpose(0, -1)",
    "{h}.transpose(0, 1)",
    "{h}.reshape(8, -1).reshape(-1, 16)",
    "{h}.contiguous()",
)
REGIONS = (
    "with torch.autocast('cpu', dtype=torch.bfloat16):",
    "with torch.no_grad():",
    "with torch.enable_grad():",
)


@dataclass(frozen=True)
class Program:
    """A function ``program`` as text, and how it is called.

    Attributes:
        statements: its body, one statement an entry.
        results: names of the values it returns.
        seed: of the numbers in its arguments.
        leading: leading dimensions of ``x``.
        dtype: name of the dtype of all arguments.
        grad: whether the arguments require gradients.
        dynamic: whether sizes are symbolic.
    """

    statements: tuple[str, ...]
    results: tuple[str, ...]
    seed: int
    leading: tuple[int, ...]
    dtype: str
    grad: bool
    dynamic: bool

    @property
    def text(self) -> str:
        lines = [SIGNATURE, *self.statements, f"return {', '.join(self.results)},"]
        return "\n    ".join(lines)

    def __str__(self) -> str:
        call = f"x of shape {(*self.leading, 8)}, {self.dtype}, gradients {self.grad}"
        return f"# seed {self.seed}, {call}, dynamic {self.dynamic}\n{self.text}"

    def smaller(self):
        """The same program without one of its statements or results."""
        for i in reversed(range(len(self.statements))):
            yield replace(self, statements=self.statements[:i] + self.statements[i + 1 :])
        for i in range(len(self.results) if len(self.results) > 1 else 0):
            yield replace(self, results=self.results[:i] + self.results[i + 1 :])


class _Writer:
    """Writes the statements of one program."""

    def __init__(self, choose: random.Random) -> None:
        self.choose = choose
        self.statements: list[str] = []
        self.inputs, self.hidden, self.results = ["x"], [], []

    def assign(self, expression: str, count: int = 1) -> list[str]:
        first = sum(statement.count(" = ") for statement in self.statements)
        names = [f"t{len(self.statements)}_{first + i}" for i in range(count)]
        statement = f"{', '.join(names)} = {expression}"
        if self.choose.random() < 0.03:
            statement = f"{self.choose.choice(REGIONS)}\n        {statement}"
        self.statements.append(statement)
        return names

    def input(self) -> str:
        return self.choose.choice(self.inputs[-3:])

    def recent(self) -> str:
        return self.choose.choice(self.hidden[-2:])

    def product(self) -> None:
        weight = self.choose.choice(WEIGHTS)
        text = self.choose.choice(PRODUCTS).format(v=self.input(), w=weight)
        self.hidden += self.assign(text)

    def packed(self) -> None:
        bias = self.choose.choice(("", ", bias.repeat(2)"))
        (packed,) = self.assign(f"F.linear({self.input()}, packed{bias})")
        if self.choose.random() < 0.2:
            self.hidden += self.assign(f"F.glu({packed})")
            return
        parts = self.assign(self.choose.choice(SPLITS).format(p=packed), 2)
        self.hidden += parts
        if self.choose.random() < 0.8:
            a, b = self.choose.sample(parts, 2)
            self.hidden += self.assign(self.choose.choice(JOINS).format(a=a, b=b))

    def activation(self) -> None:
        self.hidden += self.assign(self.choose.choice(ACTIVATIONS).format(h=self.recent()))

    def join(self) -> None:
        a, b = self.choose.choice(self.hidden[-3:]), self.choose.choice(self.hidden[-3:])
        self.hidden += self.assign(self.choose.choice(JOINS).format(a=a, b=b))

    def reshape(self) -> None:
        self.hidden += self.assign(self.choose.choice(RESHAPES).format(h=self.recent()))

    def write(self) -> None:
        h = self.choose.choice(self.hidden)
        self.statements.append(self.choose.choice(WRITES).format(h=h, v=self.input()))

    def down(self) -> None:
        text = self.choose.choice(DOWN).format(h=self.recent(), v=self.input())
        self.results += self.assign(text)
        self.inputs.append(self.results[-1])


def random_program(seed: int) -> Program:
    """The program of a seed."""
    choose = random.Random(seed)
    writer = _Writer(choose)
    steps = ["product"] * 5 + ["activation"] * 8 + ["down"] * 6 + ["packed"] * 3 + ["join"] * 2
    steps += ["reshape"] * 2 + ["write"] * choose.choice((0, 0, 1, 3))
    for _ in range(choose.randint(4, 14)):
        step = choose.choice(steps) if writer.hidden else choose.choice(("product", "packed"))
        getattr(writer, step)()
    writer.down()
    extra = choose.sample(writer.hidden, choose.choice((0, 0, 0, 0, 1)))
    return Program(
        statements=tuple(writer.statements),
        results=(*writer.results, *extra),
        seed=seed,
        leading=choose.choice(LEADING),
        dtype=choose.choice(("float32",) * 4 + ("bfloat16", "float16")),
        grad=choose.random() < 0.5,
        dynamic=choose.random() < 0.2,
    )


if __name__ == "__main__":
    from differential import main

    main()
