"""The Gluon kernel of wide layers on a GPU: numbers, layouts, and how Inductor calls it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from torch._inductor.utils import run_and_get_code

import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)
from fusion_backend import kernel_calls
from fusion_backend.kernels import hopper_epilogue, launch
from kernel_cases import (
    GATED,
    Case,
    assert_exact,
    eager_epilogue,
    eager_mlp,
    gluon_on_gpu,
    random_case,
    turned,
)

pytestmark = gluon_on_gpu

TILES = pytest.mark.parametrize("columns", hopper_epilogue.STAGES)
ACTIVATIONS = pytest.mark.parametrize("activation", [GATED, "gelu_tanh(x)", "x"])
# Several turns of all programs, an odd number of them too, and tiles that are not full in any
# direction.
SHAPES = [(1, 72, 8), (300, 72, 8), (1, 520, 1000), (1500, 520, 1000), (6500, 264, 1000)]
BIASES = pytest.mark.parametrize("missing", [[], ["bias_gate"], ["bias_up"]], ids=str)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """All tiles have as many columns."""
    monkeypatch.setattr(hopper_epilogue, "_columns", lambda *of: columns)


def case_on_gpu(rows: int, inner: int, hidden: int, bias: bool = True, **options) -> Case:
    options = {"dtype": torch.bfloat16, "device": "cuda", "bias": bias, **options}
    return random_case(rows, (inner, hidden, inner), options.pop("activation", GATED), **options)


def run(case: Case) -> Tensor:
    parameters = (case.weight_up, case.weight_gate, case.bias_up, case.bias_gate)
    assert hopper_epilogue.suits(case.x, *parameters)
    return hopper_epilogue.epilogue(case.x, *parameters, str(case.activation))


def check(case: Case) -> None:
    exact = eager_epilogue(case.to(torch.float64))[0]
    assert_exact(run(case), eager_epilogue(case)[0], exact)


@TILES
@ACTIVATIONS
@pytest.mark.usefixtures("only")
@pytest.mark.parametrize(("rows", "inner", "hidden"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_it_is_as_exact_as_eager(rows, inner, hidden, dtype, activation):
    check(case_on_gpu(rows, inner, hidden, dtype=dtype, activation=activation))


@pytest.mark.parametrize("activation", ["gelu_tanh(x)", "x"])
@pytest.mark.parametrize(("rows", "inner", "hidden"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_transposed_weights_are_read_as_they_are(rows, inner, hidden, dtype, activation):
    case = turned(case_on_gpu(rows, inner, hidden, dtype=dtype, activation=activation))
    assert not case.weight_up.is_contiguous() or min(case.weight_up.shape) == 1
    check(case)


@TILES
@BIASES
@pytest.mark.usefixtures("only")
def test_any_pointwise_function_and_either_bias(missing):
    case = case_on_gpu(300, 256, 1000, activation="clamp(g, -1.0, 2.0) * gelu(u)")
    check(case._replace(**dict.fromkeys(missing)))


@TILES
@ACTIVATIONS
@pytest.mark.usefixtures("only")
def test_rows_may_lie_apart_and_results_do_not_vary(activation):
    case = case_on_gpu(3000, 1024, 2056, bias=False, activation=activation)
    case = case._replace(x=F.pad(case.x, (0, 8))[:, :1024])
    first = run(case)
    check(case)
    assert all(run(case).equal(first) for _ in range(20))


def test_no_rows_give_no_rows():
    case = case_on_gpu(1, 64, 128)
    assert run(case._replace(x=case.x[:0])).shape == (0, 128)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """The arguments of each call of the kernel."""
    calls, kernel = [], hopper_epilogue.epilogue
    monkeypatch.setattr(hopper_epilogue, "epilogue", lambda *of: calls.append(of) or kernel(*of))
    return calls


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("activation", [GATED, "gelu_tanh(x)"])
def test_launches_take_it_where_it_was_measured_to_be_faster(launched, activation, transposed):
    case = case_on_gpu(512, 4096, 14336, bias=False, activation=activation)
    if transposed:
        case = turned(case, "weight_up", "weight_down")
    postact, *preacts = launch.epilogue(*case.first, case.activation, False)
    assert bool(launched) == (not transposed or case.weight_gate is None)
    assert preacts == [None, None]
    assert_exact(postact, eager_epilogue(case)[0], eager_epilogue(case.to(torch.float64))[0])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [64, 4096, 8192, 9000])
def test_a_linear_layer_is_as_exact_as_eager(launched, bias, dtype, rows):
    case = case_on_gpu(rows, 3072, 768, bias, dtype=dtype, activation="x")
    linear = (case.weight_up, case.bias_up)
    exact = F.linear(case.x.double(), *(None if t is None else t.double() for t in linear))
    assert_exact(launch.linear(case.x, *linear), F.linear(case.x, *linear), exact)
    assert bool(launched) == (rows in (4096, 8192) and dtype != torch.float32)


def test_a_pair_that_overlaps_waits_for_what_it_reads(launched):
    case = case_on_gpu(20000, 520, 1024, activation="gelu_tanh(x)")
    y = torch.empty_like(case.x)
    first = launch.epilogue(*case.first, case.activation, False)[0]
    expected = launch.linear(first, case.weight_down, case.bias_down)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = launch.epilogue(*case.first, case.activation, False)[0]
        y.copy_(launch.linear(hidden, case.weight_down, case.bias_down))
        hidden.zero_()
    assert len(launched) == 4
    for _ in range(50):
        y.zero_()
        graph.replay()
        assert y.equal(expected)


@ACTIVATIONS
def test_a_cuda_graph_replays_it(activation):
    case = case_on_gpu(512, 1024, 1024, activation=activation)
    expected = run(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        postact = run(case)
    for _ in range(3):
        postact.fill_(torch.nan)
        graph.replay()
        assert postact.equal(expected)


@pytest.mark.parametrize("options", [{}, {"triton.cudagraphs": True}], ids=["plain", "cudagraphs"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("rows", "widths", "activation", "transposed", "times"),
    [
        (512, (4096, 14336), GATED, False, 1),
        (8192, (768, 3072), "gelu_tanh(x)", False, 2),
        (8192, (768, 3072), "gelu_tanh(x)", True, 2),
    ],
    ids=["gated", "plain", "transposed"],
)
def test_compiled_code_calls_it(options, dynamic, rows, widths, activation, transposed, times):
    kernel_calls.install_lowering()
    case = case_on_gpu(rows, *widths, bias=False, activation=activation)
    if transposed:
        case = turned(case)

    @torch.compile(options={**options, "fx_graph_cache": False}, dynamic=dynamic)
    def compiled(x: Tensor) -> Tensor:
        return torch.ops.fusedmlp.mlp(x, *case[1:-1], [], activation, "epilogue")

    with torch.no_grad():
        got, codes = run_and_get_code(compiled, case.x)
        for _ in range(4):
            got = compiled(case.x).clone()
        assert_exact(got, eager_mlp(case), eager_mlp(case.to(torch.float64)))
    assert any(code.count("= fusedmlp_epilogue_") >= times for code in codes)
