"""The Gluon kernel of wide layers on a GPU: numbers, layouts, and how Inductor calls it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from torch._inductor.utils import run_and_get_code

import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)
from fusion_backend.kernels import launch
from fusion_backend.kernels.epilogue import launch_sm90 as hopper_epilogue
from fusion_backend.kernels.epilogue.config_sm90 import SQUARE, TALL, TILES, Tile
from fusion_backend.operators import gpu_calls
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

EACH_TILE = pytest.mark.parametrize("tile", TILES, ids=["square", "wide", "tall"])
ACTIVATIONS = pytest.mark.parametrize("activation", [GATED, "gelu_tanh(x)"])
# Several turns of all programs, an odd number of them too, and tiles that are not full in any
# direction.
SHAPES = [(1, 72, 8), (300, 72, 8), (1, 520, 1000), (1500, 520, 1000), (6500, 264, 1000)]
BIASES = pytest.mark.parametrize("missing", [[], ["bias_gate"], ["bias_up"]], ids=str)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch, tile: Tile) -> None:
    """All tiles are like this one, also where a launcher knows another for a number of rows."""
    monkeypatch.setattr(hopper_epilogue, "tile_of", lambda *of: tile)
    monkeypatch.setattr(hopper_epilogue, "launcher", hopper_epilogue.launcher.__wrapped__)


def case_on_gpu(rows: int, inner: int, hidden: int, bias: bool = True, **options) -> Case:
    options = {"dtype": torch.bfloat16, "device": "cuda", "bias": bias, **options}
    return random_case(rows, (inner, hidden, inner), options.pop("activation", GATED), **options)


def run(case: Case) -> Tensor:
    parameters = (case.weight_up, case.weight_gate, case.bias_up, case.bias_gate)
    assert hopper_epilogue.suits(case.x, *parameters)
    return hopper_epilogue.epilogue(case.x, *parameters, None, str(case.activation))


def check(case: Case) -> None:
    exact = eager_epilogue(case.to(torch.float64))[0]
    assert_exact(run(case), eager_epilogue(case)[0], exact)


@EACH_TILE
@ACTIVATIONS
@pytest.mark.usefixtures("only")
@pytest.mark.parametrize(("rows", "inner", "hidden"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_it_is_as_exact_as_eager(rows, inner, hidden, dtype, activation):
    check(case_on_gpu(rows, inner, hidden, dtype=dtype, activation=activation))


@pytest.mark.parametrize("tile", [SQUARE, TALL], ids=["square", "tall"])
@pytest.mark.usefixtures("only")
@pytest.mark.parametrize(("rows", "inner", "hidden"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_transposed_weights_are_read_as_they_are(rows, inner, hidden, dtype):
    case = turned(case_on_gpu(rows, inner, hidden, dtype=dtype, activation="relu(x)"))
    assert not case.weight_up.is_contiguous() or min(case.weight_up.shape) == 1
    check(case)


@EACH_TILE
@BIASES
@pytest.mark.usefixtures("only")
def test_any_pointwise_function_and_either_bias(missing):
    case = case_on_gpu(300, 256, 1000, activation="clamp(g, -1.0, 2.0) * gelu(u)")
    check(case._replace(**dict.fromkeys(missing)))


@EACH_TILE
@ACTIVATIONS
@pytest.mark.usefixtures("only")
def test_rows_may_lie_apart_and_results_do_not_vary(activation):
    case = case_on_gpu(3000, 1024, 2056, bias=False, activation=activation)
    case = case._replace(x=F.pad(case.x, (0, 8))[:, :1024])
    first = run(case)
    check(case)
    assert all(run(case).equal(first) for _ in range(20))


@pytest.mark.parametrize(("rows", "inner", "hidden"), [*SHAPES, (16384, 768, 1024)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_a_last_layer_adds_what_follows(rows, inner, hidden, dtype, transposed, bias):
    case = case_on_gpu(rows, inner, hidden, bias, dtype=dtype, activation="relu(x)")
    layer = (turned(case) if transposed else case).weight_up, case.bias_up
    residual = torch.randn(rows, hidden, dtype=dtype, device="cuda")
    parameters = (layer[0], None, layer[1], None)
    assert hopper_epilogue.suits(case.x, *parameters)
    got = hopper_epilogue.epilogue(case.x, *parameters, residual, hopper_epilogue.IDENTITY)
    x, *exact = (t if t is None else t.double() for t in (case.x, *layer))
    assert_exact(got, F.linear(case.x, *layer) + residual, F.linear(x, *exact) + residual)


@pytest.mark.parametrize("tile", TILES, ids=["square", "wide", "tall"])
@pytest.mark.usefixtures("only")
def test_nothing_is_read_beyond_the_end_of_memory(tile):
    """Biases at the ends of segments that the driver gave, and columns of tiles beyond them."""
    case = case_on_gpu(300, 256, 1024, activation="relu(x)")
    for _ in range(8):
        segment = torch.empty(1 << 20, dtype=torch.bfloat16, device="cuda")
        bias = segment[-1024:].copy_(case.bias_up)
        check(case._replace(bias_up=bias))
        torch.cuda.synchronize()


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


def test_two_that_overlap_wait_for_what_they_read():
    case = case_on_gpu(20000, 1024, 1024, activation="relu(x)")
    second = case._replace(x=run(case))
    expected, y = run(second), torch.empty_like(case.x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = run(case)
        y.copy_(run(second._replace(x=hidden)))
        hidden.zero_()
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


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_compiled_code_adds_a_residual(bias, transposed):
    gpu_calls.install_lowering()
    case = case_on_gpu(8192, 768, 3072, bias=bias, activation="gelu_tanh(x)")
    if transposed:
        case = turned(case)

    @torch.compile(options={"fx_graph_cache": False})
    def compiled(x: Tensor, residual: Tensor) -> Tensor:
        arguments = (x, *case[1:-1], [], "gelu_tanh(x)", "epilogue")
        return torch.ops.fusedmlp.mlp(*arguments, residual=residual)

    stored = torch.randn(8192 * 768 + 4, dtype=case.x.dtype, device="cuda")
    # An address that no copy of 16 bytes starts at is known, and the sum left to Inductor.
    for start, calls in ((0, 2), (4, 1)):
        residual = stored[start:][: 8192 * 768].view(8192, 768)
        with torch.no_grad():
            got, codes = run_and_get_code(compiled, case.x, residual)
        exact = eager_mlp(case.to(torch.float64)) + residual
        assert_exact(got, eager_mlp(case) + residual, exact)
        (code,) = codes
        assert code.count("= fusedmlp_epilogue_") == calls


@pytest.mark.parametrize("options", [{}, {"triton.cudagraphs": True}], ids=["plain", "cudagraphs"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("rows", "widths", "activation", "transposed"),
    [
        (512, (4096, 14336), GATED, False),
        (8192, (768, 3072), "gelu_tanh(x)", False),
        (8192, (768, 3072), "gelu_tanh(x)", True),
    ],
    ids=["gated", "plain", "transposed"],
)
def test_compiled_code_calls_it(options, dynamic, rows, widths, activation, transposed):
    gpu_calls.install_lowering()
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
    assert any("= fusedmlp_epilogue_" in code for code in codes)
