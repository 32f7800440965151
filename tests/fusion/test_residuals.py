"""Sums that follow an MLP: which are added within its operator, and which must stay outside."""

from __future__ import annotations

import itertools
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from capture import ALWAYS, calls_of, fused_calls, record, record_as_eager
from fusion_backend import explain, fuse
from fusion_backend.fusion import decisions
from fusion_backend.planning.planner import Plan
from models import MLP, Around, Gated, X
from repetition import slow_but

OPERATOR = torch.ops.fusedmlp.mlp.default


def mlp(m, x):
    """Of an activation that oneDNN does not know: its plan leaves sums to Inductor."""
    return m.down(F.mish(m.up(x)))


def _in_place_on_the_result(m, x):
    y = mlp(m, x)
    y += x
    return y


def _of_what_was_written_before(m, x):
    residual = x * 2
    residual.mul_(3.0)
    return mlp(m, x) + residual


def _written_to_afterwards(m, x):
    y = mlp(m, x) + x
    y.mul_(2.0)
    return y


def _residual_written_to_afterwards(m, x):
    residual = x * 2
    y = mlp(m, x) + residual
    residual.zero_()
    return y, residual


def _in_a_branch(m, x):
    return torch.cond(x.sum() > 0, lambda x: x + mlp(m, x), lambda x: x + 1, (x,))


# What eager computes, and how many sums the fused operators take in.
ABSORBED = {
    "residual first": (lambda m, x: x + mlp(m, x), 1),
    "residual last": (lambda m, x: mlp(m, x) + x, 1),
    "function": (lambda m, x: torch.add(x, mlp(m, x)), 1),
    "method with alpha of 1": (lambda m, x: x.add(mlp(m, x), alpha=1), 1),
    "keywords": (lambda m, x: torch.add(input=x, other=mlp(m, x)), 1),
    "ATen": (lambda m, x: torch.ops.aten.add.Tensor(mlp(m, x), x), 1),
    "in place on the result": (_in_place_on_the_result, 1),
    "in place by a method": (lambda m, x: mlp(m, x).add_(x), 1),
    "normed input": (lambda m, x: x + mlp(m, F.layer_norm(x, (8,))), 1),
    "inactive dropout": (lambda m, x: x + F.dropout(mlp(m, x), 0.1, training=False), 1),
    "inactive dropout in place": (
        lambda m, x: x + F.dropout(mlp(m, x), 0.1, training=False, inplace=True),
        1,
    ),
    "copied residual": (lambda m, x: x.clone() + mlp(m, x), 1),
    "computed residual": (lambda m, x: (residual := torch.sin(x)) + mlp(m, residual), 1),
    "parameter": (lambda m, x: mlp(m, x[0]) + m.position, 1),
    "two blocks": (lambda m, x: (h := x + mlp(m, x)) + mlp(m, h), 2),
    "two MLPs of one input": (lambda m, x: mlp(m, x) + mlp(m, 2 * x), 1),
    "written before": (_of_what_was_written_before, 1),
    "written afterwards": (_written_to_afterwards, 1),
    "residual written afterwards": (_residual_written_to_afterwards, 1),
    "branch": (_in_a_branch, 1),
    "norm and a later residual": (lambda m, x: (h := x + mlp(m, x)) + F.layer_norm(h, (8,)), 1),
    "product behind a reshape": (lambda m, x: (x + mlp(m, x)).flatten(0, 1) @ m.position.T, 1),
    "product behind dropout": (
        lambda m, x: F.dropout(x + mlp(m, x), 0.1, training=False) @ m.position.T,
        1,
    ),
}


def _residual_written_to_between(m, x):
    residual = x * 2
    y = mlp(m, x)
    residual.add_(1.0)
    return y + residual


def _view_of_residual_written_to_between(m, x):
    residual = x * 2
    y = mlp(m, x)
    residual[:1].zero_()
    return y + residual


def _in_place_on_the_residual(m, x):
    residual = x * 2
    residual += mlp(m, x)
    return residual


def _result_returned_as_well(m, x):
    y = mlp(m, x)
    return x + y, y


def _result_read_twice(m, x):
    y = mlp(m, x)
    return x + y, y.sum()


def _residual_computed_afterwards(m, x):
    y = mlp(m, x)
    return y + torch.sin(x)


def _residual_of_the_result(m, x):
    y = mlp(m, x)
    return y + y.mean()


def _other_grad_mode(m, x):
    with torch.enable_grad():
        y = mlp(m, x)
    return x + y


def _residual_drawn_from_before_and_after(m, x):
    y = F.dropout(mlp(m, x), 0.5)
    return x + 0 * y


def _within_another_activation(m, x):
    """The sum is the activation of a second site, of which the first one is an operand."""
    first = m.up(x)
    inner = F.linear(F.gelu(F.linear(x, m.up.weight)), m.square)
    return m.down(F.relu(first + inner))


def _of_a_chain(m, x):
    return x + m.down(F.mish(F.linear(F.mish(m.up(x)), m.square)))


def _of_a_part(m, x):
    h = F.mish(m.up(x))
    return m.down(h), h + m.square[0].expand_as(h)


ALONE = {
    "broadcast": lambda m, x: x[..., :1] + mlp(m, x),
    "broadcast result": lambda m, x: x.expand(2, *x.shape) + mlp(m, x),
    "number": lambda m, x: mlp(m, x) + 1.0,
    "scalar tensor": lambda m, x: mlp(m, x) + m.up.bias[0],
    "wider dtype": lambda m, x: x.double() + mlp(m, x),
    "narrower dtype": lambda m, x: x.bfloat16() + mlp(m, x),
    "integers": lambda m, x: x.int() + mlp(m, x),
    "alpha": lambda m, x: torch.add(mlp(m, x), x, alpha=2),
    "alpha of the residual": lambda m, x: x.add(mlp(m, x), alpha=0.5),
    "difference": lambda m, x: x - mlp(m, x),
    "scaled result": lambda m, x: x + 0.5 * mlp(m, x),
    "itself": lambda m, x: (y := mlp(m, x)) + y,
    "returned": lambda m, x: mlp(m, x),
    # A compiler does not store these either: what reads them computes them.
    "norm behind": lambda m, x: F.layer_norm(x + mlp(m, x), (8,)),
    "norm behind a reshape": lambda m, x: F.rms_norm((x + mlp(m, x)).flatten(0, 1), (8,)),
    "function behind": lambda m, x: F.relu(x + mlp(m, x)),
    "cast behind": lambda m, x: (x + mlp(m, x)).double(),
    "sum of three": lambda m, x: x + mlp(m, x) + x,
    "parallel attention": lambda m, x: x + (torch.sin(x) + mlp(m, x)),
    "transposed": lambda m, x: x.mT.contiguous().mT + mlp(m, x),
    "reshaped": lambda m, x: x.flatten(0, 1) + mlp(m, x).flatten(0, 1),
    "active dropout": _residual_drawn_from_before_and_after,
    "returned as well": _result_returned_as_well,
    "read twice": _result_read_twice,
    "written between": _residual_written_to_between,
    "view written between": _view_of_residual_written_to_between,
    "in place on the residual": _in_place_on_the_residual,
    "computed afterwards": _residual_computed_afterwards,
    "of a chain": _of_a_chain,
    "of a part of an MLP": _of_a_part,
    "of the result": _residual_of_the_result,
    "other grad mode": _other_grad_mode,
    "within another activation": _within_another_activation,
}


def model_of(body) -> Around:
    model = Around(body)
    model.position = nn.Parameter(torch.randn(5, 8))
    model.square = nn.Parameter(torch.randn(16, 16) / 4)
    return model


def residuals(recorder) -> int:
    calls = (call for graph in recorder.after for call in calls_of(graph, OPERATOR))
    return sum("residual" in call.kwargs for call in calls)


def check(body, count: int) -> None:
    recorder = record_as_eager(model_of(body), X)
    assert residuals(recorder) == count
    assert sum(site.residual for site in recorder.sites) == count
    assert sum("adds the residual" in site.detail for site in recorder.sites) == count


@pytest.mark.parametrize("name", ABSORBED)
def test_a_sum_is_added_within(name):
    check(*ABSORBED[name])


@pytest.mark.parametrize("name", ALONE)
def test_a_sum_that_would_not_be_the_same_stays_outside(name):
    check(ALONE[name], 0)


def test_no_call_is_left_of_a_block_whose_sum_is_added_within():
    with torch.no_grad():
        recorder, _ = record(model_of(ABSORBED["inactive dropout"][0]), X)
    (call,) = (n for n in recorder.after[0].graph.nodes if n.op.startswith("call"))
    assert call.target is OPERATOR
    assert call.kwargs["residual"].op == "placeholder"
    assert call.meta["example_value"].shape == X.shape


def test_gated_mlps_and_symbolic_rows_take_a_residual():
    gated = Gated(lambda g, u: F.mish(g) * u)

    def block(x):
        return x + gated(x)

    with torch.no_grad():
        recorder, result = record(block, X, dynamic=True)
        torch.testing.assert_close(result, block(X))
    assert residuals(recorder) == 1


def test_the_operator_of_a_sum_is_a_summand_of_the_next():
    def chained(m, x):
        for _ in range(3):
            x = x + mlp(m, F.layer_norm(x, (8,)))
        return x

    check(chained, 3)


@pytest.mark.parametrize("export", [False, True])
def test_graphs_that_dynamo_did_not_make_are_rewritten_alike(export):
    model = model_of(ABSORBED["residual first"][0])
    with torch.no_grad():
        traced = (
            torch.export.export(model, (X,)).module() if export else torch.fx.symbolic_trace(model)
        )
        fused = fuse(traced, [X], ALWAYS).graph_module
        torch.testing.assert_close(fused(X), model(X))
    (call,) = fused.graph.find_nodes(op="call_function", target=OPERATOR)
    assert call.kwargs
    assert operator.add not in {node.target for node in fused.graph.nodes}


def test_a_residual_that_is_learnt_stays_outside():
    model = model_of(lambda m, x: m.position + mlp(m, x[0]))
    for parameter in (*model.up.parameters(), *model.down.parameters()):
        parameter.requires_grad_(False)
    recorder, result = record(model, X)
    assert fused_calls(recorder.after[0]) == 1
    assert residuals(recorder) == 0
    assert result.requires_grad


@pytest.mark.parametrize(
    ("rows", "width", "plan", "within"),
    [
        (4096, 64, "back_to_back", True),
        (4096, 768, "epilogue", False),
        (16384, 768, "epilogue", True),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_where_a_kernel_would_take_longer_the_sum_is_left_to_inductor(
    rows, width, plan, within, dynamic
):
    layers = nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
    model = nn.Sequential(*layers).bfloat16().to("meta")
    x = torch.empty(rows, width, dtype=torch.bfloat16, device="meta")
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
        within = plan == "back_to_back"  # how many tiles there will be is not known
    with torch.no_grad():
        explanation = explain(lambda x: x + model(x), x, target="h200")
    (site,) = explanation.sites
    assert (site.plan, site.residual) == (plan, within)
    assert site.residual == (f"{plan} + residual" in str(explanation))


@pytest.mark.parametrize(
    ("dtype", "target", "within"),
    [
        (torch.float16, "h100", True),
        (torch.float32, "h100", False),
        (torch.float16, "a100", False),
    ],
)
def test_what_no_kernel_adds_is_left_to_inductor_under_any_policy(dtype, target, within):
    model = nn.Sequential(nn.Linear(512, 4096), nn.Mish(), nn.Linear(4096, 512)).to("meta", dtype)
    x = torch.empty(200, 512, dtype=dtype, device="meta")
    with torch.no_grad():
        options = {"fusedmlp.policy": "always"}
        (site,) = explain(lambda x: x + model(x), x, target=target, options=options).sites
    assert (site.plan, site.residual) == ("epilogue", within)


@pytest.mark.parametrize("training", [False, True])
def test_wide_layers_that_are_trained_leave_their_sum_to_inductor(monkeypatch, training):
    monkeypatch.setattr(decisions, "plan", lambda *of: Plan("epilogue", "by the test"))
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
    model = model.bfloat16().to("meta")
    x = torch.empty(16384, 1024, dtype=torch.bfloat16, device="meta")
    with torch.set_grad_enabled(training):
        (site,) = explain(lambda x: x + model(x), x, target="h100").sites
    assert site.residual != training


@pytest.mark.parametrize(
    ("backend", "residual_needs"),
    slow_but(
        [(None, False), ("aot_eager", True)],
        itertools.product([None, "aot_eager", "inductor"], [False, True]),
    ),
)
def test_gradients_go_through_the_sum(backend, residual_needs):
    model = MLP(F.gelu)
    parameters = [model.up.weight, model.up.bias, model.down.weight, model.down.bias]

    def run(x, residual):
        given = (x, None, None, *parameters, [], "gelu(x)", "reference")
        return OPERATOR(*given, residual=residual)

    run = run if backend is None else torch.compile(run, backend=backend, fullgraph=True)
    x, residual = X.clone().requires_grad_(), torch.randn_like(X).requires_grad_(residual_needs)
    wanted = [x, *parameters, *([residual] if residual_needs else [])]
    found, expected = run(x, residual), residual + model(x)
    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad(y.square().sum(), wanted) for y in (found, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
