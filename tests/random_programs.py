"""Random programs around MLPs: shared values, writes in place, views, extra users, several results.

A program is a function of ``(x, up, other, down, bias)`` as Python text, so that a failure can be
read. Whatever it does to its arguments, eager PyTorch says what is right.
"""

from __future__ import annotations

import random

ACTIVATIONS = (
    "F.gelu({h})",
    "F.silu({h})",
    "torch.sigmoid({h}) * {h}",
    "{h} ** 2",
    "torch.where({h} > 0, {h}, 0.1 * {h})",
    "{h}.clamp(-1, 1)",
    "F.relu({h}, inplace=True)",
    "{h}.tanh_()",
    "F.leaky_relu_({h})",
    "{h}.mul_(0.5)",
    "{h} * 2",
    "-{h}",
)
LINEARS = (
    "F.linear({v}, up)",
    "F.linear({v}, up, bias)",
    "F.linear({v}, other)",
    "{v} @ up.t()",
    "torch.addmm(bias, {v}, up.t())",
)
WRITES = (
    "{h}.add_(1.0)",
    "{h}[0].zero_()",
    "{h}.view(-1).mul_(2)",
    "x.mul_(0.9)",
    "x[:1].add_(1)",
    "down.mul_(1.01)",
)
RESHAPES = ("{h}[..., :8].repeat(1, 2)", "{h}.view(-1, 16)", "{h}.t().contiguous().t()")


def random_program(seed: int) -> str:
    """The text of a function ``program``; the same for the same seed."""
    choose = random.Random(seed)
    lines = ["def program(x, up, other, down, bias):"]
    inputs, hidden, results = ["x"], [], []

    def assign(expression: str) -> str:
        name = f"t{len(lines)}"
        lines.append(f"    {name} = {expression}")
        return name

    for _ in range(choose.randint(4, 12)):
        kind = choose.random()
        if kind < 0.3 or not hidden:
            hidden.append(assign(choose.choice(LINEARS).format(v=choose.choice(inputs))))
        elif kind < 0.6:
            hidden.append(assign(choose.choice(ACTIVATIONS).format(h=choose.choice(hidden[-2:]))))
        elif kind < 0.68:
            left, right = choose.choice(hidden[-3:]), choose.choice(hidden[-3:])
            hidden.append(assign(f"{left} {choose.choice('*+')} {right}"))
        elif kind < 0.72:
            hidden.append(assign(choose.choice(RESHAPES).format(h=choose.choice(hidden))))
        elif kind < 0.77:
            lines.append("    " + choose.choice(WRITES).format(h=choose.choice(hidden)))
        else:
            results.append(assign(f"F.linear({choose.choice(hidden[-2:])}, down)"))
            inputs.append(results[-1])
    results.append(assign(f"F.linear({hidden[-1]}, down)"))
    results.extend(choose.sample(hidden, choose.choice([0, 0, 0, 1])))
    return "\n".join([*lines, f"    return {', '.join(results)},"])
