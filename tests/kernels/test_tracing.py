"""Launches under tracing, as ahead-of-time autograd traces them: no GPU is needed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton.backends.compiler import GPUTarget

import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)
from fusion_backend.kernels import launch
from fusion_backend.kernels.back_to_back import hidden_gradient_launch
from fusion_backend.kernels.back_to_back.hidden_gradient_launch import Wanted
from fusion_backend.kernels.chain import launch as chain_launch
from fusion_backend.kernels.chain import towers_launch
from fusion_backend.kernels.codegen.specialize import specialize
from fusion_backend.kernels.epilogue.kernel import fusedmlp_epilogue
from fusion_backend.kernels.epilogue.kernel_tma import fusedmlp_epilogue_tma
from fusion_backend.kernels.host import targets
from fusion_backend.kernels.host.configs import Config
from fusion_backend.kernels.host.problems import MANY_ROWS, Problem, epilogue_problem
from fusion_backend.kernels.host.targets import H100
from fusion_backend.kernels.invocations import row_units
from fusion_backend.mlp.expression import parse
from fusion_backend.mlp.weights import FirstLayer, Tower, Weights
from kernel_cases import compiled, with_gluon
from kernel_compilation import (
    HopperDriver,
    copied_by_inductor,
    invocation,
    source_of,
    symbolic_size,
)
from repetition import each_once

pytestmark = compiled

FUNCTIONAL = torch.ops.higher_order.triton_kernel_wrapper_functional
SWIGLU = parse("silu(g) * u")
WIDTHS = (64, 256, 48)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are for an H100."""
    monkeypatch.setattr(targets, "target_of", lambda device: H100)
    for module in (chain_launch, towers_launch):
        monkeypatch.setattr(module, "target_of", lambda device: H100)
    monkeypatch.setattr(triton.runtime.driver, "_active", HopperDriver())


class Tracer:
    """Fake CUDA tensors, with one symbolic number of rows or with a given one."""

    def __init__(self, rows: int, symbolic: bool) -> None:
        self.shapes = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.shapes)
        self.rows = self.symbol("rows", rows) if symbolic else rows

    def symbol(self, name: str, value: int) -> torch.SymInt:
        return symbolic_size(self.mode, name, value)

    def tensor(self, *shape) -> Tensor:
        with self.mode:
            return torch.empty(shape, dtype=torch.bfloat16, device="cuda")

    def trace(self, function, *tensors: Tensor | None) -> torch.fx.Graph:
        with self.mode:
            return make_fx(dispatch_functionalize(function))(*tensors).graph

    def guards(self) -> list[str]:
        return [str(guard.expr).split(" ", 1)[1] for guard in self.shapes.guards]


def first_layers(tracer: Tracer) -> tuple[Tensor, ...]:
    inner, hidden, _ = WIDTHS
    layer = (tracer.tensor(hidden, inner), tracer.tensor(hidden))
    return (tracer.tensor(tracer.rows, inner), *layer, *layer)


def epilogue(x, *layers):
    return launch.epilogue(x, FirstLayer(*layers), SWIGLU, save_preact=True)


def epilogue_tma(x, *layers):
    config = Config(128, 128, programs=1, tma=True)
    return launch.epilogue(x, FirstLayer(*layers), SWIGLU, save_preact=True, config=config)


def back_to_back(x, *layers):
    return launch.back_to_back(x, Weights(*layers), SWIGLU)


def stream(x, *layers):
    return launch.stream(x, Weights(*layers), SWIGLU)


def hidden_gradient(*operands):
    return launch.hidden_gradient(*operands, SWIGLU)


def narrow_hidden_gradient(x, grad_output, weight_up, bias_up, weight_down):
    weights = Weights(None, None, weight_up, bias_up, weight_down, None)
    found = hidden_gradient_launch.narrow_hidden_gradient(
        x, grad_output, weights, parse("silu(x)"), Wanted()
    )
    return tuple(found)


def chain(x, *layers):
    activations = [parse("silu(x)"), parse("relu(x)")]
    return chain_launch.chain(x, layers[::2], (layers[1], None, layers[5]), activations)


def towers(x, *layers):
    """Two that are printed alike, and a third."""
    activations = [parse("relu(x)")] * (len(layers) // 2 - 1)
    twins = [Tower(layers[::2], layers[1::2], activations) for _ in range(2)]
    other = Tower(layers[::2], [None] * len(activations) + [layers[-1]], activations)
    return towers_launch.towers(x, [*twins, other])


def traced(name: str, tracer: Tracer) -> torch.fx.Graph:
    _, hidden, out = WIDTHS
    if name in ("chain", "towers"):
        shapes = [(64, 64), (64,), (32, 64), (32,), (1, 32), (1,)]
        tensors = [tracer.tensor(*shape) for shape in shapes]
        function = chain if name == "chain" else towers
        return tracer.trace(function, tracer.tensor(tracer.rows, 64), *tensors)
    if name.startswith("epilogue"):
        function = epilogue_tma if name == "epilogue_tma" else epilogue
        return tracer.trace(function, *first_layers(tracer))
    if name == "back_to_back":
        last = (tracer.tensor(out, hidden), tracer.tensor(out))
        return tracer.trace(back_to_back, *first_layers(tracer), *last)
    if name == "narrow_hidden_gradient":
        rows = (tracer.tensor(tracer.rows, WIDTHS[0]), tracer.tensor(tracer.rows, out))
        layers = (tracer.tensor(hidden, WIDTHS[0]), tracer.tensor(hidden))
        down = tracer.tensor(out, hidden)
        return tracer.trace(narrow_hidden_gradient, *rows, *layers, down)
    preact = tracer.tensor(tracer.rows, hidden)
    operands = (tracer.tensor(tracer.rows, out), tracer.tensor(out, hidden), preact, preact)
    return tracer.trace(hidden_gradient, *operands)


WRITTEN = {
    "epilogue": {"postact", "preact_gate", "preact_up"},
    "epilogue_tma": {"postact", "preact_gate", "preact_up"},
    "back_to_back": {"y"},
    "chain": {"y"},
    "towers": {"y_0", "y_1", "y_2"},
    "hidden_gradient": {"grad_gate", "grad_up", "postact"},
    "narrow_hidden_gradient": {"grad_x", "grad_preact", "postact", "sums"},
}


@pytest.mark.parametrize(("name", "symbolic"), each_once(WRITTEN, [True, False]))
def test_one_launch_is_traced_that_writes_its_results_only(name, symbolic):
    graph = traced(name, Tracer(3000, symbolic))
    (node,) = graph.find_nodes(op="call_function", target=FUNCTIONAL)
    assert set(node.kwargs["tensors_to_clone"]) == WRITTEN[name]


@pytest.mark.parametrize(("name", "symbolic"), each_once(WRITTEN, [True, False]))
def test_nothing_but_allocations_surrounds_a_launch(name, symbolic):
    graph = traced(name, Tracer(3000, symbolic))
    others = {
        str(node.target)
        for node in graph.nodes
        if node.op == "call_function" and node.target is not FUNCTIONAL
    }
    arithmetic = {name for name in others if "built-in function" in name or "sym_size" in name}
    assert (
        others - arithmetic
        == {"aten.new_empty.default", "<built-in function getitem>"} - arithmetic
    )


@pytest.mark.parametrize("name", [name for name in WRITTEN if name not in ("chain", "towers")])
@pytest.mark.parametrize(
    ("rows", "guards"),
    [(5, ["<= 16"]), (50, ["> 16", "<= 64"]), (3000, ["> 16", "> 64", "> 1024"])],
)
def test_symbolic_rows_are_compared_with_classes_of_rows_only(name, rows, guards):
    tracer = Tracer(rows, symbolic=True)
    traced(name, tracer)
    assert tracer.guards() == guards


@pytest.mark.parametrize("name", ["chain", "towers"])
@pytest.mark.parametrize(
    ("rows", "guards"),
    [(5, ["<= 1024"]), (3000, ["> 1024", "<= 4096"]), (5000, ["> 1024", "> 4096"])],
)
def test_symbolic_rows_of_a_chain_are_compared_with_classes_of_its_own(name, rows, guards):
    tracer = Tracer(rows, symbolic=True)
    traced(name, tracer)
    assert tracer.guards() == guards


@pytest.mark.parametrize(("rows", "symbolic"), [(1, False), (50, True)])
def test_a_stream_is_two_launches_that_write_hidden_and_y_only(rows, symbolic):
    tracer = Tracer(rows, symbolic)
    _, hidden, out = WIDTHS
    last = (tracer.tensor(out, hidden), tracer.tensor(out))
    graph = tracer.trace(stream, *first_layers(tracer), *last)
    launches = graph.find_nodes(op="call_function", target=FUNCTIONAL)
    assert [set(node.kwargs["tensors_to_clone"]) for node in launches] == [{"hidden"}, {"y"}]
    assert tracer.guards() == (["> 16", "<= 64"] if symbolic else [])


@pytest.mark.parametrize("name", ["epilogue", "hidden_gradient"])
@pytest.mark.parametrize("symbolic", [False, True])
def test_a_launch_with_operands_writes_its_results_only(name, symbolic):
    tracer = Tracer(3000, symbolic)
    _, hidden, out = WIDTHS
    activation = parse("dropout(silu(p0 + g) * u * p1, p2, 0.1)")
    with tracer.mode:
        seed = torch.empty((), dtype=torch.int64, device="cuda")
    operands = (tracer.tensor(tracer.rows, hidden), tracer.tensor(hidden), seed)

    def run(*tensors):
        own, operands = tensors[:-3], tensors[-3:]
        if name == "epilogue":
            return launch.epilogue(own[0], FirstLayer(*own[1:]), activation, True, operands)
        return launch.hidden_and_operand_gradients(*own, activation, operands, [0, 1])

    preact = tracer.tensor(tracer.rows, hidden)
    gradient = (tracer.tensor(tracer.rows, out), tracer.tensor(out, hidden), preact, preact)
    tensors = first_layers(tracer) if name == "epilogue" else gradient
    graph = tracer.trace(run, *tensors, *operands)
    (node,) = graph.find_nodes(op="call_function", target=FUNCTIONAL)
    of_operands = {"grad_p0", "grad_p1"} if name == "hidden_gradient" else set()
    assert set(node.kwargs["tensors_to_clone"]) == WRITTEN[name] | of_operands
    assert not graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    if symbolic:
        assert tracer.guards() == ["> 16", "> 64", "> 1024"]


@with_gluon
def test_kernels_are_made_for_the_widths_that_symbols_stand_for():
    tracer = Tracer(5000, symbolic=True)
    width, hidden = tracer.symbol("width", 256), tracer.symbol("hidden", 1024)
    x, up, down = (
        tracer.tensor(*shape) for shape in ((tracer.rows, width), (hidden, width), (width, hidden))
    )

    def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        weights = Weights(None, None, up, None, down, None)
        return launch.back_to_back(x, weights, parse("relu(x)"))

    graph = tracer.trace(mlp, x, up, down)
    assert graph.find_nodes(op="call_function", target=torch.ops.fusedmlp.back_to_back.default)
    assert (width.node.maybe_as_int(), hidden.node.maybe_as_int()) == (256, 1024)
    assert tracer.rows.node.maybe_as_int() is None


def test_the_grid_follows_symbolic_rows():
    graph = traced("epilogue", Tracer(3000, symbolic=True))
    (node,) = graph.find_nodes(op="call_function", target=FUNCTIONAL)
    ((programs, _, _),) = node.kwargs["grid"]
    assert isinstance(programs, torch.fx.Node)


def test_rows_with_a_symbolic_stride_need_no_copy():
    tracer = Tracer(3000, symbolic=True)
    operands = first_layers(tracer)
    inner, *_ = WIDTHS
    with tracer.mode:
        strided = torch.empty(4, tracer.rows, inner, dtype=torch.bfloat16, device="cuda")[:, 0]
    graph = tracer.trace(epilogue, strided, *operands[1:])
    assert not graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    units, unit = row_units(strided)
    assert isinstance(units, torch.SymInt)
    assert unit == 1


def test_tensor_descriptors_are_for_inputs_that_inductor_takes_to_be_aligned():
    tracer = Tracer(3000, symbolic=True)
    inner, *_ = WIDTHS
    with tracer.mode:
        shifted = torch.empty(tracer.rows, 2 * inner, dtype=torch.bfloat16, device="cuda")
    weights = first_layers(tracer)[1:]
    assert epilogue_problem(shifted[:, 8 : inner + 8], *weights[::2], H100).tma
    assert not epilogue_problem(shifted[:, 4 : inner + 4], *weights[::2], H100).tma


# Which code is copied does not depend on tiles, and how long it is compiled does.
SMALLEST = {"block_m": 16, "block_n": 16, "block_k": 16, "num_warps": 1, "num_stages": 2}


@pytest.mark.parametrize(
    ("template", "config"),
    [
        (fusedmlp_epilogue, Config(**SMALLEST)),
        (fusedmlp_epilogue_tma, Config(**SMALLEST, tma=True)),
    ],
)
@pytest.mark.parametrize(
    ("activation", "kinds"),
    [
        ("silu(g) * u", ()),
        (
            "dropout(silu(p0 + g) * u * p1 + p2, p3, 0.1)",
            ("elementwise", "vector", "scalar", "seed"),
        ),
    ],
)
def test_inductor_can_copy_a_kernel_with_all_it_calls(
    template, config, activation, kinds, tmp_path
):
    kernel = specialize(template, parse(activation), torch.bfloat16, kinds)
    copied = copied_by_inductor(kernel, tmp_path)
    problem = Problem(MANY_ROWS, 64, 256, 0, True, torch.bfloat16)
    call = invocation("epilogue", problem, H100, config, kinds)
    code = source_of(getattr(copied, template.__name__), call)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    result = triton.compile(code, GPUTarget("cuda", 90, 32), options)
    assert "tanh.approx" in result.asm["ptx"]
