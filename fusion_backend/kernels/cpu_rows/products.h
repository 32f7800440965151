// Products of blocks of rows by the weights of a layer, in float32.
//
// Register tiles of fused multiply-adds. They read weights in panels of PANEL output features: panels
// that were made beforehand, or one at a time that is made when it is read. A few rows are not worth
// that: weights are then read as they are. Weights that are laid out in panels are read in place,
// whatever the rows, but that many rows want those of 16 bits in float32. Long sums are taken in
// short ones, which loses less to rounding. Matrix units, where there are some, take the place of the
// tiles, but not of few rows.

namespace {

#if defined(CPU_CAPABILITY_AVX512) || defined(__aarch64__)
constexpr int TILE_ROWS = 12;  // of 32 registers, 24 hold sums
constexpr int DOT_ROWS = 6, DOT_FEATURES = 4;
#else
constexpr int TILE_ROWS = 6;  // of 16 registers, 12 hold sums
constexpr int DOT_ROWS = 4, DOT_FEATURES = 3;
#endif
constexpr int64_t LONGEST_SUM = 256;  // so that a panel's part of it stays in the nearest cache
constexpr int64_t SHORT_SUM = 64;
// Of few rows, whose narrow layers would else be less exact than a vendor's dot products, of which
// each lane has a sum. Where there are more lanes, shorter sums are joined before they are added.
constexpr int64_t SHORTER_SUM = LANES > 8 ? 8 : 16;
constexpr int64_t JOINED = LANES > 8 ? 8 : 1;
constexpr int64_t WEIGHT_SUM = 96;  // half of a block of rows

// LANES by LANES elements, in float32.
template <typename T>
inline void transpose_square(const T* from, int64_t ld_from, float* to, int64_t ld_to) {
  if constexpr (std::is_same_v<T, float>) {
    at::vec::transpose_mxn<float, LANES, LANES>(from, ld_from, to, ld_to);
  } else {
    alignas(64) float square[LANES * LANES];
    for (int64_t i = 0; i < LANES; i++) read(from + i * ld_from).store(square + i * LANES);
    at::vec::transpose_mxn<float, LANES, LANES>(square, LANES, to, ld_to);
  }
}

// Weights of PANEL output features from n0 on, and `terms` input features from k0 on, as a panel.
inline void pack(const Layer& layer, int64_t n0, int64_t k0, int64_t terms, float* to) {
  const int64_t width = layer.in_panels ? PANEL : std::min(PANEL, layer.n - n0);
  const Element* from = layer.at(n0, k0);
  int64_t k = 0;
  if (width == PANEL && layer.stride_n == 1) {
    for (; k < terms; k++) {
      for (int64_t j = 0; j < PANEL; j += LANES) {
        read(from + k * layer.stride_k + j).store(to + k * PANEL + j);
      }
    }
  } else if (width == PANEL && layer.stride_k == 1) {
    for (; k + LANES <= terms; k += LANES) {
      for (int64_t j = 0; j < PANEL; j += LANES) {
        const Element* corner = from + j * layer.stride_n + k;
        transpose_square(corner, layer.stride_n, to + k * PANEL + j, PANEL);
      }
    }
  }
  for (; k < terms; k++) {
    for (int64_t j = 0; j < PANEL; j++) {
      to[k * PANEL + j] = j < width
          ? static_cast<float>(from[j * layer.stride_n + k * layer.stride_k]) : 0.0f;
    }
  }
}

// The same, in `memory` where the weight has it not as it is wanted.
inline const float* panel_in_float(
    const Layer& layer, int64_t n0, int64_t k0, int64_t terms, float* memory) {
  if (std::is_same_v<Element, float> && layer.in_panels) {
    return reinterpret_cast<const float*>(layer.at(n0, k0));
  }
  pack(layer, n0, k0, terms, memory);
  return memory;
}

// A panel of a layer whose panels are all made beforehand.
void pack_panel(const Layer& layer, int64_t index) {
  pack_biases(layer, index * PANEL, layer.panel(index));
  float* weights = layer.panel(index) + PANEL;
  if (has_matrix_units()) {
    pack_pairs(layer, index * PANEL, 0, layer.k, reinterpret_cast<Element*>(weights));
  } else {
    pack(layer, index * PANEL, 0, layer.k, weights);
  }
}

// c[ROWS, VECTORS * LANES] from rows of a and rows of b: one row of b for each feature of the sum, in
// parts of PANEL elements that lie `next_panel` apart. Sums are of SUM features; JOIN of them are added
// up, and then what these make.
template <int ROWS, int VECTORS, int64_t SUM, int64_t JOIN, typename T>
inline void outer_tile(
    const float* a, int64_t lda, const T* b, int64_t ldb, int64_t next_panel, int64_t terms,
    const T* bias, Start start, float* c, int64_t ldc, int64_t count = LANES) {
  for (int i = 0; i < ROWS; i++) {  // of wide layers, sums of other panels have replaced these
    for (int j = 0; j < VECTORS; j++) __builtin_prefetch(c + i * ldc + j * LANES, 1);
  }
  alignas(64) float joined[JOIN > 1 ? ROWS * VECTORS * LANES : 1];
  for (int64_t k0 = 0; k0 < terms || k0 == 0; k0 += SUM) {
    Vec sums[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; j++) sums[i][j] = Vec(0.0f);
    }
    const int64_t end = std::min(k0 + SUM, terms);
    for (int64_t k = k0; k < end; k++) {
      Vec row[VECTORS];
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; j++) {
        const int64_t within = j / TILE_VECTORS * next_panel + j % TILE_VECTORS * LANES;
        row[j] = read(b + k * ldb + within, count);
      }
#pragma GCC unroll 16
      for (int i = 0; i < ROWS; i++) {
        const Vec value(a[i * lda + k]);
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) sums[i][j] = at::vec::fmadd(value, row[j], sums[i][j]);
      }
    }
    const bool begins = k0 % (SUM * JOIN) == 0;
    const bool ends = JOIN == 1 || end == terms || end % (SUM * JOIN) == 0;
    const bool adds = k0 >= SUM * JOIN || start == Start::ADD;
    // The bias comes last: what is added to it afterwards would be rounded as it is.
    const bool adds_bias = start == Start::BIAS && bias != nullptr && end == terms;
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; j++) {
        float* to = c + i * ldc + j * LANES;
        Vec sum = sums[i][j];
        if constexpr (JOIN > 1) {
          float* part = joined + (i * VECTORS + j) * LANES;
          if (!begins) sum = sum + read(part);
          if (!ends) write(sum, part);
        }
        if (!ends) continue;
        if (adds) sum = sum + read(to, count);
        if (adds_bias) sum = sum + read(bias + j * LANES, count);
        write(sum, to, count);
      }
    }
  }
}

// c[ROWS, FEATURES] from rows of a and rows of w, each as long as the sum.
template <int ROWS, int FEATURES>
inline void dot_tile(
    const float* a, int64_t lda, const Element* w, int64_t ldw, int64_t terms, const Element* bias,
    Start start, float* c, int64_t ldc) {
  Vec sums[ROWS][FEATURES];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 8
    for (int j = 0; j < FEATURES; j++) sums[i][j] = Vec(0.0f);
  }
  for (int64_t k = 0; k < terms; k += LANES) {
    const int64_t count = std::min(LANES, terms - k);
    Vec weights[FEATURES];
#pragma GCC unroll 8
    for (int j = 0; j < FEATURES; j++) weights[j] = read(w + j * ldw + k, count);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
      const Vec value = read(a + i * lda + k, count);
#pragma GCC unroll 8
      for (int j = 0; j < FEATURES; j++) {
        sums[i][j] = at::vec::fmadd(value, weights[j], sums[i][j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 8
    for (int j = 0; j < FEATURES; j++) {
      float* to = c + i * ldc + j;
      float sum = sum_of(sums[i][j]);
      if (start == Start::ADD) sum += *to;
      if (start == Start::BIAS && bias != nullptr) sum += static_cast<float>(bias[j]);
      *to = sum;
    }
  }
}

// Calls f(std::integral_constant<int, n>) for the n in 1 … MOST that is `count`.
template <int MOST, typename F>
inline void with_constant(int64_t count, F&& f) {
  if (count == MOST) {
    f(std::integral_constant<int, MOST>());
  } else if constexpr (MOST > 1) {
    with_constant<MOST - 1>(count, std::forward<F>(f));
  }
}

// The product of rows by a panel: c[rows, PANEL], of which all is written.
inline void panel_product(
    const float* a, int64_t lda, int64_t rows, const float* panel, int64_t terms,
    const float* biases, Start start, float* c, int64_t ldc) {
  for (int64_t r = 0; r < rows; r += TILE_ROWS) {
    with_constant<TILE_ROWS>(std::min<int64_t>(TILE_ROWS, rows - r), [&](auto count) {
      outer_tile<count.value, TILE_VECTORS, SHORT_SUM, 1, float>(
          a + r * lda, lda, panel, PANEL, PANEL, terms, biases, start, c + r * ldc, ldc);
    });
  }
}

// The product of few rows by weights as they are, whose input features are neighbours.
inline void dot_product(
    const float* a, int64_t lda, int64_t rows, const Layer& layer, int64_t n0, int64_t n1,
    int64_t k, int64_t terms, Start start, float* c, int64_t ldc) {
  const auto tiles = [&](auto most_rows, auto features, int64_t n) {
    for (int64_t r = 0; r < rows; r += most_rows.value) {
      with_constant<most_rows.value>(std::min<int64_t>(most_rows.value, rows - r), [&](auto count) {
        dot_tile<count.value, features.value>(
            a + r * lda, lda, layer.weight + n * layer.stride_n + k, layer.stride_n, terms,
            layer.bias == nullptr ? nullptr : layer.bias + n, start, c + r * ldc + (n - n0), ldc);
      });
    }
  };
  int64_t n = n0;
  if (rows == 1) {  // as many streams of memory as there are registers for
    for (; n + 8 <= n1; n += 8) {
      tiles(std::integral_constant<int, 1>(), std::integral_constant<int, 8>(), n);
    }
  }
  for (; n + DOT_FEATURES <= n1; n += DOT_FEATURES) {
    tiles(std::integral_constant<int, DOT_ROWS>(), std::integral_constant<int, DOT_FEATURES>(), n);
  }
  for (; n < n1; n++) {
    tiles(std::integral_constant<int, DOT_ROWS>(), std::integral_constant<int, 1>(), n);
  }
}

// The product of few rows by weights as they are, of which output features are neighbours: PANEL of
// them, or all.
inline void outer_product(
    const float* a, int64_t lda, int64_t rows, const Layer& layer, int64_t n0, int64_t n1,
    int64_t k, int64_t terms, Start start, float* c, int64_t ldc) {
  const auto tiles = [&](auto most_rows, auto vectors, int64_t n, int64_t count) {
    for (int64_t r = 0; r < rows; r += most_rows.value) {
      with_constant<most_rows.value>(std::min<int64_t>(most_rows.value, rows - r), [&](auto few) {
        outer_tile<few.value, vectors.value, SHORTER_SUM, JOINED, Element>(
            a + r * lda, lda, layer.at(n, k), layer.stride_k, layer.next_panel, terms,
            layer.bias == nullptr ? nullptr : layer.bias + n, start, c + r * ldc + (n - n0), ldc,
            count);
      });
    }
  };
  int64_t n = n0;
  if (rows == 1) {
    for (; n + 8 * LANES <= n1; n += 8 * LANES) {
      tiles(std::integral_constant<int, 1>(), std::integral_constant<int, 8>(), n, LANES);
    }
  }
  for (; n + 2 * LANES <= n1; n += 2 * LANES) {
    tiles(std::integral_constant<int, 4>(), std::integral_constant<int, 2>(), n, LANES);
  }
  for (; n < n1; n += LANES) {
    const int64_t count = std::min(LANES, n1 - n);
    tiles(std::integral_constant<int, 4>(), std::integral_constant<int, 1>(), n, count);
  }
}

// c[rows, n0 … n1] = a[rows, 0 … k1 - k0] weight[n0 … n1, k0 … k1]^T, in float32. n0 is a multiple
// of PANEL, and c as wide as whole panels.
void product(
    const float* a, int64_t lda, int64_t rows, const Layer& layer, int64_t n0, int64_t n1,
    int64_t k0, int64_t k1, Start start, float* c, int64_t ldc) {
  if (!multiplies_panels(layer, rows)) {  // each weight once, in their order
    if (layer.stride_k == 1 && !layer.in_panels) {
      dot_product(a, lda, rows, layer, n0, n1, k0, k1 - k0, start, c, ldc);
    } else {
      outer_product(a, lda, rows, layer, n0, n1, k0, k1 - k0, start, c, ldc);
    }
    return;
  }
  if (has_matrix_units()) {
    rounded_product(a, lda, rows, layer, n0, n1, k0, k1, start, c, ldc);
    return;
  }
  alignas(64) float panel[PANEL * LONGEST_SUM], biases[PANEL];
  for (int64_t k = k0; k < k1 || k == k0; k += LONGEST_SUM) {
    const int64_t terms = std::min(LONGEST_SUM, k1 - k);
    const float* a_k = a + (k - k0);
    const Start from = k == k0 ? start : Start::ADD;
    for (int64_t n = n0; n < n1; n += PANEL) {
      float* c_n = c + (n - n0);
      if (layer.packed != nullptr) {
        const float* whole = layer.panel(n / PANEL);
        panel_product(a_k, lda, rows, whole + PANEL * (1 + k), terms, whole, from, c_n, ldc);
      } else {
        const float* part = panel_in_float(layer, n, k, terms, panel);
        if (from == Start::BIAS) pack_biases(layer, n, biases);
        panel_product(a_k, lda, rows, part, terms, biases, from, c_n, ldc);
      }
    }
  }
}

// c[M, PANEL] from columns of a and of b: one row of each for each term of the sum.
template <int M>
inline void weight_tile(
    const float* a, int64_t lda, const float* b, int64_t ldb, int64_t terms, bool add, float* c,
    int64_t ldc) {
  for (int i = 0; i < M; i++) {  // all of a gradient may be more than the cache has room for
    for (int j = 0; j < TILE_VECTORS; j++) __builtin_prefetch(c + i * ldc + j * LANES, 1);
  }
  for (int64_t r0 = 0; r0 < terms; r0 += WEIGHT_SUM) {
    Vec sums[M][TILE_VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < M; i++) {
#pragma GCC unroll 8
      for (int j = 0; j < TILE_VECTORS; j++) sums[i][j] = Vec(0.0f);
    }
    const int64_t end = std::min(r0 + WEIGHT_SUM, terms);
    for (int64_t r = r0; r < end; r++) {
      Vec row[TILE_VECTORS];
#pragma GCC unroll 8
      for (int j = 0; j < TILE_VECTORS; j++) row[j] = Vec::loadu(b + r * ldb + j * LANES);
#pragma GCC unroll 16
      for (int i = 0; i < M; i++) {
        const Vec value(a[r * lda + i]);
#pragma GCC unroll 8
        for (int j = 0; j < TILE_VECTORS; j++) sums[i][j] = at::vec::fmadd(value, row[j], sums[i][j]);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < M; i++) {
#pragma GCC unroll 8
      for (int j = 0; j < TILE_VECTORS; j++) {
        float* to = c + i * ldc + j * LANES;
        Vec sum = sums[i][j];
        if (add || r0 > 0) sum = sum + Vec::loadu(to);
        sum.store(to);
      }
    }
  }
}

// c[m, n] = a[rows, m]^T b[rows, n], or is added to: a weight's gradient. b and c are as wide as
// whole panels.
void weight_product(
    const float* a, int64_t lda, const float* b, int64_t ldb, int64_t rows, int64_t m, int64_t n,
    bool add, float* c, int64_t ldc) {
  const int64_t tiles = (m + TILE_ROWS - 1) / TILE_ROWS;
  for (int64_t j = 0; j < n; j += PANEL) {
    for (int64_t t = 0, i = 0; t < tiles; t++) {  // of about the same size
      const int64_t height = (m - i + tiles - t - 1) / (tiles - t);
      with_constant<TILE_ROWS>(height, [&](auto count) {
        weight_tile<count.value>(a + i, lda, b + j, ldb, rows, add, c + i * ldc + j, ldc);
      });
      i += height;
    }
  }
}

}  // namespace

extern "C" void kernel(int64_t to) {
  auto* functions = reinterpret_cast<int64_t*>(to);
  functions[0] = reinterpret_cast<int64_t>(static_cast<Product>(product));
  functions[1] = has_matrix_units()
      ? reinterpret_cast<int64_t>(static_cast<ElementProduct>(element_product)) : 0;
  functions[2] = reinterpret_cast<int64_t>(static_cast<Pack>(pack_panel));
  functions[3] = reinterpret_cast<int64_t>(static_cast<WeightProduct>(weight_product));
  functions[4] = PANEL;
}
