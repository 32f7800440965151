"""Timelines: what ran when in one call, and whose it was."""

from __future__ import annotations

import torch
from torch import nn

from fusion_backend import explain, profile
from fusion_backend.instruments.profiler_trace import CPU_OPERATOR, KERNEL, Event, Step
from fusion_backend.instruments.timelines import Launch, time_by_site, timeline, with_sites
from html_models import ALWAYS, MLP, TIMES


def step(*spans: tuple[str, float, float, int]) -> Step:
    gpu = [Event(KERNEL, name, start, length, (0, lane)) for name, start, length, lane in spans]
    return Step("inductor", gpu=gpu)


def test_a_timeline_begins_at_zero_and_has_a_lane_for_each_stream() -> None:
    found = timeline([step(("b", 120.0, 5.0, 9), ("a", 100.0, 30.0, 7))])
    assert found == (Launch("a", 0.0, 30.0, 0), Launch("b", 20.0, 5.0, 1))


def test_it_is_that_of_the_call_of_the_median_length() -> None:
    steps = [step(("a", 0.0, length, 7)) for length in (50.0, 10.0, 20.0)]
    assert [launch.duration for launch in timeline(steps)] == [20.0]


def test_calls_without_launches_have_no_timeline() -> None:
    assert timeline([Step("eager"), Step("eager")]) == ()


def test_on_a_cpu_the_outermost_operators_that_do_work_are_launches() -> None:
    events = [
        Event(CPU_OPERATOR, "aten::linear", 10.0, 50.0),
        Event(CPU_OPERATOR, "aten::t", 11.0, 2.0),
        Event(CPU_OPERATOR, "aten::addmm", 20.0, 30.0),
        Event(CPU_OPERATOR, "aten::copy_", 25.0, 5.0),
    ]
    assert timeline([Step("eager", cpu=events)]) == (Launch("aten::addmm", 0.0, 30.0),)


def test_launches_between_the_products_of_a_site_are_its_own() -> None:
    with torch.no_grad():
        found = explain(MLP(), torch.randn(8, 16), options=ALWAYS)
    graphs = [(found.graphs[0].before.graph, found.sites)]
    launches = with_sites(TIMES["inductor"][1:], graphs)
    assert [launch.site for launch in launches] == [0, 0, 0, None]
    assert time_by_site(launches) == {0: 50.0}


def test_own_kernels_that_the_sites_do_not_divide_are_given_to_none() -> None:
    model = nn.Sequential(MLP(), nn.Softmax(-1), MLP())
    with torch.no_grad():
        found = explain(model, torch.randn(8, 16), options=ALWAYS)
    graphs = [(found.graphs[0].before.graph, found.sites)]
    ours = [Launch("fusedmlp_epilogue", float(i), 1.0) for i in range(4)]
    fused = [i for i, site in enumerate(found.sites) if site.fused]
    assert [each.site for each in with_sites(ours, graphs)] == [i for i in fused for _ in range(2)]
    assert not any(each.site is not None for each in with_sites(ours[:3], graphs))


def test_a_comparison_has_the_timelines_of_its_backends() -> None:
    with torch.no_grad():
        found = profile(MLP(), torch.randn(8, 16), backends=("eager",), steps=2)
    launches = found.timelines["eager"]
    assert [launch.name for launch in launches] == ["aten::addmm", "aten::gelu", "aten::addmm"]
    assert launches[0].start == 0
    assert all(launch.duration > 0 for launch in launches)
