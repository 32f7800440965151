"""Generated activation code: its numbers, its accuracy, and that it lowers on both vendors' GPUs.

The numbers need a GPU or Triton's interpreter, compilation needs neither.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton")

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from expression_examples import EXAMPLES, ONE_VARIABLE, TWO_VARIABLES, points
from fusion_backend.errors import ExpressionError
from fusion_backend.kernels.codegen.activation import emit
from fusion_backend.mlp.expression import differentiate, evaluate, parse, variables
from fusion_backend.mlp.expression.agreement import differs
from fusion_backend.mlp.expression.points import points_of
from fusion_backend.mlp.expression.programs import of_expressions
from kernel_cases import compiled
from repetition import slow_but

INTERPRETED = triton.knobs.runtime.interpret
EXACT = torch.float32
HALVES = (torch.bfloat16, torch.float16)
FAST = (
    *("gelu_tanh(x)", "gelu(x)", "silu(x)", "sigmoid(x)", "x * sigmoid(1.702 * x)", "exp(x)"),
    *("tanh(x)", "sin(x)", "cos(x)", "sin(30.0 * x)"),
)
HOPPER, CDNA3 = GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)

# By the GPU where there is one, by the interpreter elsewhere.
runs = pytest.mark.compiled if torch.cuda.is_available() else pytest.mark.interpreted


def plain(X, Y, DX, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.arange(0, BLOCK)
    x = tl.load(X + offsets)
    y, dx = activation_gradient(x)  # type: ignore[name-defined] # noqa: F821
    tl.store(Y + offsets, y)
    tl.store(DX + offsets, dx)


def gated(G, U, Y, DG, DU, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.arange(0, BLOCK)
    g = tl.load(G + offsets)
    u = tl.load(U + offsets)
    y, dg, du = activation_gradient(g, u)  # type: ignore[name-defined] # noqa: F821
    tl.store(Y + offsets, y)
    tl.store(DG + offsets, dg)
    tl.store(DU + offsets, du)


def forward(X, Y, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + offsets, activation(tl.load(X + offsets)))  # type: ignore[name-defined] # noqa: F821


def kernel(template: Any, text: str, accuracy: torch.dtype = EXACT) -> Any:
    code = emit(parse(text), accuracy)
    scope = {**globals(), "activation": code.forward, "activation_gradient": code.gradient}
    function = types.FunctionType(template.__code__, scope, template.__name__)
    function.__annotations__ = template.__annotations__
    return triton.jit(function)


def assembly(template: Any, text: str, target: GPUTarget, accuracy: torch.dtype = EXACT) -> str:
    names = template.__code__.co_varnames[: template.__code__.co_argcount]
    signature = {name: "constexpr" if name == "BLOCK" else "*fp32" for name in names}
    source = ASTSource(kernel(template, text, accuracy), signature, {"BLOCK": 256})
    compiled = triton.compile(source, target=target)
    text = compiled.asm["ptx" if target.backend == "cuda" else "amdgcn"]
    assert isinstance(text, str)
    return text


def run(text: str, accuracy: torch.dtype = EXACT) -> tuple[torch.Tensor, ...]:
    """The activation and its gradients in float32, at the points of the examples."""
    device = "cpu" if INTERPRETED else "cuda"
    names = variables(parse(text))
    names = names if names == ("x",) else ("g", "u")
    inputs = [points(torch.float32)[name].to(device) for name in names]
    outputs = [torch.empty_like(inputs[0]) for _ in range(1 + len(names))]
    kernel(plain if names == ("x",) else gated, text, accuracy)[(1,)](*inputs, *outputs, BLOCK=512)
    return tuple(output.cpu() for output in outputs)


def exact(text: str) -> tuple[torch.Tensor, ...]:
    """The same in float64, by PyTorch."""
    expression = parse(text)
    names = ("x",) if variables(expression) == ("x",) else ("g", "u")
    values = {name: points(torch.float32)[name].double().requires_grad_() for name in names}
    result = evaluate(expression, values)
    return (result.detach(), *torch.autograd.grad(result.sum(), list(values.values())))


KINDS = (
    "float(x > 0.0) + float(x > 1.0)",
    "x * ((x > 0.0) + (x > 1.0))",
    "x * ((x > 0.0) * (x < 30.0))",
    "x * maximum(x > 0.0, x < -1.0)",
    "x * (1 - int(x > 0.0))",
    "x * (int(x > 0.0) * 3 + int(x > 1.0))",
    "x * bitwise_and(bitwise_or(int(x > 0.0), 2), bitwise_not(int(x > 1.0)))",
    "x * bitwise_xor(int(x > 0.0) * 5, 3)",
    "x * where(x > 0.0, 3, -2)",
    "x * float(maximum(int(x > 0.0), 0 - int(x < 0.0)))",
    "x * abs(int(x > 0.0) - 2)",
    "x * (int(x > 0.0) / (int(x > 1.0) + 2))",
    "where((x > 0.0) == (x > 1.0), x, square(x))",
    "where(where(x > 0.0, x > 1.0, True), x, 2.0)",
    "sigmoid(x > 0.0) * x",
)
GUARDED = (
    "log(sigmoid(x) + 1e-07)",
    "sigmoid(x) * log(sigmoid(x) + 1e-08)",
    "rsqrt(maximum(x, -x) - x + 1e-08)",
    "x + 12582912.0 - 12582912.0",
    "x / (exp(-x) + 1.0)",
    "exp(x) / (exp(x) + 1.0)",
    "relu(x) / relu(x)",
    "where(x < inf, x, 0.0) * where(x > -inf, 1.0, 0.0)",
    "1.0 / (x + 0.0)",
)


@runs
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("text", [*EXAMPLES, *KINDS, *GUARDED])
def test_code_computes_what_its_expression_does_at_extremes_too(text: str) -> None:
    """At the points at which expressions are compared with graphs."""
    device = "cpu" if INTERPRETED else "cuda"
    expression = parse(text)
    names = ("x",) if variables(expression) == ("x",) else ("g", "u")
    numbers = of_expressions((expression,), names).numbers
    columns = [v.float() for v in points_of(numbers, (None,) * len(names))]
    count = triton.next_power_of_2(len(columns[0]))
    columns = [F.pad(column, (0, count - len(column)), value=1.0) for column in columns]
    outputs = [torch.empty_like(columns[0], device=device) for _ in range(1 + len(names))]
    on_device = [column.to(device) for column in columns]
    template = plain if names == ("x",) else gated
    kernel(template, text)[(1,)](*on_device, *outputs, BLOCK=count)
    values = dict(zip(names, columns, strict=True))
    parts = (expression, *(differentiate(expression, name) for name in names))
    known = ~torch.stack(columns).isnan().any(0)
    for part, got in zip(parts, outputs, strict=True):
        expected = evaluate(part, values)
        exact = evaluate(part, {name: value.double() for name, value in values.items()}).float()
        # PyTorch's own functions are off by this much somewhere: the nearer of the two counts.
        near = [differs(right, got.cpu(), right.abs() * 1e-5 + 2e-6) for right in (expected, exact)]
        wrong = near[0] & near[1] & (known | (part == expression))
        at = {name: value[wrong][:4].tolist() for name, value in values.items()}
        assert not wrong.any(), (str(part), at, expected[wrong][:4], got.cpu()[wrong][:4])


@runs
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("text", EXAMPLES)
def test_activation_and_gradient_are_those_of_pytorch_in_float64(text: str) -> None:
    for got, expected in zip(run(text), exact(text), strict=True):
        torch.testing.assert_close(
            got.double(), expected.float().double(), rtol=3e-6, atol=1e-6, equal_nan=True
        )


@runs
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("text", ["tanh(x)", "expm1(x)", "log1p(x)", "silu(x)", "gelu_tanh(x)"])
def test_small_arguments_keep_their_relative_accuracy(text: str) -> None:
    got, expected = run(text)[0], exact(text)[0]
    small = points(torch.float32)["x"].abs() < 0.5
    torch.testing.assert_close(got[small].double(), expected[small], rtol=5e-7, atol=0.0)


@runs
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("accuracy", HALVES, ids=str)
@pytest.mark.parametrize("text", ["tanh(x)", "silu(x)", "gelu_tanh(x)", "gelu(x)", "mish(x)"])
def test_approximations_are_within_the_roundings_of_16_bits(
    text: str, accuracy: torch.dtype
) -> None:
    got, (expected, slope) = run(text, accuracy)[0].double(), exact(text)
    steepness = (points(torch.float32)["x"].double() * slope).abs().nan_to_num(0.0)
    bound = torch.finfo(accuracy).eps / 4 * (expected.abs() + steepness) + 2e-6
    finite = expected.isfinite()
    assert (got - expected).abs()[finite].le(bound[finite]).all()


@compiled
@pytest.mark.parametrize("accuracy", HALVES, ids=str)
@pytest.mark.parametrize("name", ["sin", "cos"])
@pytest.mark.parametrize("largest", [1.0, 30.0, 1e3, 1e5])
def test_the_instructions_of_a_sine_compute_it(
    name: str, largest: float, accuracy: torch.dtype
) -> None:
    """They are run one by one, in float32 with products that are not rounded before the sum."""
    x = np.random.default_rng(0).uniform(-largest, largest, 100_000).astype(np.float32)
    exact = getattr(np, name)(x.astype(np.float64))
    error = np.abs(instructions(f"{name}(x)", x, accuracy) - exact)
    assert error.max() <= 2**-19
    near = np.abs(x) < 2**-6
    assert (error[near] <= 2**-18 * np.abs(exact[near])).all()


@compiled
@pytest.mark.filterwarnings("ignore:overflow")
def test_the_instructions_of_a_tanh_compute_it() -> None:
    """As exactly near zero, where an exponential's would cancel, as elsewhere."""
    x = np.random.default_rng(0).uniform(-1.0, 1.0, 100_000).astype(np.float32)
    for size in (1e-6, 1e-2, 0.25, 1.0, 20.0, 65504.0):
        exact = np.tanh((size * x).astype(np.float64))
        error = np.abs(instructions("tanh(x)", (size * x), torch.float16) - exact)
        assert (error <= 2**-19 * np.abs(exact)).all(), size


def instructions(text: str, x: np.ndarray, accuracy: torch.dtype) -> np.ndarray:
    """What the PTX of a function computes of some numbers."""
    code = inspect.getsource(emit(parse(text), accuracy).forward.fn)
    return Instructions(x).run(code.split("{")[1].split("}")[0])


class Instructions:
    """Runs the few instructions of PTX that a function is made of, on all numbers at once."""

    def __init__(self, argument: np.ndarray) -> None:
        self.registers: dict[str, np.ndarray] = {"$1": argument}

    def run(self, code: str) -> np.ndarray:
        for line in filter(None, map(str.strip, code.split(";"))):
            operation, _, operands = line.partition(" ")
            target, *sources = (each.strip() for each in operands.split(","))
            if operation != ".reg":
                values = [self.value(each) for each in sources]
                self.registers[target] = self.result(operation, *values)
        return self.registers["$0"]

    def value(self, name: str) -> Any:
        if name.startswith("0f"):
            return np.uint32(int(name[2:], 16)).view(np.float32)
        return int(name) if name.isdecimal() else self.registers[name]

    @staticmethod
    def result(operation: str, a: Any, b: Any = None, c: Any = None) -> Any:
        name, *how = operation.split(".")
        match name:
            case "fma":
                return (a.astype(np.float64) * b + c).astype(np.float32)
            case "add" | "sub" | "mul":
                return getattr(np, {"add": "add", "sub": "subtract", "mul": "multiply"}[name])(
                    a, b, dtype=np.float32
                )
            case "abs":
                return np.abs(a)
            case "setp":
                return a < b if how[0] == "lt" else a > b
            case "ex2":
                return np.exp2(a.astype(np.float64)).astype(np.float32)
            case "rcp":
                return (1.0 / a.astype(np.float64)).astype(np.float32)
            case "selp":
                return np.where(c, a, b)
            case "mov":
                return a
            case "not":
                return (~a.view(np.uint32)).view(np.float32)
            case "shl":
                return (a.view(np.uint32) << np.uint32(b)).view(np.float32)
            case "xor":
                return (a.view(np.uint32) ^ b.view(np.uint32)).view(np.float32)
        raise AssertionError(f"an unknown instruction: {operation}")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("accuracy", HALVES, ids=str)
@pytest.mark.parametrize("text", FAST)
def test_approximations_are_within_the_roundings_of_16_bits_at_all_values(
    text: str, accuracy: torch.dtype
) -> None:
    """Of the result, or of the pre-activation, which an unfused program rounds as well.

    NaN and infinities are where PyTorch has them, too.
    """
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cuda")
    x = numbers.view(accuracy).float()
    x = torch.where(x.isfinite() & (x.abs() > 2.0**100), 0.0, x)  # 30 x is finite in float32
    got = torch.empty_like(x)
    kernel(forward, text, accuracy)[(len(x) // 512,)](x, got, BLOCK=512)
    wide = x.double().requires_grad_()
    expected = evaluate(parse(text), {"x": wide})
    (slope,) = torch.autograd.grad(expected.sum(), wide)
    expected = expected.detach()
    inside = (expected.abs() < torch.finfo(accuracy).max) & slope.isfinite()
    steepness = (x.double() * slope).abs().nan_to_num(0.0)
    rounding = torch.finfo(accuracy).eps / 2
    bound = rounding / 4 * expected.abs() + rounding / 2 * steepness + 2e-6
    assert (got.double() - expected).abs()[inside].le(bound[inside]).all()
    assert got.isnan().equal(expected.isnan())
    assert got.to(accuracy).isinf().equal(expected.to(accuracy).isinf())


@compiled
@pytest.mark.parametrize(
    ("target", "accuracy"),
    slow_but(
        [(HOPPER, HALVES[0]), (CDNA3, EXACT)],
        [(HOPPER, EXACT), *((HOPPER, half) for half in HALVES), (CDNA3, EXACT)],
    ),
    ids=str,
)
def test_every_function_and_derivative_lowers(target: GPUTarget, accuracy: torch.dtype) -> None:
    assembly(plain, " + ".join(f"({text})" for text in ONE_VARIABLE), target, accuracy)
    assembly(gated, " + ".join(f"({text})" for text in TWO_VARIABLES), target, accuracy)


@compiled
@pytest.mark.parametrize(
    ("text", "accuracy", "exactly"),
    [
        ("sin(x)", torch.bfloat16, False),
        ("cos(x)", torch.float16, False),
        ("sin(x)", EXACT, True),
        ("log(abs(sin(x)))", torch.bfloat16, True),
    ],
)
def test_sines_for_16_bits_reduce_no_large_arguments(
    text: str, accuracy: torch.dtype, exactly: bool
) -> None:
    """The vendor's do so in local memory."""
    assert (".local" in assembly(forward, text, HOPPER, accuracy)) == exactly


@compiled
def test_constant_derivatives_and_infinite_constants_lower() -> None:
    assembly(plain, "2.0 * x", HOPPER)
    assembly(gated, "where(g < inf, g, -inf) + u", HOPPER)


@compiled
@pytest.mark.parametrize(
    ("text", "accuracy", "used"),
    [
        ("tanh(x)", torch.bfloat16, True),
        ("-x * tanh(x)", torch.bfloat16, True),
        ("tanh(x)", torch.float16, False),
        ("tanh(x)", EXACT, False),
        ("x - tanh(x)", torch.bfloat16, False),
        ("x * (1.0 + tanh(x))", torch.bfloat16, False),
        ("mish(x)", torch.bfloat16, False),
    ],
)
def test_hardware_tanh_serves_only_what_is_a_multiple_of_it(
    text: str, accuracy: torch.dtype, used: bool
) -> None:
    assert ("tanh.approx.f32" in assembly(forward, text, HOPPER, accuracy)) == used


@compiled
@pytest.mark.parametrize("text", ["gelu_tanh(x)", "gelu(x)", "silu(x)", "x * sigmoid(1.702 * x)"])
def test_a_value_takes_one_special_function(text: str) -> None:
    """Each thread has two values; the special-function unit is what bounds narrow layers."""
    code = assembly(forward, text, HOPPER, torch.bfloat16)
    assert code.count("tanh.approx.f32") == 2
    assert "ex2" not in code
    assert "rcp" not in code
    assert "div" not in code


@compiled
@pytest.mark.parametrize("text", ["gelu_tanh(x)", "gelu(x)", "silu(x)", "tanh(x)"])
def test_a_value_in_float16_takes_two_special_functions(text: str) -> None:
    code = assembly(forward, text, HOPPER, torch.float16)
    assert (code.count("ex2.approx"), code.count("rcp.approx")) == (2, 2)
    assert "tanh.approx" not in code
    assert "div" not in code


@pytest.mark.parametrize(
    "text",
    [
        "silu(g) * u",
        "gelu_tanh(x)",
        "gelu(x)",
        "x * sigmoid(1.702 * x)",
        "clamp(g, -inf, 7.0) * sigmoid(1.702 * clamp(g, -inf, 7.0)) * (u + 1.0)",
    ],
)
def test_function_and_derivatives_share_one_logistic_function(text: str) -> None:
    accurate = inspect.getsource(emit(parse(text), EXACT).gradient.fn)
    assert accurate.count("erf(" if "gelu(" in text else "exp(") == 1
    if not INTERPRETED:
        of_bfloat16 = inspect.getsource(emit(parse(text), torch.bfloat16).gradient.fn)
        assert of_bfloat16.count("tanh.approx") == 1


def test_source_is_readable_by_inspect_and_names_its_activation() -> None:
    source = inspect.getsource(emit(parse("silu(g) * u"), EXACT).forward.fn)
    assert source.startswith(
        "def activation(g, u, place=None, operands=None):\n    # silu(g) * u\n"
    )


@pytest.mark.parametrize("text", EXAMPLES)
def test_code_refers_to_nothing_that_inductor_does_not_copy(text: str) -> None:
    code = emit(parse(text), torch.bfloat16)
    for function, name in ((code.forward, "activation"), (code.gradient, "activation_gradient")):
        assert function.fn.__name__ == name
        used = set(function.fn.__code__.co_names) & set(function.fn.__globals__)
        assert used <= {"tl", "libdevice"}


def test_equal_expressions_share_one_function() -> None:
    assert emit(parse("silu(x)"), EXACT) is emit(parse("silu( x )"), EXACT)


def test_other_variables_are_refused() -> None:
    with pytest.raises(ExpressionError, match="must be of x, or of g and u"):
        emit(parse("silu(v0) * v1"), EXACT)
