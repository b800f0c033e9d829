// The decoder's layers on a CPU. Every number of a row is computed from that row alone, in an order that
// depends on nothing else: not on how many rows there are, which rows stand beside it, how many threads run,
// or where its blocks lie. So a row is the same to the bit whenever and however it is computed.
//
// One inner loop serves products, attention scores and attention sums: `accumulate`, dot products of up to ROWS
// rows of floats with the columns of a panel, each summed in order of k in one fp32 accumulator. Weights,
// keys and values are stored as panels: columns side by side, and for bf16 two steps of k in one 32-bit word,
// so that a shift and a mask turn one load into two vectors. Where the processor multiplies pairs of bf16 itself, products
// with bf16 weights do so (`accumulate_pairs`): their inputs are rounded to bf16 first, and an instruction does four times the work.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "model.h"
#include "team.h"

#ifdef __AVX512F__
constexpr int LANES = 16, ROWS = 12;
#else
constexpr int LANES = 8, ROWS = 6;
#endif
constexpr int PANEL = 2 * LANES;         // columns of a weight panel
constexpr int CHUNK = 16;                // columns of a panel of values; head sizes are padded to it
constexpr float NETWORK_EPS = 1.1920929e-7f;  // of an exit network's norm: what torch's rms_norm takes by default
constexpr int64_t TILE_FLOATS = 48 << 10;  // input rows kept in the second-level cache while panels stream by

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t bf16;

#define UNROLL _Pragma("GCC unroll 16")

static inline vec load(const float* p) { vec v; std::memcpy(&v, p, sizeof v); return v; }
static inline void store(float* p, vec v) { std::memcpy(p, &v, sizeof v); }
static inline vec splat(float a) { return a - vec{}; }  // x - 0 is x, sign of zero included: a bare broadcast
static inline float widen(float x) { return x; }
static inline float widen(bf16 x) { uint32_t u = uint32_t(x) << 16; float f; std::memcpy(&f, &u, 4); return f; }
static inline void narrow(float x, float& out) { out = x; }
static inline void narrow(float x, bf16& out) {  // round to nearest, ties to even; NaN stays NaN
  uint32_t u;
  std::memcpy(&u, &x, 4);
  out = (u & 0x7fffffffu) > 0x7f800000u ? bf16((u >> 16) | 64) : bf16((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

// Where column c at step k lies in a panel of `width` columns.
static inline int64_t panel_index(const float*, int64_t k, int64_t c, int64_t width) { return k * width + c; }
static inline int64_t panel_index(const bf16*, int64_t k, int64_t c, int64_t width) { return (k >> 1) * 2 * width + c * 2 + (k & 1); }

static inline vec even(const float* w, int64_t, int j) { return load(w + j * LANES); }
static inline vec odd(const float* w, int64_t width, int j) { return load(w + width + j * LANES); }
static inline uvec words(const bf16* w, int j) { uvec u; std::memcpy(&u, w + j * 2 * LANES, sizeof u); return u; }
static inline vec even(const bf16* w, int64_t, int j) { return (vec)(words(w, j) << 16); }
static inline vec odd(const bf16* w, int64_t, int j) { return (vec)(words(w, j) & 0xffff0000u); }

// What to fetch while a panel is read: `step` bytes on for every two steps of k.
struct Ahead { const char* at; int64_t step; };

// acc[r][:] += sum over k < depth of x[r][k] * w[k][:], in order of k.
template <int R, int V, class W>
static inline void accumulate(vec (&acc)[R][V], const float* __restrict x, int64_t ldx, const W* __restrict w, int64_t depth, Ahead ahead) {
  constexpr int64_t width = V * LANES;
  int64_t k = 0;
#pragma GCC unroll 1
  for (; k + 1 < depth; k += 2, w += 2 * width, ahead.at += ahead.step) {
    __builtin_prefetch(ahead.at);
    vec b[V];
    UNROLL for (int j = 0; j < V; ++j) b[j] = even(w, width, j);
    UNROLL for (int r = 0; r < R; ++r) {
      vec a = splat(x[r * ldx + k]);
      UNROLL for (int j = 0; j < V; ++j) acc[r][j] += a * b[j];
    }
    UNROLL for (int j = 0; j < V; ++j) b[j] = odd(w, width, j);
    UNROLL for (int r = 0; r < R; ++r) {
      vec a = splat(x[r * ldx + k + 1]);
      UNROLL for (int j = 0; j < V; ++j) acc[r][j] += a * b[j];
    }
  }
  if (k < depth) {
    UNROLL for (int r = 0; r < R; ++r) {
      vec a = splat(x[r * ldx + k]);
      UNROLL for (int j = 0; j < V; ++j) acc[r][j] += a * even(w, width, j);
    }
  }
}

// out[r][:] = x[r] . panel for rows r < rows <= R; V vectors of columns, `out` rows are ldo floats apart.
template <int R, int V, class W>
static void panel_rows(int rows, const float* x, int64_t ldx, const W* w, int64_t depth, float* out, int64_t ldo, Ahead ahead) {
  if constexpr (R > 0) {
    if (rows < R) return panel_rows<R - 1, V>(rows, x, ldx, w, depth, out, ldo, ahead);
    vec acc[R][V] = {};
    accumulate<R, V>(acc, x, ldx, w, depth, ahead);
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int j = 0; j < V; ++j) store(out + r * ldo + j * LANES, acc[r][j]);
  }
}

#ifdef __AVX512BF16__
constexpr int64_t PAIRS = 16;  // pairs of bf16 of a row that lie side by side, before those of the next row: one address serves all rows

// acc[p][r][:] += sum over k < pairs of x[r][k] . panel p's [k][:], pairs of bf16, in order of k. x: [pairs / PAIRS][R][PAIRS].
// Panels lie `next` bytes apart.
template <int P, int R>
static inline void accumulate_pairs(vec (&acc)[P][R][2], const uint32_t* __restrict x, const char* __restrict w, int64_t next, int64_t pairs, Ahead ahead) {
  for (int64_t first = 0; first < pairs; first += PAIRS, x += R * PAIRS) {
    const int64_t steps = std::min(PAIRS, pairs - first);
#pragma GCC unroll 1
    for (int64_t k = 0; k < steps; ++k, w += 4 * PANEL, ahead.at += ahead.step)
      UNROLL for (int p = 0; p < P; ++p) {
        __builtin_prefetch(ahead.at + p * next);
        const __m512bh low = (__m512bh)_mm512_loadu_si512(w + p * next), high = (__m512bh)_mm512_loadu_si512(w + p * next + 64);
        UNROLL for (int r = 0; r < R; ++r) {
          const __m512bh a = (__m512bh)_mm512_set1_epi32(int(x[r * PAIRS + k]));
          acc[p][r][0] = (vec)_mm512_dpbf16_ps((__m512)acc[p][r][0], a, low);
          acc[p][r][1] = (vec)_mm512_dpbf16_ps((__m512)acc[p][r][1], a, high);
        }
      }
  }
}
#endif

template <class W>
static inline Ahead soon(const W* w) { return {reinterpret_cast<const char*>(w) + 2048, 64}; }

static inline int64_t next_rows(int64_t left) {  // with ROWS 6, 8 rows run as 4 and 4, not 6 and 2
  return left > 2 * ROWS ? ROWS : left > ROWS ? (left + 1) / 2 : left;
}

template <int V, class W>
static void panel_product(int64_t rows, const float* x, int64_t ldx, const W* w, int64_t depth, float* out, int64_t ldo) {
  for (int64_t r = 0, now; r < rows; r += now) {
    now = next_rows(rows - r);
    panel_rows<ROWS, V>(int(now), x + r * ldx, ldx, w, depth, out + r * ldo, ldo, soon(w));
  }
}

// exp on a vector: 2^n * e^r with a degree-6 polynomial (Cephes' expf); results under 1e-38 are 0.
static inline vec exp_vec(vec x) {
  const float low = -87.0f, high = 88.0f;
  ivec under = x < low;
  x = x < low ? splat(low) : x;
  x = x > high ? splat(high) : x;
  vec t = x * 1.44269504088896341f + 12582912.0f;  // round to nearest: 1.5 * 2^23
  ivec n = (ivec)t - 0x4b400000;
  vec fn = t - 12582912.0f;
  vec r = x - fn * 0.693359375f;
  r = r - fn * -2.12194440e-4f;
  vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  p = p * (vec)((n + 127) << 23);
  return (vec)((ivec)p & ~under);
}

static float lane_sum(const float* x, const float* y, int64_t n) {  // sum of x * y: lanes first, then lanes in order, then the rest
  vec acc = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) acc += load(x + i) * load(y + i);
  float sum = 0;
  for (int j = 0; j < LANES; ++j) sum += acc[j];
  for (; i < n; ++i) sum += x[i] * y[i];
  return sum;
}

static void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
  float inverse = 1.0f / std::sqrt(lane_sum(x, x, n) / float(n) + eps);
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * inverse * weight[i];
}

static void norm_row(const Model& m, const Norm& norm, const float* x, float* out) {
  if (!m.layer_norm) return rms_norm(x, norm.weight, m.norm_eps, m.width, out);
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < m.width; ++i) sum += x[i];
  float mean = float(sum / double(m.width));
  for (int64_t i = 0; i < m.width; ++i) squares += double(x[i] - mean) * double(x[i] - mean);
  float inverse = float(1.0 / std::sqrt(squares / double(m.width) + double(m.norm_eps)));
  for (int64_t i = 0; i < m.width; ++i) out[i] = (x[i] - mean) * inverse * norm.weight[i] + norm.bias[i];
}

static inline void share(int64_t count, int thread, int threads, int64_t& from, int64_t& to) {
  from = count * thread / threads, to = count * (thread + 1) / threads;
}

// Where a product goes: y = x W (+ bias), or y += x W + bias.
struct Target { const Matrix& matrix; float* y; int64_t ldy; bool add; };

// Whether a panel's columns go as they are: all of them, without a bias.
static inline bool goes_whole(const Matrix& m, int64_t panel) { return (panel + 1) * PANEL <= m.out && !m.bias; }

// Puts a row of a panel's products where it belongs.
static inline void put_whole(const Target& t, int64_t panel, int64_t row, vec low, vec high) {
  float* out = t.y + row * t.ldy + panel * PANEL;
  if (t.add) low += load(out), high += load(out + LANES);
  store(out, low), store(out + LANES, high);
}

static __attribute__((noinline)) void put_part(const Target& t, int64_t panel, int64_t row, vec low, vec high) {
  const Matrix& m = t.matrix;
  const int64_t column = panel * PANEL, columns = std::min<int64_t>(PANEL, m.out - column);
  float* out = t.y + row * t.ldy + column;
  alignas(64) float in[PANEL];
  store(in, low), store(in + LANES, high);
  if (m.bias) for (int64_t c = 0; c < columns; ++c) in[c] += m.bias[column + c];
  if (t.add) for (int64_t c = 0; c < columns; ++c) out[c] += in[c];
  else std::memcpy(out, in, size_t(columns) * 4);
}

// What to fetch while rows in so many groups pass a panel: what comes soon, or where the panel stays, a part of the next one for each group.
static inline Ahead while_passing(const char* panel, int64_t bytes, int64_t depth, int64_t groups) {
  return {panel + (groups == 1 ? 2048 : bytes), 2 * bytes / depth / groups};
}

// One thread's columns of a product. from, to: whole panels.
template <class W>
static void product(const float* x, int64_t ldx, int64_t rows, const Target& t, int64_t from, int64_t to) {
  const Matrix& m = t.matrix;
  const int64_t bytes = m.in * PANEL * int64_t(sizeof(W)), step = std::max<int64_t>(ROWS, TILE_FLOATS / m.in / ROWS * ROWS);
  alignas(64) float tile[ROWS * PANEL];
  for (int64_t first = 0; first < rows; first += step) {
    int64_t last = std::min(rows, first + step);
    for (int64_t p = from; p < to; ++p) {
      const char* panel = static_cast<const char*>(m.panels) + p * bytes;
      const bool whole = goes_whole(m, p);
      Ahead ahead = while_passing(panel, bytes, m.in, (last - first + ROWS - 1) / ROWS);
      for (int64_t r = first, now; r < last; r += now, ahead.at += m.in / 2 * ahead.step) {
        now = next_rows(last - r);
        panel_rows<ROWS, 2>(int(now), x + r * ldx, ldx, reinterpret_cast<const W*>(panel), m.in, tile, PANEL, ahead);
        for (int64_t i = 0; i < now; ++i) (whole ? put_whole : put_part)(t, p, r + i, load(tile + i * PANEL), load(tile + i * PANEL + LANES));
      }
    }
  }
}

#ifdef __AVX512BF16__
// Products of P panels side by side with rows r < rows <= R. Few rows take several panels, so that no sum waits for its last step.
template <int P, int R>
static void pair_rows(int rows, const uint32_t* x, const Target& t, int64_t panel, int64_t first, Ahead ahead) {
  if constexpr (R > 0) {
    if (rows < R) return pair_rows<P, R - 1>(rows, x, t, panel, first, ahead);
    const int64_t bytes = t.matrix.in * PANEL * 2;
    vec acc[P][R][2] = {};
    accumulate_pairs<P, R>(acc, x, static_cast<const char*>(t.matrix.panels) + panel * bytes, bytes, t.matrix.in / 2, ahead);
    UNROLL for (int p = 0; p < P; ++p) {
      if (goes_whole(t.matrix, panel + p))
        UNROLL for (int r = 0; r < R; ++r) put_whole(t, panel + p, first + r, acc[p][r][0], acc[p][r][1]);
      else
        UNROLL for (int r = 0; r < R; ++r) put_part(t, panel + p, first + r, acc[p][r][0], acc[p][r][1]);
    }
  }
}

// Rounds a row of `count` floats to bf16, as row `row` of `rows` in `out`, laid out as `accumulate_pairs` reads it.
static void round_to_pairs(const float* x, int64_t count, int64_t row, int64_t rows, uint32_t* out) {
  out += row * PAIRS;
  for (int64_t i = 0; i < count; i += 2 * PAIRS, out += rows * PAIRS) {
    vec low, high;
    if (i + 2 * PAIRS <= count) {
      low = load(x + i), high = load(x + i + LANES);
    } else {
      alignas(64) float rest[2 * PAIRS] = {};
      std::memcpy(rest, x + i, size_t(count - i) * 4);
      low = load(rest), high = load(rest + LANES);
    }
    _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
  }
}

// Of `all` rows those that pass a panel next. Nine to twelve at once are slower than in two groups: loads of inputs crowd the weights'.
static inline int64_t next_pair_rows(int64_t left, int64_t all) { return all > 8 && all <= ROWS && left == all ? (left + 1) / 2 : next_rows(left); }

template <>
void product<bf16>(const float* x, int64_t ldx, int64_t rows, const Target& t, int64_t from, int64_t to) {
  const int64_t depth = t.matrix.in, bytes = depth * PANEL * 2, step = std::max<int64_t>(ROWS, 2 * TILE_FLOATS / depth / ROWS * ROWS);
  const int64_t words = (depth / 2 + PAIRS - 1) / PAIRS * PAIRS;  // of a row
  static thread_local std::vector<uint32_t> pairs;
  pairs.resize(size_t(std::min(rows, step) * words));
  for (int64_t first = 0; first < rows; first += step) {
    const int64_t last = std::min(rows, first + step), groups = last - first > 8 ? std::max<int64_t>(2, (last - first + ROWS - 1) / ROWS) : 1;
    for (int64_t r = first, now; r < last; r += now) {
      now = next_pair_rows(last - r, last - first);
      for (int64_t i = 0; i < now; ++i) round_to_pairs(x + (r + i) * ldx, depth, i, now, pairs.data() + (r - first) * words);
    }
    for (int64_t p = from, wide; p < to; p += wide) {
      wide = groups > 1 || last - first > 6 ? 1 : last - first > 2 ? 2 : 4;
      wide = wide <= to - p ? wide : 1;
      Ahead ahead = while_passing(static_cast<const char*>(t.matrix.panels) + p * bytes, bytes, depth, groups);
      for (int64_t r = first, now; r < last; r += now, ahead.at += depth / 2 * ahead.step) {
        now = next_pair_rows(last - r, last - first);
        const uint32_t* in = pairs.data() + (r - first) * words;
        if (wide == 4) pair_rows<4, 2>(int(now), in, t, p, r, ahead);
        else if (wide == 2) pair_rows<2, 6>(int(now), in, t, p, r, ahead);
        else pair_rows<1, ROWS>(int(now), in, t, p, r, ahead);
      }
    }
  }
}
#endif

template <class W>
static void product_shared(const float* x, int64_t ldx, int64_t rows, const Matrix& m, float* y, int64_t ldy, bool add, int thread, int threads) {
  int64_t from, to;
  share((m.out + PANEL - 1) / PANEL, thread, threads, from, to);
  product<W>(x, ldx, rows, {m, y, ldy, add}, from, to);
}

// Rotary embedding of one head, halves paired (Su et al., arXiv 2104.09864, in the layout of Hugging Face).
static void rotate(float* x, const float* cosines, const float* sines, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    float a = x[i], b = x[i + half];
    x[i] = a * cosines[i] - b * sines[i];
    x[i + half] = b * cosines[i] + a * sines[i];
  }
}

static void prepare_head(const Model& m, const float* norm, int64_t position, float* head) {
  if (norm) rms_norm(head, norm, m.norm_eps, m.head_size, head);
  if (m.cosines) {
    int64_t half = m.head_size / 2;
    rotate(head, m.cosines + position * half, m.sines + position * half, half);
  }
}

// Consecutive rows of one sequence that attend together, because they read the same blocks.
struct Tile { int64_t row, rows; };

static std::vector<Tile> tiles_of(const Model& m, const Rows& rows) {
  const int64_t most = std::max<int64_t>(1, ROWS / (m.heads / m.kv_heads));
  std::vector<Tile> tiles;
  for (int64_t r = 0; r < rows.rows; ++r)
    if (!tiles.empty() && tiles.back().rows < most && rows.table[r] == rows.table[r - 1]) ++tiles.back().rows;
    else tiles.push_back({r, 1});
  return tiles;
}

// sums[q][0 .. CHUNK) = the weights[q] of `context` positions times one chunk of the values in a sequence's blocks.
template <int Q, class W>
static void sum_values(int queries, const float* weights, int64_t ldw, const W* values, const int64_t* table, int64_t block_stride, int64_t block_size,
                       int64_t context, float* sums, int64_t lds) {
  if constexpr (Q > 0) {
    if (queries < Q) return sum_values<Q - 1>(queries, weights, ldw, values, table, block_stride, block_size, context, sums, lds);
    constexpr int V = CHUNK / LANES;
    vec acc[Q][V] = {};
    for (int64_t first = 0; first < context; first += block_size) {
      const W* block = values + table[first / block_size] * block_stride;
      accumulate<Q, V>(acc, weights + first, ldw, block, std::min(block_size, context - first), soon(block));
    }
    UNROLL for (int q = 0; q < Q; ++q) UNROLL for (int j = 0; j < V; ++j) store(sums + q * lds + j * LANES, acc[q][j]);
  }
}

// Attention of a tile for the query heads of one key head: scores by blocks of keys, fp32 softmax, sums over the values.
// A row's own context is shorter than its tile's: the positions past it weigh exactly 0.
template <class W>
static void attend(const Model& m, const Layer& layer, const Rows& rows, Tile tile, int64_t kv_head, const float* qkv, int64_t qkv_width, float* mixed,
                   std::vector<float>& scratch) {
  const int64_t group = m.heads / m.kv_heads, size = m.padded_head, block_size = m.block_size, queries = group * tile.rows;
  int64_t context = 0;
  for (int64_t r = 0; r < tile.rows; ++r) context = std::max(context, rows.positions[tile.row + r] + 1);
  const int64_t blocks = (context + block_size - 1) / block_size, padded = blocks * block_size;
  const int64_t* table = rows.tables + rows.table[tile.row] * rows.table_width;
  const int64_t panel = block_size * size, block_stride = m.kv_heads * panel;
  const W *keys = static_cast<const W*>(layer.keys) + kv_head * panel, *values = static_cast<const W*>(layer.values) + kv_head * panel;
  scratch.resize(size_t(queries * (padded + 2 * size + 1)));
  float *scores = scratch.data(), *sums = scores + queries * padded, *scaled = sums + queries * size, *inverse = scaled + queries * size;
  for (int64_t q = 0; q < queries; ++q) {
    const float* query = qkv + (tile.row + q / group) * qkv_width + (kv_head * group + q % group) * m.head_size;
    for (int64_t i = 0; i < m.head_size; ++i) scaled[q * size + i] = query[i] * m.scale;
  }
  for (int64_t b = 0; b < blocks; ++b)
    for (int64_t c = 0; c < block_size; c += CHUNK)
      panel_product<CHUNK / LANES>(queries, scaled, size, keys + table[b] * block_stride + c * size, m.head_size, scores + b * block_size + c, padded);
  for (int64_t q = 0; q < queries; ++q) {
    float* score = scores + q * padded;
    for (int64_t i = rows.positions[tile.row + q / group] + 1; i < padded; ++i) score[i] = -INFINITY;
    vec best = load(score), part = {};
    for (int64_t i = LANES; i < padded; i += LANES) {
      vec s = load(score + i);
      best = s > best ? s : best;
    }
    float top = best[0], total = 0;
    for (int j = 1; j < LANES; ++j) top = std::max(top, best[j]);
    for (int64_t i = 0; i < padded; i += LANES) {
      vec e = exp_vec(load(score + i) - top);
      store(score + i, e);
      part += e;
    }
    for (int j = 0; j < LANES; ++j) total += part[j];
    inverse[q] = 1.0f / total;
  }
  for (int64_t first = 0; first < queries; first += ROWS)
    for (int64_t c = 0; c < size; c += CHUNK)
      sum_values<ROWS>(int(std::min<int64_t>(ROWS, queries - first)), scores + first * padded, padded, values + c * block_size, table, block_stride,
                       block_size, context, sums + first * size + c, size);
  for (int64_t q = 0; q < queries; ++q) {
    float* out = mixed + (tile.row + q / group) * m.heads * m.head_size + (kv_head * group + q % group) * m.head_size;
    for (int64_t i = 0; i < m.head_size; ++i) out[i] = sums[q * size + i] * inverse[q];
  }
}

// Key panels hold CHUNK positions as columns and the head's entries as steps; value panels the other way round.
template <class W>
static void write_slot(const Model& m, const Layer& layer, int64_t slot, int64_t kv_head, const float* key, const float* value) {
  int64_t block = slot / m.block_size, offset = slot % m.block_size, size = m.padded_head, panel = m.block_size * size;
  W* keys = static_cast<W*>(layer.keys) + (block * m.kv_heads + kv_head) * panel + offset / CHUNK * CHUNK * size;
  W* values = static_cast<W*>(layer.values) + (block * m.kv_heads + kv_head) * panel;
  for (int64_t i = 0; i < m.head_size; ++i) {
    narrow(key[i], keys[panel_index(keys, i, offset % CHUNK, CHUNK)]);
    narrow(value[i], values[i / CHUNK * CHUNK * m.block_size + panel_index(values, offset, i % CHUNK, CHUNK)]);
  }
}

static inline vec swiglu(vec gate, vec up) { return gate / (exp_vec(-gate) + 1.0f) * up; }

static void swiglu(float* gate, const float* up, int64_t count, float* out) {  // out = silu(gate) * up
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(out + i, swiglu(load(gate + i), load(up + i)));
  if (i == count) return;
  alignas(64) float a[LANES] = {}, b[LANES] = {};  // the last, short vector: through a copy, so that every entry meets the same code
  const size_t bytes = size_t(count - i) * 4;
  std::memcpy(a, gate + i, bytes), std::memcpy(b, up + i, bytes);
  store(a, swiglu(load(a), load(b)));
  std::memcpy(out + i, a, bytes);
}

template <class W>
static void run_layers(const Model& m, const Layer* layers, int64_t count, const Rows& rows, float* hidden, float* scratch) {
  const int64_t n = rows.rows, width = m.width, query_width = m.heads * m.head_size, kv_width = m.kv_heads * m.head_size;
  const int64_t qkv_width = query_width + 2 * kv_width;
  float *normed = scratch, *qkv = normed + n * width, *mixed = qkv + n * qkv_width, *inner = mixed + n * query_width;
  float* gates = inner + n * m.intermediate;
  const int threads = int(m.threads);
  Meeting meeting(threads);
  std::vector<std::atomic<int64_t>> taken(static_cast<size_t>(count));  // (tile, key head) pairs handed out, per layer
  const std::vector<Tile> tiles = tiles_of(m, rows);
  Team::of(threads).run([&](int thread) {
    std::vector<float> buffer, key(size_t(m.head_size));
    int64_t from, to;
    for (int64_t l = 0; l < count; ++l) {
      const Layer& layer = layers[l];
      share(n, thread, threads, from, to);
      for (int64_t r = from; r < to; ++r) norm_row(m, layer.attention_norm, hidden + r * width, normed + r * width);
      meeting.wait();
      product_shared<W>(normed, width, n, layer.qkv, qkv, qkv_width, false, thread, threads);
      meeting.wait();
      share(rows.slots_count * m.kv_heads, thread, threads, from, to);
      for (int64_t i = from; i < to; ++i) {
        int64_t slot = i / m.kv_heads, head = i % m.kv_heads, row = rows.slot_rows[slot];
        const float* source = qkv + row * qkv_width + query_width + head * m.head_size;
        std::copy(source, source + m.head_size, key.begin());
        prepare_head(m, layer.key_norm, rows.positions[row], key.data());
        write_slot<W>(m, layer, rows.slots[slot], head, key.data(), source + kv_width);
      }
      share(n * m.heads, thread, threads, from, to);
      for (int64_t i = from; i < to; ++i)
        prepare_head(m, layer.query_norm, rows.positions[i / m.heads], qkv + i / m.heads * qkv_width + i % m.heads * m.head_size);
      meeting.wait();
      for (int64_t i; (i = taken[size_t(l)].fetch_add(1, std::memory_order_relaxed)) < int64_t(tiles.size()) * m.kv_heads;)
        attend<W>(m, layer, rows, tiles[size_t(i / m.kv_heads)], i % m.kv_heads, qkv, qkv_width, mixed, buffer);
      meeting.wait();
      product_shared<W>(mixed, query_width, n, layer.out, hidden, width, m.keeps, thread, threads);
      meeting.wait();
      if (m.sum) {
        if (thread == 0) m.sum(hidden, n * width);
        meeting.wait();
      }
      share(n, thread, threads, from, to);
      for (int64_t r = from; r < to; ++r) norm_row(m, layer.mlp_norm, hidden + r * width, normed + r * width);
      meeting.wait();
      share((m.intermediate + PANEL - 1) / PANEL, thread, threads, from, to);
      product<W>(normed, width, n, {layer.up, inner, m.intermediate, false}, from, to);
      if (layer.gate.panels) product<W>(normed, width, n, {layer.gate, gates, m.intermediate, false}, from, to);
      int64_t begin = from * PANEL, end = std::min(m.intermediate, to * PANEL);
      for (int64_t r = 0; r < n; ++r) {
        float *up = inner + r * m.intermediate, *gate = gates + r * m.intermediate;
        if (!layer.gate.panels) {
          for (int64_t i = begin; i < end; ++i) up[i] = std::max(up[i], 0.0f);
          continue;
        }
        if (begin < end) swiglu(gate + begin, up + begin, end - begin, up + begin);
      }
      meeting.wait();
      product_shared<W>(inner, m.intermediate, n, layer.down, hidden, width, m.keeps, thread, threads);
      meeting.wait();
      if (m.sum) {
        if (thread == 0) m.sum(hidden, n * width);
        meeting.wait();
      }
    }
  });
}

// out = x + f(x / rms(x)) for an exit's rows; scratch: n * (width + 2 * inner) floats.
template <class W>
static void run_network(const Model& m, const ExitNetwork& net, int64_t n, const float* hidden, float* scratch, float* out) {
  const int64_t width = m.width, inner = net.gate.panels ? net.up.out : 0;
  float *normed = scratch, *ups = normed + n * width, *gates = ups + n * inner;
  for (int64_t r = 0; r < n; ++r) {
    const float* x = hidden + r * width;
    float inverse = 1.0f / std::sqrt(lane_sum(x, x, width) / float(width) + NETWORK_EPS);
    for (int64_t i = 0; i < width; ++i) normed[r * width + i] = x[i] * inverse;
  }
  std::memcpy(out, hidden, size_t(n * width) * 4);
  const int threads = int(m.threads);
  Meeting meeting(threads);
  Team::of(threads).run([&](int thread) {
    if (!net.gate.panels) return product_shared<W>(normed, width, n, net.up, out, width, true, thread, threads);
    int64_t from, to;
    share((inner + PANEL - 1) / PANEL, thread, threads, from, to);
    product<W>(normed, width, n, {net.up, ups, inner, false}, from, to);
    product<W>(normed, width, n, {net.gate, gates, inner, false}, from, to);
    int64_t begin = from * PANEL, end = std::min(inner, to * PANEL);
    for (int64_t r = 0; r < n && begin < end; ++r) swiglu(gates + r * inner + begin, ups + r * inner + begin, end - begin, ups + r * inner + begin);
    meeting.wait();
    product_shared<W>(ups, inner, n, net.down, out, width, true, thread, threads);
  });
}

template <class W>
static void run_exit(const Model& m, const Norm& norm, const Exit& exit, int64_t n, const float* hidden, float* scratch, float* logits) {
  float* rows = scratch + n * m.width;
  if (exit.network.up.panels) {
    run_network<W>(m, exit.network, n, hidden, rows + n * m.width, rows);
    hidden = rows;
  }
  for (int64_t r = 0; r < n; ++r) norm_row(m, norm, hidden + r * m.width, scratch + r * m.width);
  Team::of(int(m.threads)).run([&](int thread) { product_shared<W>(scratch, m.width, n, exit.head, logits, exit.head.out, false, thread, int(m.threads)); });
}

template <class W>
static void embed(const Model& m, const Embedding& e, int64_t rows, const int64_t* ids, const int64_t* positions, float* out) {
  const W *table = static_cast<const W*>(e.table), *places = static_cast<const W*>(e.positions);
  for (int64_t r = 0; r < rows; ++r, out += m.width) {
    const int64_t id = ids[r] - e.first;
    const bool here = id >= 0 && id < e.count;
    const W* panel = table || !here ? nullptr : static_cast<const W*>(e.tied.panels) + id / PANEL * m.width * PANEL;
    for (int64_t k = 0; k < m.width; ++k) out[k] = !here ? 0.0f : widen(table ? table[id * m.width + k] : panel[panel_index(panel, k, id % PANEL, PANEL)]);
    if (places)
      for (int64_t k = 0; k < m.width; ++k) out[k] += widen(places[(positions[r] + e.offset) * m.width + k]);
  }
}

// Copies what slot `from` holds to slot `to`, in all layers.
template <class W>
static void copy_slot(const Model& m, const Layer* layers, int64_t count, int64_t from, int64_t to) {
  const int64_t size = m.padded_head, panel = m.block_size * size;
  const int64_t a = from % m.block_size, b = to % m.block_size;
  for (int64_t l = 0; l < count; ++l)
    for (int64_t head = 0; head < m.kv_heads; ++head) {
      W *keys = static_cast<W*>(layers[l].keys), *values = static_cast<W*>(layers[l].values);
      const int64_t source = (from / m.block_size * m.kv_heads + head) * panel, target = (to / m.block_size * m.kv_heads + head) * panel;
      const W* key = keys + source + a / CHUNK * CHUNK * size;
      W* new_key = keys + target + b / CHUNK * CHUNK * size;
      const W* value = values + source;
      W* new_value = values + target;
      for (int64_t i = 0; i < m.head_size; ++i) {
        new_key[panel_index(keys, i, b % CHUNK, CHUNK)] = key[panel_index(keys, i, a % CHUNK, CHUNK)];
        const int64_t chunk = i / CHUNK * CHUNK * m.block_size;
        new_value[chunk + panel_index(values, b, i % CHUNK, CHUNK)] = value[chunk + panel_index(values, a, i % CHUNK, CHUNK)];
      }
    }
}

extern "C" {
int64_t hispec_panel() { return PANEL; }
int64_t hispec_chunk() { return CHUNK; }

// Runs layers in place on hidden [rows, width]. scratch: rows * (width + qkv width + query width + 2 * intermediate) floats.
void hispec_run_layers(const Model* m, const Layer* layers, int64_t count, const Rows* rows, float* hidden, float* scratch) {
  if (m->bf16_weights) run_layers<bf16>(*m, layers, count, *rows, hidden, scratch);
  else run_layers<float>(*m, layers, count, *rows, hidden, scratch);
}

// out [rows, width] of ids [rows] at positions [rows].
void hispec_embed(const Model* m, const Embedding* e, int64_t rows, const int64_t* ids, const int64_t* positions, float* out) {
  if (m->bf16_weights) embed<bf16>(*m, *e, rows, ids, positions, out);
  else embed<float>(*m, *e, rows, ids, positions, out);
}

// logits [rows, columns of the exit's head] of hidden [rows, width]; scratch: rows * (3 * width + 2 * the network's inner width) floats.
void hispec_run_exit(const Model* m, const Norm* norm, const Exit* exit, int64_t rows, const float* hidden, float* scratch, float* logits) {
  if (m->bf16_weights) run_exit<bf16>(*m, *norm, *exit, rows, hidden, scratch, logits);
  else run_exit<float>(*m, *norm, *exit, rows, hidden, scratch, logits);
}

// Copies keys and values of slots from[i] to slots to[i], one after the other.
void hispec_copy_slots(const Model* m, const Layer* layers, int64_t layers_count, int64_t count, const int64_t* from, const int64_t* to) {
  for (int64_t i = 0; i < count; ++i)
    if (m->bf16_weights) copy_slot<bf16>(*m, layers, layers_count, from[i], to[i]);
    else copy_slot<float>(*m, layers, layers_count, from[i], to[i]);
}
}
