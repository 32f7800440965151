"""What the tests of kernels share: random MLPs, their results in float64, and the bound on errors.

The numbers are checked in two places by the same functions: on Triton's interpreter, which runs
kernels on CPU tensors (``kernels/``), and on a GPU (``gpu/``).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy
import pytest
import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from fusion_backend.compat.triton_features import has_gluon
from fusion_backend.mlp.expression import Expression, evaluate, parse, variables
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.weights import FirstLayer, Weights

# kernels/test_interpreter.py starts the process that interprets.
interpreted = pytest.mark.interpreted
loops_are_broken = pytest.mark.skipif(
    triton.__version__ < "3.7" and numpy.__version__ >= "2.4",
    reason="Triton 3.6's interpreter cannot count to a run-time number with NumPy 2.4",
)
compiled = pytest.mark.compiled
with_gluon = pytest.mark.skipif(not has_gluon(), reason="this Triton has no Gluon for sm_90")
gluon_on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available()
    or torch.cuda.get_device_capability() != (9, 0)
    or not has_gluon(),
    reason="needs Gluon and a GPU of compute capability 9.0",
)

NORMS = ("layer_norm(1e-05)", "rms_norm(1e-06)")
PLAIN, GATED = "gelu(x)", "silu(g) * u"

any_strides = pytest.mark.parametrize(
    "view",
    [
        lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
        lambda x: x.t().contiguous().t(),
        lambda x: x[:1].expand(x.shape),
    ],
    ids=["columns", "transposed", "expanded"],
)


class Case(NamedTuple):
    """The operands of one MLP; those that do not exist are None."""

    x: Tensor
    weight_gate: Tensor | None
    bias_gate: Tensor | None
    weight_up: Tensor
    bias_up: Tensor | None
    weight_down: Tensor
    bias_down: Tensor | None
    activation: Expression

    @property
    def first(self) -> tuple[Tensor, FirstLayer]:
        """The operands of the first layers."""
        return self.x, FirstLayer(*self[1:5])

    @property
    def mlp(self) -> tuple[Tensor, Weights, Expression]:
        """The arguments of a launch of the whole."""
        return self.x, Weights(*self[1:7]), self.activation

    def to(self, dtype: torch.dtype) -> Case:
        return Case(*(t.to(dtype) if isinstance(t, Tensor) else t for t in self))


def turned(case: Case, *names: str) -> Case:
    """The case, with some weights as the transposes of contiguous ones; by default with all."""
    names = names or ("weight_gate", "weight_up", "weight_down")
    stored = {name: getattr(case, name) for name in names}
    return case._replace(**{n: w.t().contiguous().t() for n, w in stored.items() if w is not None})


def random_case(
    rows: int,
    widths: tuple[int, int, int],
    activation: str = PLAIN,
    *,
    dtype: torch.dtype = torch.float32,
    bias: bool = True,
    device: str = "cpu",
) -> Case:
    """An MLP of widths (in, hidden, out) with pre-activations and results of order 1."""
    inner, hidden, out = widths
    expression = parse(activation)
    gated = "x" not in variables(expression)

    def tensor(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, device=device)).to(dtype)

    def layer(out_features: int, in_features: int) -> tuple[Tensor, Tensor | None]:
        weight = tensor(out_features, in_features, scale=in_features**-0.5)
        return weight, tensor(out_features) if bias else None

    gate = layer(hidden, inner) if gated else (None, None)
    up, down = layer(hidden, inner), layer(out, hidden)
    return Case(tensor(rows, inner), *gate, *up, *down, expression)


def random_norm(text: str, case: Case, parameters: bool = True) -> Norm:
    """A norm of rows of x, far from those of mean 0 and variance 1."""
    width, is_layer_norm = case.x.shape[1], text.startswith("layer_norm")
    weight = 1.0 + 0.3 * torch.randn(width, device=case.x.device) if parameters else None
    bias = torch.randn(width, device=case.x.device) if parameters and is_layer_norm else None
    norm = Norm.of(text, *(None if p is None else p.to(case.x.dtype) for p in (weight, bias)))
    assert norm is not None
    return norm


def normed(case: Case, norm: Norm) -> Case:
    """The MLP of the norm of x, in the dtype of the MLP."""
    parameters = (None if p is None else p.to(case.x.dtype) for p in (norm.weight, norm.bias))
    return case._replace(x=Norm(norm.kind, norm.eps, *parameters)(case.x))


def activate(case: Case, gate: Tensor | None, up: Tensor) -> Tensor:
    """The activation by PyTorch's operators, in the dtype of the pre-activations."""
    values = {"x": up} if gate is None else {"g": gate, "u": up}
    return evaluate(case.activation, values)


def eager_preact(case: Case) -> tuple[Tensor | None, Tensor]:
    gate = None
    if case.weight_gate is not None:
        gate = F.linear(case.x, case.weight_gate, case.bias_gate)
    return gate, F.linear(case.x, case.weight_up, case.bias_up)


def eager_epilogue(case: Case) -> tuple[Tensor, Tensor | None, Tensor]:
    """What ``launch.epilogue`` computes, by PyTorch's operators."""
    gate, up = eager_preact(case)
    return activate(case, gate, up), gate, up


def eager_mlp(case: Case) -> Tensor:
    """What ``launch.back_to_back`` computes, by PyTorch's operators."""
    postact, _, _ = eager_epilogue(case)
    return F.linear(postact, case.weight_down, case.bias_down)


def eager_hidden_gradient(
    case: Case, grad_output: Tensor, gate: Tensor | None, up: Tensor
) -> tuple[Tensor | None, Tensor, Tensor]:
    """What ``launch.hidden_gradient`` computes, by PyTorch's autograd."""
    leaves = [preact.detach().requires_grad_() for preact in (gate, up) if preact is not None]
    with torch.enable_grad():
        postact = activate(case, None if gate is None else leaves[0], leaves[-1])
    grad_hidden = grad_output @ case.weight_down
    gradients = torch.autograd.grad(postact, leaves, grad_hidden, materialize_grads=True)
    return None if gate is None else gradients[0], gradients[-1], postact.detach()


def error(result: Tensor, exact: Tensor) -> float:
    """Relative error in the Frobenius norm."""
    return ((result.double() - exact).norm() / exact.norm().clamp(min=1e-30)).item()


def assert_exact(result: Tensor | None, eager: Tensor | None, exact: Tensor | None) -> None:
    """``result`` is as near to float64 as what PyTorch computes in the same dtype.

    A factor of 1.5, because sums of few terms in another order may be unlucky; half a unit in the
    last place, which the rounding of the result alone costs; and four of float32, because another
    formula of the same activation is as right as PyTorch's.
    """
    if result is None or eager is None or exact is None:
        assert result is eager is exact is None
        return
    assert result.dtype == eager.dtype
    assert result.shape == eager.shape
    assert result.is_contiguous()
    rounding = torch.finfo(result.dtype).eps / 2 + 4 * torch.finfo(torch.float32).eps
    bound = 1.5 * error(eager, exact) + rounding
    assert error(result, exact) <= bound
