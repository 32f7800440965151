"""Of sites that share a layer, those that save most in total."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusion_backend import FuseResult, Options, fuse
from fusion_backend.fusion.overlaps import heaviest_independent
from fusion_backend.kernels.registry import EPILOGUE, LIBRARY, REFERENCE, STREAM


def chain(*weights):
    shared = {i: [i - 1] for i in range(1, len(weights))}
    return heaviest_independent(dict(enumerate(map(float, weights))), shared)


def test_sites_that_share_nothing_are_all_chosen():
    assert heaviest_independent({"a": 1.0, "b": 2.0}, {}) == {"a", "b"}


def test_of_two_the_heavier_one():
    assert chain(1, 2) == {1}
    assert chain(2, 1) == {0}


def test_two_light_ones_may_outweigh_the_one_between():
    assert chain(2, 3, 2) == {0, 2}
    assert chain(1, 3, 1) == {1}


def test_a_site_may_follow_two():
    weights = {"gate": 2.0, "up": 2.0, "down": 3.0}
    assert heaviest_independent(weights, {"down": ["gate", "up"]}) == {"gate", "up"}


def test_chains_are_chosen_as_by_trying_all():
    choose = random.Random(0)
    for _ in range(50):
        weights = [choose.randint(1, 9) for _ in range(choose.randint(1, 9))]
        best = max(
            sum(weights[i] for i in subset)
            for count in range(len(weights) + 1)
            for subset in itertools.combinations(range(len(weights)), count)
            if all(b - a > 1 for a, b in itertools.pairwise(subset))
        )
        assert sum(weights[i] for i in chain(*weights)) == best


class Deep(nn.Module):
    """Layers with an activation between each two."""

    def __init__(self, *widths: int, activation=F.silu):
        super().__init__()
        self.layers = nn.ModuleList(map(nn.Linear, widths[:-1], widths[1:]))
        self.activation = activation

    def forward(self, x):
        *others, last = self.layers
        for layer in others:
            x = self.activation(layer(x))
        return last(x)


def fused_for_hopper(
    model: nn.Module, x: torch.Tensor, training: bool = False, policy: str = "always"
) -> FuseResult:
    with torch.set_grad_enabled(training):
        graph = torch.export.export(model, (x,)).module()
        return fuse(graph, (x,), Options(policy=policy), target="h200")


def forms_of(result: FuseResult) -> list[tuple[str, str | None]]:
    return [(site.form, site.plan if site.rewritten else site.reason) for site in result.sites]


WIDE = (320, 512, 384, 512, 320)


def test_of_a_deep_mlp_all_activations_are_fused_where_a_library_computes_the_last_product():
    model, x = Deep(*WIDE).to(torch.bfloat16), torch.randn(2048, 320, dtype=torch.bfloat16)
    result = fused_for_hopper(model, x)
    assert forms_of(result) == [
        ("activated", EPILOGUE.name),
        ("activated", EPILOGUE.name),
        ("plain", EPILOGUE.name),
    ]
    assert "its last layer is the first one of the next MLP" in result.sites[0].detail
    graph = result.graph_module
    calls = [node for node in graph.graph.nodes if EPILOGUE.name in node.args]
    assert len(calls) == 3
    for call in calls:
        call.update_arg(call.args.index(EPILOGUE.name), REFERENCE.name)
    graph.recompile()
    with torch.no_grad():
        torch.testing.assert_close(graph(x), model(x), rtol=0.05, atol=0.02)
    assert not graph.graph.find_nodes(op="call_function", target=torch.ops.aten.silu.default)


def test_few_rows_take_kernels_of_whole_mlps():
    model, x = Deep(*WIDE).to(torch.bfloat16), torch.randn(8, 320, dtype=torch.bfloat16)
    assert forms_of(fused_for_hopper(model, x)) == [
        ("plain", STREAM.name),
        ("plain", "overlaps"),
        ("plain", STREAM.name),
    ]


def test_in_training_every_second_mlp_is_fused():
    model = Deep(*WIDE).to(torch.bfloat16)
    x = torch.randn(4096, 320, dtype=torch.bfloat16)
    result = fused_for_hopper(model, x, training=True)
    assert [form for form, _ in forms_of(result)] == ["plain"] * 3
    assert [reason for _, reason in forms_of(result)].count("overlaps") == 1


@pytest.mark.parametrize("activation", [F.relu, F.silu])
def test_the_layers_before_a_chain_are_fused_with_their_activations(activation):
    model = Deep(1088, 512, 64, 64, 16, activation=activation).to(torch.bfloat16)
    x = torch.randn(4096, 1088, dtype=torch.bfloat16)
    (first, plan), (chain, _) = forms_of(fused_for_hopper(model, x))
    assert (first, plan, chain) == ("activated", EPILOGUE.name, "chain")


def test_a_library_computes_first_layers_where_it_was_measured_to_be_faster():
    model = Deep(768, 1024, 1024, 512, activation=F.relu).to(torch.bfloat16)
    x = torch.randn(2048, 768, dtype=torch.bfloat16)
    (form, plan), _ = forms_of(fused_for_hopper(model, x, policy="auto"))
    assert (form, plan) in {("activated", LIBRARY.name), ("activated", EPILOGUE.name)}
