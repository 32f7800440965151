"""profile(): exact counts from events, and models on the CPU from end to end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusion_backend
from fusion_backend import Comparison
from fusion_backend.compat.dynamo import CompileSettings
from fusion_backend.errors import ProfileError
from fusion_backend.instruments.accuracy import relative_error
from fusion_backend.instruments.compiled_calls import compiled_call, eager_call
from fusion_backend.instruments.cpu_operators import count_operators
from fusion_backend.instruments.isolation import Inputs
from fusion_backend.instruments.kernel_counts import CPU_OPERATORS, GPU_KERNELS, count
from fusion_backend.instruments.profiler_trace import STEP, Step, read_events, record, split_steps

Entry = dict[str, Any]


def entry(category: str, name: str, start: float, end: float, correlation: int = 0) -> Entry:
    """A complete event as it stands in a Chrome trace."""
    arguments = {"correlation": correlation} if correlation else {}
    return {
        "ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start,
        "pid": 1, "tid": 1, "args": arguments,
    }  # fmt: skip


def step(label: str, start: float, end: float) -> Entry:
    return entry("user_annotation", STEP + label, start, end)


def steps_of(*entries: Entry) -> list[Step]:
    return split_steps(read_events(entries))


def one_kernel_a_step(*durations: float) -> list[Step]:
    entries = []
    for index, duration in enumerate(durations):
        start = 100.0 * index
        entries += [step("b", start, start + 90), entry("kernel", "gemm", start, start + duration)]
    return steps_of(*entries)


# Counts of GPU events


def test_gpu_events_are_told_apart_by_category_not_by_name() -> None:
    steps = steps_of(
        step("b", 0, 100),
        entry("kernel", "Memset-like kernel", 10, 20),
        entry("kernel", "gemm", 20, 30),
        entry("kernel", "gemm", 30, 40),
        entry("gpu_memcpy", "Memcpy DtoD", 40, 45),
        entry("gpu_memset", "Memset (Device)", 45, 50),
    )
    counts = count("b", steps, GPU_KERNELS)
    assert dict(counts.names) == {"Memset-like kernel": 1, "gemm": 2}
    assert (counts.kernels, counts.memcpys, counts.memsets) == (3, 1, 1)
    assert counts.gpu_us == pytest.approx(40.0)


def test_calls_of_the_runtime_and_ranges_on_the_gpu_are_not_counted() -> None:
    steps = steps_of(
        step("b", 0, 100),
        entry("kernel", "gemm", 10, 20),
        entry("cuda_runtime", "cudaLaunchKernel", 5, 6),
        entry("cuda_driver", "cuLaunchKernelEx", 6, 7),
        entry("gpu_user_annotation", "range", 10, 20),
        entry("cuda_sync", "Stream Sync", 10, 20),
    )
    assert count("b", steps, GPU_KERNELS).totals == (1, 0, 0)


def test_a_kernel_belongs_to_the_step_that_launched_it_even_if_it_ran_later() -> None:
    steps = steps_of(
        step("a", 0, 10),
        entry("cuda_runtime", "cudaLaunchKernel", 5, 6, correlation=7),
        step("b", 20, 30),
        entry("kernel", "late", 25, 28, correlation=7),
    )
    assert [len(each.gpu) for each in steps] == [1, 0]


def test_a_kernel_without_a_recorded_launch_belongs_to_the_step_it_ran_in() -> None:
    steps = steps_of(
        step("a", 0, 10), step("b", 20, 30), entry("kernel", "gemm", 25, 28, correlation=9)
    )
    assert [len(each.gpu) for each in steps] == [0, 1]


def test_events_before_between_and_after_steps_are_dropped() -> None:
    steps = steps_of(
        entry("kernel", "warm-up", 0, 5),
        step("b", 10, 20),
        entry("kernel", "gemm", 12, 15),
        entry("kernel", "copy of inputs", 25, 28),
        step("b", 30, 40),
        entry("kernel", "gemm", 32, 35),
        entry("kernel", "afterwards", 45, 50),
    )
    assert count("b", steps, GPU_KERNELS).kernels == 1


def test_gpu_time_is_the_median_of_the_steps() -> None:
    assert count("b", one_kernel_a_step(10, 50, 12), GPU_KERNELS).gpu_us == pytest.approx(12.0)


def test_gpu_time_of_kernels_that_overlap_counts_once() -> None:
    steps = steps_of(
        step("b", 0, 200),
        entry("kernel", "product", 10, 50),
        entry("kernel", "launched early, on the same stream", 40, 90),
        entry("kernel", "within the one before", 60, 70),
        entry("gpu_memset", "after a pause", 100, 105),
    )
    assert count("b", steps, GPU_KERNELS).gpu_us == pytest.approx(85.0)


def test_gpu_time_of_several_gpus_adds_up() -> None:
    kernel = entry("kernel", "gemm", 10, 30)
    steps = steps_of(step("b", 0, 100), kernel, kernel | {"pid": 2, "ts": 20})
    assert count("b", steps, GPU_KERNELS).gpu_us == pytest.approx(40.0)


def test_steps_that_differ_are_an_error_that_names_their_counts() -> None:
    steps = [*one_kernel_a_step(10), Step("b"), *one_kernel_a_step(10)]
    with pytest.raises(ProfileError, match=r"'b'.*1\+0\+0, 0\+0\+0, 1\+0\+0"):
        count("b", steps, GPU_KERNELS)


def test_no_gpu_event_at_all_is_an_error() -> None:
    with pytest.raises(ProfileError, match="no GPU event was recorded for 'b'"):
        count("b", [Step("b"), Step("b")], GPU_KERNELS)


def test_a_replayed_cuda_graph_is_recognised() -> None:
    steps = steps_of(
        step("b", 0, 10),
        entry("cuda_runtime", "cudaGraphLaunch", 1, 2, correlation=3),
        entry("kernel", "gemm", 4, 5, correlation=3),
        entry("kernel", "gelu", 5, 6, correlation=3),
        step("b", 20, 30),
    )
    assert [each.replays_graph for each in steps] == [True, False]
    assert len(steps[0].gpu) == 2


# Counts of CPU operators


def operators(*entries: Entry) -> dict[str, int]:
    return dict(count_operators(read_events(entries)))


def test_a_primitive_operator_counts_once_whatever_it_calls() -> None:
    counted = operators(
        entry("cpu_op", "aten::addmm", 0, 10),
        entry("cpu_op", "aten::copy_", 1, 2),
    )
    assert counted == {"aten::addmm": 1}


def test_a_composite_operator_counts_as_what_it_is_composed_of() -> None:
    counted = operators(
        entry("cpu_op", "aten::linear", 0, 10),
        entry("cpu_op", "aten::t", 1, 2),
        entry("cpu_op", "aten::addmm", 3, 9),
    )
    assert counted == {"aten::addmm": 1}


def test_an_opaque_custom_operator_hides_no_work() -> None:
    torch.ops.import_module("fusion_backend.operators")
    counted = operators(
        entry("cpu_op", "fusedmlp::mlp", 0, 10),
        entry("cpu_op", "mkldnn::_linear_pointwise", 1, 4),
        entry("cpu_op", "aten::empty", 2, 3),
        entry("cpu_op", "mkldnn::_linear_pointwise", 5, 9),
    )
    assert counted == {"mkldnn::_linear_pointwise": 2}


@pytest.mark.parametrize(
    "name", ["aten::view", "aten::expand", "aten::empty", "aten::item", "aten::split", "aten::t"]
)
def test_views_allocations_and_queries_do_not_count(name: str) -> None:
    assert operators(entry("cpu_op", name, 0, 10)) == {}


def test_dropout_in_evaluation_does_not_count() -> None:
    assert operators(entry("cpu_op", "aten::dropout", 0, 10)) == {}


def test_a_custom_operator_that_calls_no_other_counts_once() -> None:
    torch.ops.import_module("fusion_backend.operators")
    assert operators(entry("cpu_op", "fusedmlp::mlp", 0, 10)) == {"fusedmlp::mlp": 1}


def test_loops_of_inductor_count_without_the_number_of_their_graph() -> None:
    assert operators(entry("cpu_op", "graph_3_cpp_fused_gelu_0", 0, 10)) == {"cpp_fused_gelu_0": 1}


def test_frames_of_dynamo_and_nodes_of_autograd_count_as_what_they_run() -> None:
    counted = operators(
        entry("cpu_op", "Torch-Compiled Region: 0/0", 0, 10),
        entry("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 1, 9),
        entry("cpu_op", "AddmmBackward0", 2, 8),
        entry("cpu_op", "aten::mm", 3, 4),
        entry("cpu_op", "aten::mm", 5, 6),
    )
    assert counted == {"aten::mm": 2}


def test_reshape_counts_only_where_it_copies() -> None:
    x = torch.randn(4, 4)

    def body() -> None:
        with fusion_backend.instruments.profiler_trace.mark_step("x"):
            x.reshape(16)
            x.t().reshape(16)

    (recorded,) = record(body)
    assert dict(count_operators(recorded.cpu)) == {"aten::clone": 1}


def test_a_profiler_session_within_another_is_an_error() -> None:
    with torch.profiler.profile(), pytest.raises(ProfileError, match=r"outside of torch\.profiler"):
        record(lambda: None)


# Errors


def test_the_error_is_relative_to_the_norm_over_all_tensors() -> None:
    actual = [torch.tensor([3.0]), torch.tensor([0.0, 5.0])]
    expected = [torch.tensor([3.0]), torch.tensor([0.0, 4.0])]
    assert relative_error(actual, expected) == pytest.approx(1 / 5)


def test_results_of_other_shapes_cannot_be_compared() -> None:
    with pytest.raises(ProfileError, match="same shapes"):
        relative_error([torch.zeros(2)], [torch.zeros(3)])


# Models from end to end


class MLP(nn.Module):
    def __init__(self, width: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.fc = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.proj = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.act(self.fc(x)))


def profile_eagerly(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Comparison:
    return fusion_backend.profile(model, *args, backends=["eager"], steps=2, **kwargs)


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    with torch.no_grad():
        return fusion_backend.profile(
            MLP(), torch.randn(8, 16), steps=3, options={"fusedmlp.policy": "always"}
        )


def test_all_three_backends_are_counted_on_the_cpu(comparison: Comparison) -> None:
    assert comparison.counted == CPU_OPERATORS
    assert [row.backend for row in comparison.rows] == ["eager", "inductor", "fusedmlp"]
    assert comparison["eager"].kernels == comparison["inductor"].kernels == 3


def test_the_fused_mlp_runs_one_operator_instead_of_three(comparison: Comparison) -> None:
    assert comparison["fusedmlp"].kernels == 1
    comparison.assert_fewer_kernels()
    comparison.assert_fewer_kernels(than="eager")


def test_the_cpu_has_no_gpu_numbers(comparison: Comparison) -> None:
    for row in comparison.rows:
        assert row.gpu_us is row.memcpys is row.memsets is None
        assert row.wall_us > 0


def test_errors_in_float32_are_those_of_rounding(comparison: Comparison) -> None:
    for row in comparison.rows:
        assert row.error is not None
        assert 0 < row.error < 1e-6
        assert row.gradient_error is None


def test_differences_name_the_kernels_and_their_counts(comparison: Comparison) -> None:
    differences = comparison.differences("eager", "inductor")
    assert ("aten::gelu", 1, 0) in differences
    assert "aten::addmm" not in [difference.name for difference in differences]


def test_the_number_that_inductor_gives_a_kernel_makes_no_difference(
    comparison: Comparison,
) -> None:
    first, second = (
        replace(comparison["inductor"], backend=name, names={f"triton_poi_fused_gelu_{n}": 1})
        for name, n in (("a", 1), ("b", 12))
    )
    assert replace(comparison, rows=(first, second)).differences("a", "b") == ()


def test_json_holds_every_number(comparison: Comparison) -> None:
    content = json.loads(comparison.to_json())
    assert content["device"] == "cpu"
    assert content["baseline"] == "inductor"
    assert [row["kernels"] for row in content["rows"]] == [3, 3, 1]
    assert sum(content["rows"][0]["names"].values()) == 3


def test_backward_counts_and_checks_the_gradients() -> None:
    profiled = fusion_backend.profile(
        MLP(), torch.randn(8, 16), backends=["eager", "inductor"], steps=2, backward=True
    )
    assert profiled.backward
    # two products, their two weight gradients and one of the input of the second, two bias sums,
    # the activation and its backward
    assert profiled["eager"].kernels == 9
    for row in profiled.rows:
        assert row.gradient_error is not None
        assert 0 < row.gradient_error < 1e-6


@torch.no_grad()
def test_backward_without_gradients_is_an_error() -> None:
    with pytest.raises(ProfileError, match="backward=True needs gradients"):
        profile_eagerly(MLP(), torch.randn(8, 16), backward=True)


def test_backward_of_a_model_without_parameters_is_an_error() -> None:
    with pytest.raises(ProfileError, match="an output that requires gradients"):
        profile_eagerly(torch.relu, torch.randn(8), backward=True)


def test_buffers_and_gradients_are_left_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    gradient = torch.ones(4, 4)
    model[0].weight.grad = gradient
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    profile_eagerly(model, torch.randn(8, 4), backward=True)
    assert model[0].weight.grad is gradient
    assert model[0].bias.grad is None
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def test_every_call_starts_from_the_same_buffers() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    profiled = fusion_backend.profile(
        Counting(), torch.ones(4), backends=["eager", "aot_eager"], steps=1
    )
    assert [row.error for row in profiled.rows] == [0.0, 0.0]


def test_random_number_generators_are_left_as_they_were() -> None:
    x = torch.randn(8, 4)
    state = torch.get_rng_state()
    profile_eagerly(nn.Dropout(), x)
    assert torch.equal(torch.get_rng_state(), state)


def test_inputs_that_the_model_writes_to_are_left_as_they_were() -> None:
    x = torch.zeros(4)
    profiled = profile_eagerly(lambda x: x.add_(1), x)
    assert not x.any()
    assert profiled["eager"].error == 0.0


def test_train_and_eval_mode_are_those_of_the_caller() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    x = torch.randn(8, 4)
    training, evaluation = profile_eagerly(model, x), profile_eagerly(model.eval(), x)
    assert training["eager"].kernels > evaluation["eager"].kernels == 1
    assert training["eager"].error is None
    assert "random numbers" in training.notes[0]
    assert evaluation.notes == ()


def test_a_model_that_cannot_run_in_float64_has_no_error_but_a_note() -> None:
    weight = torch.randn(4, 4)
    profiled = profile_eagerly(lambda x: x @ weight, torch.randn(4, 4))
    assert profiled["eager"].error is None
    assert "float64" in profiled.notes[0]


def test_a_compiled_model_is_profiled_as_the_original() -> None:
    assert profile_eagerly(torch.compile(MLP()), torch.randn(8, 16))["eager"].kernels == 3


def test_eager_runs_the_compiled_parts_of_a_model_eagerly() -> None:
    graphs = []

    def backend(graph_module: Any, inputs: Any) -> Any:
        graphs.append(graph_module)
        return graph_module.forward

    model = nn.Sequential(MLP(), MLP())
    model[0].compile(backend=backend)
    model[1] = torch.compile(model[1], backend=backend)
    eager_call(model)(torch.randn(8, 16))
    assert not graphs
    model(torch.randn(8, 16))
    assert len(graphs) == 2


def test_profiling_does_not_use_up_the_recompile_limit_of_the_model() -> None:
    model = MLP()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    for rows in range(1, torch._dynamo.config.recompile_limit + 2):
        settings = CompileSettings({}, None, dynamic=False)
        call = compiled_call(model, "eager", settings, name_loops=False, observe=print)
        call(torch.randn(rows, 16))
    compiled(torch.randn(rows + 1, 16))  # raises where the limit is reached


def test_a_backend_that_fails_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph_module: Any, inputs: Any, **settings: Any) -> Any:
        raise ValueError("out of order")

    monkeypatch.setattr("fusion_backend.backend.backend_with_observer", lambda observe: broken)
    with pytest.raises(ProfileError, match="'fusedmlp' failed on the model: ValueError: out of"):
        fusion_backend.profile(MLP(), torch.randn(8, 16), backends=["eager", "fusedmlp"])


def test_the_errors_of_the_model_itself_are_raised_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        profile_eagerly(MLP(), torch.randn(8, 17))


def test_a_model_whose_work_depends_on_its_state_is_an_error() -> None:
    calls: list[int] = []

    def grows(x: Tensor) -> Tensor:
        calls.append(0)
        for _ in calls:
            x = x + 1
        return x

    with pytest.raises(ProfileError, match="every call of 'eager' must run the same"):
        profile_eagerly(grows, torch.ones(2))


def test_a_backend_that_was_not_profiled_is_an_error() -> None:
    profiled = profile_eagerly(MLP(), torch.randn(8, 16))
    with pytest.raises(ProfileError, match=r"one of those profiled \(eager\), got 'fusedmlp'"):
        profiled.assert_fewer_kernels()


@pytest.mark.parametrize("backends", ["eager", [], ["eager", "eager"]])
def test_backends_must_be_a_list_of_different_names(backends: Any) -> None:
    with pytest.raises(ProfileError, match="list of different names"):
        fusion_backend.profile(MLP(), torch.randn(8, 16), backends=backends)


def test_copied_inputs_keep_what_they_share_and_that_they_require_gradients() -> None:
    x = torch.randn(4, requires_grad=True)
    history = x * 2
    args, kwargs = Inputs((x, history), {"again": x}).copy()
    assert args[0] is kwargs["again"]
    assert args[0] is not x
    assert args[0].requires_grad
    assert args[1].is_leaf
    assert args[1].requires_grad


@pytest.mark.usefixtures("no_cpp_compiler")
def test_a_profile_says_where_the_kernels_of_fusedmlp_are_inductors() -> None:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ELU(), nn.Linear(16, 8)), torch.randn(4, 8)
    compiled = torch.compile(model, backend="fusedmlp", options={"fusedmlp.policy": "always"})
    with torch.no_grad():
        (note,) = fusion_backend.profile(compiled, x, backends=["fusedmlp"], steps=1).notes
    assert note.startswith("fusedmlp fused no MLP here (no-kernel)")


def test_a_profile_of_what_is_fused_says_nothing_of_it() -> None:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), torch.randn(4, 8)
    compiled = torch.compile(model, backend="fusedmlp", options={"fusedmlp.policy": "always"})
    with torch.no_grad():
        assert fusion_backend.profile(compiled, x, backends=["fusedmlp"], steps=1).notes == ()
