"""Code that Inductor generates for a CPU reads every layout of inputs and weights right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)
from cpu_rows_cases import WITH_COMPILER
from repetition import slow_but

PLAIN, GATED = "gelu_tanh(x)", "silu(g) * u"
ROWS, WIDTHS = 33, (12, 40, 20)

pytestmark = WITH_COMPILER

# Read as they are, by columns or by rows, or copied; the others are like one of these.
DIFFERENT = ["transposed", "every second column", "one row", "later memory"]
LAYOUTS = {
    "transposed": lambda matrix: matrix.t().contiguous().t(),
    "every second column": lambda matrix: torch.stack([matrix, matrix], -1)[..., 1],
    "every second row": lambda matrix: torch.cat([matrix, matrix], 1)[:, : matrix.shape[1]],
    "one row": lambda matrix: matrix[:1].expand_as(matrix),
    "one column": lambda matrix: matrix[:, :1].expand_as(matrix),
    "one number": lambda matrix: matrix[:1, :1].expand_as(matrix),
    "later memory": lambda matrix: torch.cat([matrix, matrix])[matrix.shape[0] :],
}


def mlp(x: Tensor, *weights: Tensor | None, plan: str) -> Tensor:
    activation = PLAIN if weights[0] is None else GATED
    result: Tensor = torch.ops.fusedmlp.mlp(x, *weights, [], activation, plan)
    return result


def made_in_the_graph(x: Tensor, *weights: Tensor | None, plan: str) -> Tensor:
    """Operands that Inductor computes, and may lay out as it likes."""
    doubled = [None if each is None else 2 * each for each in weights]
    return mlp(2 * x, *doubled, plan=plan) + sum(each.sum() for each in doubled if each is not None)


def run_all(function: Callable[..., Tensor], calls: Sequence[Sequence[Tensor]], plan: str) -> Any:
    return [function(*call, plan=plan) for call in calls]


def tensors(gated: bool) -> tuple[Tensor | None, ...]:
    inner, hidden, out = WIDTHS
    matrix = torch.randn(hidden, inner)
    gate, bias = (torch.randn(hidden, inner), torch.randn(hidden)) if gated else (None, None)
    down, bias_down = torch.randn(out, hidden), torch.randn(out)
    x = torch.randn(ROWS, inner)
    return x, gate, bias, matrix, torch.randn(hidden), down, bias_down


def in_layout(tensor: Tensor | None, change: Callable[[Tensor], Tensor]) -> Tensor | None:
    return tensor if tensor is None or tensor.dim() < 2 else change(tensor)


def in_layouts(names: Sequence[str], *tensors: Tensor | None) -> list[list[Tensor | None]]:
    """All matrices among the tensors in each of some layouts."""
    return [[in_layout(each, LAYOUTS[name]) for each in tensors] for name in names]


in_different_or_all_layouts = pytest.mark.parametrize(
    "names", slow_but([DIFFERENT], [DIFFERENT, [*LAYOUTS]]), ids=["different", "all"]
)


# Several layouts in one graph: to compile one takes seconds.
@in_different_or_all_layouts
@pytest.mark.parametrize(
    ("gated", "function"),
    slow_but([(True, made_in_the_graph)], [(False, mlp), (True, made_in_the_graph)]),
)
def test_generated_code_reads_every_layout(gated, function, names):
    calls = in_layouts(names, *tensors(gated))
    with torch.no_grad():
        found = torch.compile(run_all, backend="fusedmlp")(function, calls, "rows")
        expected = run_all(function, calls, "reference")
    for call, one, other in zip(calls, found, expected, strict=True):
        layouts = [None if each is None else each.stride() for each in call]
        torch.testing.assert_close(
            one, other, rtol=1e-4, atol=1e-4, msg=lambda text, at=layouts: f"{at}: {text}"
        )


@in_different_or_all_layouts
@pytest.mark.parametrize("gated", slow_but([False], [False, True]))
def test_generated_code_differentiates_with_every_layout(gated, names):
    leaves = [None if each is None else each.requires_grad_() for each in tensors(gated)]
    learnt = [leaf for leaf in leaves if leaf is not None]
    arriving = [LAYOUTS[name](torch.randn(ROWS, WIDTHS[2])) for name in names]

    def differentiated(run, plan):
        results = run(mlp, in_layouts(names, *leaves), plan)
        return torch.autograd.grad(results, learnt, arriving)

    found = differentiated(torch.compile(run_all, backend="fusedmlp"), "rows")
    expected = differentiated(run_all, "reference")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
