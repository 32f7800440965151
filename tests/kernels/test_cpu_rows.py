"""The family ``rows``: C++ kernels for CPUs, and what happens where they cannot be had."""

from __future__ import annotations

import itertools
import math
import textwrap
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)
from capture import ALWAYS
from cpu_rows_cases import WITH_COMPILER, assert_exact, choice_of, double, parameters
from expression_examples import ONE_VARIABLE, TWO_VARIABLES, points
from fusion_backend import fuse
from fusion_backend.compat import inductor
from fusion_backend.errors import PlanError
from fusion_backend.kernels import reference, registry
from fusion_backend.kernels.cpu_rows import compiling, cutting, launch, support
from fusion_backend.kernels.cpu_rows.source import Kernel
from fusion_backend.mlp.expression import evaluate, parse
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.weights import Weights
from repetition import slow_but

ops = torch.ops.fusedmlp

PLAIN, GATED = "gelu_tanh(x)", "silu(g) * u"

pytestmark = WITH_COMPILER


def check(x, weights, activation, residual=None, norm=None):
    found = ops.mlp(
        x,
        *weights,
        [],
        activation,
        "rows",
        residual=residual,
        norm_weight=None if norm is None else norm.weight,
        norm_bias=None if norm is None else norm.bias,
        norm="" if norm is None else norm.text,
    )

    def other(x, weights, residual, norm):
        y = reference.forward(x if norm is None else norm(x), weights, parse(activation))
        return y if residual is None else y + residual

    wide_norm = None if norm is None else Norm(norm.kind, norm.eps, *double(norm[2:]))
    exact = other(x.double(), Weights(*double(weights)), *double([residual]), wide_norm)
    assert_exact(found, other(x, weights, residual, norm), exact)


# Rows that take each way through the products: as they are, in panels of one's own, in shared ones.
@pytest.mark.parametrize("rows", [1, 3, 13, 14, 100, 700])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("activation", [PLAIN, GATED])
def test_results_are_as_exact_as_those_of_eager(rows, transposed, activation):
    for widths in ((70, 90, 33), (256, 1000, 256)):
        weights = parameters(activation == GATED, *widths, transposed=transposed)
        check(torch.randn(rows, widths[0]), weights, activation)


@pytest.mark.parametrize(
    "dtype", slow_but([torch.bfloat16], [torch.bfloat16, torch.float16]), ids=str
)
@pytest.mark.parametrize("rows", [1, 40, 300])
@pytest.mark.parametrize("transposed", [False, True])
def test_16_bits_are_computed_in_float32_and_rounded_once(dtype, rows, transposed):
    weights = parameters(False, 100, 300, 100, dtype, transposed=transposed)
    check(torch.randn(rows, 100).to(dtype), weights, PLAIN, torch.randn(rows, 100).to(dtype))


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("rows", [13, 200])
def test_norm_before_and_residual_after_are_part_of_the_kernel(kind, rows):
    bias = torch.randn(50) if kind == "layer_norm" else None
    norm = Norm(kind, 1e-5, torch.rand(50) + 0.5, bias)
    weights = parameters(True, 50, 70, 30, bias=False)
    check(3 + torch.randn(rows, 50), weights, GATED, torch.randn(rows, 30), norm)


@pytest.mark.parametrize("layout", ["sliced", "strided", "expanded"])
def test_every_layout_is_read_right(layout):
    def laid_out(tensor):
        if tensor is None:
            return None
        wide = torch.cat([tensor, tensor], -1)
        if layout == "sliced":
            return wide[..., : tensor.shape[-1]]
        return wide[..., ::2] if layout == "strided" else tensor[:1].expand_as(tensor)

    weights = Weights(*map(laid_out, parameters(True, 40, 60, 40)))
    check(laid_out(torch.randn(30, 40)), weights, GATED, laid_out(torch.randn(30, 40)))


@pytest.mark.parametrize("shape", [(0, 5, 7, 3), (4, 0, 7, 3), (4, 5, 0, 3), (4, 5, 7, 0)])
def test_empty_tensors_are_no_exception(shape):
    rows, *widths = shape
    weights = parameters(False, *widths)
    found = ops.mlp(torch.randn(rows, widths[0]), *weights, [], PLAIN, "rows")
    exact = reference.forward(torch.zeros(rows, widths[0]), weights, parse(PLAIN))
    assert found.shape == exact.shape
    if not widths[0]:
        torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("rows", [1, 64, 500])
def test_chains_are_one_kernel(rows):
    widths, activations = (13, 512, 256, 64), ("tanh(x)", "relu(x)")
    weights = [torch.randn(n, k) / k**0.5 for k, n in itertools.pairwise(widths)]
    biases = [torch.randn(n) for n in widths[1:]]
    x = torch.randn(rows, 13)
    functions = [*map(parse, activations)]
    found = ops.chain(x, weights, biases, activations, "rows")
    exact = reference.chain(x.double(), double(weights), double(biases), functions)
    assert_exact(found, reference.chain(x, weights, biases, functions), exact)


def test_operands_and_dropout_are_those_of_the_reference():
    activation = "dropout(silu(p0 * x + p1) * p2, p3, 0.3)"
    weights = parameters(False, 40, 72, 40)
    x = torch.randn(2, 60, 40)
    operands = [torch.randn(()), torch.randn(72), torch.randn(2, 60, 72), torch.tensor(2**40 + 3)]
    found = ops.mlp(x, *weights, operands, activation, "rows")
    expected = ops.mlp(x, *weights, operands, activation, "reference")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def computed(text, *tensors):
    """What the kernel of all functions of x computes by one of them."""
    chosen = torch.tensor(float(ONE_VARIABLE.index(text)))
    return ops.mlp(*tensors, [chosen], choice_of(ONE_VARIABLE), "rows")


def values_of(text, x):
    """What the kernel computes by a function of numbers."""
    one = torch.ones(1, 1)
    return computed(text, x.unsqueeze(1), None, None, one, None, one, None)[:, 0]


@pytest.mark.parametrize(
    ("text", "units", "lowest", "highest"),
    [
        ("exp(x)", 1.5, -110.0, 88.7),
        ("tanh(x)", 3.0, -12.0, 12.0),
        ("erf(x)", 2.0, -5.0, 5.0),
        ("sigmoid(x)", 3.0, -80.0, 80.0),
    ],
)
def test_inlined_functions_are_exact_to_units_in_the_last_place(text, units, lowest, highest):
    x = torch.cat([torch.linspace(lowest, highest, 20001), torch.logspace(-37, 0, 5001)])
    unit = torch.finfo(torch.float32).eps
    found = values_of(text, x)
    exact = evaluate(parse(text), {"x": x.double()})
    normal = exact.abs() > torch.finfo(torch.float32).tiny
    distance = ((found.double() - exact).abs() / exact.abs())[normal]
    assert distance.max() < units * unit
    assert bool((found[~normal].double() - exact[~normal]).abs().lt(1e-44).all())


def test_inlined_functions_are_those_of_pytorch_at_the_ends_of_numbers():
    x = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 88.7, 88.73, -87.4, 3e38, -3e38])
    for text in ("exp(x)", "tanh(x)", "erf(x)", "sigmoid(x)", "silu(x)"):
        expected = evaluate(parse(text), {"x": x})
        torch.testing.assert_close(values_of(text, x), expected, equal_nan=True, msg=text)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("texts", [ONE_VARIABLE, TWO_VARIABLES], ids=["plain", "gated"])
def test_every_function_of_the_language_is_exact_to_rounding_in_float32(texts):
    names = ("x",) if texts is ONE_VARIABLE else ("g", "u")
    values = {name: points(torch.float32)[name] for name in names}
    activation = choice_of(texts)
    one = torch.ones(1, 1)
    if len(names) == 2:  # both projections of one input of two features
        x = torch.stack([values["g"], values["u"]], 1)
        first = (torch.tensor([[1.0, 0.0]]), None, torch.tensor([[0.0, 1.0]]), None)
    else:
        x, first = values["x"].unsqueeze(1), (None, None, one, None)
    finite = x.isfinite().all(1)  # 0 * inf is no projection
    for i, text in enumerate(texts):
        found = ops.mlp(x, *first, one, None, [torch.tensor(float(i))], activation, "rows")
        exact = evaluate(parse(text), {name: value.double() for name, value in values.items()})
        torch.testing.assert_close(
            found[finite, 0].double(),
            exact[finite].float().double(),
            rtol=3e-6,
            atol=1e-6,
            equal_nan=True,
            msg=lambda message, text=text: f"{text}: {message}",
        )


def test_nan_and_infinities_are_not_hidden():
    weights = parameters(False, 40, 72, 40)
    x = torch.randn(20, 40)
    x[:3, 0] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    found = computed("relu(x)", x, *weights)
    expected = ops.mlp(x, *weights, [], "relu(x)", "reference")
    assert torch.equal(found.isfinite(), expected.isfinite())


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("rows", [1, 2, 40, 300])
def test_the_number_of_threads_changes_rounding_at_most(threads, rows):
    weights = parameters(False, 256, 1024, 256)
    x = torch.randn(rows, 256)
    expected = ops.mlp(x, *weights, [], PLAIN, "reference")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = [ops.mlp(x, *weights, [], PLAIN, "rows") for _ in range(3)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], each) for each in found)  # the same from run to run
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 100, 10**6])
@pytest.mark.parametrize("threads", [1, 8, 96])
def test_a_cut_covers_the_work_and_allocates_no_hidden_layer(rows, threads):
    for widths in ((64, 256, 64), (768, 3072, 768), (13, 512, 256, 64)):
        how = cutting.cut(rows, widths, False, threads)
        assert 1 <= how.block_rows <= rows
        assert 1 <= how.threads <= threads
        assert how.chunk % cutting.PANEL == 0
        weights = sum((n + 64) * (k + 64) for k, n in itertools.pairwise(widths))
        assert how.floats <= weights + how.shares * how.block_rows * (widths[-1] + 64) * threads
        assert rows < 10**6 or how.floats < rows * max(widths[1:-1])


@pytest.mark.parametrize(
    ("rows", "hidden"), [(1, 3072), *itertools.product((77, 176), (48, 96, 192, 336, 3072))]
)
def test_no_thread_has_much_more_to_do_than_another(rows, hidden):
    how = cutting.cut(rows, (384, hidden, 384), False, threads=2)
    blocks = -(-rows // how.block_rows)
    share = -(-hidden // how.shares)
    busiest = -(-blocks * how.shares // how.threads) * how.block_rows * share
    assert how.threads == 2
    assert busiest <= 0.65 * rows * hidden


def test_compiled_code_calls_the_kernel_itself_and_takes_any_number_of_rows():
    from torch._inductor.utils import run_and_get_code

    mlp, always = model(), {"fusedmlp.policy": "always"}
    compiled = torch.compile(mlp, backend="fusedmlp", dynamic=True, options=always)
    with torch.no_grad():
        x = torch.randn(2, 5, 64)
        found, (code, *others) = run_and_get_code(compiled, x)
        assert "= fusedmlp_rows_" in code
        assert not others
        assert "torch.ops.fusedmlp.rows.default(" not in code
        torch.testing.assert_close(found, mlp(x))
        more = torch.randn(3, 9, 64)
        torch.testing.assert_close(compiled(more), mlp(more))


def model():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).eval()


def explained(model, x, **options):
    from fusion_backend import explain

    with torch.no_grad():
        return explain(model, x, options={f"fusedmlp.{key}": v for key, v in options.items()}).sites


def test_the_default_policy_takes_the_kernel_where_it_is_faster_and_says_why():
    (site,) = explained(model(), torch.randn(8192, 64))
    assert (site.fused, site.plan) == (True, "rows")
    assert "times as fast as Inductor by rates measured on an EPYC" in site.detail


def test_without_a_compiler_a_site_is_left_with_a_reason(monkeypatch):
    compiling.compiled_or_message.cache_clear()

    def refuse(*_):
        raise RuntimeError("No working C++ compiler found in ['nowhere']\nmore")

    monkeypatch.setattr(inductor, "cpp_function", refuse)
    try:
        message = support.why_not_compiled(torch.float32, ("cos(x)",), False, ())
        assert message is not None
        assert message.endswith("No working C++ compiler found in ['nowhere']")
        sites = explained(
            nn.Sequential(nn.Linear(8, 9), Cosine(), nn.Linear(9, 8)), torch.ones(2, 8)
        )
        assert [(site.fused, site.reason) for site in sites] == [(False, "no-kernel")]
        assert "No working C++ compiler" in sites[0].detail
    finally:
        compiling.compiled_or_message.cache_clear()


def test_with_a_cache_that_cannot_be_written_to_a_site_is_left_with_a_reason(monkeypatch, tmp_path):
    compiling.compiled_or_message.cache_clear()
    compiling.compiled_products.cache_clear()
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    try:
        message = support.why_not_compiled(torch.float32, ("sinh(x)",), False, ())
        assert message is not None
        assert "could not be compiled" in message
        assert str(tmp_path) in message
    finally:
        compiling.compiled_or_message.cache_clear()
        compiling.compiled_products.cache_clear()


class Cosine(nn.Module):
    def forward(self, x):
        return torch.cos(x)


def test_a_plan_for_cpus_is_refused_elsewhere():
    with pytest.raises(PlanError, match="'rows' is for CPUs"):
        registry.ROWS.check_device(torch.device("cuda"))


def test_a_fused_program_in_another_dtype_says_what_to_do():
    model, x = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)), torch.randn(5, 8)
    fused = fuse(torch.fx.symbolic_trace(model), (x,), ALWAYS).graph_module
    with pytest.raises(RuntimeError, match="got float64; fuse the program when it has"):
        fused.double()(x.double())


def test_float64_is_left_alone():
    assert "float64" in (support.why_not(torch.float64, (PLAIN,)) or "")


def test_a_second_process_compiles_nothing(children):
    program = """
        import sys
        import torch
        from fusion_backend.kernels.cpu_rows import compiling
        from fusion_backend.kernels.cpu_rows.source import Kernel

        def note(event, arguments):
            if event == "subprocess.Popen" and "-shared" in arguments[1]:
                libraries.append(arguments[1])

        libraries = []
        sys.addaudithook(note)
        for activation in sys.argv[1:]:
            compiling.compiled(Kernel(torch.float32, (activation,)))
            print(len(libraries))
        """
    compiling.compiled(Kernel(torch.float32, (PLAIN,)))  # and the products
    new = f"{PLAIN} + {time.time_ns()}.0"
    printed = children.printed(textwrap.dedent(program), arguments=[PLAIN, new])
    assert printed.split() == ["0", "1"]


def test_a_kernel_is_known_by_its_activation_not_by_its_sizes():
    kernels = {
        launch.Call(
            Kernel(torch.float32, (PLAIN,)), widths, ((widths[0], 1), (widths[1], 1))
        ).kernel
        for widths in ((8, 16, 8), (9, 17, 9))
    }
    assert len(kernels) == 1


def test_weights_that_are_written_to_are_read_anew():
    mlp = model()
    x = torch.randn(8192, 64)
    with torch.no_grad():
        compiled = torch.compile(mlp, backend="fusedmlp")
        compiled(x)
        mlp[0].weight.mul_(2.0)
        torch.testing.assert_close(compiled(x), mlp(x))
        torch.testing.assert_close(F.linear(mlp[1](mlp[0](x)), mlp[2].weight, mlp[2].bias), mlp(x))
