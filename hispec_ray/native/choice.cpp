// The choice rule on a CPU: the same bits as hispec_ray.speculation.choice, which says what it computes and why.
// Compiled without contraction: every operation is one IEEE rounding, as it is in torch.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "team.h"

constexpr int GROUP = 64;  // counters at a time, four ids each

static inline float log_positive(float x) {  // Cephes' logf for normal x > 0
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  int32_t exponent = (bits >> 23) - 126;
  bits = (bits & 0x007fffff) | 0x3f000000;
  float m;
  std::memcpy(&m, &bits, 4);  // in [0.5, 1)
  bool low = m < 0.707106781186547524f;
  float e = float(exponent - (low ? 1 : 0));
  m = (m - 1.0f) + (low ? m : 0.0f);
  float z = m * m;
  float p = 7.0376836292e-2f;
  p = p * m + -1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m + -1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m + -1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m + -2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  p = p * m * z;
  p = p + e * -2.12194440e-4f;
  p = p + z * -0.5f;
  return (m + p) + e * 0.693359375f;
}

static void gumbel_group(uint64_t seed, uint64_t position, uint32_t first, float* out) {  // ids 4 * first ...
  uint32_t a[GROUP], b[GROUP], c[GROUP], d[GROUP];
  for (int i = 0; i < GROUP; ++i) a[i] = first + uint32_t(i), b[i] = uint32_t(position), c[i] = uint32_t(position >> 32), d[i] = 0;
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
    for (int i = 0; i < GROUP; ++i) {
      uint64_t p = uint64_t(0xD2511F53u) * a[i], q = uint64_t(0xCD9E8D57u) * c[i];
      a[i] = uint32_t(q >> 32) ^ b[i] ^ k0;
      b[i] = uint32_t(q);
      c[i] = uint32_t(p >> 32) ^ d[i] ^ k1;
      d[i] = uint32_t(p);
    }
  const uint32_t* parts[4] = {a, b, c, d};
  for (int part = 0; part < 4; ++part) {
    float noise[GROUP];
    for (int i = 0; i < GROUP; ++i) {
      float u = (float(int32_t(parts[part][i] >> 9)) + 0.5f) * 1.1920928955078125e-07f;
      noise[i] = -log_positive(-log_positive(u));
    }
    for (int i = 0; i < GROUP; ++i) out[4 * i + part] = noise[i];
  }
}

// The largest of n > 0 numbers, lane by lane so that the loop is vectorised.
static inline float largest(const float* x, int64_t n) {
  constexpr int W = 32;
  float lanes[W];
  for (int j = 0; j < W; ++j) lanes[j] = -INFINITY;
  int64_t i = 0;
  for (; i + W <= n; i += W)
    for (int j = 0; j < W; ++j) lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
  for (; i < n; ++i) lanes[0] = x[i] > lanes[0] ? x[i] : lanes[0];
  float top = lanes[0];
  for (int j = 1; j < W; ++j) top = lanes[j] > top ? lanes[j] : top;
  return top;
}

// The best of ids [from, to): the largest logit / temperature + noise, the lowest id among equals.
static void best_of(const float* logits, float temperature, uint64_t seed, uint64_t position, int64_t from, int64_t to, float& value, int64_t& id) {
  value = -INFINITY, id = from;
  if (temperature == 0.0f) {
    float top = largest(logits + from, to - from);
    for (int64_t v = from; v < to; ++v)
      if (logits[v] == top) { value = top, id = v; return; }
    return;
  }
  for (int64_t start = from; start < to; start += 4 * GROUP) {
    float noise[4 * GROUP];
    gumbel_group(seed, position, uint32_t(start / 4), noise);
    int64_t stop = std::min<int64_t>(to, start + 4 * GROUP);
    float score[4 * GROUP];
    for (int64_t v = start; v < stop; ++v) score[v - start] = logits[v] / temperature + noise[v - start];
    float top = largest(score, stop - start);
    if (top > value)
      for (int64_t v = start; v < stop; ++v)
        if (score[v - start] == top) { value = top, id = v; break; }
  }
}

extern "C" {
// gumbel noise of ids 0 .. count-1; count is a multiple of 256.
void hispec_gumbel(int64_t seed, int64_t position, int64_t count, float* out) {
  for (int64_t v = 0; v < count; v += 4 * GROUP) gumbel_group(uint64_t(seed), uint64_t(position), uint32_t(v / 4), out + v);
}

// chosen[r] for logits [rows, vocabulary], row by row with its own temperature, seed and position.
void hispec_choose(const float* logits, int64_t rows, int64_t vocabulary, const float* temperatures, const int64_t* seeds, const int64_t* positions, int64_t threads, int64_t* chosen) {
  const int64_t unit = 4 * GROUP, units = (vocabulary + unit - 1) / unit, parts = std::min(threads, units);
  std::vector<float> values(size_t(rows * parts));
  std::vector<int64_t> ids(size_t(rows * parts));
  Team::of(int(threads)).run([&](int thread) {
    for (int64_t i = thread; i < rows * parts; i += threads) {
      int64_t r = i / parts, p = i % parts;
      best_of(logits + r * vocabulary, temperatures[r], uint64_t(seeds[r]), uint64_t(positions[r]), units * p / parts * unit,
              std::min(vocabulary, units * (p + 1) / parts * unit), values[size_t(i)], ids[size_t(i)]);
    }
  });
  for (int64_t r = 0; r < rows; ++r) {
    int64_t best = r * parts;
    for (int64_t i = best; i < (r + 1) * parts; ++i)
      if (values[size_t(i)] > values[size_t(best)]) best = i;
    chosen[r] = ids[size_t(best)];
  }
}
}
