// The choice rule on a CPU: the same bits as hispec_ray.speculation.choice, which says what it computes and why.
// Compiled without contraction: every operation is one IEEE rounding, as it is in torch.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "model.h"
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

// Noise of the ids 4 * counters[i] + j, at out[4 * i + j], for GROUP counters.
static void gumbel_group(uint64_t seed, uint64_t position, const uint32_t* counters, float* out) {
  uint32_t a[GROUP], b[GROUP], c[GROUP], d[GROUP];
  for (int i = 0; i < GROUP; ++i) a[i] = counters[i], b[i] = uint32_t(position), c[i] = uint32_t(position >> 32), d[i] = 0;
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

namespace {
struct Best { float value = -INFINITY, second_value = -INFINITY; int64_t id = -1, second = -1; };
}  // namespace

// Takes up a score that comes after all that were taken up before, in order of id.
static inline void take(Best& best, float score, int64_t id) {
  if (score > best.value) {
    best.second_value = best.value, best.second = best.id;
    best.value = score, best.id = id;
  } else if (score > best.second_value || best.second < 0) {
    if (best.id < 0) best.id = id;  // minus infinity, and nothing before
    else best.second_value = score, best.second = id;
  }
}

// The best and the second of columns [from, to): the largest logit / temperature + noise, the lowest id among equals.
static Best best_of(const float* logits, const int64_t* ids, float temperature, uint64_t seed, uint64_t position, int64_t from, int64_t to) {
  Best best;
  float score[4 * GROUP], noise[4 * GROUP];
  uint32_t counters[GROUP];
  int32_t place[4 * GROUP];  // where in `noise` a column's is
  for (int64_t start = from, stop; start < to; start = stop) {
    stop = std::min<int64_t>(to, start + 4 * GROUP);
    const float* scores = logits + start;
    if (temperature != 0.0f) {
      if (!ids) {
        for (int i = 0; i < GROUP; ++i) counters[i] = uint32_t(start / 4 + i);
      } else {  // as many columns as share GROUP counters
        int used = -1;
        int64_t v = start;
        for (; v < stop; ++v) {
          uint32_t counter = uint32_t(ids[v] / 4);
          if (used < 0 || counters[used] != counter) {
            if (used + 1 == GROUP) break;
            counters[++used] = counter;
          }
          place[v - start] = int32_t(4 * used + ids[v] % 4);
        }
        stop = v;
        for (int i = used + 1; i < GROUP; ++i) counters[i] = 0;
      }
      gumbel_group(seed, position, counters, noise);
      if (ids)
        for (int64_t v = start; v < stop; ++v) score[v - start] = logits[v] / temperature + noise[place[v - start]];
      else
        for (int64_t v = start; v < stop; ++v) score[v - start] = logits[v] / temperature + noise[v - start];
      scores = score;
    }
    if (best.second >= 0 && !(largest(scores, stop - start) > best.second_value)) continue;
    for (int64_t v = start; v < stop; ++v) take(best, scores[v - start] != scores[v - start] ? -INFINITY : scores[v - start], v);
  }
  return best;
}

extern "C" {
// gumbel noise of ids 0 .. count-1; count is a multiple of 256.
void hispec_gumbel(int64_t seed, int64_t position, int64_t count, float* out) {
  uint32_t counters[GROUP];
  for (int64_t v = 0; v < count; v += 4 * GROUP) {
    for (int i = 0; i < GROUP; ++i) counters[i] = uint32_t(v / 4 + i);
    gumbel_group(uint64_t(seed), uint64_t(position), counters, out + v);
  }
}

// The choice of each row of logits [rows, columns]; column v is id ids[v], or v where ids is null.
void hispec_choose(const float* logits, int64_t rows, int64_t columns, const int64_t* ids, const Law* law, int64_t threads, const Chosen* chosen) {
  const int64_t unit = 4 * GROUP, units = (columns + unit - 1) / unit, parts = std::min(threads, units);
  std::vector<Best> found(static_cast<size_t>(rows * parts));
  Team::of(int(threads)).run([&](int thread) {
    for (int64_t i = thread; i < rows * parts; i += threads) {
      int64_t r = i / parts, p = i % parts;
      found[size_t(i)] = best_of(logits + r * columns, ids, law->temperatures[r], uint64_t(law->seeds[r]), uint64_t(law->positions[r]),
                                 units * p / parts * unit, std::min(columns, units * (p + 1) / parts * unit));
    }
  });
  for (int64_t r = 0; r < rows; ++r) {
    Best best;
    for (int64_t i = r * parts; i < (r + 1) * parts; ++i) {
      const Best& part = found[size_t(i)];
      take(best, part.value, part.id);
      if (part.second >= 0) take(best, part.second_value, part.second);
    }
    chosen->ids[r] = ids ? ids[best.id] : best.id;
    if (!chosen->seconds) continue;
    chosen->seconds[r] = best.second < 0 ? chosen->ids[r] : ids ? ids[best.second] : best.second;
    chosen->gaps[r] = best.second < 0 ? INFINITY : best.value - best.second_value;
    if (chosen->scores) chosen->scores[r] = best.value, chosen->second_scores[r] = best.second_value;
  }
}
}
