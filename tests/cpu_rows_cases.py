"""MLPs that tests of the family ``rows`` share, and how exact their results are to be."""

from __future__ import annotations

import functools

import pytest
import torch

from fusion_backend.compat.triton_features import triton_is_interpreted
from fusion_backend.mlp.expression.operand_names import name_of
from fusion_backend.mlp.weights import Weights

#: Marks of tests that run what a C++ compiler makes.
WITH_COMPILER = [
    pytest.mark.usefixtures("cpp_compiler"),
    pytest.mark.skipif(triton_is_interpreted(), reason="the interpreter runs Triton's kernels"),
]


def parameters(gated, width, hidden, out, dtype=torch.float32, *, transposed=False, bias=True):
    """The six parameters of an MLP, scaled as those of a trained model."""

    def layer(out_features, in_features):
        weight = (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)
        weight = weight.t().contiguous().t() if transposed else weight
        return weight, torch.randn(out_features).to(dtype) if bias else None

    gate = layer(hidden, width) if gated else (None, None)
    return Weights(*gate, *layer(hidden, width), *layer(out, hidden))


def choice_of(texts):
    """One activation that is all of them; an operand says which. So one kernel has them all."""
    chosen = functools.partial("where({} == {}, {}, {})".format, name_of(0))
    result = texts[-1]
    for i, text in reversed([*enumerate(texts[:-1])]):
        result = chosen(float(i), text, result)
    return result


def double(tensors):
    return [None if tensor is None else tensor.double() for tensor in tensors]


def distance(result, exact):
    return (result.double() - exact).norm()


def assert_exact(found, theirs, exact):
    """That ours is no further from float64 than eager's, but for another order of sums."""
    assert (found.dtype, found.shape) == (theirs.dtype, theirs.shape)
    assert distance(found, exact) <= 1.2 * distance(theirs, exact)
