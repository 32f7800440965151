"""The steps of torch.ops.fusedmlp.chain: norms, and values that are read again."""

from __future__ import annotations

import io

import pytest
import torch
from torch.autograd import gradcheck
from torch.library import opcheck

from chain_cases import eager_steps, joining_chain, normed_chain, residual_blocks
from fusion_backend.errors import PlanError

ops = torch.ops.fusedmlp

CASES = {
    "norms": lambda **how: normed_chain(6, (5, 7, 4, 3), **how),
    "rms norms": lambda **how: normed_chain(6, (5, 7, 4, 3), "rms_norm", **how),
    "residuals": lambda **how: residual_blocks(6, 5, (7, 4), 3, **how),
    "joined": lambda **how: joining_chain(
        6, (5, 7, 4, 6, 3), {1: "before", 3: "after"}, "tanh(x)", **how
    ),
}


def arguments_of(case):
    texts = [str(f) for f in case.activations]
    inner = {"steps": case.steps.text, "norms": case.parameters}
    return (case.x, case.weights, case.biases, texts, "reference"), inner


def run(case):
    given, inner = arguments_of(case)
    return ops.chain(*given, **inner)


def leaves_of(case):
    found = [case.x, *case.weights, *case.biases, *case.parameters]
    return [leaf.requires_grad_() for leaf in found if leaf is not None]


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_eager(name):
    case = CASES[name](dtype=torch.float64)
    leaves = leaves_of(case)
    ours, eager = run(case), eager_steps(case)
    torch.testing.assert_close(ours, eager)
    found, right = (torch.autograd.grad(y.square().sum(), leaves) for y in (ours, eager))
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("name", ["residuals", "joined"])
def test_gradients_are_those_of_finite_differences(name):
    case = CASES[name](dtype=torch.float64)
    leaves_of(case)
    assert gradcheck(lambda x: run(case._replace(x=x)), [case.x])


@pytest.mark.parametrize("name", CASES)
def test_it_is_a_well_behaved_operator(name):
    given, inner = arguments_of(CASES[name]())
    opcheck(ops.chain, given, inner)


@pytest.mark.parametrize("leading", [(), (2, 3), (2, 0)])
def test_any_leading_dimensions_are_rows(leading):
    case = CASES["residuals"]()
    case = case._replace(x=torch.randn(*leading, 5))
    torch.testing.assert_close(run(case), eager_steps(case))


@pytest.mark.parametrize("name", ["residuals", "joined"])
def test_compiled_gradients_are_those_of_eager(name):
    case = CASES[name]()
    leaves = leaves_of(case)
    (_, *given), inner = arguments_of(case)

    def model(x):
        return ops.chain(x, *given, **inner)

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found, right = (torch.autograd.grad(f(case.x).sum(), leaves) for f in (compiled, model))
    torch.testing.assert_close(found, right)


def test_autocast_casts_layers_and_keeps_norms():
    case = normed_chain(200, (16, 32, 32, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, eager = run(case), eager_steps(case)
    exact = eager_steps(case.to(torch.float64))
    assert ours.dtype == eager.dtype == torch.bfloat16
    assert (ours - exact).norm() <= 1.1 * (eager - exact).norm()


def test_autocast_rounds_the_input_for_each_layer_that_reads_it():
    case = joining_chain(200, (16, 32, 32, 8), {1: "before", 2: "after"})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, eager = run(case), eager_steps(case)
    exact = eager_steps(case.to(torch.float64))
    assert ours.dtype == eager.dtype == torch.bfloat16
    assert (ours - exact).norm() <= 1.1 * (eager - exact).norm()


def test_a_weight_must_have_the_features_of_all_that_its_layer_reads():
    case = joining_chain(6, (5, 7, 4, 3), {1: "before"})
    case.weights[1] = case.weights[1][:, :7]
    with pytest.raises(ValueError, match=r"weights\[1\] must have shape \(4, 12\), got \(4, 7\)"):
        run(case)


def test_an_exported_program_is_saved_and_loaded_with_its_steps():
    case = CASES["norms"]()

    class Model(torch.nn.Module):
        def forward(self, x):
            return run(case._replace(x=x))

    program = torch.export.export(Model(), (case.x,))
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    torch.testing.assert_close(loaded(case.x), run(case))


def test_programs_without_steps_have_the_arguments_that_they_had():
    x, weights, biases, *_ = CASES["norms"]()
    y = ops.chain(x, weights, biases, ["relu(x)", "relu(x)"], "reference")
    steps = "linear; activation; linear; activation; linear"
    again = ops.chain(x, weights, biases, ["relu(x)"] * 2, "reference", steps=steps, norms=None)
    torch.testing.assert_close(y, again, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"steps": "linear; linear"}, ValueError, "as many layers as weights, 3, got 2"),
        ({"norms": None}, ValueError, "for each of its 2 norms, got 0 tensors"),
        ({"norms": [torch.ones(3)] * 4}, ValueError, r"norms\[0\] must be a floating \(7,\)"),
        (
            {"steps": "linear; activation; linear; activation(0); linear", "norms": None},
            ValueError,
            "step 3 must read values of 4 features, got 5 of value 0",
        ),
        (
            {"steps": "linear; activation; activation(2); linear; linear", "norms": None},
            PlanError,
            "an expression of p0 and x, got 'tanh\\(x\\)'",
        ),
    ],
)
def test_steps_that_do_not_fit_are_refused(change, error, message):
    given, inner = arguments_of(CASES["norms"]())
    with pytest.raises(error, match=message):
        ops.chain(*given, **{**inner, **change})
