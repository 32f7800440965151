"""Operands of the activation in every kernel, on Triton's interpreter and compiled."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")

from fusion_backend.kernels import invocations, launch, reference
from fusion_backend.kernels.codegen.activation import emit
from fusion_backend.kernels.host.configs import Config, shared_memory
from fusion_backend.kernels.host.problems import MANY_ROWS, Problem
from fusion_backend.kernels.preferences import chosen
from fusion_backend.mlp.expression import parse, philox
from fusion_backend.mlp.weights import FirstLayer, Weights
from kernel_cases import Case, assert_exact, compiled, interpreted, loops_are_broken, random_case
from kernel_compilation import (
    ARCHITECTURES,
    GPUS,
    compile_for,
    invocation,
    spilled_bytes,
    touched_in_flight,
)
from repetition import slow_but, telling, walked

EVEN, ODD = (16, 32, 16), (33, 65, 20)
# Several tiles in each direction, and bands of tiles that are not full.
SMALL_TILES = Config(16, 16, 16, group_m=2, num_stages=2)
PARTS = Config(16, 32, 16, parts=2, num_stages=2)
SEED = 2**40 + 12345

PLAIN = {
    "prelu(x, p0)": ("scalar",),
    "p0 * square(relu(x)) + p1": ("scalar", "vector"),
    "where(x > 0.0, softplus(p0, 1.0, 20.0) * square(x), (expm1(minimum(x, -1e-06)) - x) * p1)": (
        "scalar",
        "scalar",
    ),
    "gelu(p0 + x)": ("elementwise",),
    "p0 + 0.0 * x": ("vector",),
    "gelu((x - p0) * rsqrt(square(p1) + 0.5) * p2 + p3)": ("vector",) * 4,
}
GATED = {"silu(p0 + g) * (p1 + u)": ("elementwise", "elementwise"), "p0 * g * u": ("vector",)}
DROPOUT = {
    "dropout(gelu(x), p0, 0.25)": ("seed",),
    "dropout(tanh(dropout(x, p0, 0.5)), p1, 0.1)": ("seed", "seed"),
    "dropout(p1 * silu(g) * u + p2, p0, 0.5) + p3": ("seed", "vector", "elementwise", "scalar"),
}
WITHOUT_DROPOUT = PLAIN | GATED
ALL = WITHOUT_DROPOUT | DROPOUT


def operands(kinds, case: Case):
    rows, hidden = case.x.shape[0], case.weight_up.shape[0]
    shapes = {"scalar": (), "vector": (hidden,), "elementwise": (rows, hidden)}
    return [
        torch.tensor(SEED + position)
        if kind == "seed"
        else torch.randn(shapes[kind]).to(case.x.dtype)
        for position, kind in enumerate(kinds)
    ]


def double(values):
    return [
        value if value is None or value.dtype == torch.int64 else value.double() for value in values
    ]


IN_BOTH_DTYPES = pytest.mark.parametrize(
    ("activation", "dtype"), walked(ALL, [torch.float32, torch.float16])
)


def check_mlp(run, case: Case, extra, **how):
    """A whole MLP is as exact as the reference in the same dtype."""
    x, *weights, activation = case
    found = run(x, Weights(*weights), activation, extra, **how)
    right = reference.forward(x, Weights(*weights), activation, extra)
    wide, *wide_weights = double((x, *weights))
    exact = reference.forward(wide, Weights(*wide_weights), activation, double(extra))
    assert_exact(found, right, exact)


def check_epilogue(case: Case, extra, config: Config | None = None):
    gated = case.weight_gate is not None
    found = launch.epilogue(*case.first, case.activation, True, extra, config)
    eye = torch.eye(case.weight_up.shape[0])

    def expected(tensors, values):
        x, first = tensors
        weights = Weights(*first, eye.to(x.dtype), None)
        y, gate, up = reference.forward_saving(x, weights, case.activation, values)
        return y, gate, up

    wide, *first = double((case.x, *case.first[1]))
    right = expected(case.first, extra)
    exact = expected((wide, first), double(extra))
    for triple in zip(found, right, exact, strict=True):
        assert_exact(*triple)
    assert (found[1] is not None) == gated


def check_hidden_gradient(case: Case, extra, config: Config | None = None):
    rows, hidden = case.x.shape[0], case.weight_up.shape[0]
    gate = torch.randn(rows, hidden).to(case.x.dtype) if case.weight_gate is not None else None
    tensors = [torch.randn(rows, case.weight_down.shape[0]).to(case.x.dtype), case.weight_down]
    tensors += [gate, torch.randn(rows, hidden).to(case.x.dtype)]
    wanted = [index for index, value in enumerate(extra) if value.is_floating_point()]
    found, right, exact = (
        run(*own, case.activation, values, wanted, *how)
        for run, own, values, how in (
            (launch.hidden_and_operand_gradients, tensors, extra, (config,)),
            (reference.hidden_and_operand_gradients, tensors, extra, ()),
            (reference.hidden_and_operand_gradients, double(tensors), double(extra), ()),
        )
    )
    assert [gradient.shape for gradient in found[3]] == [extra[index].shape for index in wanted]
    for triple in zip(
        (*found[:3], *found[3]), (*right[:3], *right[3]), (*exact[:3], *exact[3]), strict=True
    ):
        assert_exact(*triple)
    alone = launch.hidden_gradient(*tensors, case.activation, extra, config)
    for one, other in zip(alone, found, strict=False):
        assert one is other is None or one.equal(other)


def case_of(activation: str, widths=ODD, rows=17, dtype=torch.float32):
    # Which form it is does not depend on operands.
    case = random_case(rows, widths, "g * u" if "g" in activation.replace("gelu", "") else "x")
    case = case.to(dtype)._replace(activation=parse(activation))
    return case, operands(ALL[activation], case)


@interpreted
@IN_BOTH_DTYPES
def test_an_epilogue_takes_operands(activation, dtype):
    check_epilogue(*case_of(activation, dtype=dtype))


def tiled():
    """Each kind of operand, and each configuration."""
    cases = [*itertools.product(ALL, [SMALL_TILES, PARTS])]
    return slow_but(telling(cases, lambda case: (*ALL[case[0]], str(case[1]))), cases)


@interpreted
@pytest.mark.parametrize(("activation", "config"), tiled(), ids=str)
def test_operands_are_loaded_tile_by_tile(activation, config):
    case, extra = case_of(activation, (24, 40, 16), rows=40)
    check_epilogue(case, extra, config)
    check_hidden_gradient(case, extra, config)


@interpreted
@loops_are_broken
def test_an_epilogue_by_tensor_descriptors_takes_operands():
    case, extra = case_of("dropout(gelu(x), p0, 0.25)", (24, 40, 16), 70, torch.float16)
    config = Config(16, 16, 16, num_stages=2, tma=True, programs=3, parts=2, flatten=True)
    check_epilogue(case, extra, config)


@interpreted
@IN_BOTH_DTYPES
def test_a_hidden_gradient_takes_operands(activation, dtype):
    check_hidden_gradient(*case_of(activation, dtype=dtype))


@interpreted
def test_no_rows_give_operands_gradients_of_zero():
    up, down, f = torch.zeros(0, 32), torch.zeros(16, 32), parse("p0 * silu(x)")
    tensors = (torch.zeros(0, 16), down, None, up, f, [torch.ones(32)], [0])
    (gradient,) = launch.hidden_and_operand_gradients(*tensors)[3]
    assert gradient.equal(torch.zeros(32))


@interpreted
@loops_are_broken
@IN_BOTH_DTYPES
def test_back_to_back_takes_operands(activation, dtype):
    check_mlp(launch.back_to_back, *case_of(activation, dtype=dtype))


@interpreted
@pytest.mark.parametrize(("activation", "rows"), walked(WITHOUT_DROPOUT, [17, 1]))
def test_a_stream_takes_operands(activation, rows):
    check_mlp(launch.stream, *case_of(activation, rows=rows))


@interpreted
@pytest.mark.parametrize("activation", ["gelu(p0 + x)", "p0 * g * u"])
def test_operands_may_have_strides_and_another_dtype(activation):
    case, (operand,) = case_of(activation)
    strided = torch.stack([operand.double()] * 2, dim=-1).float()[..., 0]
    assert not strided.is_contiguous()
    check_epilogue(case, [strided])
    check_epilogue(case.to(torch.float16), [strided])


@interpreted
@pytest.mark.parametrize("activation", ["gelu(p0 + x)", "dropout(gelu(x), p0, 0.25)"])
def test_wide_offsets_address_the_same_elements(activation, monkeypatch):
    monkeypatch.setattr(invocations, "LARGEST_32_BIT", 0)
    check_epilogue(*case_of(activation, rows=40), SMALL_TILES)


def plain(weight_up, bias_up):
    return FirstLayer(None, None, weight_up, bias_up)


def kept_by(run, hidden):
    """Where results of ones that drop out are not zero."""
    rows = 37
    x, up, down = torch.zeros(rows, 16), torch.zeros(hidden, 16), torch.eye(hidden)
    ones, extra = torch.ones(hidden), [torch.tensor(-SEED)]
    return run(x, up, ones, down, parse("dropout(x, p0, 0.3)"), extra) != 0


@interpreted
@pytest.mark.parametrize("hidden", [64, 66])
def test_all_kernels_and_the_reference_draw_the_same_mask(hidden):
    kept = philox.kept(torch.tensor(-SEED), 0.3, torch.Size((37, hidden)))
    assert 0 < kept.sum() < kept.numel()
    runs = [
        lambda x, up, one, down, f, p: launch.epilogue(x, plain(up, one), f, False, p)[0],
        lambda x, up, one, down, f, p: launch.epilogue(x, plain(up, one), f, False, p, SMALL_TILES)[
            0
        ],
        lambda x, up, one, down, f, p: launch.hidden_gradient(
            one.expand(37, hidden).contiguous(), down, None, x.new_ones(37, hidden), f, p
        )[1],
    ]
    for run in runs:
        assert kept_by(run, hidden).equal(kept)


@interpreted
@loops_are_broken
def test_back_to_back_draws_the_same_mask():
    def run(x, up, one, down, f, extra):
        return launch.back_to_back(x, Weights(*plain(up, one), down, None), f, extra)

    kept = philox.kept(torch.tensor(-SEED), 0.3, torch.Size((37, 66)))
    assert kept_by(run, 66).equal(kept)


@compiled
def test_functions_of_other_operands_are_other_functions():
    f = parse("p0 * silu(x)")
    assert emit(f, torch.float32, ("scalar",)) is not emit(f, torch.float32, ("vector",))
    assert emit(f, torch.float32, ("scalar",)) is emit(f, torch.float32, ("scalar",))


@compiled
def test_a_function_and_its_derivative_share_one_mask():
    code = emit(parse("dropout(gelu(x), p0, 0.25)"), torch.float32, ("seed",)).gradient.src
    assert code.count("random_bits(") == 1


LAUNCHES = [
    (gpu, family, gated)
    for gpu in ARCHITECTURES
    for family in ("epilogue", "hidden_gradient", "back_to_back", "stream_hidden")
    for gated in (False, True)
]


QUICK = [
    ("sm_90", "epilogue", False),
    ("sm_90", "back_to_back", True),
    ("sm_90", "stream_hidden", True),
]


def launch_with_operands(gpu, family, gated):
    """A kernel with an operand of each kind that it takes."""
    kinds = ("elementwise", "vector") + (() if family == "stream_hidden" else ("seed",))
    widths = (64, 256, 64) if family == "back_to_back" else (768, 3072, 768)
    rows = 16 if family == "stream_hidden" else MANY_ROWS
    problem = Problem(rows, *widths, gated, torch.bfloat16, exchanged=6)
    projection = "silu(p0 + g) * u" if gated else "gelu_tanh(p0 + x)"
    activation = f"p1 * {projection}"
    if "seed" in kinds:
        activation = f"dropout({activation}, p2, 0.1)"
    target = GPUS[gpu].target
    config = chosen(family, problem, target)
    call = invocation(family, problem, target, config, kinds)
    kernel = compile_for(gpu, call, activation, kinds)
    return kernel, shared_memory(family, config, problem, target)


@compiled
@pytest.mark.parametrize(("gpu", "family", "gated"), slow_but(QUICK, LAUNCHES))
def test_kernels_with_operands_need_no_more_than_there_is(gpu, family, gated):
    kernel, foreseen = launch_with_operands(gpu, family, gated)
    # Sums of gradients spill. An H100 was measured to be slower with tiles so small that none do.
    if family != "hidden_gradient":
        assert spilled_bytes(kernel) == 0
    assert kernel.metadata.shared <= foreseen <= GPUS[gpu].target.shared_memory


@compiled
@pytest.mark.parametrize(
    ("activation", "kinds", "exchanged"),
    [
        pytest.param("dropout(gelu_tanh(x), p0, 0.1)", ("seed",), 4, marks=pytest.mark.slow),
        ("gelu_tanh(p0 + x)", ("elementwise",), 2),
        pytest.param("prelu(x, p0)", ("vector",), 0, marks=pytest.mark.slow),
    ],
)
def test_accumulators_are_reset_when_the_matrix_units_have_written_them(
    activation, kinds, exchanged
):
    widths = (768, 3072, 768)
    problem = Problem(MANY_ROWS, *widths, False, torch.bfloat16, tma=True, exchanged=exchanged)
    target = GPUS["sm_90"].target
    config = chosen("epilogue", problem, target)
    assert config.flatten
    call = invocation("epilogue", problem, target, config, kinds)
    assert not touched_in_flight(compile_for("sm_90", call, activation, kinds))
