// Attends in float32 on CPUs with AVX-512: HEAD, the size of a head, is defined before this text.
//
// A row (an answer) attends to the columns of its prompt, which many rows share, and to its own.
// Columns lie beside each other for exponents (one product of a query's element with 16 columns),
// elements for sums of values. A group is the queries of heads with the same keys and values.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr long D = HEAD;
constexpr long V = HEAD / 16;  // vectors of a head
constexpr long Q = 8;          // queries of a block
constexpr long AHEAD = 32;     // columns that are fetched ahead
constexpr long TILE = 64;      // columns whose gradients stay in the nearest cache
constexpr float LOWEST = -3e38f;
using vectors::below;
using vectors::Vec;

inline long padded(long n) { return (n + 31) / 32 * 32; }

// e^x for x <= 0, within 2 units in the last place; 0 below -87
inline Vec exponential(Vec x) {
  const __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_GT_OQ);
  x = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
  return _mm512_maskz_mov_ps(counts, vectors::power(x));
}

// s [Q, room] = q [Q, D] times the first ``used`` columns of kt [D, columns], a multiple of 32
inline void exponents(const float* q, const float* kt, long columns, long used, float* s,
                      long room) {
  for (long j = 0; j < used; j += 32) {
    Vec sums[Q][2];
    for (auto& row : sums) row[0] = row[1] = _mm512_setzero_ps();
    for (long d = 0; d < D; d++) {
      const Vec a = _mm512_loadu_ps(kt + d * columns + j);
      const Vec b = _mm512_loadu_ps(kt + d * columns + j + 16);
      for (long i = 0; i < Q; i++) {
        const Vec x = _mm512_set1_ps(q[i * D + d]);
        sums[i][0] = _mm512_fmadd_ps(x, a, sums[i][0]);
        sums[i][1] = _mm512_fmadd_ps(x, b, sums[i][1]);
      }
    }
    for (long i = 0; i < Q; i++) {
      _mm512_storeu_ps(s + i * room + j, sums[i][0]);
      _mm512_storeu_ps(s + i * room + j + 16, sums[i][1]);
    }
  }
}

// sums [Q, D] of the first ``used`` values v [columns, D] by weights w [Q, columns]
inline void weighed(const float* w, const float* v, long columns, long used, float* sums) {
  for (long d = 0; d < V; d++) {
    Vec even[Q], odd[Q];
    for (long i = 0; i < Q; i++) even[i] = odd[i] = _mm512_setzero_ps();
    for (long j = 0; j < used; j += 2) {  // weights and values are 0 behind the last
      const Vec a = _mm512_loadu_ps(v + j * D + 16 * d);
      const Vec b = _mm512_loadu_ps(v + (j + 1) * D + 16 * d);
      for (long i = 0; i < Q; i++) {
        even[i] = _mm512_fmadd_ps(_mm512_set1_ps(w[i * columns + j]), a, even[i]);
        odd[i] = _mm512_fmadd_ps(_mm512_set1_ps(w[i * columns + j + 1]), b, odd[i]);
      }
    }
    for (long i = 0; i < Q; i++)
      _mm512_storeu_ps(sums + i * D + 16 * d, _mm512_add_ps(even[i], odd[i]));
  }
}

// to [columns, D] += weights w [Q, columns] times x [Q, D]
inline void spread(const float* w, const float* x, long columns, long used, float* to) {
  for (long d = 0; d < V; d++) {
    Vec rows[Q];
    for (long i = 0; i < Q; i++) rows[i] = _mm512_loadu_ps(x + i * D + 16 * d);
    for (long j = 0; j < used; j++) {
      Vec sum = _mm512_loadu_ps(to + j * D + 16 * d);
      for (long i = 0; i < Q; i++)
        sum = _mm512_fmadd_ps(_mm512_set1_ps(w[i * columns + j]), rows[i], sum);
      _mm512_storeu_ps(to + j * D + 16 * d, sum);
    }
  }
}

// Shapes of a pass over whole answers: B rows of T tokens, P prompts of S columns, of which those
// from ``start`` [P] are real, H heads of queries and G of keys. Strides of the answers' queries,
// keys and values [B, heads, T, D] in elements; prompts are [P, G, S, D].
struct Pass {
  long B, T, P, S, H, G;
  const int64_t *rows, *start;
  float scale;
  const float *q, *k, *v, *pk, *pv;
  long q_row, q_head, q_token, k_row, k_head, k_token, v_row, v_head, v_token;
};

// Columns that a row attends to: its prompt's and its own, n in all, and room for 32 at a time.
struct Columns {
  long before, n, size;
  long of_prompt = -1, of_head = -1;  // whose columns are here already
  std::vector<float> kt, k, vt, v;

  void resize(long most, bool all) {
    for (auto* x : {&kt, &v}) x->assign(padded(most) * D, 0.0f);
    if (all)
      for (auto* x : {&k, &vt}) x->assign(padded(most) * D, 0.0f);
  }

  void set(float* turned, float* plain, long at, const float* x) {
    if (turned)
      for (long d = 0; d < D; d++) turned[d * size + at] = x[d];
    if (plain) std::memcpy(plain + at * D, x, D * sizeof(float));
  }

  void read(const Pass& p, long row, long g, bool all) {
    const long prompt = p.rows[row], start = p.start[prompt];
    before = p.S - start;
    n = before + p.T;
    size = padded(n);
    float *keys = all ? k.data() : nullptr, *turned = all ? vt.data() : nullptr;
    const long base = (prompt * p.G + g) * p.S * D;
    const bool known = prompt == of_prompt && g == of_head;
    for (long j = start; j < p.S && !known; j++) {
      set(kt.data(), keys, j - start, p.pk + base + j * D);
      set(turned, v.data(), j - start, p.pv + base + j * D);
    }
    of_prompt = prompt;
    of_head = g;
    const float* ks = p.k + row * p.k_row + g * p.k_head;
    const float* vs = p.v + row * p.v_row + g * p.v_head;
    for (long t = 0; t < p.T; t++) {
      set(kt.data(), keys, before + t, ks + t * p.k_token);
      set(turned, v.data(), before + t, vs + t * p.v_token);
    }
    const float zero[D] = {};
    for (long j = n; j < size; j++) {
      set(kt.data(), keys, j, zero);
      set(turned, v.data(), j, zero);
    }
  }
};

// Queries first ... first + Q - 1 of a head, scaled; 0 behind the last token.
inline void queries(const Pass& p, long row, long head, long first, float* q) {
  for (long i = 0; i < Q; i++)
    for (long d = 0; d < D; d++) {
      const float* at = p.q + row * p.q_row + head * p.q_head + (first + i) * p.q_token;
      q[i * D + d] = first + i < p.T ? at[d] * p.scale : 0.0f;
    }
}

// Turns exponents s [columns] of n columns into weights relative to the largest, 0 behind them up to
// ``used``; returns the largest exponent and, in ``total``, the sum of weights.
inline float weights(float* s, long n, long used, float* total) {
  Vec top = _mm512_set1_ps(LOWEST);
  for (long j = 0; j < n; j += 16)
    top = _mm512_mask_max_ps(top, below(n - j), top, _mm512_loadu_ps(s + j));
  const float highest = _mm512_reduce_max_ps(top);
  Vec sum = _mm512_setzero_ps();
  for (long j = 0; j < used; j += 16) {
    Vec x = exponential(_mm512_sub_ps(_mm512_loadu_ps(s + j), _mm512_set1_ps(highest)));
    x = _mm512_maskz_mov_ps(below(n - j), x);
    sum = _mm512_add_ps(sum, x);
    _mm512_storeu_ps(s + j, x);
  }
  *total = _mm512_reduce_add_ps(sum);
  return highest;
}

// What a row's queries [heads, padded T, D] of one group bring to the gradients: themselves scaled,
// the gradients of outputs, how much of these lies along the outputs, and the gradients that they
// collect; 0 behind the last token.
struct Asked {
  long room;
  std::vector<float> q, dout, along, dq;

  void read(const Pass& p, long row, long g, const float* out, const float* gradient) {
    const long each = p.H / p.G;
    room = padded(p.T);
    for (auto* x : {&q, &dout, &dq}) x->assign(each * room * D, 0.0f);
    along.assign(each * room, 0.0f);
    for (long i = 0; i < each; i++)
      for (long t = 0; t < p.T; t++) {
        const long head = g * each + i, at = ((row * p.T + t) * p.H + head) * D;
        const float* from = p.q + row * p.q_row + head * p.q_head + t * p.q_token;
        Vec sum = _mm512_setzero_ps();
        for (long d = 0; d < D; d += 16) {
          const Vec x = _mm512_loadu_ps(gradient + at + d);
          sum = _mm512_fmadd_ps(x, _mm512_loadu_ps(out + at + d), sum);
          _mm512_storeu_ps(dout.data() + (i * room + t) * D + d, x);
          const Vec scaled = _mm512_mul_ps(_mm512_loadu_ps(from + d), _mm512_set1_ps(p.scale));
          _mm512_storeu_ps(q.data() + (i * room + t) * D + d, scaled);
        }
        along[i * room + t] = _mm512_reduce_add_ps(sum);
      }
  }

  // Writes the gradients of the queries to dq [B, H, T, D].
  void write(const Pass& p, long row, long g, float* to) const {
    const long each = p.H / p.G;
    for (long i = 0; i < each; i++) {
      float* rows = to + (row * p.H + g * each + i) * p.T * D;
      for (long x = 0; x < p.T * D; x++) rows[x] = dq[i * room * D + x] * p.scale;
    }
  }
};

// Gradients of one block of queries and one tile of columns: of its exponents, by which those of
// keys and queries go.
struct Gradients {
  float s[Q * TILE], w[Q * TILE];
  std::vector<float> dk, dv;

  void resize(long most) {
    for (auto* x : {&dk, &dv}) x->assign(padded(most) * D, 0.0f);
  }

  // Queries from ``first`` on of the i-th head of a group, and columns from ``tile`` on, those that
  // the last of the queries sees; lse [T] is the head's.
  void block(const Pass& p, const Columns& c, Asked& asked, long i, long first, long tile,
             const float* lse) {
    const long at = i * asked.room + first, last = std::min(first + Q, p.T);
    const long seen = std::min(c.before + last - tile, TILE), used = padded(seen);
    const float *q = asked.q.data() + at * D, *dout = asked.dout.data() + at * D;
    exponents(q, c.kt.data() + tile, c.size, used, w, TILE);
    exponents(dout, c.vt.data() + tile, c.size, used, s, TILE);
    for (long of = 0; of < Q; of++) {
      const long t = first + of, n = t < p.T ? c.before + t + 1 - tile : 0;
      const Vec top = _mm512_set1_ps(t < p.T ? lse[t] : 0.0f);
      const Vec along = _mm512_set1_ps(asked.along[at + of]);
      for (long j = 0; j < used; j += 16) {
        float *wj = w + of * TILE + j, *sj = s + of * TILE + j;
        Vec x = exponential(_mm512_sub_ps(_mm512_loadu_ps(wj), top));
        x = _mm512_maskz_mov_ps(below(n - j), x);
        _mm512_storeu_ps(wj, x);
        const Vec slope = _mm512_sub_ps(_mm512_loadu_ps(sj), along);
        _mm512_storeu_ps(sj, _mm512_maskz_mul_ps(below(n - j), x, slope));
      }
    }
    float sums[Q * D];
    weighed(s, c.k.data() + tile * D, TILE, seen, sums);
    spread(s, q, TILE, seen, dk.data() + tile * D);
    spread(w, dout, TILE, seen, dv.data() + tile * D);
    float* dq = asked.dq.data() + at * D;
    for (long x = 0; x < Q * D; x++) dq[x] += sums[x];
  }
};

}  // namespace

extern "C" {

// out [B, T, H, D] and, for the gradient, lse [B, H, T].
void attend(const Pass* pass, float* out, float* lse, long threads) {
  const Pass& p = *pass;
#pragma omp parallel num_threads(threads)
  {
    Columns c;
    c.resize(p.S + p.T, false);
    std::vector<float> s(padded(p.S + p.T) * Q);
#pragma omp for schedule(dynamic, 4)
    for (long task = 0; task < p.B * p.G; task++) {
      const long row = task % p.B, g = task / p.B, each = p.H / p.G;
      c.read(p, row, g, false);
      for (long head = g * each; head < (g + 1) * each; head++)
        for (long first = 0; first < p.T; first += Q) {
          float q[Q * D], sums[Q * D], totals[Q];
          const long last = std::min(first + Q, p.T), used = padded(c.before + last);
          queries(p, row, head, first, q);
          exponents(q, c.kt.data(), c.size, used, s.data(), c.size);
          for (long i = 0; i < Q; i++) {
            const long t = std::min(first + i, last - 1);
            const float top = weights(s.data() + i * c.size, c.before + t + 1, used, totals + i);
            if (first + i < last) lse[(row * p.H + head) * p.T + t] = top + std::log(totals[i]);
          }
          weighed(s.data(), c.v.data(), c.size, c.before + last, sums);
          for (long t = first; t < last; t++)
            for (long d = 0; d < D; d++)
              out[((row * p.T + t) * p.H + head) * D + d] =
                  sums[(t - first) * D + d] / totals[t - first];
        }
    }
  }
}

// Gradients dq [B, H, T, D], dk and dv [B, G, T, D], and dpk and dpv [P, G, S, D], which are 0
// before, for out, lse and the gradient dout [B, T, H, D] of out.
void attend_backward(const Pass* pass, const float* out, const float* lse, const float* dout,
                     float* dq, float* dk, float* dv, float* dpk, float* dpv, long threads) {
  const Pass& p = *pass;
#pragma omp parallel num_threads(threads)
  {
    Columns c;
    Asked asked;
    Gradients grads;
    c.resize(p.S + p.T, true);
#pragma omp for schedule(dynamic)
    for (long task = 0; task < p.P * p.G; task++) {
      const long prompt = task / p.G, g = task % p.G, each = p.H / p.G;
      for (long row = 0; row < p.B; row++) {
        if (p.rows[row] != prompt) continue;
        c.read(p, row, g, true);
        asked.read(p, row, g, out, dout);
        grads.resize(c.n);
        for (long tile = 0; tile < c.n; tile += TILE) {
          // the first block of queries of which one sees a column of the tile
          const long from = std::max(tile - c.before, 0L) / Q * Q;
          for (long i = 0; i < each; i++)
            for (long first = from; first < p.T; first += Q)
              grads.block(p, c, asked, i, first, tile, lse + (row * p.H + g * each + i) * p.T);
        }
        asked.write(p, row, g, dq);
        const long own = (row * p.G + g) * p.T * D, bytes = p.T * D * sizeof(float);
        std::memcpy(dk + own, grads.dk.data() + c.before * D, bytes);
        std::memcpy(dv + own, grads.dv.data() + c.before * D, bytes);
        const long shared = ((prompt * p.G + g) * p.S + p.S - c.before) * D;
        for (long x = 0; x < c.before * D; x++) {
          dpk[shared + x] += grads.dk[x];
          dpv[shared + x] += grads.dv[x];
        }
      }
    }
  }
}

}  // extern "C"

namespace {

// One token a row: queries [B, H, D]; ``seen`` [B, n] says which of an answer's n columns are real.
// Keys of prompts have their columns beside each other, keys of answers and values their elements.
// out [B, H, D].
struct Step {
  long B, P, S, H, G, n;
  const int64_t *rows, *start;
  const bool* seen;
  float scale;
  const float *q, *k, *v, *pk, *pv;
  long seen_row, q_row, q_head;
  long k_row, k_head, k_token, v_row, v_head, v_token;
  long pk_row, pk_head, pk_element, pv_row, pv_head, pv_token;
};

// Where a step's results are kept for the gradient, as [tokens, N, H, D] and [tokens, N, H]: at one
// token of one of N answers for each row; null: they are not.
struct Store {
  float *attended, *lse;
  const int64_t *answers, *tokens;
  long N;

  long place(long row) const { return tokens[row] * N + answers[row]; }
};

// Turns 16 columns of 16 elements into 16 elements of 16 columns, in two passes of four.
inline void turn(Vec x[16]) {
  Vec y[16];
  for (int i = 0; i < 16; i += 4) {
    const Vec a = _mm512_unpacklo_ps(x[i], x[i + 1]), b = _mm512_unpackhi_ps(x[i], x[i + 1]);
    const Vec c = _mm512_unpacklo_ps(x[i + 2], x[i + 3]), d = _mm512_unpackhi_ps(x[i + 2], x[i + 3]);
    y[i] = _mm512_shuffle_ps(a, c, 0x44);
    y[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
    y[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
    y[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
  }
  for (int i = 0; i < 4; i++) {
    const Vec a = _mm512_shuffle_f32x4(y[i], y[i + 4], 0x88);
    const Vec b = _mm512_shuffle_f32x4(y[i], y[i + 4], 0xdd);
    const Vec c = _mm512_shuffle_f32x4(y[i + 8], y[i + 12], 0x88);
    const Vec d = _mm512_shuffle_f32x4(y[i + 8], y[i + 12], 0xdd);
    x[i] = _mm512_shuffle_f32x4(a, c, 0x88);
    x[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
    x[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
    x[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
}

template <int R>
inline void step_exponents(const float* q, const float* k, long token, long n, float* s,
                           long size) {
  for (long j = 0; j < n; j += 16) {
    Vec sums[R];
    for (auto& x : sums) x = _mm512_setzero_ps();
    for (long d = 0; d < D; d += 16) {
      Vec x[16];
      for (long c = 0; c < 16; c++) {  // behind the last column once more the last
        const float* at = k + std::min(j + c, n - 1) * token + d;
        _mm_prefetch(reinterpret_cast<const char*>(at + AHEAD * token), _MM_HINT_T0);
        x[c] = _mm512_loadu_ps(at);
      }
      turn(x);
      for (long e = 0; e < 16; e++)
        for (long i = 0; i < R; i++)
          sums[i] = _mm512_fmadd_ps(_mm512_set1_ps(q[i * D + d + e]), x[e], sums[i]);
    }
    for (long i = 0; i < R; i++) _mm512_storeu_ps(s + i * size + j, sums[i]);
  }
}

// Exponents of W vectors of a prompt's columns, those of the last to which ``last`` points.
template <int R, int W>
inline void prompt_columns(const float* q, const float* k, long element, __mmask16 last, float* s,
                           long size) {
  Vec sums[R][W];
  for (auto& row : sums)
    for (auto& x : row) x = _mm512_setzero_ps();
  for (long d = 0; d < D; d++) {
    Vec x[W];
    for (long c = 0; c < W; c++)
      x[c] = _mm512_maskz_loadu_ps(c + 1 < W ? 0xffff : last, k + d * element + 16 * c);
    for (long i = 0; i < R; i++) {
      const Vec of_query = _mm512_set1_ps(q[i * D + d]);
      for (long c = 0; c < W; c++) sums[i][c] = _mm512_fmadd_ps(of_query, x[c], sums[i][c]);
    }
  }
  for (long i = 0; i < R; i++)
    for (long c = 0; c < W; c++) _mm512_storeu_ps(s + i * size + 16 * c, sums[i][c]);
}

template <int R>
inline void prompt_exponents(const float* q, const float* k, long element, long n, float* s,
                             long size) {
  long j = 0;
  for (; j + 16 < n; j += 32)
    prompt_columns<R, 2>(q, k + j, element, below(n - j - 16), s + j, size);
  if (j < n) prompt_columns<R, 1>(q, k + j, element, below(n - j), s + j, size);
}

template <int R>
inline void step_weighed(const float* w, const float* v, long token, long n, long size,
                         Vec sums[R][V]) {
  for (long d = 0; d < V; d++) {
    Vec parts[R][4];
    for (auto& row : parts)
      for (auto& x : row) x = _mm512_setzero_ps();
    long j = 0;
    for (; j + 4 <= n; j += 4)
      for (long c = 0; c < 4; c++) {
        const float* at = v + (j + c) * token + 16 * d;
        _mm_prefetch(reinterpret_cast<const char*>(at + AHEAD * token), _MM_HINT_T0);
        const Vec value = _mm512_loadu_ps(at);
        for (long i = 0; i < R; i++)
          parts[i][c] = _mm512_fmadd_ps(_mm512_set1_ps(w[i * size + j + c]), value, parts[i][c]);
      }
    for (; j < n; j++) {
      const Vec value = _mm512_loadu_ps(v + j * token + 16 * d);
      for (long i = 0; i < R; i++)
        parts[i][0] = _mm512_fmadd_ps(_mm512_set1_ps(w[i * size + j]), value, parts[i][0]);
    }
    for (long i = 0; i < R; i++) {
      const Vec both = _mm512_add_ps(parts[i][0], parts[i][1]);
      const Vec rest = _mm512_add_ps(parts[i][2], parts[i][3]);
      sums[i][d] = _mm512_add_ps(sums[i][d], _mm512_add_ps(both, rest));
    }
  }
}

template <int R>
inline void step_heads(const Step& p, const Store& to, long row, long g, long head, float* s,
                       long size, float* out) {
  const long prompt = p.rows[row], start = p.start[prompt], before = p.S - start;
  const long room = (before + 15) / 16 * 16, used = room + (p.n + 15) / 16 * 16;
  float q[R * D];
  for (long i = 0; i < R; i++)
    for (long d = 0; d < D; d++)
      q[i * D + d] = p.q[row * p.q_row + (head + i) * p.q_head + d] * p.scale;
  const float* pk = p.pk + prompt * p.pk_row + g * p.pk_head + start;
  const float* pv = p.pv + prompt * p.pv_row + g * p.pv_head + start * p.pv_token;
  const float *k = p.k + row * p.k_row + g * p.k_head, *v = p.v + row * p.v_row + g * p.v_head;
  const bool* seen = p.seen + row * p.seen_row;
  prompt_exponents<R>(q, pk, p.pk_element, before, s, size);
  step_exponents<R>(q, k, p.k_token, p.n, s + room, size);
  Vec sums[R][V];
  float totals[R];
  for (long i = 0; i < R; i++) {
    float* w = s + i * size;
    Vec top = _mm512_set1_ps(LOWEST), total = _mm512_setzero_ps();
    for (long j = 0; j < used; j += 16) {
      __mmask16 real = below(before - j);
      if (j >= room) {
        const __mmask16 written = below(p.n + room - j);
        const __m128i bytes = _mm_maskz_loadu_epi8(written, seen + j - room);
        real = _mm_mask_test_epi8_mask(written, bytes, bytes);
      }
      const Vec x = _mm512_mask_mov_ps(_mm512_set1_ps(LOWEST), real, _mm512_loadu_ps(w + j));
      _mm512_storeu_ps(w + j, x);
      top = _mm512_max_ps(top, x);
    }
    const Vec highest = _mm512_set1_ps(_mm512_reduce_max_ps(top));
    for (long j = 0; j < used; j += 16) {
      const Vec x = exponential(_mm512_sub_ps(_mm512_loadu_ps(w + j), highest));
      total = _mm512_add_ps(total, x);
      _mm512_storeu_ps(w + j, x);
    }
    totals[i] = _mm512_reduce_add_ps(total);
    if (to.lse)
      to.lse[to.place(row) * p.H + head + i] = _mm512_cvtss_f32(highest) + std::log(totals[i]);
    for (auto& x : sums[i]) x = _mm512_setzero_ps();
  }
  step_weighed<R>(s, pv, p.pv_token, before, size, sums);
  step_weighed<R>(s + room, v, p.v_token, p.n, size, sums);
  for (long i = 0; i < R; i++)
    for (long d = 0; d < V; d++) {
      const Vec x = _mm512_mul_ps(sums[i][d], _mm512_set1_ps(1.0f / totals[i]));
      _mm512_storeu_ps(out + (row * p.H + head + i) * D + 16 * d, x);
      if (to.attended)
        _mm512_stream_ps(to.attended + (to.place(row) * p.H + head + i) * D + 16 * d, x);
    }
}

}  // namespace

// out [B, H, D]
extern "C" void attend_step(const Step* step, const Store* store, float* out, long threads) {
  const Step& p = *step;
  const long size = (p.S + 15) / 16 * 16 + (p.n + 15) / 16 * 16 + 64;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> s(4 * size);
#pragma omp for
    for (long task = 0; task < p.B * p.G; task++) {
      const long row = task / p.G, g = task % p.G, each = p.H / p.G;
      long head = g * each;
      const long end = head + each;
      for (; head + 4 <= end; head += 4) step_heads<4>(p, *store, row, g, head, s.data(), size, out);
      for (; head + 2 <= end; head += 2) step_heads<2>(p, *store, row, g, head, s.data(), size, out);
      for (; head < end; head++) step_heads<1>(p, *store, row, g, head, s.data(), size, out);
    }
    _mm_sfence();  // what is kept was written past the caches
  }
}
