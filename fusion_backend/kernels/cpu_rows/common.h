// What products and activations have in common: vectors of float32 from any element type, layers.
//
// Comes after what says which type Element is.

namespace {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t LANES = Vec::size();

template <typename T>
inline Vec read(const T* from, int64_t count = LANES) {
  if constexpr (std::is_same_v<T, float>) {
    return count == LANES ? Vec::loadu(from) : Vec::loadu(from, count);
  } else {
    return at::vec::convert<float>(at::vec::Vectorized<T>::loadu(from, count));
  }
}

template <typename T>
inline void write(Vec value, T* to, int64_t count = LANES) {
  if constexpr (std::is_same_v<T, float>) {
    count == LANES ? value.store(to) : value.store(to, count);
  } else {
    at::vec::convert<T>(value).store(to, count);
  }
}

inline float sum_of(Vec value) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, value);
}

constexpr int TILE_VECTORS = 2;
constexpr int64_t PANEL = TILE_VECTORS * LANES;
static_assert(PANEL <= 64, "Python reserves memory for panels of at most 64 features");

inline int64_t padded(int64_t features) { return (features + PANEL - 1) / PANEL * PANEL; }

// A linear layer: weight[n * stride_n + k * stride_k], one of the strides is 1.
struct Layer {
  const Element* weight;
  int64_t stride_n, stride_k;
  const Element* bias;  // or nullptr
  int64_t n, k;
  float* packed;  // its panels, or nullptr where the weight is read as it is

  int64_t panels() const { return (n + PANEL - 1) / PANEL; }
  int64_t floats() const { return panels() * PANEL * (k + 1); }
  // A panel is PANEL biases, then PANEL weights of each input feature.
  float* panel(int64_t index) const { return packed + index * PANEL * (k + 1); }
};

// What a product does with its sums.
enum class Start { ZERO, BIAS, ADD };

// What the library of products offers: `product` and `pack_panel`.
using Product = void (*)(
    const float* a, int64_t lda, int64_t rows, const Layer& layer, int64_t n0, int64_t n1,
    int64_t k0, int64_t k1, Start start, float* c, int64_t ldc);
using Pack = void (*)(const Layer& layer, int64_t panel);

}  // namespace
