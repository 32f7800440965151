"""watch(): launches of fused MLPs in a loop that runs, and what it warns of."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusion_backend
from fusion_backend import Site, SiteShape
from fusion_backend.errors import WatchError
from fusion_backend.fusion import journal
from fusion_backend.fusion.journal import CompiledGraph
from fusion_backend.instruments import watching
from fusion_backend.instruments.claims import claims_of, graph_runs, launches_by_claim, named
from fusion_backend.instruments.profiler_trace import Event
from fusion_backend.instruments.watching import Problem, Watch
from fusion_backend.kernels import registry

ALWAYS = {"fusedmlp.policy": "always"}
KERNELS = Path(registry.__file__).parent


def site(module: str, plan: str | None = "rows", training: bool = False, **more: Any) -> Site:
    return Site(
        form="plain", activation="gelu(x)", module=module, shape=SiteShape(8, 16, 32, 16),
        dtype="float32", device=more.pop("device", "cpu"), fused=plan is not None, plan=plan,
        reason=None if plan else "not-faster", detail="", training=training, layers="0 → 2", **more,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def numbered_anew() -> Iterator[None]:
    """Only graphs of the test are looked at."""
    torch._dynamo.reset()
    journal.numbered()
    yield
    torch._dynamo.reset()


def compiled_graph(name: str, *sites: Site) -> CompiledGraph:
    graph = CompiledGraph(name, sites)
    journal._history.append(graph)
    journal._numbered.append(graph)
    return graph


def op(name: str, start: float, end: float, thread: int = 1) -> Event:
    return Event("cpu_op", name, start, end - start, ("cpu", thread))


def region(name: str, start: float, end: float, thread: int = 1) -> Event:
    return op(f"Torch-Compiled Region: {name}", start, end, thread)


def launch(correlation: int, start: float, name: str = "cudaLaunchKernel") -> Event:
    return Event("cuda_runtime", name, start, 1, ("cpu", 1), correlation)


def kernel(name: str, start: float, correlation: int) -> Event:
    return Event("kernel", name, start, 5, ("gpu", 7), correlation)


def looked_at(watch: Watch, *events: Event, steps: int = 1) -> Watch:
    watch._look_at_new_graphs()
    watch._read(events, steps)
    return watch


def kinds(watch: Watch) -> list[str]:
    return [problem.kind for problem in watch.problems]


def quiet(**settings: Any) -> Watch:
    return fusion_backend.watch(on_problem=lambda problem: None, **settings)


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        blocks = [(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(count)]
        self.blocks = nn.ModuleList(nn.Sequential(*block) for block in blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


# Which launches are whose


def test_launches_belong_to_the_graph_in_whose_run_they_began() -> None:
    first, second = graph_runs(
        [
            op("fusedmlp::rows", 0, 5),
            region("0/0", 10, 30),
            op("fusedmlp::rows", 12, 20),
            op("fusedmlp::rows", 13, 19),  # the function that the operator calls
            op("fusedmlp::rows", 21, 29),
            op("fusedmlp::rows", 22, 23, thread=2),
            region("1/0", 40, 50),
            op("fusedmlp::rows", 41, 45),
        ]
    )
    assert [len(run.launches("fusedmlp::rows")) for run in (first, second)] == [2, 1]


def test_work_on_a_gpu_belongs_to_the_run_that_launched_it() -> None:
    (run,) = graph_runs(
        [
            region("0/0", 0, 10),
            launch(1, 2),
            launch(2, 20),
            kernel("fusedmlp_back_to_back_0", 50, 1),
            kernel("fusedmlp_back_to_back_0", 5, 2),
        ]
    )
    assert [event.start for event in run.launches(r"fusedmlp_back_to_back\w*")] == [50]


def test_kernels_that_a_cuda_graph_replays_belong_to_the_run_that_replayed_it() -> None:
    (run,) = graph_runs(
        [
            region("0/0", 0, 10),
            launch(1, 2, "cudaGraphLaunch"),
            kernel("fusedmlp_stream_hidden", 5, 1),
            kernel("fusedmlp_stream_out", 9, 1),
        ]
    )
    claims = claims_of([site("a", "stream", device="cuda"), site("b", "library", device="cuda")])
    found = launches_by_claim(claims, run)
    assert found[0] is not None
    assert len(found[0]) == 2
    assert found[1] is None  # the operator that shows it is not called in a replay


def test_mlps_that_share_a_call_claim_one_launch_together() -> None:
    policy, value = (site(name, "chain", device="cuda", call=1) for name in ("policy", "value"))
    other = site("other", "chain", device="cuda")
    claims = claims_of([policy, other, value])
    assert [(claim.label, claim.site) for claim in claims] == [("policy + value", 0), ("other", 1)]
    assert [(claim.fewest, claim.most) for claim in claims] == [(1, 1), (1, 1)]
    (run,) = graph_runs(
        [
            region("0/0", 0, 10),
            launch(1, 2, "cudaGraphLaunch"),
            kernel("fusedmlp_chain_towers", 5, 1),
            kernel("fusedmlp_chain", 9, 1),
        ]
    )
    found = launches_by_claim(claims, run)
    assert [[event.name for event in each or ()] for each in found] == [
        ["fusedmlp_chain_towers"],
        ["fusedmlp_chain"],
    ]
    (interpreted,) = claims_of([replace(each, device="cpu") for each in (policy, value)])
    assert named("fusedmlp::towers", interpreted.mark)


def test_sites_of_one_family_get_their_launches_in_order_and_the_last_go_without() -> None:
    claims = claims_of([site("a"), site("b"), site("c", None), site("d")])
    assert [claim.label for claim in claims] == ["a", "b", "d"]
    for launched, shares in ((3, [1, 1, 1]), (2, [1, 1, 0]), (4, [1, 1, 2])):
        times = [(10.0 * i, 10.0 * i + 5) for i in range(1, 1 + launched)]
        (run,) = graph_runs([region("0/0", 0, 99), *(op("fusedmlp::rows", *at) for at in times)])
        assert [len(each or ()) for each in launches_by_claim(claims, run)] == shares


def test_a_family_that_launches_one_or_two_kernels_claims_one() -> None:
    claims = claims_of([site("a", "epilogue", device="cuda"), site("b", "epilogue", device="cuda")])
    assert [(claim.fewest, claim.most) for claim in claims] == [(1, 2)] * 2
    for launched, shares in ((2, [1, 1]), (4, [2, 2])):
        events: list[Event] = [region("0/0", 0, 90)]
        for i in range(1, launched + 1):
            events += [launch(i, 2 * i), kernel("fusedmlp_epilogue_hopper", 10 * i, i)]
        (run,) = graph_runs(events)
        assert [len(each or ()) for each in launches_by_claim(claims, run)] == shares


@pytest.mark.parametrize("rows", [0, "u0", "8*u12"])
def test_of_no_rows_no_launch_is_claimed(rows: int | str) -> None:
    none = [replace(site(name, plan), shape=SiteShape(rows, 16, 32, 16))
            for name, plan in (("a", "rows"), ("b", "rows"), ("c", "onednn"))]  # fmt: skip
    assert [claim.fewest for claim in claims_of(none)] == [0, 0, 0]
    some = [replace(site("a"), shape=SiteShape(rows, 16, 32, 16)) for rows in (1, "s0", "8*s0")]
    assert [claim.fewest for claim in claims_of(some)] == [1, 1, 1]


def test_a_batch_without_rows_is_no_failure() -> None:
    compiled = torch.compile(Layers(1), backend="fusedmlp", options=ALWAYS)
    with fusion_backend.watch(first=1, every=1, on_problem="raise") as watch:
        for rows in (8, 8, 0, 0, 0, 8, 8):
            with torch.no_grad():
                compiled(torch.randn(rows, 16))
            watch.step()
    watch.check()
    assert watch.profiled > 1
    assert {each.claimed - (each.launched or 0) for each in watch.sites} == {0}


def test_a_plan_without_kernels_claims_nothing() -> None:
    assert claims_of([site("a", None)]) == []


@pytest.mark.parametrize("family", registry.FAMILIES, ids=lambda family: family.name)
def test_the_kernels_of_a_family_have_the_names_that_it_is_known_by(family: Any) -> None:
    folder = Path(KERNELS, family.name)
    texts = [path.read_text() for path in folder.glob("*.py")]
    kernels = {name for text in texts for name in re.findall(r"def (fusedmlp_\w+)\(", text)}
    marks = (family.mark, family.gradient_mark)
    assert all(any(named(name, mark) for mark in marks) for name in kernels)
    assert not any(named(name, family.mark) for name in kernels if "gradient" in name)


# In a loop


def test_every_launch_of_a_training_loop_is_counted_by_site() -> None:
    model = torch.compile(Layers(2), backend="fusedmlp", options=ALWAYS)
    with fusion_backend.watch(first=1, every=2, on_problem="raise") as watch:
        for _ in range(6):
            model(torch.randn(8, 16)).sum().backward()
            watch.step()
    assert (watch.steps, watch.profiled) == (6, 2)  # the second and the fourth
    found = [(s.label, s.plan, s.runs, s.claimed, s.launched) for s in watch.sites]
    assert found == [("blocks.0", "rows", 2, 2, 2), ("blocks.1", "rows", 2, 2, 2)]
    assert watch.gradients == {"fusedmlp::rows_gradients": 4}
    assert watch.kernels
    watch.check()
    assert "6 steps, 2 profiled: 2 fused MLPs ran" in str(watch)
    assert re.search(r"blocks.1\s+rows\s+2\s+2\s+2", str(watch))


@torch.no_grad()
def test_it_is_a_handler_for_a_session_of_torchs_profiler() -> None:
    model = torch.compile(Layers(2), backend="fusedmlp", options=ALWAYS)
    watch = fusion_backend.watch(on_problem="raise")
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    with torch.profiler.profile(schedule=schedule, on_trace_ready=watch.on_trace_ready) as session:
        for _ in range(4):
            model(torch.randn(8, 16))
            session.step()
    assert watch.profiled == 2
    assert [(site.runs, site.launched) for site in watch.sites] == [(2, 2), (2, 2)]
    watch.check()


@torch.no_grad()
def test_a_loop_that_runs_the_model_uncompiled_is_warned_of_once_in_the_line_of_the_step() -> None:
    model = Layers(1)
    with (
        warnings.catch_warnings(record=True) as caught,
        fusion_backend.watch(first=0, every=1) as w,
    ):
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.randn(8, 16))
            w.step()
    assert kinds(w) == ["nothing-ran"]
    (warning,) = caught
    assert "step 1: no graph with a fused MLP ran" in str(warning.message)
    assert warning.filename == __file__


@torch.no_grad()
def test_a_graph_that_is_compiled_again_without_a_fusion_is_found_at_once() -> None:
    model = Layers(1)
    compiled = torch.compile(model, backend="fusedmlp", options=ALWAYS, dynamic=False)
    with quiet(first=100) as watch:
        compiled(torch.randn(8, 16))
        watch.step()
        model.blocks[0][1] = nn.Softmax(dim=-1)
        compiled(torch.randn(8, 16))
        watch.step()
    assert kinds(watch) == ["recompiled"]
    (problem,) = watch.problems
    assert problem.step == 2
    assert "graph 0/1 was compiled after 0/0" in problem.message
    assert "does not fuse blocks.0" in problem.message


def test_a_graph_for_training_is_not_compared_with_one_for_inference() -> None:
    watch = quiet()
    compiled_graph("0/0", site("a"))
    compiled_graph("0/1", site("a", None, training=True))
    compiled_graph("1/0", site("a", None))
    watch.step()
    assert not watch.problems
    compiled_graph("0/2", site("a", None))
    watch.step()
    assert kinds(watch) == ["recompiled"]
    assert "does not fuse a (not-faster)" in watch.problems[0].message


def test_graphs_from_before_a_reset_of_dynamo_are_not_taken_for_those_of_their_names() -> None:
    compiled_graph("0/0", site("a"), site("b"))
    torch._dynamo.reset()
    watch = quiet()
    compiled_graph("0/1", site("a", None))
    looked_at(watch, region("0/0", 0, 90), op("fusedmlp::rows", 10, 20))
    assert kinds(watch) == ["nothing-ran"]
    assert len(journal.history()) >= 2


def test_a_claimed_launch_that_did_not_happen_is_found() -> None:
    compiled_graph("0/0", site("a"), site("b"))
    calls = [op("fusedmlp::rows", 10, 20), op("fusedmlp::rows", 30, 40)]
    assert not looked_at(quiet(), region("0/0", 0, 90), *calls).problems
    watch = looked_at(quiet(), region("0/0", 0, 90), *calls[:1])
    assert kinds(watch) == ["not-fired"]
    assert "launched 1 kernels of rows in 1 runs" in watch.problems[0].message
    assert "claim 2" in watch.problems[0].message


def test_the_replay_of_a_cuda_graph_is_not_missed_where_only_an_operator_would_show_it() -> None:
    compiled_graph("0/0", site("a", "library", device="cuda"))
    replay = (region("0/0", 0, 90), launch(1, 10, "cudaGraphLaunch"), kernel("gemm", 20, 1))
    watch = looked_at(quiet(), *replay)
    assert not watch.problems
    assert watch.sites[0].launched is None
    assert kinds(
        looked_at(quiet(), region("0/0", 0, 90), launch(1, 10), kernel("gemm", 20, 1))
    ) == ["not-fired"]


def test_more_kernels_from_the_same_code_are_found_and_fewer_are_not() -> None:
    compiled_graph("0/0", site("a"))
    compiled_graph("0/1", site("a"))
    compiled_graph("0/2", site("a", training=True))
    fused, add = op("fusedmlp::rows", 10, 20), op("aten::add", 30, 40)
    watch = looked_at(quiet(), region("0/0", 0, 90), fused)
    looked_at(watch, region("0/2", 0, 90), fused, add)
    assert not watch.problems
    looked_at(watch, region("0/1", 0, 90), fused, add)
    assert kinds(watch) == ["more-kernels"]
    assert "graph 0/1 runs 2 kernels, where the same code ran 1 before" in watch.problems[0].message


def test_a_step_may_be_given_a_number_of_kernels() -> None:
    compiled_graph("0/0", site("a"))
    events = region("0/0", 0, 90), op("fusedmlp::rows", 10, 20), op("aten::add", 100, 110)
    assert not looked_at(quiet(most_kernels=2), *events).problems
    assert kinds(looked_at(quiet(most_kernels=1), *events)) == ["more-kernels"]


def test_a_problem_can_be_raised_or_handed_to_a_function() -> None:
    with pytest.raises(WatchError, match="no graph with a fused MLP ran"):
        looked_at(fusion_backend.watch(on_problem="raise"))
    found: list[Problem] = []
    watch = looked_at(fusion_backend.watch(on_problem=found.append))
    assert found == watch.problems
    with pytest.raises(WatchError, match="no graph with a fused MLP ran"):
        watch.check()


def test_a_check_before_anything_was_profiled_is_an_error() -> None:
    with fusion_backend.watch() as watch:
        watch.step()
    with pytest.raises(WatchError, match="no step was profiled: 1 steps have ended"):
        watch.check()


@pytest.mark.parametrize("wrong", [{"first": -1}, {"every": 1.5}, {"on_problem": "shout"}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(WatchError, match="must"):
        fusion_backend.watch(**wrong)


def test_a_step_under_somebody_elses_profiler_is_left_to_it() -> None:
    with torch.profiler.profile(), quiet(first=0) as watch:
        watch.step()
    assert not watch.profiled
    with quiet(first=0) as watch:
        watch.step()
    assert watch.profiled == 1


def test_steps_that_are_not_profiled_start_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**settings: Any) -> None:
        raise AssertionError("a session was started")

    monkeypatch.setattr(watching.torch.profiler, "profile", refuse)
    with quiet(first=100, every=100) as watch:
        for _ in range(99):
            watch.step()
    assert watch.steps == 99


def test_a_watch_that_never_began_says_so():
    watch = fusion_backend.watch()
    watch.step()
    assert "No step was profiled: a watch begins with `with watch:`" in str(watch)
    with pytest.raises(WatchError, match="a watch begins with `with watch:`"):
        watch.check()
