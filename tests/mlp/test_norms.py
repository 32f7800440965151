"""Norms as the operators take them: what they mean, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)
from fusion_backend.mlp.norms import Norm
from operator_calls import GATED, IN, OUT, PLAIN, arguments, compiled_calls, eager
from repetition import slow_but

ops = torch.ops.fusedmlp


def parameters(text, grad=False):
    """Those of a norm as arguments of ``mlp``."""
    bias = torch.randn(IN, requires_grad=grad) if text.startswith("layer_norm") else None
    weight = torch.randn(IN, requires_grad=grad)
    return {"norm": text, "norm_weight": weight, "norm_bias": bias}


def right(x, norm, norm_weight, norm_bias):
    if norm == "layer_norm(0.001)":
        return F.layer_norm(x, (IN,), norm_weight, norm_bias, 1e-3)
    return F.rms_norm(x, (IN,), norm_weight, 1e-6)


TEXTS = pytest.mark.parametrize("text", ["layer_norm(0.001)", "rms_norm(1e-06)"])


@pytest.mark.parametrize("eps", [1e-5, 1e-12, 0.1, torch.finfo(torch.float32).eps, 0.0, 2.0])
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_the_text_of_a_norm_says_all_but_its_parameters(kind, eps):
    norm = Norm(kind, eps)
    assert Norm.of(norm.text, None, None) == norm


def test_no_text_is_no_norm():
    assert Norm.of("", None, None) is None


@pytest.mark.parametrize(
    ("text", "weight", "bias"),
    [
        ("batch_norm(1e-05)", None, None),
        ("layer_norm", None, None),
        ("layer_norm(1e-05", None, None),
        ("", torch.ones(IN), None),
        ("rms_norm(1e-05)", torch.ones(IN), torch.ones(IN)),
    ],
)
def test_other_texts_and_parameters_that_a_norm_has_not_are_refused(text, weight, bias):
    with pytest.raises(ValueError, match="norm must be layer_norm"):
        ops.mlp(*arguments(PLAIN), norm=text, norm_weight=weight, norm_bias=bias)


@pytest.mark.parametrize("name", ["norm_weight", "norm_bias"])
@pytest.mark.parametrize("vector", [torch.ones(1), torch.ones(OUT), torch.ones(IN).double()])
def test_parameters_that_do_not_fit_are_refused(name, vector):
    with pytest.raises(ValueError, match=f"{name} must"):
        ops.mlp(*arguments(PLAIN), norm="layer_norm(1e-05)", **{name: vector})


@TEXTS
@pytest.mark.parametrize("plan", ["reference", "onednn"])
@pytest.mark.parametrize("activation", [PLAIN, GATED])
@pytest.mark.parametrize("leading", [(), (3,), (2, 0, 3)])
def test_a_norm_comes_before_all_else(activation, plan, leading, text):
    values, norm = arguments(activation, plan, leading=leading), parameters(text)
    residual = torch.randn(*leading, OUT)
    y = ops.mlp(*values, residual=residual, **norm)
    assert y.is_contiguous()
    torch.testing.assert_close(y, eager(right(values[0], **norm), *values[1:]) + residual)


@TEXTS
@pytest.mark.parametrize("grad", slow_but([True], [False, True]))
def test_mlp_is_a_well_behaved_operator_with_a_norm(text, grad):
    values = arguments(GATED)
    values[0].requires_grad_(grad)
    opcheck(ops.mlp, values, parameters(text, grad))


@TEXTS
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_gradients_go_through_a_norm(backend, text):
    values, norm = arguments(GATED), parameters(text, grad=True)
    values[0].requires_grad_()

    def run(x):
        return ops.mlp(x, *values[1:], **norm)

    run = run if backend is None else torch.compile(run, backend=backend, fullgraph=True)
    wanted = [values[0], *(p for p in norm.values() if isinstance(p, torch.Tensor))]
    found, expected = run(values[0]), eager(right(values[0], **norm), *values[1:])
    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad(y.square().sum(), wanted) for y in (found, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@TEXTS
def test_compilers_see_what_a_norm_consists_of(text):
    values, norm = arguments(PLAIN), parameters(text)
    with torch.no_grad():
        found = compiled_calls(lambda x: ops.mlp(x, *values[1:], **norm), values[0])
    assert not any("fusedmlp" in call for call in found)
    assert any("norm" in call or "rsqrt" in call for call in found)
