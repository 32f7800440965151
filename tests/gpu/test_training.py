"""Kernels of training on a GPU: numbers, layouts, launches, and how Inductor calls them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

pytest.importorskip("triton")

import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)
from fusion_backend.kernels import launch
from fusion_backend.kernels.epilogue import gradient_launch_sm90 as hopper_hidden_gradient
from fusion_backend.kernels.epilogue import launch_sm90 as hopper_epilogue
from fusion_backend.kernels.epilogue.config_sm90 import Form, Tile, tiles_for
from fusion_backend.mlp.weights import is_transposed
from fusion_backend.operators import gpu_calls
from kernel_cases import (
    GATED,
    Case,
    assert_exact,
    eager_epilogue,
    eager_hidden_gradient,
    eager_mlp,
    eager_preact,
    gluon_on_gpu,
    random_case,
    turned,
)

pytestmark = gluon_on_gpu

ops = torch.ops.fusedmlp
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
ACTIVATIONS = pytest.mark.parametrize("activation", [GATED, "gelu_tanh(x)", "square(relu(x))"])
CASES = pytest.mark.parametrize(
    ("activation", "dtype"),
    [
        (GATED, torch.bfloat16),
        ("gelu_tanh(x)", torch.bfloat16),
        ("square(relu(x))", torch.float16),
        ("relu(g) * u", torch.float16),
    ],
)
# Several turns of all programs, an odd number of them too, and tiles that are not full in any
# direction; of the sum, fewer blocks than there are buffers and more.
SHAPES = [(1, 136, 8), (300, 136, 136), (1500, 520, 1000), (6500, 264, 1000), (20000, 128, 520)]


# Whether gradients of pre-activations are summed, and whether that of the result is.
Sums = tuple[bool, bool]


def case_on_gpu(rows: int, inner: int, hidden: int, activation: str, **options) -> Case:
    options = {"dtype": torch.bfloat16, "device": "cuda", **options}
    return random_case(rows, (inner, hidden, inner), activation, **options)


def saving(case: Case) -> list[Tensor | None]:
    parameters = (case.weight_up, case.weight_gate, case.bias_up, case.bias_gate)
    how = str(case.activation)
    postact, *preacts = ops.epilogue_saving(case.x, *parameters, how, False)
    if case.weight_gate is None:
        return [postact, None, *preacts]
    # The same numbers side by side.
    again, joined = ops.epilogue_saving(case.x, *parameters, how, True)
    assert again.equal(postact)
    assert joined.equal(torch.cat(preacts, 1))
    return [postact, *preacts]


def of_form(case: Case, transposed: bool = False) -> Form:
    biases = case.bias_up is not None, case.bias_gate is not None
    return Form(case.weight_gate is not None, *biases, transposed, saves=True)


@CASES
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_first_layers_keep_what_eager_computes(monkeypatch, activation, dtype, bias, transposed):
    if transposed and "u" in activation.split():
        pytest.skip("of transposed weights there is only one")
    for rows, inner, hidden in [*SHAPES, (1500, 768, 1024)]:
        case = case_on_gpu(rows, inner, hidden, activation, dtype=dtype, bias=bias)
        case = turned(case) if transposed else case
        for tile in tiles_for(activation, dtype, of_form(case, transposed)):
            monkeypatch.setattr(hopper_epilogue, "tile_of", lambda *of, tile=tile: tile)
            results = (saving(case), eager_epilogue(case), eager_epilogue(case.to(torch.float64)))
            for triple in zip(*results, strict=True):
                assert_exact(*triple)


def check_gradients(case: Case, grad_output: Tensor, sums_of: Sums) -> list[Tensor]:
    gate, up = eager_preact(case)
    tensors = (grad_output, case.weight_down, gate, up)
    how = str(case.activation)
    *found, postact, sums = ops.hidden_gradient(*tensors, how, False, *sums_of)
    found = torch.cat(found, 1)
    if gate is not None:
        # The same numbers side by side.
        side = (grad_output, case.weight_down, None, torch.cat([gate, up], 1))
        again = ops.hidden_gradient(*side, how, True, *sums_of)
        assert all(a.equal(b) for a, b in zip(again, (found, postact, sums), strict=True))
        check_in_place(case, side, sums_of, (found, postact, sums))
    else:
        check_in_place(case, tensors, sums_of, (found, postact, sums))
    eager = eager_hidden_gradient(case, grad_output, gate, up)
    wide = [None if t is None else t.double() for t in (grad_output, gate, up)]
    exact = eager_hidden_gradient(case.to(torch.float64), *wide)
    joined = [torch.cat([t for t in of[:2] if t is not None], 1) for of in (eager, exact)]
    assert_exact(found, *joined)
    assert_exact(postact, eager[2], exact[2])
    summed = [[of] if sums_of[0] else [] for of in joined]
    if sums_of[1]:
        summed = [[*of, grad_output.to(joined[i].dtype)] for i, of in enumerate(summed)]
    if any(sums_of):
        assert sums.dtype == torch.float32
        assert_exact(sums.sum(0).to(found.dtype), *(torch.cat(of, 1).sum(0) for of in summed))
    return [found, postact, sums]


def check_in_place(case: Case, tensors, sums_of: Sums, expected) -> None:
    """Gradients that take the memory of the pre-activations have the same bits."""
    grad, weight, gate, preact = tensors
    given, joined = (True, True, gate is not None, True), preact.shape[1] != weight.shape[1]
    known = (tuple(weight.shape), weight.dtype, given, is_transposed(weight), grad.get_device())
    how = (str(case.activation), joined, *sums_of)
    run = hopper_hidden_gradient.hidden_gradient_caller(*how, *known, True)
    spent = preact.clone()
    found = run(grad, weight, gate, spent)
    assert found[0].data_ptr() == spent.data_ptr()
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))


@CASES
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize(
    "sums_of", [(False, False), (True, True), (True, False), (False, True)], ids=str
)
def test_gradients_of_preactivations_are_as_exact_as_eager(activation, dtype, transposed, sums_of):
    for rows, inner, hidden in SHAPES:
        case = case_on_gpu(rows, inner, hidden, activation, dtype=dtype)
        case = turned(case) if transposed else case
        check_gradients(case, torch.randn_like(case.x), sums_of)


@pytest.mark.parametrize("activation", ["exp(g) * u", "log(x)"])
def test_rows_beyond_the_last_are_in_no_sum(activation):
    """Of a pre-activation of 0 the derivative of a logarithm is infinite."""
    case = case_on_gpu(130, 136, 72, activation)
    gate, up = (None if t is None else t.abs() + 0.5 for t in eager_preact(case))
    grad = torch.randn_like(case.x)
    tensors = (grad, case.weight_down, gate, up, activation, False, True, True)
    *found, _, sums = ops.hidden_gradient(*tensors)
    expected = torch.cat([*found, grad], 1).double().sum(0)
    assert (sums.double().sum(0) - expected).norm() < 0.02 * expected.norm()


@ACTIVATIONS
def test_rows_may_lie_apart_and_results_do_not_vary(activation):
    case = case_on_gpu(5000, 1024, 2056, activation)
    grad = F.pad(torch.randn_like(case.x), (0, 8))[:, :1024]
    first = check_gradients(case, grad, (True, True))
    for _ in range(10):
        for again, before in zip(check_gradients(case, grad, (True, True)), first, strict=True):
            assert again.equal(before)


@pytest.mark.parametrize("widths", [(768, 3072), (2048, 5632)], ids=str)
@ACTIVATIONS
def test_gradients_of_many_tiles_do_not_vary(activation, widths):
    """Where a copy overtook loads from its buffer, one call in three had a wrong row."""
    case = case_on_gpu(8192, *widths, activation)
    gate, up = eager_preact(case)
    how = (str(case.activation), False, True, True)
    tensors = (torch.randn_like(case.x), case.weight_down, gate, up)
    first = ops.hidden_gradient(*tensors, *how)
    for _ in range(100):
        again = ops.hidden_gradient(*tensors, *how)
        assert all(a.equal(b) for a, b in zip(again, first, strict=True))


@HALVES
@pytest.mark.parametrize("rows", [1, 200, 9000])
def test_the_gradient_of_a_gated_input_is_summed_before_it_is_rounded(dtype, rows):
    gate, up = (torch.randn(192, 520, dtype=dtype, device="cuda") for _ in range(2))
    grad = torch.randn(rows, 384, dtype=dtype, device="cuda")
    weight = torch.cat([gate, up])
    eager, exact = grad @ weight, grad.double() @ weight.double()
    (found,) = ops.input_gradient(grad, gate, up, None)
    assert_exact(found, eager, exact)
    of_gate, of_up = (half.contiguous() for half in grad.chunk(2, 1))
    assert ops.input_gradient(of_gate, gate, up, of_up)[0].equal(found)


def tensors_of(case: Case) -> list[Tensor]:
    return [t.requires_grad_() for t in case[:-1] if t is not None]


def gradients_by(function, case: Case, grad: Tensor) -> list[Tensor]:
    with torch.enable_grad():
        asked = tensors_of(case)
        return list(torch.autograd.grad(function(case), asked, grad))


def check_training(function, case: Case, grad: Tensor) -> None:
    wide = case.to(torch.float64)
    wide = Case(*(t.detach() if isinstance(t, Tensor) else t for t in wide))
    exact = gradients_by(eager_mlp, wide, grad.double())
    eager = gradients_by(eager_mlp, case, grad)
    for found, *others in zip(gradients_by(function, case, grad), eager, exact, strict=True):
        assert found.stride() == others[0].stride()
        assert_exact(found.contiguous(), *others)


def fused(plan: str):
    def function(case: Case) -> Tensor:
        return ops.mlp(*case[:-1], [], str(case.activation), plan)

    return function


def compiled(case: Case, plan: str, dynamic: bool):
    gpu_calls.install_lowering()
    run = torch.compile(
        lambda *tensors: ops.mlp(*tensors, [], str(case.activation), plan),
        dynamic=dynamic,
        options={"shape_padding": False},  # products that times make wider have other strides
    )
    return lambda case: run(*case[:-1])


WIDE = [
    (8192, (768, 3072), "gelu_tanh(x)", False),
    (8192, (768, 3072), "gelu_tanh(x)", True),
    (4096, (2048, 5632), GATED, False),
    (2048, (2048, 5632), GATED, False),
]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("rows", "widths", "activation", "transposed"), WIDE)
def test_a_compiled_step_is_as_exact_as_eager(rows, widths, activation, transposed, bias, dynamic):
    case = case_on_gpu(rows, *widths, activation, bias=bias)
    case = turned(case) if transposed else case
    case = Case(*(t.detach() if isinstance(t, Tensor) else t for t in case))
    check_training(compiled(case, "epilogue", dynamic), case, torch.randn_like(case.x))


@pytest.mark.parametrize(("rows", "widths", "activation", "transposed"), WIDE)
def test_an_eager_step_is_as_exact_as_eager(rows, widths, activation, transposed):
    case = case_on_gpu(rows, *widths, activation)
    case = turned(case) if transposed else case
    check_training(fused("epilogue"), case, torch.randn_like(case.x))


def test_gradients_that_are_one_value_everywhere():
    case = case_on_gpu(4096, 768, 3072, "gelu_tanh(x)")
    check_training(
        fused("epilogue"), case, torch.ones((), device="cuda").to(case.x).expand(4096, 768)
    )


# Of the second line the gradients of the weights do not fit in registers.
NARROW = [
    *((1, 16, 16, 16), (1000, 64, 256, 64), (5000, 32, 128, 32), (777, 50, 200, 10)),
    *((1, 128, 512, 128), (3000, 64, 1024, 128), (777, 100, 700, 33), (1100, 128, 300, 128)),
]


@HALVES
@pytest.mark.parametrize("how", ["eager", "static", "dynamic"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("rows", "inner", "hidden", "out"), NARROW)
def test_a_narrow_step_is_as_exact_as_eager(rows, inner, hidden, out, bias, how, dtype):
    widths = (inner, hidden, out)
    case = random_case(rows, widths, "gelu_tanh(x)", dtype=dtype, bias=bias, device="cuda")
    function = fused("back_to_back")
    if how != "eager":
        function = compiled(case, "back_to_back", how == "dynamic")
    check_training(function, case, torch.randn(rows, out, dtype=dtype, device="cuda"))


@pytest.mark.parametrize(("widths", "most"), [((64, 256), 1), ((128, 512), 3)])
def test_a_narrow_step_keeps_nothing_hidden_and_does_not_vary(widths, most):
    case = case_on_gpu(100000, *widths, "gelu_tanh(x)")
    grad, function = torch.randn_like(case.x), fused("back_to_back")
    first = gradients_by(function, case, grad)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    again = gradients_by(function, case, grad)
    hidden = 100000 * widths[1] * case.x.itemsize
    assert torch.cuda.max_memory_allocated() - before < most * hidden
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))


def kernels(function) -> list[str]:
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        function()
        torch.cuda.synchronize()
    names = [e.name for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [n for n in names if not n.startswith(("Mem", "void cublasLt::splitKreduce"))]


@pytest.mark.parametrize(
    ("rows", "widths", "activation", "bias", "plan", "count"),
    [
        (8192, (1024, 4096), "gelu_tanh(x)", False, "epilogue", 6),
        (4096, (768, 3072), "gelu_tanh(x)", True, "epilogue", 7),  # one adds up all sums
        (8192, (2048, 5632), GATED, False, "epilogue", 6),
        (8192, (2048, 5632), GATED, True, "epilogue", 7),
        (4096, (4096, 14336), GATED, False, "epilogue", 7),  # to give up one gradient early
        (65536, (64, 256), "gelu_tanh(x)", False, "back_to_back", 3),
        (65536, (128, 512), "gelu_tanh(x)", False, "back_to_back", 4),
    ],
)
def test_a_step_is_so_many_launches(rows, widths, activation, bias, plan, count):
    case = case_on_gpu(rows, *widths, activation, bias=bias)
    function, grad = compiled(case, plan, False), torch.randn_like(case.x)
    assert len(kernels(lambda: gradients_by(function, case, grad))) == count


def test_launches_take_the_kernels_for_hopper():
    case = case_on_gpu(4096, 768, 3072, "gelu_tanh(x)")
    gate, up = eager_preact(case)
    arguments = (torch.randn_like(case.x), case.weight_down, gate, up, case.activation)
    assert launch.summed_hidden_gradient(*arguments, True, True) is not None
    few = (arguments[0][:64], case.weight_down, None, up[:64], case.activation)
    assert launch.summed_hidden_gradient(*few, True, True) is None
    assert isinstance(hopper_hidden_gradient.blocks(4096), int)
    assert isinstance(tiles_for("x", torch.bfloat16, of_form(case))[0], Tile)
