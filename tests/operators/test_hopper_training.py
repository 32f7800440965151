"""A training step as it runs on Hopper, without a GPU: functions on the CPU in place of kernels."""

from __future__ import annotations

import itertools
import uuid

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

hopper_config = pytest.importorskip("fusion_backend.kernels.epilogue.config_sm90")
hopper_epilogue = pytest.importorskip("fusion_backend.kernels.epilogue.launch_sm90")
hidden_gradients = pytest.importorskip("fusion_backend.kernels.epilogue.gradient_launch_sm90")

import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)
from fusion_backend.compat import inductor
from fusion_backend.compat.sessions import allocations
from fusion_backend.instruments.memory import highest_sum
from fusion_backend.kernels import reference
from fusion_backend.kernels.family import TritonFamily
from fusion_backend.kernels.host import targets
from fusion_backend.kernels.host.targets import H100
from fusion_backend.mlp.expression import parse
from fusion_backend.operators import gpu_calls
from kernel_cases import GATED, Case, assert_exact, compiled, eager_mlp, random_case, with_gluon
from repetition import slow_but

pytestmark = [compiled, with_gluon]

ops = torch.ops.fusedmlp
IN, HIDDEN, OUT = 16, 64, 24
JOINED, APART = 40, 24  # rows: more than twice as many as input features, and fewer
PLAIN = "gelu_tanh(x)"


def saving(x, weight_up, weight_gate, bias_up, bias_gate, activation, joined):
    linear = torch.nn.functional.linear
    up = linear(x, weight_up, bias_up)
    if weight_gate is None:
        return [reference.activate(None, up, parse(activation)), up]
    gate = linear(x, weight_gate, bias_gate)
    postact = reference.activate(gate, up, parse(activation))
    return [postact, *([torch.cat([gate, up], 1)] if joined else [gate, up])]


def hidden_gradient(grad, weight, gate, up, activation, *flags, spends=False):
    joined, has_sums, has_output_sums = flags
    kept = [up] if gate is None else [gate, up]
    gate, up = up.chunk(2, 1) if joined else (gate, up)
    of_gate, of_up, postact = reference.hidden_gradient(grad, weight, gate, up, parse(activation))
    both = of_up if of_gate is None else torch.cat([of_gate, of_up], 1)
    found = [both] if joined or of_gate is None else [of_gate, of_up]
    summed = [*([both] if has_sums else []), *([grad] if has_output_sums else [])]
    blocks = hidden_gradients.blocks(grad.shape[0]) if summed else 0
    width = sum(each.shape[1] for each in summed) if summed else HIDDEN
    sums = both.new_zeros((blocks, width), dtype=torch.float32)
    if summed:
        sums[0] = torch.cat(summed, 1).float().sum(0)
    if spends:
        found = [old.copy_(new) for old, new in zip(kept, found, strict=True)]
    return [*found, postact, sums]


def input_gradient(grad, weight_gate, weight_up, grad_up):
    grad = grad if grad_up is None else torch.cat([grad, grad_up], 1)
    return [grad @ torch.cat([weight_gate, weight_up])]


@pytest.fixture(autouse=True)
def told(monkeypatch):
    """Whether pre-activations were joined and spent, of each backward pass that was compiled."""
    found: list[tuple[bool, bool]] = []

    def caller(*known):
        how, spends = known[:4], known[-1]
        found.append((known[1], spends))
        return lambda *tensors: hidden_gradient(*tensors, *how, spends=spends)

    def saving_caller(*known):
        return lambda *tensors: saving(*tensors, *known[:2])

    for module, name, value in (
        (targets, "target_of", lambda device: H100),
        (TritonFamily, "check_device", lambda family, device: None),
        (inductor, "compiles_in_parallel", lambda: False),
        (hopper_config, "NARROWEST", 8),
        (hopper_config, "SMALLEST", 0),
        (hopper_config, "SMALLEST_PLAIN", 0),
        (hopper_config, "FEW_ROWS", 0),
        (hopper_config, "FEW_ROWS_PLAIN", 0),
        (hopper_config, "joins", lambda *sizes: True),
        (hopper_epilogue, "epilogue_saving_caller", saving_caller),
        (hopper_epilogue, "input_gradient_caller", lambda *known: input_gradient),
        (hidden_gradients, "NARROWEST", 8),
        (hidden_gradients, "NARROWEST_RESULT", 8),
        (hidden_gradients, "SMALLEST", 0),
        (hidden_gradients, "LARGE", 0),
        (hidden_gradients, "hidden_gradient_caller", caller),
    ):
        monkeypatch.setattr(module, name, value)
    gpu_calls.install_lowering()
    torch._dynamo.reset()
    library = torch.library.Library("fusedmlp", "IMPL")  # for compilers that call operators
    for function in (saving, hidden_gradient, input_gradient):
        name = "epilogue_saving" if function is saving else function.__name__
        library.impl(name, function, "CPU")
    yield found
    library._destroy()


def step_of(case: Case, backend: str, dynamic: bool = False):
    options = {"fx_graph_cache": False} if backend == "inductor" else None

    def function(*tensors: Tensor) -> Tensor:
        return ops.mlp(*tensors, [], str(case.activation), "epilogue")

    return torch.compile(function, backend=backend, options=options, dynamic=dynamic)


def leaves_of(case: Case, frozen: tuple[str, ...] = ()) -> list[Tensor]:
    named = case._asdict().items()
    return [t.requires_grad_() for n, t in named if isinstance(t, Tensor) and n not in frozen]


def check(case: Case, function, frozen: tuple[str, ...] = ()) -> None:
    grad = torch.randn(case.x.shape[0], case.weight_down.shape[0]).to(case.x)
    wide = case.to(torch.float64)
    wide = Case(*(t.detach() if isinstance(t, Tensor) else t for t in wide))
    leaves, asked = leaves_of(case, frozen), leaves_of(wide, frozen)
    exact = torch.autograd.grad(eager_mlp(wide), asked, grad.double())
    eager = torch.autograd.grad(eager_mlp(case), leaves, grad)
    found = torch.autograd.grad(function(*case[:-1]), leaves, grad)
    for got, *others in zip(found, eager, exact, strict=True):
        assert got.stride() == others[0].stride()
        assert_exact(got.contiguous(), *others)


def case_of(rows: int, activation: str = GATED, bias: bool = False) -> Case:
    sizes = (IN, HIDDEN, OUT)
    return random_case(rows, sizes, activation, dtype=torch.bfloat16, bias=bias)


STEPS = [(JOINED, GATED, True), (APART, GATED, False), (APART, PLAIN, True)]
BACKENDS = ["inductor", "aot_eager"]


@pytest.mark.parametrize(
    ("rows", "activation", "bias", "backend"),
    slow_but(
        [(*STEPS[0], "inductor"), (*STEPS[-1], "aot_eager")],
        [
            (rows, activation, bias, backend)
            for rows, activation, _ in STEPS
            for bias in (False, True)
            for backend in BACKENDS
        ],
    ),
)
def test_a_step_is_as_exact_as_eager_and_spends_what_it_kept(told, rows, activation, bias, backend):
    case = case_of(rows, activation, bias)
    check(case, step_of(case, backend))
    joined = rows == JOINED and activation == GATED
    assert told == ([(joined, True)] if backend == "inductor" else [])


@pytest.mark.parametrize(("out", "in_kernel"), [(OUT, True), (HIDDEN + 8, False)])
def test_the_kernel_sums_the_results_gradient_unless_it_is_wide(monkeypatch, out, in_kernel):
    found, made = [], hidden_gradients.hidden_gradient_caller

    def caller(*known):
        found.append(known[2:4])
        return made(*known)

    monkeypatch.setattr(hidden_gradients, "hidden_gradient_caller", caller)
    case = random_case(APART, (IN, HIDDEN, out), PLAIN, dtype=torch.bfloat16, bias=True)
    check(case, step_of(case, "inductor"))
    assert found == [(True, in_kernel)]


def test_pre_activations_are_side_by_side_where_weights_are_small(told, monkeypatch):
    monkeypatch.setattr(hidden_gradients, "LARGE", IN * HIDDEN + 1)
    case = case_of(APART)
    check(case, step_of(case, "inductor"))
    assert told == [(True, True)]


def test_pre_activations_are_side_by_side_for_any_large_number_of_rows(told):
    case = case_of(1500)
    function = step_of(case, "inductor", dynamic=True)
    check(case, function)
    check(case_of(2000), function)
    assert told == [(True, True)]


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_a_pair_are_one_product_and_of_a_packed_weight_no_copies(told, packed):
    x, gate, _, up, _, down, *_ = case_of(JOINED)
    firsts = [torch.cat([gate, up])] if packed else [gate, up]
    leaves = [each.requires_grad_() for each in (x, *firsts, down)]

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        *firsts, down = weights
        gate, up = firsts[0].split([HIDDEN, HIDDEN]) if packed else firsts
        return ops.mlp(x, gate, None, up, None, down, None, [], GATED, "epilogue")

    y = torch.compile(function, options={"fx_graph_cache": False})(*leaves)
    _, (code,) = run_and_get_code(torch.autograd.grad, y, leaves, torch.randn_like(y))
    assert told == [(True, True)]
    assert code.count("extern_kernels.mm(") == (3 if packed else 2)
    assert "cpp_fused" not in code


FROZEN = [
    ("x",),
    ("weight_gate",),
    ("weight_up", "bias_up"),
    ("x", "weight_gate", "weight_up"),
    ("weight_down", "bias_down", "bias_gate"),
    ("x", "weight_gate", "bias_gate", "weight_up", "bias_up"),
    ("bias_gate", "bias_up"),
]


@pytest.mark.parametrize(
    ("frozen", "rows"),
    slow_but(
        [*zip(FROZEN[::4], itertools.cycle([JOINED, APART]), strict=False)],
        itertools.product(FROZEN, [JOINED, APART]),
    ),
)
def test_only_what_is_asked_for(rows, frozen):
    case = case_of(rows, bias=True)
    check(case, step_of(case, "inductor"), frozen)


@pytest.mark.parametrize("rows", [JOINED, APART])
def test_a_second_backward_pass_finds_what_was_kept(told, rows):
    case = case_of(rows)
    leaves, grad = leaves_of(case), torch.randn(rows, OUT, dtype=torch.bfloat16)
    with torch._functorch.config.patch(donated_buffer=False):
        y = step_of(case, "inductor")(*case[:-1])
        first = torch.autograd.grad(y, leaves, grad, retain_graph=True)
        again = torch.autograd.grad(y, leaves, grad)
    assert told == [(rows == JOINED, False)]
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))


@torch.compiler.config.patch(cache_key_tag=uuid.uuid4().hex)  # finds no graph of an earlier run
def test_cached_code_that_spends_is_not_taken_where_nothing_is_given(told):
    case = case_of(JOINED)
    leaves, grad = leaves_of(case), torch.randn(JOINED, OUT, dtype=torch.bfloat16)
    for gives in (True, False):
        torch._dynamo.reset()
        with torch._functorch.config.patch(donated_buffer=gives):
            y = step_of(case, "fusedmlp")(*case[:-1])
            torch.autograd.grad(y, leaves, grad, retain_graph=not gives)
    assert told == [(True, True), (True, False)]


@pytest.mark.parametrize("rows", [JOINED, APART])
def test_what_is_computed_again_is_spent_too(told, rows):
    case = case_of(rows)

    def layer(*tensors: Tensor) -> Tensor:
        return ops.mlp(*tensors, [], GATED, "epilogue")

    def function(*tensors: Tensor) -> Tensor:
        return checkpoint(layer, *tensors, use_reentrant=False)

    check(case, torch.compile(function, options={"fx_graph_cache": False}))
    assert told == [(rows == JOINED, True)]


@pytest.mark.parametrize("rows", [JOINED, APART])
def test_transposed_weights_and_gradients_of_one_value(rows):
    case = case_of(rows)
    case = case._replace(weight_down=case.weight_down.t().contiguous().t())
    function = step_of(case, "inductor")
    leaves = leaves_of(case)
    eager = torch.autograd.grad(eager_mlp(case).sum(), leaves)
    found = torch.autograd.grad(function(*case[:-1]).sum(), leaves)
    torch.testing.assert_close(found, eager, rtol=0.05, atol=0.05)


def allocating(function):
    """In place of a kernel: allocates its results, and nothing besides."""

    def caller(*known):
        how = known[: 3 if function is hidden_gradient else 2]

        def call(*tensors):
            first, weight, *others = tensors
            rows, out = first.shape[0], weight.shape[1]
            if function is input_gradient:
                return [first.new_empty((rows, out))]
            if function is saving:
                hidden, width = weight.shape[0], 2 if how[1] else 1
                sizes = [hidden, *[width * hidden] * (1 if how[1] else 2)]
                return [first.new_empty((rows, size)) for size in sizes]
            kept = [each for each in others if each is not None]
            grads = kept if known[-1] else [each.new_empty(each.shape) for each in kept]
            return [*grads, first.new_empty((rows, out)), first.new_empty((0, 2 * out)).float()]

        return call

    return caller


@pytest.mark.parametrize("again", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize(
    ("rows", "width"),
    [
        (256, 32),  # the peak is where the last weight's gradient is computed
        (64, 64),  # or where all gradients are there but one
    ],
    ids=["joined", "apart"],
)
def test_a_step_holds_three_hidden_values_or_one_and_the_gradients(monkeypatch, rows, width, again):
    for module, function in (
        (hopper_epilogue, saving),
        (hidden_gradients, hidden_gradient),
        (hopper_epilogue, input_gradient),
    ):
        name = "epilogue_saving" if function is saving else function.__name__
        monkeypatch.setattr(module, f"{name}_caller", allocating(function))
    sizes = (width, 1024, width)
    case = random_case(rows, sizes, GATED, dtype=torch.bfloat16, bias=False)

    def layer(*tensors: Tensor) -> Tensor:
        return ops.mlp(*tensors, [], GATED, "epilogue")

    def function(*tensors: Tensor) -> Tensor:
        return checkpoint(layer, *tensors, use_reentrant=False) if again else layer(*tensors)

    compiled_step = torch.compile(function, options={"fx_graph_cache": False})
    leaves, grad = leaves_of(case), torch.randn_like(case.x)

    def step() -> object:
        y = compiled_step(*case[:-1])
        return y, torch.autograd.grad(y, leaves, grad)

    with torch.backends.mkldnn.flags(enabled=False):  # its products have scratch on some CPUs
        step()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as session:
            step()
    found = sorted(allocations(session), key=lambda each: each[0])
    peak = highest_sum(size for _, size, _ in found)
    hidden, weight, outer = (2 * n for n in (rows * 1024, 1024 * width, rows * width))
    expected = max(3 * hidden + weight + outer, hidden + 3 * weight + 2 * outer)
    assert peak <= 1.02 * expected


def test_operators_that_are_called_by_themselves_keep_two(told):
    case = case_of(JOINED)
    check(case, lambda *tensors: ops.mlp(*tensors, [], GATED, "epilogue"))
    _, gate, up = ops.mlp_forward(*case[:-1], [], GATED, "epilogue")
    assert gate.shape == up.shape == (JOINED, HIDDEN)
    assert told == []
