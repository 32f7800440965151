"""profile(): claims beside launches, whole steps, memory, changes, traces, rows and JSON."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusion_backend
from fusion_backend import Comparison, KernelCounts
from fusion_backend.errors import ProfileError
from fusion_backend.instruments.claims import SiteLaunches
from fusion_backend.instruments.comparison import SCHEMA_VERSION
from fusion_backend.instruments.kernel_counts import GPU_KERNELS, count
from fusion_backend.instruments.memory import bytes_of, highest_sum
from fusion_backend.instruments.perfetto import Range, Trace, write
from fusion_backend.instruments.profiler_trace import Event, Step

ALWAYS = {"fusedmlp.policy": "always"}
DOCS = Path(__file__).resolve().parents[2] / "docs"
ROWS, WIDTH, HIDDEN = 32, 16, 64


def layers() -> nn.Sequential:
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
        for _ in range(2)
    ]
    return nn.Sequential(*blocks)


@pytest.fixture(scope="module")
def trained() -> Comparison:
    """A forward and backward pass of two MLPs."""
    return fusion_backend.profile(
        layers(), torch.randn(ROWS, WIDTH), backends=["eager", "fusedmlp"], steps=2, backward=True,
        options=ALWAYS,
    )  # fmt: skip


def test_each_site_has_what_its_plan_claims_and_what_was_launched(trained: Comparison) -> None:
    found = [(s.label, s.plan, s.runs, s.claimed, s.launched, s.kernels) for s in trained.sites]
    kernels = {"fusedmlp::rows": 1}
    assert found == [("0", "rows", 1, 1, 1, kernels), ("1", "rows", 1, 1, 1, kernels)]
    assert all(site.time_us > 0 for site in trained.sites)
    assert trained.gradients == {"fusedmlp::rows_gradients": 2}
    assert re.search(r"1 +rows +1 +1 +\d+\S* +fusedmlp::rows\n", str(trained))
    assert "Backward passes: fusedmlp::rows_gradients 2×." in str(trained)


def test_every_kernel_has_a_time(trained: Comparison) -> None:
    for row in trained.rows:
        assert set(row.times) == set(row.names)
        assert all(time > 0 for time in row.times.values())


def test_what_is_saved_for_backward_is_counted_without_inputs_and_parameters(
    trained: Comparison,
) -> None:
    # Eager keeps both pre-activations, both activations and what the second MLP reads.
    hidden, wide = 4 * ROWS * HIDDEN, 4 * ROWS * WIDTH
    assert trained["eager"].saved_bytes == 4 * hidden + wide
    assert trained["fusedmlp"].saved_bytes == wide


def test_the_most_memory_at_once_is_less_where_no_hidden_value_is_kept(trained: Comparison) -> None:
    eager, fused = trained["eager"].peak_bytes, trained["fusedmlp"].peak_bytes
    assert eager is not None
    assert fused is not None
    assert eager > 4 * 4 * ROWS * HIDDEN
    assert fused < eager


def test_the_first_call_of_a_compiled_backend_is_timed(trained: Comparison) -> None:
    assert trained["eager"].first_call_s is None
    assert trained["fusedmlp"].first_call_s > trained["fusedmlp"].wall_us / 1e6


def test_nothing_is_saved_without_gradients() -> None:
    with torch.no_grad():
        (row,) = fusion_backend.profile(
            layers(), torch.randn(4, WIDTH), backends=["eager"], steps=1
        ).rows
    assert row.saved_bytes is None
    assert row.peak_bytes


def test_the_highest_sum_is_that_of_memory_in_use() -> None:
    assert highest_sum([100, 50, -50, 20, -120]) == 150
    assert highest_sum([-10, 5]) == 0


def test_storages_that_are_shared_count_once() -> None:
    base, other = torch.zeros(8), torch.zeros(4)
    assert bytes_of([base[:2], base[2:], other], [other]) == 32


# Steps


def test_a_whole_step_is_counted_and_leaves_parameters_and_optimizer_as_they_were() -> None:
    model, x = layers(), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    before = [parameter.clone() for parameter in model.parameters()]
    profiled = fusion_backend.profile(
        model, x, step=train, backends=["eager", "fusedmlp"], steps=2, options=ALWAYS
    )
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer.state
    eager, fused = profiled.rows
    assert eager.names["aten::mul_"] >= 8  # the momentum of each parameter
    assert fused.names["fusedmlp::rows_gradients"] == 2
    assert fused.kernels < eager.kernels
    assert 0 < fused.error < 1e-5  # the loss: every step starts with the same parameters
    assert fused.saved_bytes < eager.saved_bytes
    assert [site.launched for site in profiled.sites] == [1, 1]
    assert str(profiled).startswith("cpu, train: ")


def test_a_step_and_backward_exclude_each_other() -> None:
    with pytest.raises(ProfileError, match="exclude each other"):
        fusion_backend.profile(layers(), torch.randn(4, WIDTH), step=print, backward=True)


# Changes, rows, JSON


def comparison(**times: dict[str, float]) -> Comparison:
    rows = [
        KernelCounts(name, 2, 0, 0, 1.0, 1.0, None, None, dict.fromkeys(each, 1), each)
        for name, each in times.items()
    ]
    return Comparison(tuple(rows), "H100", GPU_KERNELS, 1, False)


def test_changes_have_counts_and_times_of_both_and_the_longest_first() -> None:
    inductor = {"gemm": 30.0, "triton_poi_fused_gelu_0": 5.0, "triton_poi_fused_gelu_3": 6.0}
    found = comparison(inductor=inductor, fusedmlp={"gemm": 28.0, "fusedmlp_epilogue": 40.0})
    changes = found.changes()
    assert [tuple(each) for each in changes] == [
        ("fusedmlp_epilogue", 0, 1, 0.0, 40.0),
        ("gemm", 1, 1, 30.0, 28.0),
        ("triton_poi_fused_gelu", 2, 0, 11.0, 0.0),
    ]
    assert [(each.change, each.change_us) for each in changes] == [
        (1, 40.0),
        (0, -2.0),
        (-2, -11.0),
    ]
    lines = [line.split() for line in found.changes_text().splitlines()]
    assert lines[3] == ["gemm", "1", "1", "+0", "30", "28", "-2"]
    assert lines[-1] == ["all", "3", "2", "-1", "41", "68", "+27"]


def test_names_of_templates_are_cut_in_the_table_and_whole_in_the_json() -> None:
    name = "void at::native::vectorized_elementwise_kernel<8, at::native::GeluCUDAKernelImpl"
    name += f"(at::TensorIteratorBase&)::{{lambda()#2}}, std::array<char*, 2ul> >({'x' * 300})"
    found = comparison(inductor={name: 4.0}, fusedmlp={})
    lines = found.changes_text().splitlines()
    assert max(map(len, lines)) < 180
    assert "vectorized_elementwise_kernel<8, GeluCUDAKernelImpl" in lines[2]
    assert name in found.to_json()


def test_rows_are_flat_and_become_a_frame(trained: Comparison) -> None:
    rows = trained.to_rows()
    assert [row["backend"] for row in rows] == ["eager", "fusedmlp"]
    assert all(not isinstance(value, (dict, list)) for row in rows for value in row.values())
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(rows).set_index("backend")
    assert frame.loc["fusedmlp", "kernels"] == 4


def test_every_key_of_the_json_is_on_its_page_and_the_other_way_round(trained: Comparison) -> None:
    content = json.loads(trained.to_json())
    assert content["schema_version"] == SCHEMA_VERSION
    page = (DOCS / "profile-json.md").read_text()
    assert f"version {SCHEMA_VERSION}" in page
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    documented = {
        section.partition("\n")[0]: set(re.findall(r"^\| `(\w+)`", section, re.MULTILINE))
        for section in sections
    }
    assert documented["The whole"] == set(content)
    assert documented["A row"] == set(content["rows"][0])
    assert documented["A site"] == set(content["sites"][0])
    assert {each.name for each in fields(KernelCounts)} <= documented["A row"]
    assert {each.name for each in fields(SiteLaunches)} == documented["A site"]


# GPU events


def kernel(name: str, start: float, duration: float, correlation: int = 0) -> Event:
    return Event("kernel", name, start, duration, (0, 7), correlation)


def test_times_on_a_gpu_are_medians_of_what_a_call_spends_in_each_kernel() -> None:
    steps = [
        Step("b", [kernel("gemm", 0, 10), kernel("gemm", 20, 5), kernel("gelu", 30, 1)]),
        Step("b", [kernel("gemm", 0, 10), kernel("gemm", 20, 7), kernel("gelu", 30, 2)]),
        Step("b", [kernel("gemm", 0, 90), kernel("gemm", 99, 7), kernel("gelu", 200, 9)]),
    ]
    assert count("b", steps, GPU_KERNELS).times == {"gemm": 17, "gelu": 2}


# Traces


def events_of(path: Path, phase: str = "X") -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes())
    return [event for event in json.loads(text)["traceEvents"] if event["ph"] == phase]


def test_a_trace_has_each_backend_as_a_process_and_each_site_as_a_range(
    trained: Comparison, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json.gz"
    trained.save_trace(path)
    processes = {
        e["args"]["name"]: e["pid"] for e in events_of(path, "M") if "process" in e["name"]
    }
    assert list(processes) == ["eager", "fusedmlp"]
    events = [event for event in events_of(path) if event["pid"] == processes["fusedmlp"]]
    assert min(event["ts"] for event in events) == 0
    sites = [event for event in events if event["cat"] == "mlp"]
    assert [site["name"] for site in sites] == ["0", "1", "1, backward", "0, backward"]
    calls = [e for e in events if e["name"] in ("fusedmlp::rows", "fusedmlp::rows_gradients")]
    calls.sort(key=lambda call: call["ts"])
    assert [site["ts"] for site in sites] == [call["ts"] for call in calls]
    assert [site["dur"] for site in sites] == pytest.approx(
        [call["dur"] for call in calls], rel=0.01
    )
    assert not [e for e in events_of(path) if e["pid"] == processes["eager"] and e["cat"] == "mlp"]


def test_streams_and_threads_have_names_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    call = Event("cpu_op", "aten::mm", 100, 5, (9, 9))
    step = Step(
        "b", [kernel("gemm", 110, 10), kernel("copy", 112, 1)._replace(thread=(0, 8))], [call]
    )
    write(path, {"fusedmlp": Trace(step, (Range("mlp", 110, 120, {"plan": "library"}),))})
    events = json.loads(path.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["MLPs", "GPU 0, stream 7", "GPU 0, stream 8", "CPU thread 9"]
    (mlp,) = [event for event in events if event.get("cat") == "mlp"]
    assert (mlp["ts"], mlp["dur"], mlp["args"]) == (10, 10, {"plan": "library"})


def test_traces_do_not_make_two_comparisons_differ(trained: Comparison) -> None:
    assert replace(trained, traces={}) == trained
