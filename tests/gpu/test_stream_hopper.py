"""The overlapping pair of kernels on a GPU: numbers, graphs, streams, compiled code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from torch._inductor.utils import run_and_get_code

import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)
from fusion_backend import profile
from fusion_backend.kernels.stream import launch_sm90 as stream_launch
from kernel_cases import GATED, PLAIN, Case, assert_exact, eager_mlp, random_case, turned

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU of compute capability 9.0",
)

WIDE = (768, 3072, 768)
BOTH = pytest.mark.parametrize("activation", [PLAIN, GATED])
FEW_ROWS = pytest.mark.parametrize("rows", [1, 2, 16, 17, 64, 65, 128])


def case_of(rows: int, widths=WIDE, activation=PLAIN, dtype=torch.bfloat16, bias=True) -> Case:
    return random_case(rows, widths, activation, dtype=dtype, bias=bias, device="cuda")


def run(case: Case) -> Tensor:
    parameters = (case.weight_up, case.weight_down, case.bias_up, case.bias_down)
    gate = (case.weight_gate, case.bias_gate)
    assert stream_launch.suits(case.x, *parameters, *gate)
    return stream_launch.stream(case.x, *parameters, *gate, str(case.activation))


def as_it_is(case: Case) -> Case:
    return case


TURNED = pytest.mark.parametrize("turn", [as_it_is, turned], ids=["plain", "transposed"])


def check(case: Case) -> None:
    assert_exact(run(case), eager_mlp(case), eager_mlp(case.to(torch.float64)))


@FEW_ROWS
@pytest.mark.parametrize("widths", [(64, 256, 72), (520, 1280, 264), WIDE, (1600, 6400, 1600)])
@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_it_is_as_exact_as_eager(rows, widths, activation, dtype):
    check(case_of(rows, widths, activation, dtype))


@FEW_ROWS
@pytest.mark.parametrize("widths", [(64, 256, 72), (520, 1280, 264), WIDE])
@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_weights_may_be_transposed(rows, widths, activation, dtype):
    check(turned(case_of(rows, widths, activation, dtype)))


@FEW_ROWS
@pytest.mark.parametrize("names", [["weight_up"], ["weight_down"]], ids=str)
def test_one_of_both_weights_may_be_transposed(rows, names):
    check(turned(case_of(rows), *names))


@FEW_ROWS
@BOTH
def test_it_is_as_exact_as_eager_without_biases(rows, activation):
    check(case_of(rows, activation=activation, bias=False))


@pytest.mark.parametrize("rows", [16, 100])
def test_rows_may_lie_apart(rows):
    case = case_of(rows)
    check(case._replace(x=torch.cat([case.x, case.x], dim=1)[:, : case.x.shape[1]]))


def test_no_rows_give_no_rows():
    case = case_of(1)
    assert run(case._replace(x=case.x[:0])).shape == (0, 768)


@FEW_ROWS
@BOTH
@TURNED
def test_results_are_the_same_bit_for_bit_whatever_ran_before(rows, activation, turn):
    case, other = (turn(case_of(rows, activation=activation)) for _ in range(2))
    first = run(case)
    for _ in range(50):
        run(other)
        assert torch.equal(run(case), first)


@FEW_ROWS
@BOTH
def test_it_waits_for_what_wrote_its_operands(rows, activation):
    """Each call reads what the kernels just before it wrote: x, and each of the weights."""
    case = case_of(rows, activation=activation)
    doubled = [2 * tensor if isinstance(tensor, Tensor) else tensor for tensor in case]
    expected = run(case), run(Case(*doubled))
    copies = [tensor.clone() if isinstance(tensor, Tensor) else tensor for tensor in case]
    for turn in range(40):
        for copy, plain in zip(copies, case, strict=True):
            if isinstance(copy, Tensor):
                torch.mul(plain, 1 + turn % 2, out=copy)
        assert torch.equal(run(Case(*copies)), expected[turn % 2])


@FEW_ROWS
def test_a_captured_graph_of_many_calls_reads_its_inputs_again_when_replayed(rows):
    cases = [case_of(rows) for _ in range(4)]
    source = torch.randn(rows, 768, device="cuda").bfloat16()

    def chain(x: Tensor) -> Tensor:
        for case in cases:
            x = run(case._replace(x=x))
        return x

    chain(source)
    graph, copied = torch.cuda.CUDAGraph(), torch.empty_like(source)
    with torch.cuda.graph(graph):
        copied.copy_(source)
        y = chain(copied)
    for _ in range(20):
        source.copy_(torch.randn_like(source))
        graph.replay()
        assert torch.equal(y, chain(source.clone()))


@FEW_ROWS
def test_graphs_may_be_replayed_on_several_streams_at_one_time(rows):
    cases = [case_of(rows, activation=GATED) for _ in range(3)]
    expected = [run(case) for case in cases]
    graphs, results = [], []
    for case in cases:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            results.append([run(case) for _ in range(5)])
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(20):
        for side, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(side):
                graph.replay()
    torch.cuda.synchronize()
    for found, one in zip(results, expected, strict=True):
        assert all(torch.equal(result, one) for result in found)


@FEW_ROWS
def test_calls_on_several_streams_do_not_disturb_each_other(rows):
    cases = [case_of(rows) for _ in range(3)]
    expected = [run(case) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    found = []
    for _ in range(50):
        for side, case in zip(streams, cases, strict=True):
            with torch.cuda.stream(side):
                found.append(run(case))
    torch.cuda.synchronize()
    for position, result in enumerate(found):
        assert torch.equal(result, expected[position % len(cases)])


def operator(case: Case):
    """The MLP as a function of x, as a graph calls it."""

    def mlp(x: Tensor) -> Tensor:
        return torch.ops.fusedmlp.mlp(x, *case[1:-1], [], str(case.activation), "stream")

    return mlp


@pytest.mark.parametrize("rows", [1, 16, 100])
@BOTH
@TURNED
@pytest.mark.parametrize("options", [{}, {"triton.cudagraphs": True}], ids=["plain", "cudagraphs"])
def test_compiled_code_calls_it(rows, activation, turn, options):
    case = turn(case_of(rows, activation=activation))
    compiled = torch.compile(operator(case), backend="fusedmlp", options=options)
    with torch.no_grad():
        got, codes = run_and_get_code(compiled, case.x)
        for _ in range(4):
            got = compiled(case.x).clone()
    (code,) = codes
    assert "= fusedmlp_stream_" in code
    assert "triton_poi" not in code  # no weight is copied
    assert torch.equal(got, run(case))


def test_compiled_code_serves_every_number_of_few_rows():
    case = case_of(128)
    compiled = torch.compile(operator(case), backend="fusedmlp", dynamic=True)
    counter = torch._dynamo.utils.counters["stats"]
    with torch.no_grad():
        compiled(case.x)
        before = counter["unique_graphs"]
        for rows in (2, 16, 17, 64, 100):
            part = case._replace(x=case.x[:rows])
            assert torch.equal(compiled(part.x), run(part))
    assert counter["unique_graphs"] == before


@pytest.mark.parametrize("rows", [1, 16, 100])
def test_it_is_two_kernels(rows):
    case = case_of(rows)
    with torch.no_grad():
        counts = profile(operator(case), case.x, backends=["fusedmlp"])["fusedmlp"]
    assert counts.kernels == 2
    assert all(name.startswith("fusedmlp_stream_hopper") for name in counts.names)
