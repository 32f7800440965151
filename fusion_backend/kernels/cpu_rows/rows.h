// Layers joined by activations, in blocks of rows: what is between two layers stays in the cache of
// the thread that computes it.
//
//     for each block of rows, a thread:
//         for each chunk of hidden features:
//             hidden  = f(x W_1^T + b_1)          rows × chunk, in the thread's own memory
//             y      += hidden W_down^T           the chunk's part of the sum
//
// Few rows are computed by several threads, each of a share of the hidden features; what they have
// of y is added in the order of the shares, so a result does not depend on who was first.
//
// The products are those of `products.h`, compiled by themselves. Comes after `common.h` and what
// `source` writes: LAYERS, GATED, Operands and `activation<layer>`.

namespace {

// Pre-activations that are kept, [rows, ld], or nullptr.
struct Kept {
  Element* gate;
  Element* up;
  int64_t ld;
};

// Writes rows of a thread's memory, which begin at (row, column) of the whole, where they are kept.
inline void keep(const float* from, int64_t ld_from, int64_t rows, int64_t width, int64_t row,
                 int64_t column, Element* to, int64_t ld) {
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t j = 0; j < width; j += LANES) {
      write(read(from + r * ld_from + j), to + (row + r) * ld + column + j,
            std::min(LANES, width - j));
    }
  }
}

// hidden[rows, width] = f(gate, hidden), both of which begin at (row, column) of the whole.
template <int LAYER>
void activate(
    const float* gate, float* hidden, int64_t ld, int64_t rows, int64_t width, int64_t row,
    int64_t column, const Operands& operands) {
  for (int64_t r = 0; r < rows; r++) {
    const float* g = gate + r * ld;
    float* u = hidden + r * ld;
    int64_t j = 0;
    for (; j + LANES <= width; j += LANES) {
      activation<LAYER>(read(g + j), read(u + j), row + r, column + j, LANES, operands).store(u + j);
    }
    if (j < width) {  // the thread's memory is wider than this, operands are not
      activation<LAYER>(read(g + j), read(u + j), row + r, column + j, width - j, operands)
          .store(u + j);
    }
  }
}

// The norm before the first layer.
struct Norm {
  enum Kind : int64_t { NONE, LAYER, RMS } kind;
  float eps;
  const Element* weight;  // or nullptr, as the bias
  const Element* bias;
};

// A row of the input in float32, normalised where a norm comes before the first layer.
inline void prepare_row(const Element* x, int64_t width, const Norm& norm, float* to) {
  if (norm.kind == Norm::NONE) {
    for (int64_t k = 0; k < width; k += LANES) {
      const int64_t count = std::min(LANES, width - k);
      write(read(x + k, count), to + k, count);
    }
    return;
  }
  Vec sum(0.0f);
  float mean = 0.0f;
  if (norm.kind == Norm::LAYER) {
    for (int64_t k = 0; k < width; k += LANES) sum += read(x + k, std::min(LANES, width - k));
    mean = sum_of(sum) / static_cast<float>(width);
  }
  Vec squares(0.0f);
  for (int64_t k = 0; k < width; k += LANES) {
    const int64_t count = std::min(LANES, width - k);
    Vec centred = read(x + k, count) - Vec(mean);
    if (count < LANES) centred = Vec::set(Vec(0.0f), centred, count);
    squares = at::vec::fmadd(centred, centred, squares);
  }
  const float variance = sum_of(squares) / static_cast<float>(width);
  const Vec scale(1.0f / std::sqrt(variance + norm.eps));
  for (int64_t k = 0; k < width; k += LANES) {
    const int64_t count = std::min(LANES, width - k);
    Vec value = (read(x + k, count) - Vec(mean)) * scale;
    if (norm.weight != nullptr) value = value * read(norm.weight + k, count);
    if (norm.bias != nullptr) value = value + read(norm.bias + k, count);
    write(value, to + k, count);
  }
}

// What all threads read, and how the work is cut.
struct Task {
  const Element* x;
  int64_t ldx;
  Element* y;  // [rows, out]
  const Element* residual;  // [rows, out], or nullptr
  Norm norm;
  Layer gate;             // where GATED, beside layers[0]
  Layer layers[LAYERS];
  Operands operands;
  Kept kept;              // what training saves
  Product product;
  ElementProduct element_product;  // or nullptr
  Pack pack;
  int64_t rows, block_rows, chunk, shares;
  float* sums;  // [shares, rows, padded out], where there are shares of hidden features

  int64_t out() const { return layers[LAYERS - 1].n; }
  int64_t hidden() const { return layers[LAYERS - 1].k; }
};

// Memory of one thread, kept between calls: it is as large as its cache.
struct Own {
  std::vector<float> floats;
  float* input;      // [block_rows, in]
  float* between[2]; // [block_rows, the widest value but the last hidden one]
  float* gate;       // [block_rows, chunk]
  float* hidden;     // [block_rows, chunk]
  float* out;        // [block_rows, out]
  int64_t ld_input, ld_between, ld_hidden, ld_out;

  void fit(const Task& task) {
    ld_input = padded(task.layers[0].k) + STAGGER;
    ld_between = 0;
    for (int i = 0; i + 2 < LAYERS; i++) {
      ld_between = std::max(ld_between, padded(task.layers[i].n) + STAGGER);
    }
    ld_hidden = padded(task.chunk) + STAGGER;
    ld_out = padded(task.out()) + STAGGER;
    const int64_t each[] = {ld_input, ld_between, ld_between, ld_hidden, ld_hidden, ld_out};
    const size_t needed = task.block_rows *
        (ld_input + 2 * ld_between + (GATED ? 2 : 1) * ld_hidden + ld_out) + 64 / sizeof(float);
    if (floats.size() < needed) floats.resize(needed);
    float** parts[] = {&input, &between[0], &between[1], &gate, &hidden, &out};
    float* next = aligned(floats.data());
    for (int i = 0; i < 6; i++) {
      *parts[i] = next;
      if (GATED || parts[i] != &gate) next += task.block_rows * each[i];
    }
  }
};

// Rows that a layer is of: in float32, or where matrix units read them, as they are.
struct Input {
  const float* floats;
  const Element* elements;  // or nullptr
  int64_t ld;
};

// Features n0 … n1 of a layer, biases added.
inline void layer_of_rows(const Task& task, const Input& a, int64_t rows, const Layer& layer,
                          int64_t n0, int64_t n1, float* c, int64_t ldc) {
  if (a.elements != nullptr) {
    task.element_product(a.elements, a.ld, rows, layer, n0, n1, 0, layer.k, Start::BIAS, c, ldc);
  } else {
    task.product(a.floats, a.ld, rows, layer, n0, n1, 0, layer.k, Start::BIAS, c, ldc);
  }
}

// The input of the first layer: x where its products can read that, else the thread's copy.
inline Input first_input(const Task& task, Own& own, int64_t row, int64_t rows) {
  const Element* x = task.x + row * task.ldx;
  const Layer& layer = task.layers[0];
  if (task.norm.kind == Norm::NONE) {
    if (std::is_same_v<Element, float>) {
      return {reinterpret_cast<const float*>(x), nullptr, task.ldx};
    }
    if (task.element_product != nullptr && layer.k % 2 == 0 && multiplies_panels(layer, rows)) {
      return {nullptr, x, task.ldx};
    }
  }
  for (int64_t r = 0; r < rows; r++) {
    prepare_row(x + r * task.ldx, layer.k, task.norm, own.input + r * own.ld_input);
  }
  return {own.input, nullptr, own.ld_input};
}

template <int I>
void layers_between(const Task& task, Own& own, Input& a, int64_t row, int64_t rows) {
  if constexpr (I + 2 < LAYERS) {
    const Layer& layer = task.layers[I];
    float* next = own.between[I % 2];
    layer_of_rows(task, a, rows, layer, 0, layer.n, next, own.ld_between);
    activate<I>(next, next, own.ld_between, rows, layer.n, row, 0, task.operands);
    a = {next, nullptr, own.ld_between};
    layers_between<I + 1>(task, own, a, row, rows);
  }
}

// y[row … row + rows] from hidden features h0 … h1, into c.
void block(const Task& task, Own& own, int64_t row, int64_t rows, int64_t h0, int64_t h1, float* c,
           int64_t ldc) {
  Input a = first_input(task, own, row, rows);
  layers_between<0>(task, own, a, row, rows);
  const Layer& up = task.layers[LAYERS - 2];
  const Layer& down = task.layers[LAYERS - 1];
  for (int64_t h = h0; h < h1 || h == h0; h += task.chunk) {
    const int64_t end = std::min(h + task.chunk, h1);
    float* gate = own.hidden;
    if constexpr (GATED) {
      gate = own.gate;
      layer_of_rows(task, a, rows, task.gate, h, end, gate, own.ld_hidden);
    }
    layer_of_rows(task, a, rows, up, h, end, own.hidden, own.ld_hidden);
    if (task.kept.up != nullptr) {
      const Kept& kept = task.kept;
      if constexpr (GATED) {
        keep(gate, own.ld_hidden, rows, end - h, row, h, kept.gate, kept.ld);
      }
      keep(own.hidden, own.ld_hidden, rows, end - h, row, h, kept.up, kept.ld);
    }
    activate<LAYERS - 2>(gate, own.hidden, own.ld_hidden, rows, end - h, row, h, task.operands);
    const Start start = h > h0 ? Start::ADD : h == 0 ? Start::BIAS : Start::ZERO;
    task.product(own.hidden, own.ld_hidden, rows, down, 0, down.n, h, end, start, c, ldc);
  }
}

// y[row] from sums, and the residual; `shares` sums lie `distance` apart.
inline void finish_row(const Task& task, int64_t row, const float* sums, int64_t shares,
                       int64_t distance) {
  const int64_t out = task.out();
  for (int64_t j = 0; j < out; j += LANES) {
    const int64_t count = std::min(LANES, out - j);
    Vec value = read(sums + j, count);
    for (int64_t s = 1; s < shares; s++) value = value + read(sums + s * distance + j, count);
    if (task.residual != nullptr) value = value + read(task.residual + row * out + j, count);
    write(value, task.y + row * out + j, count);
  }
}

void run(const Task& task, int64_t threads) {
  const int64_t blocks = (task.rows + task.block_rows - 1) / task.block_rows;
  const int64_t out = task.out(), ld_sums = padded(out), hidden = task.hidden();
  // Shares of hidden features begin where panels do.
  const int64_t share = padded((hidden + task.shares - 1) / task.shares);
  const bool direct = std::is_same_v<Element, float> && task.residual == nullptr && out % PANEL == 0;
#pragma omp parallel num_threads(threads)
  {
    static thread_local Own own;
    own.fit(task);
    if (task.layers[0].packed != nullptr) {
      const auto pack_all = [&](const Layer& layer) {
#pragma omp for schedule(static) nowait
        for (int64_t index = 0; index < layer.panels(); index++) task.pack(layer, index);
      };
      if constexpr (GATED) pack_all(task.gate);
      for (const Layer& layer : task.layers) pack_all(layer);
#pragma omp barrier
    }
    if (task.shares == 1) {
#pragma omp for schedule(dynamic, 1)
      for (int64_t b = 0; b < blocks; b++) {
        const int64_t row = b * task.block_rows;
        const int64_t rows = std::min(task.block_rows, task.rows - row);
        if (direct) {
          block(task, own, row, rows, 0, hidden, reinterpret_cast<float*>(task.y) + row * out, out);
        } else {
          block(task, own, row, rows, 0, hidden, own.out, own.ld_out);
          for (int64_t r = 0; r < rows; r++) {
            finish_row(task, row + r, own.out + r * own.ld_out, 1, 0);
          }
        }
      }
    } else {
      const int64_t distance = task.rows * ld_sums;
#pragma omp for schedule(dynamic, 1)
      for (int64_t t = 0; t < blocks * task.shares; t++) {
        const int64_t s = t % task.shares, row = t / task.shares * task.block_rows;
        const int64_t rows = std::min(task.block_rows, task.rows - row);
        const int64_t h0 = std::min(s * share, hidden), h1 = std::min(h0 + share, hidden);
        float* sums = task.sums + s * distance + row * ld_sums;
        if (h0 < h1) {
          block(task, own, row, rows, h0, h1, sums, ld_sums);
        } else {
          for (int64_t r = 0; r < rows; r++) std::fill_n(sums + r * ld_sums, out, 0.0f);
        }
      }
#pragma omp for schedule(static)
      for (int64_t row = 0; row < task.rows; row++) {
        finish_row(task, row, task.sums + row * ld_sums, task.shares, distance);
      }
    }
  }
}

Norm norm_of(int64_t kind, int64_t eps, int64_t weight, int64_t bias) {
  Norm norm{static_cast<Norm::Kind>(kind), 0.0f, reinterpret_cast<const Element*>(weight),
            reinterpret_cast<const Element*>(bias)};
  const int32_t bits = static_cast<int32_t>(eps);
  std::memcpy(&norm.eps, &bits, sizeof(float));
  return norm;
}

}  // namespace
