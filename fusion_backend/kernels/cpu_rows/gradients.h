// Gradients of two layers joined by an activation, in blocks of rows: what is as wide as the hidden
// layer stays in the cache of the thread that computes it.
//
//     for each part of the rows and each share of the hidden features, a thread:
//         for each block of rows, for each chunk of hidden features:
//             dhidden = dy W_down                  rows × chunk, in the thread's own memory
//             postact = f(preact), dpreact = dhidden · f'(preact)
//             dW_down += dyᵀ postact,  dW_up += dpreactᵀ x,  db_up += Σ_rows dpreact
//             dx      += dpreact W_up
//
// Pre-activations are those that the forward pass saved, or are computed from x again. Each part has
// sums of its own of the weights' gradients, each share of dx; they are added in a fixed order, so
// gradients do not depend on who was first. What nobody asks for is not computed.
//
// The products are those of `products.h`, compiled by themselves. Comes after `common.h` and what
// `gradient_source` writes: GATED, WANTED, Operands and `differentiated`.

namespace {

constexpr int64_t GROUP = 16;  // blocks whose sums are added to those of others, where there are many

// A gradient [m, n] that is a sum over rows.
template <typename T>
struct Sum {
  T* to;  // or nullptr where nobody asks for it
  int64_t m, n, stride_m, stride_n;
  bool direct;    // the first part of the rows adds to the gradient itself, which is as sums are
  float* memory;  // sums of the other parts, [m, ld] each
  float* recent;  // sums of the group of blocks at hand, or nullptr: there is one group a part

  int64_t ld() const { return direct ? n : padded(n); }
  float* total(int64_t p) const {
    if (direct && p == 0) return reinterpret_cast<float*>(to);
    return memory + (p - direct) * m * ld();
  }
  float* part(int64_t p) const { return recent == nullptr ? total(p) : recent + p * m * ld(); }
  void fit(int64_t parts, bool groups, float*& next) {
    if (to == nullptr) return;
    memory = next;
    next += (parts - direct) * m * ld();
    if (groups) recent = std::exchange(next, next + parts * m * ld());
  }
  // Adds a group's sums to those of the part, or begins with them.
  void add_group(int64_t p, int64_t i0, int64_t i1, int64_t j0, int64_t j1, bool first) const {
    if (to == nullptr) return;
    for (int64_t i = i0; i < i1; i++) {
      float* sums = total(p) + i * ld();
      const float* others = recent + (p * m + i) * ld();
      for (int64_t j = j0; j < j1; j += LANES) {
        const int64_t count = std::min(LANES, j1 - j);
        const Vec value = read(others + j, count);
        write(first ? value : value + read(sums + j, count), sums + j, count);
      }
    }
  }
};

// Writes LANES or fewer elements of a gradient, `stride` apart.
template <typename T>
inline void write_apart(Vec value, T* to, int64_t stride, int64_t count) {
  if (stride == 1) return write(value, to, count);
  alignas(64) float values[LANES];
  value.store(values);
  for (int64_t k = 0; k < count; k++) to[k * stride] = static_cast<T>(values[k]);
}

// Row i of a gradient, from the sums of all parts of the rows.
template <typename T>
void finish_row(const Sum<T>& sum, int64_t i, int64_t parts) {
  if (sum.direct && parts == 1) return;
  for (int64_t j = 0; j < sum.n; j += LANES) {
    const int64_t count = std::min(LANES, sum.n - j);
    Vec value = read(sum.total(0) + i * sum.ld() + j, count);
    for (int64_t p = 1; p < parts; p++) value = value + read(sum.total(p) + i * sum.ld() + j, count);
    write_apart(value, sum.to + i * sum.stride_m + j * sum.stride_n, sum.stride_n, count);
  }
}

// A gradient [n] that is a sum over rows: of a bias, or of an operand. What an addition loses to
// rounding is kept beside the sum and added in the end.
template <typename T>
struct RowSum {
  T* to;  // or nullptr where nobody asks for it
  int64_t n;
  float* memory;  // of each part: sums and what they lack, [2, ld]

  int64_t ld() const { return padded(n); }
  float* part(int64_t p) const { return memory + p * 2 * ld(); }
  void fit(int64_t parts, float*& next) {
    if (to != nullptr) memory = std::exchange(next, next + parts * 2 * ld());
  }
  void clear(int64_t p, int64_t j0, int64_t j1) const {
    if (to == nullptr) return;
    std::fill(part(p) + j0, part(p) + j1, 0.0f);
    std::fill(part(p) + ld() + j0, part(p) + ld() + j1, 0.0f);
  }
  // Adds rows of `width` elements that belong to those from j0 on.
  void add(int64_t p, int64_t j0, const float* from, int64_t ld_from, int64_t rows,
           int64_t width) const {
    if (to == nullptr) return;
    for (int64_t j = 0; j < width; j += LANES) {
      Vec value(0.0f);
      for (int64_t r0 = 0; r0 < rows; r0 += 64) {
        Vec few[4] = {Vec(0.0f), Vec(0.0f), Vec(0.0f), Vec(0.0f)};
        const int64_t end = std::min(r0 + 64, rows);
        int64_t r = r0;
        for (; r + 4 <= end; r += 4) {
          for (int i = 0; i < 4; i++) few[i] = few[i] + Vec::loadu(from + (r + i) * ld_from + j);
        }
        for (; r < end; r++) few[0] = few[0] + Vec::loadu(from + r * ld_from + j);
        value = value + ((few[0] + few[1]) + (few[2] + few[3]));
      }
      const int64_t count = std::min(LANES, width - j);
      float* at = part(p) + j0 + j;
      const Vec before = read(at, count), sum = before + value;
      const Vec added = sum - before;
      const Vec lost = (before - (sum - added)) + (value - added);
      write(sum, at, count);
      write(read(at + ld(), count) + lost, at + ld(), count);
    }
  }
  void finish(int64_t j, int64_t parts) const {
    const int64_t count = std::min(LANES, n - j);
    Vec value(0.0f), lost(0.0f);
    for (int64_t p = 0; p < parts; p++) {
      value = value + read(part(p) + j, count);
      lost = lost + read(part(p) + ld() + j, count);
    }
    lost = Vec::blendv(lost, Vec(0.0f), lost != lost);  // of infinite sums
    write(value + lost, to + j, count);
  }
};

// What all threads read, and how the work is cut.
struct Task {
  const Element* x;
  int64_t ldx;
  const Element* dy;
  int64_t dy_row, dy_column;     // strides, of which any may be 0
  const Element *preact_gate, *preact_up;  // [rows, hidden], or nullptr: to be computed
  Layer gate, up;                // hidden features from x, where pre-activations are computed
  Layer from_down;               // hidden features from dy
  Layer from_gate, from_up;      // features of x from hidden ones
  Operands operands;
  Product product;
  Pack pack;
  WeightProduct weight_product;
  int64_t rows, in, hidden, out;
  int64_t part_rows, block_rows, chunk, parts, shares;
  bool groups;                   // whether a part consists of groups of blocks
  bool needs_preact;             // any gradient but those of the last layer
  Element* dx;                   // [rows, in], or nullptr
  bool passes_gate, passes_up;   // whether autograd finds a way to the projection
  float* dx_sums;                // [shares, rows, padded in], where there are shares
  Sum<Element> d_gate, d_up, d_down;
  RowSum<Element> d_bias_gate, d_bias_up, d_bias_down;
  RowSum<float> d_operands[WANTED + 1];  // of scalars and vectors, whose terms `differentiated` gives

  bool reads_x() const { return preact_up == nullptr || d_gate.to != nullptr || d_up.to != nullptr; }
  bool goes_through_hidden() const { return needs_preact || d_down.to != nullptr; }
};

// Memory of one thread, kept between calls: it is as large as its cache.
struct Own {
  std::vector<float> floats;
  float *x, *dx;      // [block_rows, in]
  float* dy;          // [block_rows, out]
  float* hidden[3 + GATED + WANTED];  // [block_rows, chunk]: see below
  int64_t ld_in, ld_out, ld_hidden;

  float* up() const { return hidden[0]; }      // a pre-activation, then its gradient
  float* d_hidden() const { return hidden[1]; }
  float* postact() const { return hidden[2]; }
  float* gate() const { return hidden[2 + GATED]; }  // as up
  float* of_operand(int i) const { return hidden[3 + GATED + i]; }

  void fit(const Task& task) {
    ld_in = padded(task.in) + STAGGER;
    ld_out = padded(task.out) + STAGGER;
    ld_hidden = padded(task.chunk) + STAGGER;
    constexpr int COUNT = 3 + GATED + WANTED;
    const size_t needed = task.block_rows * (2 * ld_in + ld_out + COUNT * ld_hidden) + 16;
    if (floats.size() < needed) floats.resize(needed);
    float* next = aligned(floats.data());
    const auto take = [&](int64_t ld) { return std::exchange(next, next + task.block_rows * ld); };
    x = take(ld_in);
    dx = take(ld_in);
    dy = take(ld_out);
    for (float*& each : hidden) each = take(ld_hidden);
  }
};

// Rows in float32.
void read_rows(const Element* from, int64_t stride_row, int64_t stride_column, int64_t rows,
               int64_t width, float* to, int64_t ld) {
  for (int64_t r = 0; r < rows; r++) {
    const Element* row = from + r * stride_row;
    if (stride_column == 1) {
      for (int64_t j = 0; j < width; j += LANES) {
        const int64_t count = std::min(LANES, width - j);
        write(read(row + j, count), to + r * ld + j, count);
      }
    } else {
      for (int64_t j = 0; j < width; j++) to[r * ld + j] = static_cast<float>(row[j * stride_column]);
    }
  }
}

// Activation and gradients of what it is of, from `column` on.
void differentiate(const Task& task, Own& own, int64_t row, int64_t rows, int64_t column,
                   int64_t width) {
  for (int64_t r = 0; r < rows; r++) {
    const int64_t own_row = r * own.ld_hidden, saved_row = (row + r) * task.hidden + column;
    for (int64_t j = 0; j < width; j += LANES) {
      const int64_t at = own_row + j, count = std::min(LANES, width - j);
      const bool saved = task.preact_up != nullptr;
      const Vec u = saved ? read(task.preact_up + saved_row + j, count) : Vec::loadu(own.up() + at);
      Vec g = u;
      if constexpr (GATED) {
        g = saved ? read(task.preact_gate + saved_row + j, count) : Vec::loadu(own.gate() + at);
      }
      const Vec d = Vec::loadu(own.d_hidden() + at);
      Vec results[3 + WANTED];  // of elementwise operands not all are written to
      differentiated(g, u, d, row + r, column + j, count, task.operands, results);
      results[0].store(own.postact() + at);
      results[1].store(own.up() + at);
      if constexpr (GATED) results[2].store(own.gate() + at);
      for (int i = 0; i < WANTED; i++) results[3 + i].store(own.of_operand(i) + at);
    }
  }
}

// A block of rows of a part, and a share of hidden features.
void block(const Task& task, Own& own, int64_t p, int64_t s, int64_t row, int64_t rows, int64_t h0,
           int64_t h1, bool first) {
  if (task.reads_x()) {
    read_rows(task.x + row * task.ldx, task.ldx, 1, rows, task.in, own.x, own.ld_in);
  }
  read_rows(task.dy + row * task.dy_row, task.dy_row, task.dy_column, rows, task.out, own.dy,
            own.ld_out);
  if (s == 0) task.d_bias_down.add(p, 0, own.dy, own.ld_out, rows, task.out);
  if (!task.goes_through_hidden()) return;
  Start start = Start::ZERO;  // of the sums that dx is
  for (int64_t h = h0; h < h1; h += task.chunk) {
    const int64_t end = std::min(h + task.chunk, h1), width = end - h, ld = own.ld_hidden;
    const auto from_x = [&](const Layer& layer, float* to) {
      task.product(own.x, own.ld_in, rows, layer, h, end, 0, task.in, Start::BIAS, to, ld);
    };
    if (task.preact_up == nullptr) {
      from_x(task.up, own.up());
      if constexpr (GATED) from_x(task.gate, own.gate());
    }
    if (task.needs_preact) {
      task.product(own.dy, own.ld_out, rows, task.from_down, h, end, 0, task.out, Start::ZERO,
                   own.d_hidden(), ld);
    }
    differentiate(task, own, row, rows, h, width);
    if (task.d_down.to != nullptr) {
      task.weight_product(own.dy, own.ld_out, own.postact(), ld, rows, task.out, width, !first,
                          task.d_down.part(p) + h, task.d_down.ld());
    }
    const auto of_first_layer = [&](const auto& weight, const auto& bias, const float* d) {
      if (weight.to != nullptr) {
        task.weight_product(d, ld, own.x, own.ld_in, rows, width, task.in, !first,
                            weight.part(p) + h * weight.ld(), weight.ld());
      }
      bias.add(p, h, d, ld, rows, width);
    };
    of_first_layer(task.d_up, task.d_bias_up, own.up());
    if constexpr (GATED) of_first_layer(task.d_gate, task.d_bias_gate, own.gate());
    for (int i = 0; i < WANTED; i++) task.d_operands[i].add(p, h, own.of_operand(i), ld, rows, width);
    if (task.dx == nullptr) continue;
    const auto to_x = [&](const Layer& layer, const float* d) {
      task.product(d, ld, rows, layer, 0, task.in, h, end, start, own.dx, own.ld_in);
      start = Start::ADD;
    };
    if (task.passes_up) to_x(task.from_up, own.up());
    if (GATED && task.passes_gate) to_x(task.from_gate, own.gate());
  }
  if (task.dx == nullptr) return;
  const int64_t ld_sums = padded(task.in);
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t j = 0; j < task.in; j += LANES) {
      const int64_t count = std::min(LANES, task.in - j);
      const Vec value = start == Start::ADD ? Vec::loadu(own.dx + r * own.ld_in + j) : Vec(0.0f);
      if (task.shares == 1) {
        write(value, task.dx + (row + r) * task.in + j, count);
      } else {
        value.store(task.dx_sums + (s * task.rows + row + r) * ld_sums + j);
      }
    }
  }
}

// All blocks of a part of the rows, for a share of hidden features.
void part(const Task& task, Own& own, int64_t p, int64_t s) {
  // Shares begin where panels do.
  const int64_t share = padded((task.hidden + task.shares - 1) / task.shares);
  const int64_t h0 = std::min(s * share, task.hidden), h1 = std::min(h0 + share, task.hidden);
  if (s == 0) task.d_bias_down.clear(p, 0, task.out);
  task.d_bias_up.clear(p, h0, h1);
  task.d_bias_gate.clear(p, h0, h1);
  for (int i = 0; i < WANTED; i++) task.d_operands[i].clear(p, h0, h1);
  const int64_t begin = p * task.part_rows, end = std::min(begin + task.part_rows, task.rows);
  const int64_t group = task.groups ? GROUP * task.block_rows : end - begin;
  for (int64_t start = begin; start < end; start += group) {
    const int64_t stop = std::min(start + group, end);
    for (int64_t row = start; row < stop; row += task.block_rows) {
      block(task, own, p, s, row, std::min(task.block_rows, stop - row), h0, h1, row == start);
    }
    if (!task.groups) return;
    const bool first = start == begin;
    task.d_down.add_group(p, 0, task.out, h0, h1, first);
    task.d_up.add_group(p, h0, h1, 0, task.in, first);
    task.d_gate.add_group(p, h0, h1, 0, task.in, first);
  }
}

void run(const Task& task, int64_t threads) {
  const Layer* layers[] = {&task.gate, &task.up, &task.from_down, &task.from_gate, &task.from_up};
#pragma omp parallel num_threads(threads)
  {
    static thread_local Own own;
    own.fit(task);
    for (const Layer* layer : layers) {
      if (layer->packed == nullptr) continue;
#pragma omp for schedule(static) nowait
      for (int64_t index = 0; index < layer->panels(); index++) task.pack(*layer, index);
    }
#pragma omp barrier
#pragma omp for schedule(static)
    for (int64_t t = 0; t < task.parts * task.shares; t++) {
      part(task, own, t / task.shares, t % task.shares);
    }
    const auto finish = [&](const auto& sum) {
      if (sum.to == nullptr) return;
#pragma omp for schedule(static) nowait
      for (int64_t i = 0; i < sum.m; i++) finish_row(sum, i, task.parts);
    };
    finish(task.d_gate);
    finish(task.d_up);
    finish(task.d_down);
    const auto finish_sums = [&](const auto& sum) {
      if (sum.to == nullptr) return;
#pragma omp for schedule(static) nowait
      for (int64_t j = 0; j < sum.n; j += LANES) sum.finish(j, task.parts);
    };
    finish_sums(task.d_bias_gate);
    finish_sums(task.d_bias_up);
    finish_sums(task.d_bias_down);
    for (int i = 0; i < WANTED; i++) finish_sums(task.d_operands[i]);
    if (task.dx != nullptr && task.shares > 1) {
      const int64_t ld_sums = padded(task.in);
#pragma omp for schedule(static) nowait
      for (int64_t row = 0; row < task.rows; row++) {
        for (int64_t j = 0; j < task.in; j += LANES) {
          Vec value(0.0f);
          for (int64_t s = 0; s < task.shares; s++) {
            value = value + Vec::loadu(task.dx_sums + (s * task.rows + row) * ld_sums + j);
          }
          write(value, task.dx + row * task.in + j, std::min(LANES, task.in - j));
        }
      }
    }
  }
}

}  // namespace
