"""The fourth way to extend, done: a family of kernels that exists in this test only."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config as inductor_config

from fusion_backend import explain, fuse
from fusion_backend.kernels import registry
from fusion_backend.kernels.family import Family, why_not_on_cpu
from fusion_backend.mlp.expression import evaluate
from fusion_backend.planning.planner import available

PACKAGE = Path(registry.__file__).parent.parent
TOY = "toy"


class Toy(Family):
    """It runs plain MLPs on CPUs, hidden features first, and counts how often."""

    name = TOY
    mlps = "a toy that holds hidden features in rows"

    def __init__(self) -> None:
        self.runs = 0

    def is_for(self, device_type: str) -> bool:
        return device_type == "cpu"

    def why_not(self, mlp, target) -> str | None:
        return why_not_on_cpu(mlp) or ("a toy has no gate" if mlp.gated else None)

    def run(self, x, weights, activation, operands, residual=None, norm=None) -> Tensor:
        self.runs += 1
        preact = weights.weight_up @ x.t()
        if weights.bias_up is not None:
            preact = preact + weights.bias_up[:, None]
        hidden = evaluate(activation, {"x": preact})
        return F.linear(hidden.t(), weights.weight_down, weights.bias_down)


class ToyOfChains(Toy):
    """It runs chains on CPUs, and no MLPs of two layers."""

    mlps = ""
    chains = "a toy that goes layer by layer"

    def why_not(self, mlp, target) -> str | None:
        return None if mlp.layer_widths == (8, 16, 16, 8) else "it knows one chain"

    def run_chain(self, x, weights, biases, activations) -> Tensor:
        self.runs += 1
        return registry.REFERENCE.run_chain(x, weights, biases, activations)


@pytest.fixture
def toy(monkeypatch) -> Toy:
    family = Toy()
    monkeypatch.setattr(registry, "FAMILIES", (family, *registry.FAMILIES))
    return family


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.cos(self.up(x)))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


ALWAYS = {"fusedmlp.policy": "always"}


def test_a_family_is_planned_and_reported_under_its_name(toy):
    with torch.no_grad():
        (site,) = explain(MLP(), torch.randn(5, 8), options=ALWAYS).sites
        (gated,) = explain(Gated(), torch.randn(5, 8), options=ALWAYS).sites
    assert (site.fused, site.plan) == (True, TOY)
    assert site.detail.startswith(toy.mlps)
    assert gated.plan != TOY


def test_a_family_runs_in_compiled_code(toy):
    model, x = MLP(), torch.randn(5, 8)
    # A cache that knows the graph does not know that this family is no part of the package.
    with torch.no_grad(), inductor_config.patch(force_disable_caches=True):
        compiled = torch.compile(model, backend="fusedmlp", options=ALWAYS)
        torch.testing.assert_close(compiled(x), model(x))
    assert toy.runs > 0


def test_a_family_of_chains_is_asked_planned_and_run_as_any_other(monkeypatch):
    family = ToyOfChains()
    monkeypatch.setattr(registry, "FAMILIES", (family, *registry.FAMILIES))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.SiLU())
    model.append(nn.Linear(16, 8))
    x = torch.randn(5, 8)
    with torch.no_grad():
        fused = fuse(torch.fx.symbolic_trace(model), (x,), ALWAYS)
        torch.testing.assert_close(fused.graph_module(x), model(x))
    (site,) = fused.sites
    assert (site.form, site.plan) == ("chain", TOY)
    assert site.detail.startswith(family.chains)
    assert family.runs == 1


def test_a_family_is_not_believed_to_pay_where_nothing_says_so(toy, monkeypatch):
    monkeypatch.setattr(registry, "FAMILIES", (toy, registry.REFERENCE))
    with torch.no_grad():
        (site,) = explain(MLP(), torch.randn(5, 8)).sites
    assert (site.plan, site.reason) == (None, "not-faster")
    assert TOY in site.detail


def test_a_family_is_called_by_name_and_takes_norm_residual_and_gradients_from_aten(toy):
    model, x, residual = MLP(), torch.randn(5, 8), torch.randn(5, 8)
    layers = (None, None, model.up.weight, model.up.bias, model.down.weight, model.down.bias)
    around = {"residual": residual, "norm": "rms_norm(1e-05)"}
    result = torch.ops.fusedmlp.mlp(x, *layers, [], "cos(x)", TOY, **around)
    expected = model(F.rms_norm(x, (8,), eps=1e-5)) + residual
    torch.testing.assert_close(result, expected)
    parameters = tuple(model.parameters())
    found = torch.autograd.grad(result.sum(), parameters)
    torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), parameters))


def test_without_it_the_name_is_refused():
    x = torch.ones(1, 1)
    layers = (x, None, None, x, None, x, None)
    with pytest.raises(RuntimeError, match=r"plan must be one of .*, got 'toy'"):
        torch.ops.fusedmlp.mlp(*layers, [], "x", TOY)


# Words of other things that are a family's name, too, by file: columns in reports, parameters of
# kernels, kernels whose configurations are chosen by their own names, ways that a CPU's rates are
# of, an operator, and namespaces of torch's operators.
WORDS = {
    "rows": {
        *("bench/cells.py", "bench/plots.py", "cli/tune.py", "planning/user_table.py"),
        *("kernels/codegen/specialize.py", "kernels/chain/source.py"),
        "kernels/chain/towers_source.py",
        *("planning/cpu_rates.py", "planning/cpu_model.py"),
    },
    "chain": {"operators/chain.py"},
    "onednn": {"instruments/cpu_operators.py", "planning/cpu_rates.py"},
    "epilogue": {
        *("kernels/host/configs.py", "kernels/host/candidates.py"),
        *("kernels/host/config_times.py", "kernels/preferences.py"),
    },
    "back_to_back": {"kernels/host/configs.py", "kernels/preferences.py"},
}


@functools.cache
def strings(path: Path, keys: bool) -> list[str]:
    """Literals that are no documentation; keys, too, or not."""
    tree = ast.parse(path.read_text())
    left_out: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            left_out.add(id(node.value))
        elif isinstance(node, ast.Subscript) and not keys:
            left_out.add(id(node.slice))
        elif isinstance(node, ast.Dict) and not keys:
            left_out.update(map(id, node.keys))
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return [
        node.value for node in constants if isinstance(node.value, str) and id(node) not in left_out
    ]


def own_files(family: Family) -> Path:
    """The folder of a family, or its file where it has none."""
    file = Path(inspect.getfile(type(family)))
    return file.parent if file.name == "family.py" else file


@pytest.mark.parametrize("family", registry.FAMILIES, ids=lambda family: family.name)
def test_a_familys_name_stands_in_its_own_files_only(family):
    own = own_files(family)
    quoted = re.compile(rf"'{family.name}'")
    keys = family is not registry.ROWS  # the column of tables that says how many rows there are
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if not (path.is_relative_to(own) or path.is_relative_to(PACKAGE / "patterns"))
        and any(text == family.name or quoted.search(text) for text in strings(path, keys))
    }
    assert found - {"kernels/reference.py"} <= WORDS.get(family.name, set())


@pytest.mark.parametrize("family", registry.FAMILIES, ids=lambda family: family.name)
def test_a_family_says_what_it_does(family):
    assert family.mlps or family.first_layers or family.chains
    assert re.fullmatch(r"[a-z_]+", family.name)
    assert registry.named(family.name) is family


def test_the_order_of_the_registry_is_that_of_offers(toy):
    from fusion_backend.planning.cases import Case

    setting = Case.of_form("gelu_tanh", 5, 8, 32, "ieee").setting(torch.device("cpu"))
    order = [family.name for family in registry.FAMILIES]
    offered = list(available(setting))
    assert offered[0] == TOY
    assert offered == sorted(offered, key=order.index)
