"""explain(): every MLP of a model, across graph breaks, and nothing of the model changed."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion_backend import Explanation, explain
from fusion_backend.compat import dynamo, inductor
from fusion_backend.errors import ExplainError, OptionError
from fusion_backend.fusion import decisions
from fusion_backend.fusion import fuse as fusion
from fusion_backend.fusion.sites import REPLACES
from fusion_backend.instruments.compiled_calls import as_compiled

ALWAYS = {"fusedmlp.policy": "always"}


class MLP(nn.Module):
    def __init__(self, width: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.fc = nn.Linear(width, hidden)
        self.proj = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(x), approximate="tanh"))


class Escaping(MLP):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        preact = self.fc(x)
        return self.proj(F.gelu(preact, approximate="tanh")), preact


class Model(nn.Module):
    """A fused and an unfused MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()
        self.escaping = Escaping()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.escaping(x + self.mlp(x))


class Broken(Model):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.mlp(x)
        torch._dynamo.graph_break()
        return self.escaping(x)


def explain_fusing_all(model: Any, *args: Any, **kwargs: Any) -> Explanation:
    with torch.no_grad():
        return explain(model, *args, options=ALWAYS, **kwargs)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 4, 16)


def test_every_site_is_reported_with_its_module_and_fate(x: Tensor) -> None:
    explanation = explain_fusing_all(Model(), x)
    (fused,), (left,) = explanation.fused, explanation.left_alone
    assert explanation.sites == (fused, left)
    assert (fused.module, fused.activation, fused.reason) == ("mlp", "gelu_tanh(x)", None)
    assert tuple(fused.shape) == (8, 16, 32, 16)
    assert (left.module, left.reason, left.plan) == ("escaping", "hidden-escapes", None)


def test_the_default_policy_is_the_one_of_the_backend(x: Tensor) -> None:
    (site,) = explain(MLP(), x, options={"fusedmlp.policy": "never"}).sites
    assert not site.fused


def test_all_graphs_of_a_broken_model_are_reported(x: Tensor) -> None:
    explanation = explain_fusing_all(Broken(), x)
    assert [site.module for site in explanation.sites] == ["mlp", "escaping"]
    assert len(explanation.graphs) == 2
    (reason,) = explanation.graph_breaks
    assert "graph_break" in reason
    assert __file__ in reason


def test_a_graph_break_in_a_loop_is_reported(x: Tensor) -> None:
    def loops(x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.relu(x)
            torch._dynamo.graph_break()
        return mlp(x)

    mlp = MLP()
    (reason,) = explain(loops, x).graph_breaks
    assert "graph_break" in reason


def test_a_whole_graph_has_no_graph_breaks(x: Tensor) -> None:
    assert explain(Model(), x).graph_breaks == ()


def test_graphs_hold_the_operator_after_and_not_before(x: Tensor) -> None:
    ((before, after),) = explain_fusing_all(Model(), x).graphs
    target = torch.ops.fusedmlp.mlp.default
    assert not before.graph.find_nodes(op="call_function", target=target)
    assert len(after.graph.find_nodes(op="call_function", target=target)) == 1


def test_the_diff_shows_the_rewrite_under_the_names_of_the_model(x: Tensor) -> None:
    removed, added = [], []
    for line in explain_fusing_all(Model(), x).graph_diff().splitlines()[2:]:
        if line.startswith("-"):
            removed.append(line)
        if line.startswith("+"):
            added.append(line)
    assert len(removed) > len(added) > 0
    assert any("linear(l_args_0_, mlp.fc.weight, mlp.fc.bias)" in line for line in removed)
    assert any("fusedmlp.mlp.default(" in line and "mlp.proj.bias" in line for line in added)


def test_the_diff_of_an_unchanged_graph_is_empty(x: Tensor) -> None:
    assert explain(Model(), x, options={"fusedmlp.policy": "never"}).graph_diff() == ""


def test_graphs_are_printed_before_and_after(x: Tensor) -> None:
    output = io.StringIO()
    explain_fusing_all(Broken(), x).print_graphs(output)
    titles = [line for line in output.getvalue().splitlines() if line.startswith("#")]
    expected = [f"# graph {i}, {moment}" for i in (0, 1) for moment in ("before", "after")]
    assert titles == expected


def test_json_holds_every_site(x: Tensor) -> None:
    content = json.loads(explain_fusing_all(Broken(), x).to_json())
    assert content["graphs"] == 2
    assert len(content["graph_breaks"]) == 1
    assert [site["fused"] for site in content["sites"]] == [True, False]
    assert [site["legal"] for site in content["sites"]] == [True, False]
    assert content["sites"][0]["shape"] == {
        "rows": 8,
        "in_features": 16,
        "hidden_features": 32,
        "out_features": 16,
    }


def test_symbolic_rows_are_text(x: Tensor) -> None:
    explanation = explain_fusing_all(MLP(), x, dynamic=True)
    rows = json.loads(explanation.to_json())["sites"][0]["shape"]["rows"]
    assert isinstance(rows, str)
    assert rows.count("s") == 2


def test_a_function_and_keyword_arguments_can_be_explained(x: Tensor) -> None:
    mlp = MLP()

    def function(x: Tensor, *, scale: float) -> Tensor:
        return mlp(x) * scale

    assert len(explain(function, x, scale=2.0).sites) == 1


def test_a_compiled_model_is_explained_as_the_original(x: Tensor) -> None:
    compiled = torch.compile(MLP(), backend="eager")
    compiled(x)
    assert len(explain(compiled, x).sites) == 1


def test_a_model_compiled_in_place_is_explained(x: Tensor) -> None:
    model = MLP()
    model.compile(backend="eager")
    model(x)
    assert len(explain(model, x).sites) == 1


def compiled(model: Any, how: str, **settings: Any) -> Any:
    """A model as ``torch.compile`` returns it, in one of its ways."""
    if how == "in place":
        model.compile(**settings)
        return model
    return torch.compile(model.forward if how == "a method" else model, **settings)


WAYS = pytest.mark.parametrize("how", ["a module", "a method", "in place"])


@WAYS
@pytest.mark.parametrize("policy", ["always", "never"])
def test_a_compiled_model_is_explained_with_its_options(x: Tensor, how: str, policy: str) -> None:
    options = {"fusedmlp.policy": policy}
    with torch.no_grad():
        (site,) = explain(compiled(MLP(), how, backend="fusedmlp", options=options), x).sites
    assert site.rewritten == (policy == "always")
    assert (site.reason == "policy") == (policy == "never")


@WAYS
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_compiled_model_is_explained_as_dynamic_as_it_is(
    x: Tensor, how: str, dynamic: bool
) -> None:
    (site,) = explain(compiled(MLP(), how, backend="fusedmlp", dynamic=dynamic), x).sites
    assert isinstance(site.shape.rows, str) == dynamic
    (site,) = explain(compiled(MLP(), how, dynamic=dynamic), x).sites  # by Inductor
    assert isinstance(site.shape.rows, str) == dynamic


@WAYS
def test_a_compiled_model_is_explained_in_its_mode(
    x: Tensor, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    plan = decisions.plan
    monkeypatch.setattr(
        decisions, "plan", lambda *all_: seen.append(inductor.max_autotunes()) or plan(*all_)
    )
    mode = {"mode": "max-autotune-no-cudagraphs"}
    explain(compiled(MLP(), how, backend="fusedmlp", **mode), x)
    explain(compiled(MLP(), how, backend="inductor", **mode), x)
    explain(compiled(MLP(), how, backend="fusedmlp"), x)
    explain(compiled(MLP(), how, backend="fusedmlp", **mode), x, options=ALWAYS)
    assert seen == [True, True, False, True]


def test_what_is_asked_for_replaces_what_a_model_was_compiled_with(x: Tensor) -> None:
    options = {"fusedmlp.policy": "never", "freezing": True}
    model = torch.compile(MLP(), backend="fusedmlp", options=options, dynamic=True)
    (site,) = explain(model, x, options=ALWAYS, dynamic=False).sites
    assert (site.rewritten, site.shape.rows) == (True, 8)
    given = dynamo.CompileSettings(ALWAYS, None, None)
    assert as_compiled(model, given) == ({**options, **ALWAYS}, None, True)
    assert as_compiled(MLP(), given) == given


def test_options_of_other_backends_are_not_taken_for_ours(x: Tensor) -> None:
    def backend(graph_module: Any, inputs: Any, **settings: Any) -> Any:
        return graph_module.forward

    model = torch.compile(MLP(), backend=backend, options={"theirs": 1}, dynamic=True)
    (site,) = explain(model, x).sites
    assert isinstance(site.shape.rows, str)


def test_a_model_with_compiled_parts_is_explained(x: Tensor) -> None:
    model = nn.Sequential(MLP(), MLP())
    model[0] = torch.compile(model[0], backend="eager")
    model[1].compile(backend="eager")
    model(x)
    assert len(explain(model, x).sites) == 2


def test_explaining_works_in_inference_mode(x: Tensor) -> None:
    with torch.inference_mode():
        assert len(explain(MLP(), x, options=ALWAYS).fused) == 1


@pytest.mark.usefixtures("rows_by_reference")
def test_training_mode_is_the_callers() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4))
    x = torch.randn(2, 4)
    with torch.no_grad():
        (training,) = explain(model, x, options=ALWAYS).sites
        (evaluation,) = explain(model.eval(), x, options=ALWAYS).sites
    assert training.activation == "dropout(relu(x), p0, 0.5)"
    assert evaluation.activation == "relu(x)"


@pytest.mark.usefixtures("rows_by_reference")
def test_what_enters_the_activation_is_named_in_report_and_json() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.PReLU(), nn.Dropout(0.5), nn.Linear(8, 4))
    explanation = explain(model, torch.randn(2, 4), options=ALWAYS)
    assert "p0 is the number 1.weight, p1 is the seed of a dropout." in str(explanation)
    (site,) = json.loads(explanation.to_json())["sites"]
    assert site["operands"] == ["number 1.weight", "seed of a dropout"]


def test_explaining_twice_with_other_sizes_does_not_make_sizes_dynamic() -> None:
    model = MLP()
    for rows in (4, 8):
        (site,) = explain(model, torch.randn(rows, 16)).sites
        assert site.shape.rows == rows


def test_explaining_does_not_make_sizes_dynamic_for_the_caller() -> None:
    symbolic: list[bool] = []

    def backend(graph_module: Any, inputs: Any) -> Any:
        symbolic.append(any(isinstance(value, torch.SymInt) for value in inputs))
        return graph_module.forward

    model = MLP()
    explain(model, torch.randn(4, 16))
    torch.compile(model, backend=backend)(torch.randn(8, 16))
    assert symbolic == [False]


def test_compiled_code_of_the_caller_stays_valid() -> None:
    model = MLP()
    compiled = torch.compile(model, backend="eager")
    compiled(torch.randn(8, 16))
    explain(model, torch.randn(4, 16))
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(torch.randn(8, 16))


def test_explaining_never_meets_the_recompile_limit(x: Tensor) -> None:
    model = MLP()
    for _ in range(torch._dynamo.config.recompile_limit + 1):
        assert len(explain(model, x).sites) == 1


def test_inputs_buffers_and_random_numbers_are_left_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Dropout(), nn.BatchNorm1d(8))
    x = torch.randn(8, 4)
    x_before, buffers = x.clone(), {k: v.clone() for k, v in model.named_buffers()}
    random = torch.get_rng_state()
    explain(lambda x: model(x.add_(1)), x)
    assert torch.equal(x, x_before)
    assert torch.equal(torch.get_rng_state(), random)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def test_a_model_that_fails_is_one_clear_error() -> None:
    with pytest.raises(ExplainError, match="the model fails under torch"):
        explain(MLP(), torch.randn(3, 5))


def test_a_model_without_graph_is_an_error(x: Tensor) -> None:
    with pytest.raises(ExplainError, match="captured no graph"):
        explain(torch.compiler.disable(MLP().forward), x)


def test_an_unknown_option_of_fusedmlp_is_an_option_error(x: Tensor) -> None:
    with pytest.raises(OptionError, match=r"fusedmlp\.polcy"):
        explain(MLP(), x, options={"fusedmlp.polcy": "always"})


def test_an_unknown_option_of_inductor_is_an_error(x: Tensor) -> None:
    with pytest.raises(ExplainError, match="no_such_option"):
        explain(MLP(), x, options={"no_such_option": 1})


def test_a_site_has_the_line_that_calls_its_first_layer() -> None:
    for module in (MLP(), Escaping()):
        (site,) = explain_fusing_all(module, torch.randn(4, 16)).sites
        path, line = site.source.rsplit(":", 1)
        assert path == __file__
        assert "self.fc(" in Path(path).read_text().splitlines()[int(line) - 1]


def test_a_site_within_layers_of_the_user_has_the_line_of_the_function_that_calls_both() -> None:
    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight, self.bias)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = Layer(16, 32), Layer(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            return self.last(F.gelu(hidden))

    (site,) = explain_fusing_all(Model(), torch.randn(4, 16)).sites
    path, line = site.source.rsplit(":", 1)
    assert "hidden = self.first(x)" in Path(path).read_text().splitlines()[int(line) - 1]


def test_a_site_of_a_graph_without_traces_has_no_line() -> None:
    result = fusion.fuse(torch.fx.symbolic_trace(MLP()), [torch.randn(4, 16)], ALWAYS)
    assert result.sites[0].source == ""


def test_sites_name_their_nodes_graph_by_graph() -> None:
    explanation = explain_fusing_all(Broken(), torch.randn(4, 16))
    assert sum(explanation.sites_by_graph, ()) == explanation.sites
    for (before, after), sites in zip(explanation.graphs, explanation.sites_by_graph, strict=True):
        names = [node.name for node in before.graph.nodes]
        kept = {node.name for node in after.graph.nodes}
        for site in sites:
            assert [name for name in names if name in site.nodes] == list(site.nodes)
            assert site.fused == (not kept.intersection(site.nodes))
            replaced = [n.meta[REPLACES] for n in after.graph.nodes if REPLACES in n.meta]
            assert (site.nodes in replaced) == site.fused


def test_a_mode_and_options_may_be_given_together():
    model, x = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), torch.randn(4, 8)
    options = {"fusedmlp.policy": "always"}
    explanation = explain(model, x, options=options, mode="max-autotune")
    assert [site.fused for site in explanation.sites] == [True]


def test_an_argument_of_the_model_that_is_called_target_needs_a_partial():
    def function(x, target):
        return x @ target

    x = torch.randn(4, 4)
    with pytest.raises(OptionError, match="got Tensor; give an argument of the model that has"):
        explain(function, x, target=x)
