"""What is benchmarked: one MLP a cell, and the grids of cells that are published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend.errors import CommandError
from fusion_backend.mlp.expression import evaluate, parse, variables
from fusion_backend.mlp.weights import Weights
from fusion_backend.options import nearest

#: Names of activations, and what they mean as expressions.
FORMS = {
    "gelu": "gelu(x)",
    "gelu_tanh": "gelu_tanh(x)",
    "relu": "relu(x)",
    "silu": "silu(x)",
    "swiglu": "silu(g) * u",
    "geglu": "gelu(g) * u",
    "geglu_tanh": "gelu_tanh(g) * u",
    "reglu": "relu(g) * u",
}
#: Dtypes of all tensors. Products of float32 tensors are exact to IEEE's rules, or TF32.
PRECISIONS = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "tf32": torch.float32,
    "float32": torch.float32,
}


@dataclass(frozen=True)
class Cell:
    """One MLP, ``rows`` × ``width`` → ``hidden`` → ``out``, for inference.

    Published results are keyed by it, so it has the names that people give to forms and dtypes.

    Attributes:
        form: a name in :data:`FORMS`, or an expression of ``x``, or of ``g`` and ``u``.
        rows: number of input vectors.
        width: of the input.
        hidden: width between the layers.
        precision: a name in :data:`PRECISIONS`.
        bias: whether every layer has one; by default plain MLPs have, gated ones have not.
        out: width of the output, by default that of the input.
    """

    form: str
    rows: int
    width: int
    hidden: int
    precision: str = "bfloat16"
    bias: bool | None = None
    out: int | None = None

    @property
    def activation(self) -> str:
        """The activation as a canonical expression."""
        return FORMS.get(self.form) or str(parse(self.form))

    @property
    def gated(self) -> bool:
        """Whether there are two first layers."""
        return "g" in variables(parse(self.activation))

    @property
    def has_bias(self) -> bool:
        """Whether the layers have biases."""
        return not self.gated if self.bias is None else self.bias

    @property
    def out_width(self) -> int:
        """Width of the output."""
        return self.width if self.out is None else self.out

    @property
    def dtype(self) -> torch.dtype:
        """Of all tensors."""
        return PRECISIONS[self.precision]

    @property
    def name(self) -> str:
        """The cell in words, its key in the results."""
        bias = "biases" if self.has_bias else "no biases"
        widths = f"{self.width}→{self.hidden}→{self.out_width}"
        return f"{self.form} {self.rows}×{widths}, {self.precision}, {bias}"


def operands(cell: Cell, sets: int, device: torch.device) -> tuple[Tensor, list[Weights]]:
    """A random input ``(rows, width)`` and that many sets of weights; results are of order one."""

    def weight(out_features: int, in_features: int) -> Tensor:
        drawn = torch.randn(out_features, in_features, dtype=cell.dtype, device=device)
        return drawn.div_(in_features**0.5)

    def bias(features: int) -> Tensor | None:
        if not cell.has_bias:
            return None
        return torch.randn(features, dtype=cell.dtype, device=device)

    def drawn() -> Weights:
        return Weights(
            weight_gate=weight(cell.hidden, cell.width) if cell.gated else None,
            bias_gate=bias(cell.hidden) if cell.gated else None,
            weight_up=weight(cell.hidden, cell.width),
            bias_up=bias(cell.hidden),
            weight_down=weight(cell.out_width, cell.hidden),
            bias_down=bias(cell.out_width),
        )

    x = torch.randn(cell.rows, cell.width, dtype=cell.dtype, device=device)
    return x, [drawn() for _ in range(sets)]


def as_written(cell: Cell) -> Callable[..., Tensor]:
    """The MLP as a person writes it: a function of the input and the six weights and biases."""
    activate = _activation_as_written(cell.activation)

    def gated(x: Tensor, *w: Any) -> Tensor:
        gate, up = F.linear(x, w[0], w[1]), F.linear(x, w[2], w[3])
        return F.linear(activate(gate, up), w[4], w[5])

    def plain(x: Tensor, *w: Any) -> Tensor:
        return F.linear(activate(F.linear(x, w[2], w[3])), w[4], w[5])

    return gated if cell.gated else plain


def _activation_as_written(activation: str) -> Callable[..., Tensor]:
    written: dict[str, Callable[..., Tensor]] = {
        "gelu(x)": F.gelu,
        "gelu_tanh(x)": lambda x: F.gelu(x, approximate="tanh"),
        "relu(x)": F.relu,
        "silu(x)": F.silu,
        "silu(g) * u": lambda g, u: F.silu(g) * u,
        "gelu(g) * u": lambda g, u: F.gelu(g) * u,
        "gelu_tanh(g) * u": lambda g, u: F.gelu(g, approximate="tanh") * u,
        "relu(g) * u": lambda g, u: F.relu(g) * u,
    }
    if activation in written:
        return written[activation]
    expression = parse(activation)
    if "g" in variables(expression):
        return lambda g, u: evaluate(expression, {"g": g, "u": u})
    return lambda x: evaluate(expression, {"x": x})


def check(cell: Cell) -> None:
    """Refuse a cell that cannot be built.

    Raises:
        CommandError: a size is below one, or the form is neither a name nor an expression.
    """
    for size in ("rows", "width", "hidden", "out_width"):
        if getattr(cell, size) < 1:
            raise CommandError(f"{size} must be at least 1, got {getattr(cell, size)}")
    try:
        names = set(variables(parse(cell.activation)))
    except ValueError as error:
        raise CommandError(
            f"the form must be one of {', '.join(FORMS)} or an expression such as 'silu(g) * u', "
            f"got {cell.form!r}{nearest(cell.form, FORMS)}: {error}"
        ) from error
    if names not in ({"x"}, {"g", "u"}):
        near = nearest(cell.form, FORMS)
        raise CommandError(f"the form must speak of x, or of g and u, got {cell.form!r}{near}")
