"""Timelines: what ran when in one call, and whose it was."""

from __future__ import annotations

import torch

from fusion_backend import profile
from fusion_backend.instruments.profiler_trace import CPU_OPERATOR, KERNEL, Event, Step
from fusion_backend.instruments.timelines import BACKWARD, Launch, time_by_site, timeline
from html_models import MLP, TIMES


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


def test_a_sites_time_is_that_of_its_launches_in_the_forward_pass() -> None:
    backward = Launch("aten::mm", 60.0, 30.0, site=0, backward=True)
    assert time_by_site((*TIMES["inductor"], backward)) == {1: 50.0}


def test_launches_are_those_of_owners_and_backward_passes_are_told() -> None:
    events = [
        Event(CPU_OPERATOR, "aten::addmm", 10.0, 5.0),
        Event(CPU_OPERATOR, f"{BACKWARD}AddmmBackward0", 20.0, 30.0),
        Event(CPU_OPERATOR, "aten::mm", 25.0, 5.0),
    ]
    found = timeline([Step("eager", cpu=events)], lambda step, launches: [3, None])
    assert [(each.site, each.backward) for each in found] == [(3, False), (None, True)]


def test_a_comparison_has_the_timelines_of_its_backends() -> None:
    with torch.no_grad():
        found = profile(MLP(), torch.randn(8, 16), backends=("eager",), steps=2)
    launches = found.timelines["eager"]
    assert [launch.name for launch in launches] == ["aten::addmm", "aten::gelu", "aten::addmm"]
    assert launches[0].start == 0
    assert all(launch.duration > 0 for launch in launches)
