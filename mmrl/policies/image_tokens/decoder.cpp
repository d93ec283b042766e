// Passes one token a row through the layers of a Llama in float32 on CPUs with AVX-512: HEAD, the
// size of a head, is defined before this text.
//
// A token reads all weights, and all keys and values, once, so memory bounds it. Weights therefore
// lie in the order in which they are read: panels of 32 outputs, of which each has for every input
// the 32 weights beside each other, all matrices of all layers one behind the other. While a panel
// is multiplied the next one is fetched.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

constexpr long D = HEAD;
constexpr long V = HEAD / 16;  // vectors of a head
constexpr long PANEL = 32;     // outputs of a panel
constexpr long ROWS = 8;       // rows that are multiplied together
constexpr long RUN = 8;        // vectors of columns whose exponents are made together
constexpr float LOWEST = -3e38f;
using vectors::below;
using vectors::Vec;

inline void fetch(const float* at) {
  _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T1);
}

inline void fetch_first(const float* at) {
  _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0);
}

// e^x within 2 units in the last place, for x between -87 and 88, to which others are moved
inline Vec exponential(Vec x) {
  x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.0f)), _mm512_set1_ps(88.0f));
  return vectors::power(x);
}

// x / (1 + e^-x)
inline Vec silu(Vec x) {
  const Vec one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(x, _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

// R rows of x, ``in`` numbers each, times a panel, handed to ``put`` (row, first vector, second)
// while lines of the next panel from ``ahead`` on are fetched.
template <long R, class Put>
inline void multiply(const float* x, const float* panel, const float* ahead, long in, long row,
                     const Put& put) {
  Vec sums[R][2];
  for (auto& of : sums) of[0] = of[1] = _mm512_setzero_ps();
  for (long k = 0; k < in; k++) {
    fetch(ahead + 16 * k);
    const Vec a = _mm512_loadu_ps(panel + PANEL * k), b = _mm512_loadu_ps(panel + PANEL * k + 16);
    for (long i = 0; i < R; i++) {
      const Vec of_row = _mm512_set1_ps(x[i * in + k]);
      sums[i][0] = _mm512_fmadd_ps(of_row, a, sums[i][0]);
      sums[i][1] = _mm512_fmadd_ps(of_row, b, sums[i][1]);
    }
  }
  for (long i = 0; i < R; i++) put(row + i, sums[i][0], sums[i][1]);
}

template <class Put>
inline void multiply_last(long rows, const float* x, const float* panel, const float* ahead,
                          long in, long row, const Put& put) {
  switch (rows) {
    case 1: return multiply<1>(x, panel, ahead, in, row, put);
    case 2: return multiply<2>(x, panel, ahead, in, row, put);
    case 3: return multiply<3>(x, panel, ahead, in, row, put);
    case 4: return multiply<4>(x, panel, ahead, in, row, put);
    case 5: return multiply<5>(x, panel, ahead, in, row, put);
    case 6: return multiply<6>(x, panel, ahead, in, row, put);
    case 7: return multiply<7>(x, panel, ahead, in, row, put);
    default: return multiply<8>(x, panel, ahead, in, row, put);
  }
}

// x [B, in] times the panels of a matrix; ``put`` takes the panel's number too.
template <class Put>
inline void product(const float* x, const float* weights, long rows, long in, long panels,
                    const Put& put) {
#pragma omp for
  for (long p = 0; p < panels; p++) {
    const float* panel = weights + p * PANEL * in;
    const auto of_panel = [&](long row, Vec a, Vec b) { put(p, row, a, b); };
    for (long row = 0; row < rows; row += ROWS) {
      // the first rows fetch one half of the next panel, all others the other
      const float* ahead = panel + PANEL * in + (row ? 16 * in : 0);
      multiply_last(std::min(rows - row, ROWS), x + row * in, panel, ahead, in, row, of_panel);
    }
  }
}

}  // namespace

extern "C" {

// Weights as they lie, and keys and values [B, groups, S, D], whose columns lie beside each other
// for keys and elements for values.
struct Layer {
  const float *norm, *qkv, *out, *second_norm, *gated, *down;
  float *k, *v;
};

// One token of B rows. Rotations [B or 1, D]: an element counts ``cos`` times, and its partner
// ``sin`` times, that of the other half, or its neighbour where ``adjacent``. Columns of a row
// begin at its ``start``; the token's own is ``place``.
struct Token {
  long B, width, heads, groups, feed, layers, place, adjacent, rotation_row;
  long k_row, k_head, k_element, v_row, v_head, v_token;
  float scale, epsilon;
  const int64_t* start;
  const float *cos, *sin, *norm;
  const Layer* layer;
};
}

namespace {

// Root mean square norm of a row.
inline void normed(const float* x, const float* weight, long n, float epsilon, float* to) {
  Vec squares = _mm512_setzero_ps();
  for (long i = 0; i < n; i += 16) {
    const Vec a = _mm512_loadu_ps(x + i);
    squares = _mm512_fmadd_ps(a, a, squares);
  }
  const Vec by = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / n + epsilon));
  for (long i = 0; i < n; i += 16) {
    const Vec a = _mm512_mul_ps(_mm512_loadu_ps(x + i), by);
    _mm512_storeu_ps(to + i, _mm512_mul_ps(a, _mm512_loadu_ps(weight + i)));
  }
}

inline void rotated(const Token& p, long row, const float* x, float by, float* to) {
  const float *cos = p.cos + row * p.rotation_row, *sin = p.sin + row * p.rotation_row;
  if (p.adjacent)
    for (long d = 0; d < D; d++) to[d] = (x[d] * cos[d] + x[d ^ 1] * sin[d]) * by;
  else
    for (long d = 0; d < D / 2; d++) {
      const float a = x[d], b = x[d + D / 2];
      to[d] = (a * cos[d] + b * sin[d]) * by;
      to[d + D / 2] = (b * cos[d + D / 2] + a * sin[d + D / 2]) * by;
    }
}

// Exponents of W vectors of columns, those of the last to which ``last`` points.
template <long W>
inline void columns(const float* q, const float* k, long element, __mmask16 last, float* s) {
  Vec sums[W];
  for (auto& x : sums) x = _mm512_setzero_ps();
  for (long d = 0; d < D; d++) {
    const Vec of_query = _mm512_set1_ps(q[d]);
    for (long c = 0; c < W; c++) {
      fetch_first(k + std::min(d + 4, D - 1) * element + 16 * c);
      const Vec x = _mm512_maskz_loadu_ps(c + 1 < W ? 0xffff : last, k + d * element + 16 * c);
      sums[c] = _mm512_fmadd_ps(of_query, x, sums[c]);
    }
  }
  for (long c = 0; c < W; c++) _mm512_storeu_ps(s + 16 * c, sums[c]);
}

inline void exponents(const float* q, const float* k, long element, long n, float* s) {
  long j = 0;
  for (; n - j >= 16 * RUN; j += 16 * RUN) columns<RUN>(q, k + j, element, 0xffff, s + j);
  for (; n - j >= 64; j += 64) columns<4>(q, k + j, element, 0xffff, s + j);
  for (; n - j > 32; j += 32) columns<2>(q, k + j, element, 0xffff, s + j);
  if (n - j > 16)
    columns<2>(q, k + j, element, below(n - j - 16), s + j);
  else if (n > j)
    columns<1>(q, k + j, element, below(n - j), s + j);
}

// Turns n exponents into weights and returns one over their sum.
inline float weights(float* s, long n) {
  Vec top = _mm512_set1_ps(LOWEST), total = _mm512_setzero_ps();
  for (long j = 0; j < n; j += 16)
    top = _mm512_max_ps(top, _mm512_mask_loadu_ps(top, below(n - j), s + j));
  const Vec highest = _mm512_set1_ps(_mm512_reduce_max_ps(top));
  for (long j = 0; j < n; j += 16) {
    const Vec x = exponential(_mm512_sub_ps(_mm512_loadu_ps(s + j), highest));
    _mm512_storeu_ps(s + j, x);
    total = _mm512_add_ps(total, _mm512_maskz_mov_ps(below(n - j), x));
  }
  return 1.0f / _mm512_reduce_add_ps(total);
}

// to [D] = the sum of n values v by weights w, times ``by``.
inline void weighed(const float* w, const float* v, long token, long n, float by, float* to) {
  Vec even[V], odd[V];
  for (long d = 0; d < V; d++) even[d] = odd[d] = _mm512_setzero_ps();
  const auto add = [&](long j, Vec* sums) {
    const Vec weight = _mm512_set1_ps(w[j]);
    for (long d = 0; d < V; d++) {
      const float* at = v + j * token + 16 * d;
      fetch_first(at + 16 * token);
      sums[d] = _mm512_fmadd_ps(weight, _mm512_loadu_ps(at), sums[d]);
    }
  };
  long j = 0;
  for (; j + 2 <= n; j += 2) {
    add(j, even);
    add(j + 1, odd);
  }
  if (j < n) add(j, even);
  const Vec factor = _mm512_set1_ps(by);
  for (long d = 0; d < V; d++)
    _mm512_storeu_ps(to + 16 * d, _mm512_mul_ps(_mm512_add_ps(even[d], odd[d]), factor));
}

// Writes the key and value of one group of a row, of qkv [heads + 2 groups, D], and attends.
inline void attend(const Token& p, const Layer& layer, const float* qkv, long row, long g,
                   float* s, float* to) {
  float *k = layer.k + row * p.k_row + g * p.k_head, *v = layer.v + row * p.v_row + g * p.v_head;
  float key[D], q[D];
  rotated(p, row, qkv + (p.heads + g) * D, 1.0f, key);
  for (long d = 0; d < D; d++) k[d * p.k_element + p.place] = key[d];
  const float* value = qkv + (p.heads + p.groups + g) * D;
  for (long d = 0; d < D; d++) v[p.place * p.v_token + d] = value[d];
  const long each = p.heads / p.groups, start = p.start[row], n = p.place + 1 - start;
  for (long head = g * each; head < (g + 1) * each; head++) {
    rotated(p, row, qkv + head * D, p.scale, q);
    exponents(q, k + start, p.k_element, n, s);
    const float by = weights(s, n);
    weighed(s, v + start * p.v_token, p.v_token, n, by, to + head * D);
  }
}

}  // namespace

// x [B, width] becomes the hidden states, normed; ``room`` has B (width + 2 (heads + groups) D +
// feed) numbers, and place + 17 for every thread.
extern "C" void token(const Token* described, float* x, float* room, long threads) {
  const Token& p = *described;
  const long W = p.width, N = (p.heads + 2 * p.groups) * D, A = p.heads * D;
  float *h = room, *qkv = h + p.B * W, *attended = qkv + p.B * N, *gated = attended + p.B * A;
  float* scores = gated + p.B * p.feed;
#pragma omp parallel num_threads(threads)
  for (long l = 0; l < p.layers; l++) {
    const Layer& layer = p.layer[l];
#pragma omp for
    for (long row = 0; row < p.B; row++)
      normed(x + row * W, layer.norm, W, p.epsilon, h + row * W);
    product(h, layer.qkv, p.B, W, (N + PANEL - 1) / PANEL, [&](long panel, long row, Vec a, Vec b) {
      float* at = qkv + row * N + panel * PANEL;
      _mm512_storeu_ps(at, a);
      if (panel * PANEL + 16 < N) _mm512_storeu_ps(at + 16, b);
    });
#pragma omp for
    for (long task = 0; task < p.B * p.groups; task++) {
      const long row = task / p.groups;
      float* s = scores + omp_get_thread_num() * (p.place + 17);
      attend(p, layer, qkv + row * N, row, task % p.groups, s, attended + row * A);
    }
    const auto add = [&](long panel, long row, Vec a, Vec b) {
      float* at = x + row * W + panel * PANEL;
      _mm512_storeu_ps(at, _mm512_add_ps(_mm512_loadu_ps(at), a));
      if (panel * PANEL + 16 < W)
        _mm512_storeu_ps(at + 16, _mm512_add_ps(_mm512_loadu_ps(at + 16), b));
    };
    product(attended, layer.out, p.B, A, (W + PANEL - 1) / PANEL, add);
#pragma omp for
    for (long row = 0; row < p.B; row++)
      normed(x + row * W, layer.second_norm, W, p.epsilon, h + row * W);
    product(h, layer.gated, p.B, W, p.feed / 16, [&](long panel, long row, Vec gate, Vec up) {
      _mm512_storeu_ps(gated + row * p.feed + panel * 16, _mm512_mul_ps(silu(gate), up));
    });
    product(gated, layer.down, p.B, p.feed, (W + PANEL - 1) / PANEL, add);
  }
  for (long row = 0; row < p.B; row++) normed(x + row * W, p.norm, W, p.epsilon, x + row * W);
}

// out [B, outputs] = x [B, inputs] times a matrix as it lies, plus bias.
extern "C" void linear(const float* x, const float* matrix, const float* bias, long rows,
                       long inputs, long outputs, float* out, long threads) {
#pragma omp parallel num_threads(threads)
  product(x, matrix, rows, inputs, (outputs + PANEL - 1) / PANEL,
          [&](long panel, long row, Vec a, Vec b) {
            const long first = panel * PANEL;
            float* at = out + row * outputs + first;
            if (bias) {
              a = _mm512_add_ps(a, _mm512_maskz_loadu_ps(below(outputs - first), bias + first));
              b = _mm512_add_ps(
                  b, _mm512_maskz_loadu_ps(below(outputs - first - 16), bias + first + 16));
            }
            _mm512_mask_storeu_ps(at, below(outputs - first), a);
            _mm512_mask_storeu_ps(at + 16, below(outputs - first - 16), b);
          });
}
