// What the C++ of activations calls: masks as numbers, dropout.

namespace {

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
