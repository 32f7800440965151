// What the C++ of activations calls: exponentials, masks as numbers, dropout.
//
// The functions of the vector library that ATen calls take 1 to 3 ns an element with AVX2. These take
// less, because they are inlined; docs/kernel-notes.md has their times and errors.

namespace {

// 2^n e^r is e^x, for a whole number n and |r| <= log(2) / 2.
struct Reduced {
  Vec n, r;
};

constexpr float ROUNDS = 12582912.0f;  // 1.5 · 2^23: what is added to it becomes a whole number

inline Reduced reduced(Vec x) {
  const Vec n = at::vec::fmadd(x, Vec(1.44269504f), Vec(ROUNDS)) - Vec(ROUNDS);
  // log(2) in two parts, the first of which has few digits: its product by n is exact
  const Vec r = at::vec::fmadd(n, Vec(-0.693145752f), x);
  return {n, at::vec::fmadd(n, Vec(-1.42860677e-6f), r)};
}

// 2^n for whole numbers n from -126 to 127.
inline Vec power_of_two(Vec n) {
  // Vectors of g++ and clang: shifts of ATen's are not the same on all instruction sets.
  typedef int32_t Integers __attribute__((vector_size(sizeof(Vec))));
  Vec value = n + Vec(ROUNDS + 127.0f);
  Integers bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits = bits << 23;
  std::memcpy(&value, &bits, sizeof(bits));
  return value;
}

// e^r - 1, relative to which the error is small. Minimax polynomials here were fitted by reweighted
// least squares.
inline Vec expm1_of_small(Vec r) {
  Vec p = at::vec::fmadd(r, Vec(0.0013814218f), Vec(0.0083688982f));
  p = at::vec::fmadd(p, r, Vec(0.0416684076f));
  p = at::vec::fmadd(p, r, Vec(0.1666651964f));
  p = at::vec::fmadd(p, r, Vec(0.4999999404f));
  return at::vec::fmadd(p, r * r, r);
}

// e^x. The scale is two factors, since 2^n may be beyond the numbers that have an exponent.
inline Vec exponential(Vec x) {
  const Reduced parts = reduced(at::vec::clamp(x, Vec(-105.0f), Vec(89.0f)));
  const Vec half = at::vec::fmadd(parts.n, Vec(0.5f), Vec(ROUNDS)) - Vec(ROUNDS);
  const Vec scaled = (expm1_of_small(parts.r) + Vec(1.0f)) * power_of_two(half);
  return scaled * power_of_two(parts.n - half);
}

// e^x, but never less than e^-87: sigmoid(-x) = 1 / (1 + e^x) needs no more, and this is faster.
inline Vec exponential_for_sigmoid(Vec x) {
  const Reduced parts = reduced(at::vec::clamp(x, Vec(-87.0f), Vec(89.0f)));
  const Vec scale = power_of_two(parts.n - Vec(1.0f));  // beyond 2^127 there is only infinity
  return (expm1_of_small(parts.r) + Vec(1.0f)) * scale * Vec(2.0f);
}

// A magnitude with the sign of another number.
inline Vec with_sign_of(Vec sign, Vec magnitude) {
  return (sign & Vec(-0.0f)) | magnitude;
}

// tanh(x), from e^-2|x| - 1, which has no cancellation near 0.
inline Vec hyperbolic_tangent(Vec x) {
  const Reduced parts = reduced(at::vec::clamp_min(x.abs() * Vec(-2.0f), Vec(-30.0f)));
  const Vec scale = power_of_two(parts.n);
  const Vec below_one = at::vec::fmadd(expm1_of_small(parts.r), scale, scale - Vec(1.0f)).neg();
  return with_sign_of(x, (below_one / (Vec(2.0f) - below_one)).abs());
}

// erf(x): x plus its series near 0, and 1 - e^p(|x|) beyond.
inline Vec error_function(Vec x) {
  const Vec t = at::vec::clamp_max(x.abs(), Vec(4.0f)), square = x * x;
  Vec near = at::vec::fmadd(square, Vec(-0.0005862089f), Vec(0.0049675079f));
  near = at::vec::fmadd(near, square, Vec(-0.0267488658f));
  near = at::vec::fmadd(near, square, Vec(0.1128132045f));
  near = at::vec::fmadd(near, square, Vec(-0.3761244714f));
  near = at::vec::fmadd(near, square, Vec(0.1283791363f));
  near = at::vec::fmadd(near, x, x);
  Vec far = at::vec::fmadd(t, Vec(-1.04346254e-05f), Vec(0.0003148726f));
  far = at::vec::fmadd(far, t, Vec(-0.0036103979f));
  far = at::vec::fmadd(far, t, Vec(0.0236946773f));
  far = at::vec::fmadd(far, t, Vec(-0.1061591730f));
  far = at::vec::fmadd(far, t, Vec(-0.6351979375f));
  far = at::vec::fmadd(far, t, Vec(-1.1286370754f)) * t;
  const Reduced parts = reduced(far);
  const Vec scale = power_of_two(parts.n);
  far = (Vec(1.0f) - scale) - expm1_of_small(parts.r) * scale;
  return Vec::blendv(with_sign_of(x, far), near, t < Vec(0.925f));
}

// 1 where a mask is set, else 0.
inline Vec as_number(Vec mask) { return Vec::blendv(Vec(0.0f), Vec(1.0f), mask); }

// What a dropout multiplies LANES elements of a row by, with the random bits of `philox`: a counter
// gives those of four columns.
inline Vec kept(int64_t seed, int64_t row, int64_t column, uint32_t limit, float factor) {
  alignas(64) float values[LANES + 4];
  const int64_t skipped = column % 4;
  for (int64_t i = 0; i * 4 < LANES + skipped; i++) {
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    uint32_t c0 = static_cast<uint32_t>(column / 4 + i), c1 = static_cast<uint32_t>(row);
    uint32_t c2 = 0, c3 = 0;
    for (int round = 0; round < 10; round++) {
      const uint64_t a = uint64_t{0xD2511F53} * c0, b = uint64_t{0xCD9E8D57} * c2;
      c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
      c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
      c1 = static_cast<uint32_t>(b);
      c3 = static_cast<uint32_t>(a);
      k0 += 0x9E3779B9;
      k1 += 0xBB67AE85;
    }
    const uint32_t words[] = {c0, c1, c2, c3};
    for (int64_t j = 0; j < 4; j++) values[i * 4 + j] = words[j] >= limit ? factor : 0.0f;
  }
  return Vec::loadu(values + skipped);
}

}  // namespace
