"""Products by a CPU's matrix units, in whose place there are loops here: most CPUs have none.

Where a CPU has some, `test_cpu_rows.py` runs them.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cpu_rows_cases import WITH_COMPILER, assert_exact, double, parameters
from fusion_backend.kernels import reference
from fusion_backend.kernels.cpu_rows import compiling, launch, source
from fusion_backend.mlp.expression import parse
from fusion_backend.mlp.norms import Norm
from fusion_backend.mlp.weights import Weights

PLAIN, GATED = "gelu_tanh(x)", "silu(g) * u"

pytestmark = WITH_COMPILER

_LOOPS = """
inline void brgemm(
    int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool adds,
    const Element* a, const Element* b, float* c) {
  for (int64_t i = 0; i < m; i++) {
    for (int64_t j = 0; j < n; j++) {
      float sum = adds ? c[i * ldc + j] : 0.0f;
      for (int64_t p = 0; p < k; p++) {
        const float weight = b[p / 2 * 2 * ldb + 2 * j + p % 2];
        sum += static_cast<float>(a[i * lda + p]) * weight;
      }
      c[i * ldc + j] = sum;
    }
  }
}
inline void brgemm_release() {}
"""

# What is written in the products' source, and what takes its place here.
_INSTEAD = {
    "|| PANEL != 32": "",
    "at::native::cpublas::could_pack(c10::CppTypeToScalarType<Element>::value)": "true",
    "at::native::cpublas::brgemm": "brgemm",
    "constexpr int64_t MATRIX_SUM": f"{_LOOPS}\nconstexpr int64_t MATRIX_SUM",
}


@pytest.fixture(scope="module")
def units():
    """Products of 16 bits are computed as if there were matrix units for them."""
    real = source.products

    def with_units(dtype):
        text = real(dtype)
        for written, other in _INSTEAD.items():
            assert written in text
            text = text.replace(written, other)
        return text

    def forget():
        for cache in (compiling.compiled_products, compiling.compiled_or_message, launch.caller):
            cache.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "products", with_units)
        forget()
        yield
    forget()


def check(x, weights, activation, norm=None):
    """That the kernel's error is no larger than eager's."""
    matrices, biases = weights.by_kind()
    found = launch.rows(x, matrices, biases, [], [activation], activation == GATED, norm=norm)

    def eager(x, weights, norm):
        return reference.forward(x if norm is None else norm(x), weights, parse(activation))

    wide_norm = None if norm is None else Norm(norm.kind, norm.eps, *double(norm[2:]))
    exact = eager(x.double(), Weights(*double(weights)), wide_norm)
    assert_exact(found, eager(x, weights, norm), exact)


# Few rows, panels of one's own, shared panels. Sums that end within a vector, and odd ones.
@pytest.mark.parametrize("rows", [5, 40, 700])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str
)
def test_results_are_as_exact_as_those_of_eager(units, rows, transposed, dtype):
    for widths in ((33, 75, 41), (70, 96, 32), (600, 64, 64)):
        weights = parameters(False, *widths, dtype, transposed=transposed)
        check(torch.randn(rows, widths[0]).to(dtype), weights, PLAIN)


def test_gates_rows_of_a_wider_tensor_and_norms_are_read(units):
    x = torch.randn(40, 100).bfloat16()[:, 20:84]
    weights = parameters(True, 64, 96, 64, torch.bfloat16)
    check(x, weights, GATED)
    check(x, weights, GATED, Norm("layer_norm", 1e-5, None, None))


def test_panels_of_frozen_weights_are_read(units):
    x, w1, w2 = (torch.randn(*shape).bfloat16() for shape in ((40, 64), (96, 64), (48, 96)))
    call = launch.Call(
        source.Kernel(torch.bfloat16, (PLAIN,)), (64, 96, 48), (launch.IN_PANELS, launch.IN_PANELS)
    )
    panels = [launch.panels(weight) for weight in (w1, w2)]
    found = launch.caller(call)(x, *panels, None, None, None, None, None)

    def eager(x, w1, w2):
        return F.linear(F.gelu(F.linear(x, w1), approximate="tanh"), w2)

    assert_exact(found, eager(x, w1, w2), eager(*double((x, w1, w2))))


def test_infinities_beside_an_odd_number_of_features_are_not_read(units):
    x = torch.full((40, 40), float("inf")).bfloat16()
    x[:, :33] = torch.randn(40, 33)
    check(x[:, :33], parameters(False, 33, 64, 48, torch.bfloat16), PLAIN)
