// What products and activations have in common: vectors of float32 from any element type, layers.
//
// Comes after what says which type Element is.

#include <omp.h>

namespace {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t LANES = Vec::size();

template <typename T>
inline Vec read(const T* from, int64_t count = LANES) {
  if constexpr (std::is_same_v<T, float>) {
    return count == LANES ? Vec::loadu(from) : Vec::loadu(from, count);
  } else {
    // A number that the compiler knows is one load; any other goes through memory.
    return at::vec::convert<float>(count == LANES ? at::vec::Vectorized<T>::loadu(from, LANES)
                                                  : at::vec::Vectorized<T>::loadu(from, count));
  }
}

template <typename T>
inline void write(Vec value, T* to, int64_t count = LANES) {
  if constexpr (std::is_same_v<T, float>) {
    count == LANES ? value.store(to) : value.store(to, count);
  } else {
    const auto rounded = at::vec::convert<T>(value);
    count == LANES ? rounded.store(to, LANES) : rounded.store(to, count);
  }
}

inline float sum_of(Vec value) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, value);
}

constexpr int TILE_VECTORS = 2;
constexpr int64_t PANEL = TILE_VECTORS * LANES;
static_assert(PANEL <= 64, "Python reserves memory for panels of at most 64 features");

inline int64_t padded(int64_t features) { return (features + PANEL - 1) / PANEL * PANEL; }

// A linear layer. Its weight is a matrix of which one stride is 1, or is laid out in panels: those of
// PANEL output features follow each other, and a panel has PANEL elements of each input feature.
struct Layer {
  const Element* weight;
  int64_t stride_n, stride_k;
  int64_t next_panel;  // elements from PANEL output features to the next ones
  bool in_panels;      // whether the weight is laid out so, filled up with zeros
  const Element* bias; // or nullptr
  int64_t n, k;
  float* packed;  // panels that a call makes of it, or nullptr where the weight is read as it is

  const Element* at(int64_t feature, int64_t input) const {
    return weight + feature / PANEL * next_panel + feature % PANEL * stride_n + input * stride_k;
  }
  int64_t panels() const { return (n + PANEL - 1) / PANEL; }
  int64_t floats() const { return panels() * PANEL * (k + 1); }
  // A panel is PANEL biases, then PANEL weights of each input feature.
  float* panel(int64_t index) const { return packed + index * PANEL * (k + 1); }
};

// Biases of PANEL output features from n0 on.
inline void pack_biases(const Layer& layer, int64_t n0, float* to) {
  for (int64_t j = 0; j < PANEL; j++) {
    to[j] = layer.bias != nullptr && n0 + j < layer.n
        ? static_cast<float>(layer.bias[n0 + j]) : 0.0f;
  }
}

constexpr int64_t WORTH_PACKING = 14;  // rows: with fewer, packing takes longer than it saves

// Whether a product makes panels of a layer, or has them, rather than to read the weight as it is.
inline bool multiplies_panels(const Layer& layer, int64_t rows) {
  return layer.packed != nullptr || rows >= WORTH_PACKING;
}

// What a product does with its sums.
enum class Start { ZERO, BIAS, ADD };

// What the library of products offers: `product`, `element_product` where there are matrix units,
// `pack_panel` and `weight_product`.
using Product = void (*)(
    const float* a, int64_t lda, int64_t rows, const Layer& layer, int64_t n0, int64_t n1,
    int64_t k0, int64_t k1, Start start, float* c, int64_t ldc);
using ElementProduct = void (*)(
    const Element* a, int64_t lda, int64_t rows, const Layer& layer, int64_t n0, int64_t n1,
    int64_t k0, int64_t k1, Start start, float* c, int64_t ldc);
using Pack = void (*)(const Layer& layer, int64_t panel);
using WeightProduct = void (*)(
    const float* a, int64_t lda, const float* b, int64_t ldb, int64_t rows, int64_t m, int64_t n,
    bool add, float* c, int64_t ldc);

constexpr int64_t STAGGER = 16;  // floats: rows of a power of two compete for places in a cache

// The next multiple of a line of the cache.
inline float* aligned(float* next) {
  return next + (64 - reinterpret_cast<uintptr_t>(next) % 64) % 64 / sizeof(float);
}

// A layer whose panels, where there is memory for them, take the next of it. Strides of zero stand
// for a weight that is laid out in panels.
Layer layer_of(int64_t weight, int64_t stride_n, int64_t stride_k, int64_t bias, int64_t n,
               int64_t k, float** memory) {
  const bool in_panels = stride_n == 0 && stride_k == 0;
  Layer layer{reinterpret_cast<const Element*>(weight),
              in_panels ? 1 : stride_n,
              in_panels ? PANEL : stride_k,
              in_panels ? PANEL * k : PANEL * stride_n,
              in_panels,
              reinterpret_cast<const Element*>(bias),
              n,
              k,
              nullptr};
  if (memory != nullptr) {
    layer.packed = *memory;
    *memory += layer.floats();
  }
  return layer;
}

}  // namespace
