"""What sites are called: modules and layers as the model has them, and the line that calls them."""

from __future__ import annotations

import inspect
import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion_backend
from capture import sites_of
from fusion_backend.fusion.sites import labels


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(8, 16)
        self.up_proj = nn.Linear(8, 16)
        self.down_proj = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)  # the first layer's line
        return self.down_proj(F.silu(gate) * up)


class Twice(nn.Module):
    """Three sites in one module: two call the same layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)
        self.both = nn.Linear(8, 32)
        self.weight = nn.Parameter(torch.randn(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc2(F.gelu(self.fc1(x)))
        x = self.fc2(F.gelu(self.fc1(x)))
        gate, up = self.both(x).chunk(2, -1)
        x = self.fc2(F.silu(gate) * up)
        return self.fc2(F.relu(F.linear(x, self.weight)))


class Hiding(nn.Module):
    """Looks attributes up by itself, as PEFT's models do: Dynamo spells that out."""

    def __init__(self) -> None:
        super().__init__()
        self.Inner = Gated()

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "Inner":
                raise
            return getattr(self.Inner, name)

    def forward(self, x: Tensor) -> Tensor:
        return self.Inner(x)


def test_a_site_says_which_layers_of_which_module_it_is_and_where_they_are_called() -> None:
    (site,) = sites_of(nn.Sequential(nn.Identity(), Gated()), torch.randn(4, 8))
    assert (site.module, site.layers) == ("1", "gate_proj, up_proj → down_proj")
    file, line = site.source.rsplit(":", 1)
    text, first = inspect.getsourcelines(Gated.forward)
    assert file == __file__
    assert "the first layer's line" in text[int(line) - first]


class OwnLinear(nn.Linear):
    """As transformers' Conv1D: a layer whose forward is the user's."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def test_the_line_is_that_of_the_mlp_where_a_layer_has_a_forward_of_the_users_own() -> None:
    model = Gated()
    model.gate_proj = OwnLinear(8, 16)
    (site,) = sites_of(nn.Sequential(model), torch.randn(4, 8))
    text, first = inspect.getsourcelines(Gated.forward)
    assert "the first layer's line" in text[int(site.source.rsplit(":", 1)[1]) - first]
    (alone,) = sites_of(model, torch.randn(4, 8))
    assert alone.source == site.source


def test_layers_are_named_by_their_modules_or_else_by_their_weights() -> None:
    sites = sites_of(Twice(), torch.randn(4, 8))
    layers = ["fc1 → fc2", "fc1 → fc2", "both → fc2", "weight → fc2"]
    assert [site.layers for site in sites] == layers


def test_no_two_sites_have_the_same_label() -> None:
    sites = sites_of(Twice(), torch.randn(4, 8))
    assert labels(sites) == [
        "(model): fc1 → fc2",
        "(model): fc1 → fc2 (2)",
        "(model): both → fc2",
        "(model): weight → fc2",
    ]


def test_the_report_has_the_labels_and_the_lines_and_so_has_its_json() -> None:
    explanation = fusion_backend.explain(Twice(), torch.randn(4, 8))
    found = json.loads(explanation.to_json())["sites"]
    assert [site["label"] for site in found] == labels(explanation.sites)
    line = found[0]["source"].rpartition("/")[2]
    assert f"(model): fc1 → fc2 ({line})" in str(explanation)
    assert all(label in str(explanation) for label in labels(explanation.sites))


def test_a_model_of_torchs_own_layers_only_has_no_line() -> None:
    (site,) = sites_of(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), torch.randn(4, 8)
    )
    assert "/torch/" not in site.source
    assert site.layers == "0 → 2"


def test_paths_are_the_models_where_it_looks_its_modules_up_by_itself() -> None:
    options = {"fusedmlp.policy": "always"}
    explanation = fusion_backend.explain(Hiding(), torch.randn(4, 8), options=options)
    (site,) = explanation.sites
    assert site.module == "Inner"
    assert site.layers == "gate_proj, up_proj → down_proj"
    graph = str(explanation.graph_diff())
    assert "Inner.gate_proj.weight" in graph
    assert "__dict__" not in f"{explanation}{graph}"


def test_a_site_says_whether_it_was_planned_for_training() -> None:
    model, x = Gated(), torch.randn(4, 8)
    assert sites_of(model, x)[0].training
    with torch.no_grad():
        assert not sites_of(model, x)[0].training


def test_layers_of_an_exported_program_have_their_names() -> None:
    program = torch.export.export(Gated(), (torch.randn(4, 8),))
    (site,) = fusion_backend.fuse(program, options={"fusedmlp.policy": "always"}).sites
    assert site.layers == "gate_proj, up_proj → down_proj"
    assert site.source.startswith(f"{__file__}:")


def test_paths_of_a_peft_model_are_those_of_its_named_modules() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["up_proj"], r=2)
    model = peft.get_peft_model(nn.Sequential(Gated()), config)
    (site,) = sites_of(model, torch.randn(4, 8))
    assert site.module == "base_model.model.0"
    assert site.module in dict(model.named_modules())


def test_paths_of_a_traced_module_are_the_models() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            block = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
            self.blocks = nn.ModuleList([block])

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[0](x)

    traced, x = torch.fx.symbolic_trace(Blocks()), torch.randn(4, 8)
    options = {"fusedmlp.policy": "always"}
    (site,) = fusion_backend.explain(traced, x, options=options).sites
    assert (site.module, site.layers) == ("blocks.0", "0 → 2")
    options["fusedmlp.exclude"] = "blocks.0"
    (site,) = fusion_backend.explain(traced, x, options=options).sites
    assert site.reason == "excluded"
