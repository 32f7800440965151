// Products of rows in 16 bits, where the CPU has matrix units for them (AMX).
//
// They are computed by oneDNN's kernels, as ATen offers them. Sums are in float32. Panels of weights
// hold two neighbours of the sum of each output feature side by side.

#include <ATen/native/CPUBlas.h>

namespace {

constexpr int64_t MATRIX_SUM = 256;  // so that a panel's part of it stays in the nearest cache

// Whether there are such units, and ATen uses them. Its kernels want 32 output features.
inline bool has_matrix_units() {
  if constexpr (std::is_same_v<Element, float> || PANEL != 32) {
    return false;
  } else {
    static const bool has =
        at::native::cpublas::could_pack(c10::CppTypeToScalarType<Element>::value);
    return has;
  }
}

// Two rows of PANEL elements as one of pairs.
inline void pair_rows(const Element* row, const Element* next, Element* pairs) {
  using Ints = at::vec::Vectorized<int32_t>;  // of two elements each
  const Ints half(16), first(0x0000ffff), second(0xffff0000);
  const Ints a = Ints::loadu(row), b = Ints::loadu(next);
  const Ints even = (a & first) | (b << half);
  const Ints odd = ((a >> half) & first) | (b & second);
  const auto [low, high] = at::vec::interleave2(at::vec::cast<float>(even), at::vec::cast<float>(odd));
  low.store(pairs);
  high.store(pairs + PANEL);
}

// Weights of PANEL output features from n0 on, and `terms` input features from k0 on, as a panel. An
// odd term has a zero beside it.
inline void pack_pairs(const Layer& layer, int64_t n0, int64_t k0, int64_t terms, Element* to) {
  const int64_t width = layer.in_panels ? PANEL : std::min(PANEL, layer.n - n0);
  const Element* from = layer.at(n0, k0);
  int64_t k = 0;
  if (width == PANEL && layer.stride_k == 1) {  // a pair moves as if it were one float
    for (; k + 2 * LANES <= terms; k += 2 * LANES) {
      for (int64_t j = 0; j < PANEL; j += LANES) {
        alignas(64) float square[LANES * LANES];
        for (int64_t i = 0; i < LANES; i++) {
          std::memcpy(square + i * LANES, from + (j + i) * layer.stride_n + k, LANES * sizeof(float));
        }
        float* pairs = reinterpret_cast<float*>(to + k * PANEL) + j;
        at::vec::transpose_mxn<float, LANES, LANES>(square, LANES, pairs, PANEL);
      }
    }
  } else if (width == PANEL && layer.stride_n == 1) {
    for (; k + 2 <= terms; k += 2) {
      const Element* row = from + k * layer.stride_k;
      pair_rows(row, row + layer.stride_k, to + k * PANEL);
    }
  }
  for (; k < terms; k += 2) {
    for (int64_t j = 0; j < PANEL; j++) {
      const Element* pair = from + j * layer.stride_n + k * layer.stride_k;
      Element* place = to + k * PANEL + 2 * j;
      place[0] = j < width ? pair[0] : Element(0.0f);
      place[1] = j < width && k + 1 < terms ? pair[layer.stride_k] : Element(0.0f);
    }
  }
}

// As `product` of products.h, of rows in 16 bits, which have a column more where k1 - k0 is odd.
void element_product(
    const Element* a, int64_t lda, int64_t rows, const Layer& layer, int64_t n0, int64_t n1,
    int64_t k0, int64_t k1, Start start, float* c, int64_t ldc) {
  alignas(64) Element panel[PANEL * MATRIX_SUM];
  alignas(64) float biases[PANEL];
  for (int64_t k = k0; k < k1 || k == k0; k += MATRIX_SUM) {
    const int64_t terms = std::min(MATRIX_SUM, k1 - k);
    for (int64_t n = n0; n < n1; n += PANEL) {
      float* c_n = c + (n - n0);
      const Element* pairs = panel;
      const float* of_panel = biases;
      if (layer.packed != nullptr) {
        of_panel = layer.panel(n / PANEL);
        pairs = reinterpret_cast<const Element*>(of_panel + PANEL) + k * PANEL;
      } else {
        pack_pairs(layer, n, k, terms, panel);
        if (start == Start::BIAS && k == k0) pack_biases(layer, n, biases);
      }
      const bool adds = k > k0 || start != Start::ZERO;
      if (k == k0 && (start == Start::BIAS || (terms == 0 && !adds))) {
        for (int64_t j = 0; j < PANEL; j += LANES) {
          const Vec from = start == Start::BIAS ? read(of_panel + j) : Vec(0.0f);
          for (int64_t r = 0; r < rows; r++) write(from, c_n + r * ldc + j);
        }
      }
      if (terms > 0) {
        at::native::cpublas::brgemm(
            rows, PANEL, (terms + 1) / 2 * 2, lda, PANEL, ldc, adds, a + (k - k0), pairs, c_n);
      }
    }
  }
  at::native::cpublas::brgemm_release();  // others may use the units
}

// The same of rows in float32, which are rounded first, as eager PyTorch rounds what is between
// layers.
inline void rounded_product(
    const float* a, int64_t lda, int64_t rows, const Layer& layer, int64_t n0, int64_t n1,
    int64_t k0, int64_t k1, Start start, float* c, int64_t ldc) {
  static thread_local std::vector<Element> memory;
  const int64_t terms = k1 - k0, ld = (terms + LANES - 1) / LANES * LANES;
  if (memory.size() < static_cast<size_t>(rows * ld)) memory.resize(rows * ld);
  for (int64_t r = 0; r < rows; r++) {
    int64_t j = 0;
    for (; j + LANES <= terms; j += LANES) write(read(a + r * lda + j), memory.data() + r * ld + j);
    if (j < terms) write(read(a + r * lda + j, terms - j), memory.data() + r * ld + j);
  }
  element_product(memory.data(), ld, rows, layer, n0, n1, k0, k1, start, c, ldc);
}

}  // namespace
