"""The kernels on a GPU: numbers in all dtypes, layouts and configurations, and launches counted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fusion_backend.compat import tf32, triton_features
from fusion_backend.kernels import launch
from fusion_backend.kernels.back_to_back.family import can_back_to_back
from fusion_backend.kernels.host.configs import Config
from fusion_backend.mlp.expression import parse
from fusion_backend.mlp.weights import FirstLayer
from kernel_cases import (
    GATED,
    NORMS,
    PLAIN,
    Case,
    assert_exact,
    eager_epilogue,
    eager_hidden_gradient,
    eager_mlp,
    eager_preact,
    normed,
    random_case,
    random_norm,
    turned,
)

CUDA = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EVEN = (64, 256, 64)
ODD = (33, 129, 65)
BOTH = pytest.mark.parametrize("activation", [PLAIN, "gelu_tanh(x)", GATED])
IN_ALL_DTYPES = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
SHAPES = pytest.mark.parametrize(
    ("rows", "widths"),
    [(1, EVEN), (17, ODD), (50, EVEN), (333, ODD), (1000, EVEN), (5000, (200, 520, 120))],
)


def case_on_gpu(rows: int, widths: tuple[int, int, int], activation: str, dtype=torch.bfloat16):
    return random_case(rows, widths, activation, dtype=dtype, device="cuda")


def check_epilogue(case: Case, save_preact: bool = True, config: Config | None = None) -> None:
    with triton_features.launching_directly():
        results = launch.epilogue(*case.first, case.activation, save_preact, config=config)
    eager, exact = eager_epilogue(case), eager_epilogue(case.to(torch.float64))
    for triple in zip(results, eager, exact, strict=True):
        assert_exact(*triple)


def check_back_to_back(case: Case, config: Config | None = None) -> None:
    with triton_features.launching_directly():
        result = launch.back_to_back(*case.mlp, config=config)
    assert_exact(result, eager_mlp(case), eager_mlp(case.to(torch.float64)))


def check_hidden_gradient(case: Case, config: Config | None = None) -> None:
    grad_output = torch.randn_like(
        case.x @ case.x.new_zeros(case.x.shape[1], len(case.weight_down))
    )
    gate, up = eager_preact(case)
    with triton_features.launching_directly():
        results = launch.hidden_gradient(
            grad_output, case.weight_down, gate, up, case.activation, config=config
        )
    eager = eager_hidden_gradient(case, grad_output, gate, up)
    doubled = [None if t is None else t.double() for t in (grad_output, gate, up)]
    exact = eager_hidden_gradient(case.to(torch.float64), *doubled)
    for triple in zip(results, eager, exact, strict=True):
        assert_exact(*triple)


@SHAPES
@BOTH
@IN_ALL_DTYPES
def test_epilogue_is_as_exact_as_eager(rows, widths, activation, dtype):
    check_epilogue(case_on_gpu(rows, widths, activation, dtype))


@SHAPES
@BOTH
@IN_ALL_DTYPES
def test_hidden_gradient_is_as_exact_as_eager(rows, widths, activation, dtype):
    check_hidden_gradient(case_on_gpu(rows, widths, activation, dtype))


@SHAPES
@BOTH
@IN_ALL_DTYPES
def test_back_to_back_is_as_exact_as_eager(rows, widths, activation, dtype):
    if not can_back_to_back(*widths, activation == GATED, dtype):
        pytest.skip("not possible on this GPU")
    check_back_to_back(case_on_gpu(rows, widths, activation, dtype))


@SHAPES
@BOTH
@IN_ALL_DTYPES
def test_back_to_back_adds_a_residual_before_rounding(rows, widths, activation, dtype):
    if not can_back_to_back(*widths, activation == GATED, dtype):
        pytest.skip("not possible on this GPU")
    case = case_on_gpu(rows, widths, activation, dtype)
    residual = 8.0 * torch.randn(rows, widths[2], device=CUDA).to(dtype)
    with triton_features.launching_directly():
        result = launch.back_to_back(*case.mlp, residual=residual)
    exact = eager_mlp(case.to(torch.float64)) + residual
    assert_exact(result, eager_mlp(case) + residual, exact)


@pytest.mark.parametrize("width", [16, 64, 100, 128, 256])
@BOTH
def test_back_to_back_runs_in_all_widths(width, activation):
    check_back_to_back(case_on_gpu(3000, (width, 4 * width, width), activation))


def test_tf32_is_used_if_and_only_if_it_is_allowed():
    case = case_on_gpu(2000, (256, 512, 256), PLAIN, torch.float32)
    for allowed in (True, False):
        with tf32.multiplying_in_tf32(allowed):
            check_epilogue(case)
            assert rounds_operands(_preact) == allowed
            assert rounds_operands(torch.nn.functional.linear) == allowed  # as cuBLAS does


def rounds_operands(layer) -> bool:
    """Whether a layer of one input feature is more than one exact product, rounded once."""
    x, weight = torch.zeros(2000, 256, device=CUDA), torch.zeros(512, 256, device=CUDA)
    x[:, 0], weight[:, 0] = torch.randn(2000, device=CUDA), torch.randn(512, device=CUDA)
    exact = (x.double() @ weight.double().T).float()
    return not torch.equal(layer(x, weight), exact)


def _preact(x: Tensor, weight: Tensor) -> Tensor:
    with triton_features.launching_directly():
        preact = launch.epilogue(x, FirstLayer(None, None, weight, None), parse(PLAIN), True)[-1]
    assert preact is not None
    return preact


@IN_ALL_DTYPES
@pytest.mark.parametrize("activation", [PLAIN, GATED])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("rows", "widths"), [(1, EVEN), (333, (33, 129, 33)), (5000, (96, 384, 96)), (3000, EVEN)]
)
def test_back_to_back_computes_the_norm_of_a_block(rows, widths, norm, activation, dtype):
    case = case_on_gpu(rows, widths, activation, dtype)
    if not can_back_to_back(*widths, activation == GATED, dtype):
        pytest.skip("too wide in this dtype")
    case = case._replace(x=3.0 * case.x + 2.0)
    norm = random_norm(norm, case, parameters=rows > 1)
    with triton_features.launching_directly():
        result = launch.back_to_back(*case.mlp, norm=norm, residual=case.x)
    eager, exact = eager_mlp(normed(case, norm)), eager_mlp(normed(case.to(torch.float64), norm))
    assert_exact(result, eager + case.x, exact + case.x)


@BOTH
def test_no_rows_give_no_rows(activation):
    case = case_on_gpu(0, EVEN, activation)
    with triton_features.launching_directly():
        postact, _, preact_up = launch.epilogue(*case.first, case.activation, True)
        assert postact.shape == preact_up.shape == (0, 256)
        assert launch.back_to_back(*case.mlp).shape == (0, 64)


@BOTH
def test_weights_may_be_transposed(activation):
    case = turned(case_on_gpu(300, (64, 136, 72), activation))
    check_epilogue(case)
    check_back_to_back(case)
    check_hidden_gradient(case)


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
    case = case_on_gpu(300, EVEN, PLAIN)
    check_epilogue(case._replace(x=view(case.x)))
    check_back_to_back(case._replace(x=view(case.x)))


def test_rows_may_lie_beyond_32_bits():
    far = torch.randn(40, 1 << 26, device=CUDA).bfloat16()[:, :64]
    assert far.stride(0) * far.shape[0] > 2**31
    case = case_on_gpu(40, EVEN, PLAIN)._replace(x=far)
    check_epilogue(case)
    check_back_to_back(case)


def test_results_may_have_more_elements_than_32_bits_count():
    rows, hidden = 2**31 // 4096 + 300, 4096
    case = case_on_gpu(rows, (16, hidden, 16), PLAIN)
    with triton_features.launching_directly():
        postact, _, _ = launch.epilogue(*case.first, case.activation, False)
    last = case._replace(x=case.x[-300:])
    exact = eager_epilogue(last.to(torch.float64))[0]
    assert_exact(postact[-300:], eager_epilogue(last)[0], exact)


def launches(function) -> list[str]:
    """Names of what ``function`` runs on the GPU, after a first call that compiles it."""
    from torch.profiler import ProfilerActivity, profile

    with triton_features.launching_directly():
        function()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            function()
            torch.cuda.synchronize()
    return [e.name for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]


@BOTH
def test_each_is_one_launch(activation):
    case = case_on_gpu(2000, EVEN, activation)
    gate, up = eager_preact(case)
    (name,) = launches(lambda: launch.epilogue(*case.first, case.activation, True))
    assert name.startswith("fusedmlp_epilogue")
    (name,) = launches(lambda: launch.back_to_back(*case.mlp))
    assert name.startswith("fusedmlp_back_to_back")
    assert launches(
        lambda: launch.hidden_gradient(case.x, case.weight_down, gate, up, case.activation)
    ) == ["fusedmlp_hidden_gradient"]


def test_a_compiled_launch_runs_without_rows():
    """The grid is empty then, which must not be an error."""
    case = case_on_gpu(100, EVEN, PLAIN)

    def run(x: Tensor) -> Tensor:
        return torch.ops.fusedmlp.mlp(x, *case[1:-1], [], "gelu(x)", "epilogue")

    import fusion_backend.operators  # noqa: F401  (registers torch.ops.fusedmlp)

    compiled = torch.compile(run, dynamic=True)
    compiled(case.x)
    assert compiled(case.x[:0]).shape == (0, 64)
