"""torch.compile(model, backend="fusedmlp"): the way to Inductor."""

from __future__ import annotations

import itertools
import textwrap
import warnings

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusion_backend.backend as backend_module
from fusion_backend.backend import backend_with_observer
from models import MLP, Gated, X
from processes import own_graphs
from repetition import slow_but


def compiled_with_record(model, **kwargs):
    records = []
    backend = backend_with_observer(lambda before, result: records.append((before, result)))
    return torch.compile(model, backend=backend, **kwargs), records


ALWAYS = {"fusedmlp.policy": "always"}


@pytest.mark.parametrize("training", [False, True])
def test_the_name_alone_compiles_and_agrees_with_eager(training):
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    with torch.set_grad_enabled(training):
        result = torch.compile(model, backend="fusedmlp")(X)
        torch.testing.assert_close(result, model(X))


def test_the_name_works_in_a_fresh_process_without_any_import(tmp_path, children):
    program = """
        import sys, torch
        assert not [name for name in sys.modules if name.startswith("fusion_backend")]
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
        assert "fusedmlp" in torch._dynamo.list_backends()
        x = torch.randn(4, 8)
        with torch.no_grad():
            torch.testing.assert_close(torch.compile(model, backend="fusedmlp")(x), model(x))
        assert "fusion_backend.backend" in sys.modules
        """
    children.printed(textwrap.dedent(program), folder=tmp_path)


def test_training_through_inductor_gives_the_gradients_of_eager():
    model = Gated(lambda g, u: F.silu(g) * u, bias=True)
    compiled, records = compiled_with_record(model, options=ALWAYS)
    compiled(X).square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(X).square().sum().backward()
    torch.testing.assert_close(gradients, [parameter.grad for parameter in model.parameters()])
    assert [site.rewritten for _, result in records for site in result.sites] == [True]


def test_checkpointed_training_gives_the_gradients_of_eager():
    model = MLP(F.gelu)
    compiled, records = compiled_with_record(
        lambda x: checkpoint(model, x, use_reentrant=False), options=ALWAYS
    )
    compiled(X).square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(X).square().sum().backward()
    torch.testing.assert_close(gradients, [parameter.grad for parameter in model.parameters()])
    assert [site.rewritten for _, result in records for site in result.sites] == [True]


class Entered(nn.Module):
    """A parameter, another layer and, in training, dropout enter the activation."""

    def __init__(self):
        super().__init__()
        self.up, self.other, self.down = nn.Linear(8, 64), nn.Linear(4, 64), nn.Linear(64, 8)
        self.slope, self.dropout = nn.PReLU(64), nn.Dropout(0.5)

    def forward(self, x):
        return self.down(self.dropout(self.slope(self.up(x) + 2.0 * self.other(x[:, :4]))))


def gradients_of(function, model, x, seed):
    model.zero_grad()
    torch.manual_seed(seed)
    result = function(x)
    (result * torch.linspace(-1, 1, result.numel()).view(result.shape)).sum().backward()
    return result, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.slow  # tests/fusion/test_operand.py looks at the gradients of such graphs
@pytest.mark.parametrize("dynamic", [None, True])
def test_parameters_and_other_layers_get_the_gradients_of_eager(dynamic):
    model, x = Entered().eval(), torch.randn(6, 8)
    compiled, records = compiled_with_record(model, options=ALWAYS, dynamic=dynamic)
    found = gradients_of(compiled, model, x, 0)
    torch.testing.assert_close(found, gradients_of(model, model, x, 0))
    activations = {
        site.activation for _, result in records for site in result.sites if site.rewritten
    }
    assert activations == {"prelu(x + 2.0 * p0, p1)"}


def _plain(model, x):
    return model(x)


def _checkpointed(model, x):
    return checkpoint(model, x, use_reentrant=False)


def _checkpointed_reentrant(model, x):
    return checkpoint(model, x, use_reentrant=True)


@pytest.mark.parametrize(
    ("how", "dynamic"),
    slow_but(
        [(_checkpointed, None)],
        itertools.product([_plain, _checkpointed, _checkpointed_reentrant], [None, True]),
    ),
)
def test_dropout_is_reproducible_and_the_same_in_the_backward(how, dynamic):
    model, x = Entered(), torch.randn(6, 8, requires_grad=True)
    compiled, records = compiled_with_record(
        lambda x: how(model, x), options=ALWAYS, dynamic=dynamic
    )
    result, gradients = gradients_of(compiled, model, x, 0)
    again, gradients_again = gradients_of(compiled, model, x, 0)
    torch.testing.assert_close((again, gradients_again), (result, gradients))
    assert not torch.allclose(gradients_of(compiled, model, x, 1)[0], result)
    assert {site.rewritten for _, record in records for site in record.sites} == {True}
    # PReLU and dropout scale with their argument: Euler's identity holds for one and the same mask.
    weights = torch.linspace(-1, 1, result.numel()).view(result.shape)
    loss = ((result - model.down.bias) * weights).sum()
    first = ("up.weight", "up.bias", "other.weight", "other.bias")
    for names in (("down.weight",), first):
        of_layer = sum((model.get_parameter(n) * gradients[n]).sum() for n in names)
        torch.testing.assert_close(of_layer, loss)


def test_a_checkpoint_around_compiled_code_draws_the_mask_again():
    model, x = Entered(), torch.randn(6, 8, requires_grad=True)
    compiled, _ = compiled_with_record(model, options=ALWAYS)
    inside = gradients_of(compiled, model, x, 0)
    outside = gradients_of(lambda x: checkpoint(compiled, x, use_reentrant=False), model, x, 0)
    torch.testing.assert_close(outside, inside)


def test_dropout_that_must_draw_the_numbers_of_eager_is_left_alone():
    model, x = Entered(), torch.randn(6, 8)
    options = {**ALWAYS, "fallback_random": True}
    compiled, records = compiled_with_record(model, options=options)
    torch.testing.assert_close(
        gradients_of(compiled, model, x, 0), gradients_of(model, model, x, 0)
    )
    (site,) = records[0][1].sites
    assert site.reason == "active-dropout"
    assert "fallback_random" in site.detail


def test_symbolic_rows_do_not_recompile():
    model = MLP(F.gelu)
    compiled, records = compiled_with_record(model, options=ALWAYS, dynamic=True)
    with torch.no_grad():
        for rows in (3, 17, 64, 100):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(compiled(x), model(x))
    assert len(records) == 1


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_are_those_of_inductor(mode):
    model = MLP(F.gelu)
    with torch.no_grad():
        compiled = torch.compile(model, backend="fusedmlp", mode=mode)
        torch.testing.assert_close(compiled(X), model(X))


def test_options_of_inductor_reach_it():
    seen = []

    def observe(graph):
        seen.append(inductor_config.max_autotune)

    model = MLP(F.gelu)
    options = {"post_grad_custom_post_pass": observe, "max_autotune": True}
    with torch.no_grad(), inductor_config.patch(force_disable_caches=True):
        torch.compile(model, backend="fusedmlp", options=options)(X)
    assert seen == [True]
    assert not inductor_config.max_autotune


def test_an_unknown_option_raises_with_the_known_ones():
    model = torch.compile(MLP(F.gelu), backend="fusedmlp", options={"fusedmlp.polcy": "always"})
    with pytest.raises(Exception, match=r"known options are fusedmlp\.policy, fusedmlp\.strict"):
        model(X)


def test_an_unknown_option_of_inductor_raises_as_inductor_does():
    model = torch.compile(MLP(F.gelu), backend="fusedmlp", options={"max_autotuna": True})
    with pytest.raises(Exception, match="Unexpected optimization option max_autotuna"):
        model(X)


def test_an_unknown_mode_raises_as_inductor_does():
    model = torch.compile(MLP(F.gelu), backend="fusedmlp", mode="fastest")
    with pytest.raises(Exception, match="fastest"):
        model(X)


def test_freezing_works():
    model = MLP(F.gelu).eval()
    with torch.no_grad():
        compiled = torch.compile(model, backend="fusedmlp", options={**ALWAYS, "freezing": True})
        torch.testing.assert_close(compiled(X), model(X))


def test_a_failing_rewrite_warns_and_compiles_the_graph_as_it_was(monkeypatch):
    def fail(graph_module, options, target):
        raise ArithmeticError("broken")

    monkeypatch.setattr(backend_module, "fuse_in_place", fail)
    model = MLP(F.gelu)
    with torch.no_grad(), pytest.warns(UserWarning, match="left a graph as it was.*broken"):
        result = torch.compile(model, backend="fusedmlp")(X)
    torch.testing.assert_close(result, model(X))


def test_a_failing_rewrite_raises_under_strict(monkeypatch):
    def fail(graph_module, options, target):
        raise ArithmeticError("broken")

    monkeypatch.setattr(backend_module, "fuse_in_place", fail)
    compiled = torch.compile(MLP(F.gelu), backend="fusedmlp", options={"fusedmlp.strict": True})
    with warnings.catch_warnings(), pytest.raises(Exception, match="broken"):
        compiled(X)


def test_the_observer_sees_the_graph_before_and_after():
    compiled, records = compiled_with_record(MLP(F.gelu), options=ALWAYS)
    with torch.no_grad():
        compiled(X)
    ((before, result),) = records
    target = torch.ops.fusedmlp.mlp.default
    assert not before.graph.find_nodes(op="call_function", target=target)
    assert result.graph_module.graph.find_nodes(op="call_function", target=target)


CACHED = """
    import torch, torch.nn.functional as F
    from torch._dynamo.utils import counters
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    x = torch.randn(4, 8)
    {setup}
    compiled = torch.compile(model, {arguments})
    loss = compiled(x).square().sum()
    loss.backward()
    torch.testing.assert_close(compiled(x), model(x))
    autograd, inductor = counters["aot_autograd"], counters["inductor"]
    print(autograd["autograd_cache_hit"], autograd["autograd_cache_bypass"],
          inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_bypass"])
    """
BACKEND = 'backend="fusedmlp", options={"fusedmlp.policy": "always"}'
PASS = (
    "import torch._inductor.config; from fusion_backend import Options; "
    "from fusion_backend.inductor_pass import FusionPass; "
    'torch._inductor.config.pre_grad_custom_pass = FusionPass(Options(policy="always"))'
)


def cached(children, *how):
    """What is taken from the cache by programs that run one after the other."""
    programs = [textwrap.dedent(CACHED).format(setup=s, arguments=a) for s, a in how]
    names = ("autograd_hit", "autograd_bypass", "inductor_hit", "inductor_bypass")
    beginning = own_graphs()
    lines = [children.printed(beginning + program) for program in programs]
    return [dict(zip(names, map(int, line.split()), strict=True)) for line in lines]


def test_a_second_process_compiles_nothing_again_and_new_source_of_ours_is_compiled_anew(children):
    changed = "import fusion_backend.backend as b; b.source_hash = lambda: 'another version'"
    first, second, third = cached(children, ("", BACKEND), ("", BACKEND), (changed, BACKEND))
    assert first["autograd_bypass"] == second["autograd_bypass"] == 0
    assert [each["autograd_hit"] for each in (first, second, third)] == [0, 1, 0]


def test_a_second_process_takes_what_the_inductor_pass_made_from_the_cache(children):
    first, second = cached(children, (PASS, ""), (PASS, ""))
    assert first["autograd_bypass"] == second["autograd_bypass"] == 0
    assert (first["autograd_hit"], second["autograd_hit"]) == (0, 1)
