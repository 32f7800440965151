"""What the tests of chains share: random chains and their results by PyTorch's operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_backend.kernels.host.configs import Config
from fusion_backend.mlp.expression import Expression, evaluate, parse
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.steps import Steps
from kernel_cases import interpreted, loops_are_broken

RESIDENT = Config(16, 16, num_stages=1, resident=True)
STREAMED = Config(16, 16, num_stages=1)
IN_BOTH_SHAPES = pytest.mark.parametrize(
    "config", [RESIDENT, STREAMED], ids=["resident", "streamed"]
)


def runs(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that Triton's interpreter runs."""
    return interpreted(loops_are_broken(test))


class ChainCase(NamedTuple):
    """The operands of one chain; a bias that does not exist is None."""

    x: Tensor
    weights: list[Tensor]
    biases: list[Tensor | None]
    activations: list[Expression]

    def to(self, dtype: torch.dtype) -> ChainCase:
        biases = [None if bias is None else bias.to(dtype) for bias in self.biases]
        weights = [weight.to(dtype) for weight in self.weights]
        return ChainCase(self.x.to(dtype), weights, biases, self.activations)


def random_chain(
    rows: int,
    widths: Sequence[int],
    activations: Sequence[str] = ("gelu(x)",),
    *,
    dtype: torch.dtype = torch.float32,
    biases: Sequence[bool] = (True,),
    device: str = "cpu",
) -> ChainCase:
    """A chain of these widths; the last activation and the last of ``biases`` go on to the end."""
    layers = len(widths) - 1

    def tensor(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, device=device)).to(dtype)

    def extended(values, length):
        return [values[min(i, len(values) - 1)] for i in range(length)]

    weights = [tensor(widths[i + 1], widths[i], scale=widths[i] ** -0.5) for i in range(layers)]
    has_bias = extended(biases, layers)
    return ChainCase(
        tensor(rows, widths[0]),
        weights,
        [tensor(widths[i + 1]) if has_bias[i] else None for i in range(layers)],
        [parse(text) for text in extended(activations, layers - 1)],
    )


def eager_chain(case: ChainCase) -> Tensor:
    """What ``chain_launch.chain`` computes, by PyTorch's operators."""
    value = case.x
    for i, (weight, bias) in enumerate(zip(case.weights, case.biases, strict=True)):
        if i:
            value = evaluate(case.activations[i - 1], {"x": value})
        value = F.linear(value, weight, bias)
    return value


def random_towers(
    rows: int,
    all_widths: Sequence[Sequence[int]],
    activations: Sequence[str] = ("gelu(x)",),
    **others: Any,
) -> list[ChainCase]:
    """Chains of one input; see :func:`random_chain`."""
    cases = [random_chain(rows, widths, activations, **others) for widths in all_widths]
    return [case._replace(x=cases[0].x) for case in cases]


class StepsCase(NamedTuple):
    """The operands of one chain with norms, and values that are read again."""

    x: Tensor
    weights: list[Tensor]
    biases: list[Tensor | None]
    activations: list[Expression]
    steps: Steps
    norms: list[Norm]

    def to(self, dtype: torch.dtype) -> StepsCase:
        chain = ChainCase(*self[:4]).to(dtype)
        norms = [
            Norm(kind, eps, *(None if each is None else each.to(dtype) for each in parameters))
            for kind, eps, *parameters in self.norms
        ]
        return StepsCase(*chain, self.steps, norms)

    @property
    def parameters(self) -> list[Tensor | None]:
        """Weight and bias of each norm, as the operator takes them."""
        return [each for norm in self.norms for each in (norm.weight, norm.bias)]


def random_steps(
    rows: int,
    widths: Sequence[int],
    text: str,
    activations: Sequence[str],
    *,
    dtype: torch.dtype = torch.float32,
    with_parameters: bool = True,
    device: str = "cpu",
) -> StepsCase:
    """A chain of these widths and steps."""
    chain = random_chain(rows, widths, dtype=dtype, device=device)
    steps = Steps.of(text, len(widths) - 1)
    for i in (i for i, beside in enumerate(steps.beside) if beside):
        read = widths[0] + widths[i]
        weight = read**-0.5 * torch.randn(widths[i + 1], read, device=device)
        chain.weights[i] = weight.to(dtype)
    norms = []
    for group, indices in enumerate(steps.groups):
        for step in (steps.all[index] for index in indices):
            if step.is_norm:
                parameters = (1.0 + torch.randn(widths[group]), torch.randn(widths[group]))
                given = parameters[: 2 if step.kind == "layer_norm" else 1]
                given = [each.to(device, dtype) for each in given] if with_parameters else []
                norms.append(Norm(step.kind, step.eps, *given))
    functions = [parse(text) for text in activations]
    return StepsCase(*chain[:3], functions, steps, norms)


def normed_chain(rows: int, widths: Sequence[int], kind: str = "layer_norm", **how) -> StepsCase:
    """Linear, norm, tanh, linear, …"""
    hidden = len(widths) - 2
    text = "; ".join(["linear", *[f"{kind}(1e-05)", "activation", "linear"] * hidden])
    return random_steps(rows, widths, text, ["tanh(x)"] * hidden, **how)


def residual_blocks(rows: int, width: int, hidden: Sequence[int], out: int, **how) -> StepsCase:
    """x + W_2 gelu(W_1 norm(x)) as often as there are hidden widths, a norm and a last layer."""
    texts: list[str] = []
    for _ in hidden:
        value = len(texts)
        texts += ["rms_norm(1e-06)", "linear", "activation", "linear", f"activation({value})"]
    text = "; ".join([*texts, "layer_norm(1e-05)", "linear"])
    widths = [width, *(each for inner in hidden for each in (inner, width)), out]
    return random_steps(rows, widths, text, ["gelu(x)", "x + p0"] * len(hidden), **how)


def skip_chain(rows: int, width: int, layers: int, out: int, **how) -> StepsCase:
    """h = tanh(W h + b) + h, and a last layer."""
    texts: list[str] = []
    for _ in range(layers):
        value = len(texts)
        texts += ["linear", f"activation({value})"]
    text = "; ".join([*texts, "linear"])
    return random_steps(
        rows, [*[width] * (layers + 1), out], text, ["tanh(x) + p0"] * layers, **how
    )


def joining_chain(
    rows: int,
    widths: Sequence[int],
    joins: Mapping[int, str],
    activation: str = "relu(x)",
    **how: Any,
) -> StepsCase:
    """Layers with an activation between each two, of which some also read the input, as NeRF's.

    ``joins``: where the input stands beside the value before a layer, ``before`` or ``after`` it.
    """
    said = {"before": "linear(0, x)", "after": "linear(x, 0)"}
    layers = [said.get(joins.get(i, ""), "linear") for i in range(len(widths) - 1)]
    hidden = len(widths) - 2
    return random_steps(rows, widths, "; activation; ".join(layers), [activation] * hidden, **how)


def eager_steps(case: StepsCase) -> Tensor:
    """What ``chain_launch.chain`` computes of them, each step rounded as PyTorch rounds it."""
    layers, left = iter(zip(case.weights, case.biases, strict=True)), iter(case.activations)
    norms, values = iter(case.norms), [case.x]
    for step in case.steps.all:
        if step.kind == "linear":
            both = {"before": [case.x, values[-1]], "after": [values[-1], case.x]}
            read = torch.cat(both[step.beside], -1) if step.beside else values[-1]
            values.append(F.linear(read, *next(layers)))
        elif step.is_norm:
            values.append(next(norms)(values[-1]))
        else:
            operands = {f"p{i}": values[read] for i, read in enumerate(step.reads)}
            values.append(evaluate(next(left), {"x": values[-1], **operands}))
    return values[-1]
