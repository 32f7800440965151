"""The stream kernels on a GPU: numbers, determinism, concurrency, CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)
from fusion_backend.compat import triton_features
from fusion_backend.kernels import launch
from kernel_cases import GATED, PLAIN, Case, assert_exact, eager_mlp, random_case

WIDE = (768, 3072, 768)
BOTH = pytest.mark.parametrize("activation", [PLAIN, GATED])
FEW_ROWS = pytest.mark.parametrize("rows", [1, 2, 16, 64, 128])
IN_ALL_DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda dtype: str(dtype)[6:]
)


def case_on_gpu(rows: int, widths=WIDE, activation: str = PLAIN, dtype=torch.bfloat16) -> Case:
    return random_case(rows, widths, activation, dtype=dtype, device="cuda")


def stream(case: Case) -> Tensor:
    with triton_features.launching_directly():
        return launch.stream(*case.mlp)


def check(case: Case) -> None:
    assert_exact(stream(case), eager_mlp(case), eager_mlp(case.to(torch.float64)))


def operator(case: Case):
    """The MLP as a function of x, as a graph calls it."""
    activation = GATED if case.weight_gate is not None else PLAIN

    def mlp(x: Tensor) -> Tensor:
        return torch.ops.fusedmlp.mlp(x, *case[1:-1], [], activation, "stream")

    return mlp


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17, 64, 100, 128, 300])
@pytest.mark.parametrize("widths", [(64, 256, 64), (33, 129, 65), WIDE, (2048, 4000, 1000)])
@BOTH
@IN_ALL_DTYPES
def test_it_is_as_exact_as_eager(rows, widths, activation, dtype):
    check(case_on_gpu(rows, widths, activation, dtype))


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_it_is_as_exact_as_eager_in_the_widths_of_a_large_model(rows):
    check(case_on_gpu(rows, (4096, 14336, 4096), GATED))


@pytest.mark.parametrize("rows", [1, 7])
@BOTH
def test_weights_may_be_transposed_or_lie_at_odd_addresses(rows, activation):
    case = case_on_gpu(rows, (64, 136, 72), activation)
    names = [
        name
        for name in ("weight_gate", "weight_up", "weight_down")
        if getattr(case, name) is not None
    ]
    for view in (
        lambda weight: weight.t().contiguous().t(),
        lambda weight: torch.cat([weight, weight], dim=1)[:, 1 : weight.shape[1] + 1],
    ):
        check(case._replace(**{name: view(getattr(case, name)) for name in names}))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
        lambda x: torch.cat([x, x], dim=1)[:, 1 : x.shape[1] + 1],
        lambda x: x.t().contiguous().t(),
        lambda x: x[:1].expand(x.shape),
    ],
    ids=["columns", "unaligned columns", "transposed", "expanded"],
)
def test_rows_may_have_any_strides(view):
    case = case_on_gpu(30)
    check(case._replace(x=view(case.x)))


def test_rows_may_lie_beyond_32_bits():
    far = torch.randn(40, 1 << 26, device="cuda").bfloat16()[:, :64]
    assert far.stride(0) * far.shape[0] > 2**31
    check(case_on_gpu(40, (64, 256, 64))._replace(x=far))


@BOTH
def test_no_rows_give_no_rows(activation):
    assert stream(case_on_gpu(0, activation=activation)).shape == (0, 768)


@FEW_ROWS
@BOTH
def test_results_are_the_same_bit_for_bit_from_run_to_run(rows, activation):
    case = case_on_gpu(rows, activation=activation)
    first = stream(case)
    assert all(torch.equal(first, stream(case)) for _ in range(100))


@FEW_ROWS
def test_several_streams_may_run_one_compiled_model_at_one_time(rows):
    case = case_on_gpu(rows, activation=GATED)
    compiled = torch.compile(operator(case), fullgraph=True)
    inputs = [torch.randn_like(case.x) for _ in range(3)]
    with torch.no_grad():
        expected = [compiled(x) for x in inputs]
        streams = [torch.cuda.Stream() for _ in inputs]
        torch.cuda.synchronize()
        found = []
        for _ in range(50):
            for side, x in zip(streams, inputs, strict=True):
                with torch.cuda.stream(side):
                    found.append(compiled(x))
        torch.cuda.synchronize()
    for position, result in enumerate(found):
        assert torch.equal(result, expected[position % len(inputs)])


@FEW_ROWS
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_it_is_as_exact_as_eager_when_compiled(mode, rows):
    case = case_on_gpu(rows, activation=GATED)
    compiled = torch.compile(operator(case), fullgraph=True, mode=mode)
    with torch.no_grad():
        for _ in range(4):
            result = compiled(case.x).clone()
    assert_exact(result, eager_mlp(case), eager_mlp(case.to(torch.float64)))


@FEW_ROWS
def test_a_captured_graph_reads_its_inputs_again_when_replayed(rows):
    case = case_on_gpu(rows)
    mlp, x = operator(case), case.x.clone()
    mlp(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = mlp(x)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, mlp(x))


def test_symbolic_rows_compile_at_most_once_for_each_class_of_rows():
    case = case_on_gpu(64)
    compiled = torch.compile(operator(case), fullgraph=True, dynamic=True)
    counter = torch._dynamo.utils.counters["stats"]
    with torch.no_grad():
        for rows in (5, 40):
            compiled(case.x[:rows])
        before = counter["unique_graphs"]
        for rows in (2, 3, 9, 16, 17, 33, 64):
            part = case._replace(x=case.x[:rows])
            result = compiled(part.x)
            assert_exact(result, eager_mlp(part), eager_mlp(part.to(torch.float64)))
    assert counter["unique_graphs"] == before
