"""What is reported of MLPs that share a call."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fusion_backend import Site, SiteShape, explain
from fusion_backend.cli.demo import fused
from fusion_backend.fusion.sites import by_call, numbered_apart
from fusion_backend.instruments.html.site_rows import site_rows


class PolicyAndValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = (
            nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), last)
            for last in (nn.Linear(64, 17), nn.Linear(64, 1))
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(x), self.value(x)


@pytest.fixture(scope="module")
def explanation():
    model, x = PolicyAndValue().bfloat16(), torch.randn(64, 64).bfloat16()
    with torch.no_grad():
        return explain(model, x, target="h100")


def site(module: str, call: int = 0, fused: bool = True) -> Site:
    return Site(
        form="chain", activation="tanh(x)", module=module, shape=SiteShape(8, 64, 64, 1),
        dtype="bfloat16", device="cuda", fused=fused, plan="chain" if fused else None,
        reason=None, detail=module, chain=(64, 64), call=call,
    )  # fmt: skip


def test_the_table_says_which_mlps_are_one_kernel(explanation):
    text = " ".join(str(explanation).split())
    assert "2 of 2 MLPs fused" in text
    assert "In one kernel: - policy, value: one Triton kernel for all layers of MLPs of" in text
    assert "each in a launch of its own" in text


def test_data_has_the_number_of_the_shared_call(explanation):
    assert [each["call"] for each in json.loads(explanation.to_json())["sites"]] == [1, 1]


def test_the_page_shows_the_kernel_once_for_both(explanation):
    page = explanation.to_html(kernels=False)
    assert "one Triton kernel for all layers of MLPs of the same input" in page
    assert "fusedmlp.towers · chain" in page


def test_kernels_are_counted_once_a_call():
    assert fused([site("a", 1), site("b", 1), site("c"), site("d", 2), site("e", 2)]) == 3
    assert fused([site("a", 1, False), site("b", 1, False), site("c")]) == 1


def test_sites_are_gathered_by_their_calls():
    assert by_call([site("a", 2), site("b"), site("c", 2), site("d")]) == [(0, 2), (1,), (3,)]


def test_calls_of_two_graphs_are_two_calls():
    one, other = numbered_apart([[site("a", 1), site("b", 2)], [site("c", 1), site("d")]])
    assert [each.call for each in (*one, *other)] == [1, 2, 3, 0]


def test_what_was_measured_of_a_shared_call_is_that_of_all_its_mlps():
    sites = [site("a", 1), replace(site("b", 1), activation="relu(x)"), site("c")]
    rows = site_rows(sites, {0: 5.0, 2: 2.0}, {0: 10.0, 1: 10.0, 2: 6.0})
    assert [(row.site.module, row.measured) for row in rows] == [("a", 4.0), ("b", 4.0), ("c", 3.0)]
