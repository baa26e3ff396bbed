// Attention of one head of one image at a time, so that its tables stay in the cache: exact softmax, float32 sums.
//
// The table of attention weights is kept for backward, in bfloat16 with rows padded to whole lanes, as an explicit
// softmax keeps it. Queries, keys and values are read in place from the linear layer's output, by strides.

#include "bfloat16.h"

#include <limits>

namespace {

constexpr int kRows = 6, kWide = 4;  // 24 sums, 4 numbers and 1 factor in 32 registers

// Loops over M or N are unrolled by pragma; otherwise the compiler keeps the sums in memory before and after the loop.
// c[M][16 N] = a b. a: the pair of row m and step k lies at m * row + k * step. b, c: rows of `width` numbers.
template <int M, int N>
void tile(long depth, const pair* a, long row, long step, const pair* b, float* c, long width) {
  __m512 sums[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sums[m][n] = _mm512_setzero_ps();
  for (long k = 0; k < depth; ++k) {
    __m512bh right[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) right[n] = (__m512bh)_mm512_loadu_si512(b + k * width + n * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const __m512bh left = (__m512bh)_mm512_set1_epi32(a[m * row + k * step]);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sums[m][n] = _mm512_dpbf16_ps(sums[m][n], left, right[n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) _mm512_storeu_ps(c + m * width + n * kLanes, sums[m][n]);
}

using Tile = void (*)(long, const pair*, long, long, const pair*, float*, long);
#define TILES(M) {tile<M, 1>, tile<M, 2>, tile<M, 3>, tile<M, 4>}
constexpr Tile kTiles[kRows][kWide] = {TILES(1), TILES(2), TILES(3), TILES(4), TILES(5), TILES(6)};

// The same for `rows` rows, at most kRows, and any number of whole lanes.
inline void multiply(int rows, long width, long depth, const pair* a, long row, long step, const pair* b, float* c) {
  for (long n = 0; n < width; n += kWide * kLanes) {
    const int wide = std::min<long>(kWide, (width - n) / kLanes);
    kTiles[rows - 1][wide - 1](depth, a, row, step, b + n, c + n, width);
  }
}

// Rows that lie above each other become pairs, to[i][n] = (from[2i][n], from[2i+1][n]): for sums over rows.
inline void pair_rows(pair* to, const half* from, long stride, long rows, long width) {
  for (long i = 0; i < rows; i += 2, to += width)
    for (long n = 0; n < width; n += kLanes) {
      __m512i both = _mm512_cvtepu16_epi32(load(from + i * stride + n));
      if (i + 1 < rows) {
        const __m512i above = _mm512_cvtepu16_epi32(load(from + (i + 1) * stride + n));
        both = _mm512_or_si512(both, _mm512_slli_epi32(above, 16));
      }
      _mm512_storeu_si512(to + n, both);
    }
}

// Neighbours in a row become pairs of the transposed table, to[k][n] = (from[n][2k], from[n][2k+1]): for sums along
// rows. `to` has `padded` columns, the last ones zero.
inline void pair_columns(pair* to, const half* from, long stride, long rows, long padded, long width) {
  for (long n = 0; n < padded; ++n) {
    const pair* row = (const pair*)(from + n * stride);
    for (long k = 0; k < width / 2; ++k) to[k * padded + n] = n < rows ? row[k] : 0;
  }
}

inline __m512 power_of_two(__m512 x) {  // of numbers up to 0, with a relative error of 5e-6
  x = _mm512_max_ps(_mm512_set1_ps(-126.0f), x);  // this order keeps nan
  const __m512 whole = _mm512_roundscale_ps(x, 0), part = _mm512_sub_ps(x, whole);
  __m512 y = _mm512_set1_ps(9.55408e-3f);
  for (float next : {5.587055e-2f, 2.4024698e-1f, 6.93128e-1f, 9.9999946e-1f})
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(next));
  return _mm512_scalef_ps(y, whole);
}

// to = softmax(scale * row) over the first `count` numbers, 0 in the rest of `padded`; row is overwritten.
inline void softmax(half* to, float* row, long count, long padded, float scale) {
  const __mmask16 last = (1u << (count - (padded - kLanes))) - 1;
  const auto there = [&](long n) { return n + kLanes < padded ? (__mmask16)0xffff : last; };
  __m512 most = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  for (long n = 0; n < padded; n += kLanes) most = _mm512_mask_max_ps(most, there(n), most, _mm512_loadu_ps(row + n));
  const __m512 factor = _mm512_set1_ps(scale * 1.44269504f);
  const __m512 shift = _mm512_mul_ps(_mm512_set1_ps(_mm512_reduce_max_ps(most)), factor);
  __m512 sum = _mm512_setzero_ps();
  for (long n = 0; n < padded; n += kLanes) {
    const __m512 power = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(row + n), factor, shift));
    _mm512_storeu_ps(row + n, _mm512_maskz_mov_ps(there(n), power));
    sum = _mm512_mask_add_ps(sum, there(n), sum, power);
  }
  const __m512 over = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(sum));
  for (long n = 0; n < padded; n += kLanes) narrow(to + n, _mm512_mul_ps(_mm512_loadu_ps(row + n), over));
}

struct Scratch {  // per thread
  std::vector<pair> pairs;
  std::vector<float> sums;
  std::vector<half> halves;
};
thread_local Scratch scratch;

}  // namespace

// Strides of heads: `image`, `token` and `head` are the distances between neighbours, in numbers.
struct Strides {
  long image, token, head;
};
struct Sizes {
  long images, heads, n_queries, n_keys, side;
};

// out [images n_queries heads side], weights [images heads n_queries padded] or null
extern "C" void attention(const half* q, Strides at_q, const half* k, const half* v, Strides at_kv, half* out,
                          half* weights, Sizes size, float scale, int threads) {
  const long heads = size.heads, n_queries = size.n_queries, n_keys = size.n_keys, side = size.side;
  const long padded = whole_lanes(n_keys);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long job = 0; job < size.images * heads; ++job) {
    const long image = job / heads, head = job % heads;
    const long kv_start = image * at_kv.image + head * at_kv.head;
    pair* keys = room(scratch.pairs, padded * side);
    pair* values = keys + padded * side / 2;
    float* scores = room(scratch.sums, kRows * (padded + side));
    float* mixed = scores + kRows * padded;
    half* some = room(scratch.halves, kRows * padded);
    pair_columns(keys, k + kv_start, at_kv.token, n_keys, padded, side);
    std::fill(values + n_keys / 2 * side, values + padded / 2 * side, 0);
    pair_rows(values, v + kv_start, at_kv.token, n_keys, side);
    const half* query = q + image * at_q.image + head * at_q.head;
    for (long i = 0; i < n_queries; i += kRows) {
      const int rows = std::min<long>(kRows, n_queries - i);
      half* weight = weights ? weights + (job * n_queries + i) * padded : some;
      multiply(rows, padded, side / 2, (const pair*)(query + i * at_q.token), at_q.token / 2, 1, keys, scores);
      for (int m = 0; m < rows; ++m) softmax(weight + m * padded, scores + m * padded, n_keys, padded, scale);
      multiply(rows, side, padded / 2, (const pair*)weight, padded / 2, 1, values, mixed);
      for (int m = 0; m < rows; ++m)
        narrow(out + ((image * n_queries + i + m) * heads + head) * side, mixed + m * side, side);
    }
  }
}

// grad [images n_queries heads side]; dq has the layout of q, dk and dv that of k and v, each with its own strides
extern "C" void attention_backward(const half* grad, const half* weights, const half* q, Strides at_q, const half* k,
                                   const half* v, Strides at_kv, half* dq, Strides at_dq, half* dk, half* dv,
                                   Strides at_dkv, Sizes size, float scale, int threads) {
  const long heads = size.heads, n_queries = size.n_queries, n_keys = size.n_keys, side = size.side;
  const long padded = whole_lanes(n_keys), pairs = (n_queries + 1) / 2, token = heads * side;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long job = 0; job < size.images * heads; ++job) {
    const long image = job / heads, head = job % heads;
    const long q_start = image * at_q.image + head * at_q.head, kv_start = image * at_kv.image + head * at_kv.head;
    pair* values = room(scratch.pairs, padded * side + 2 * pairs * (side + padded));
    pair* keys = values + padded * side / 2;
    pair* queries = keys + padded * side / 2;
    pair* grads = queries + pairs * side;
    pair* shares = grads + pairs * side;
    pair* slopes = shares + pairs * padded;
    float* scores = room(scratch.sums, kRows * (padded + side));
    float* sums = scores + kRows * padded;
    half* slope = room(scratch.halves, kRows * padded);
    const half* given = grad + image * n_queries * token + head * side;
    const half* weight = weights + job * n_queries * padded;
    pair_columns(values, v + kv_start, at_kv.token, n_keys, padded, side);
    std::fill(keys + n_keys / 2 * side, keys + padded / 2 * side, 0);
    pair_rows(keys, k + kv_start, at_kv.token, n_keys, side);
    pair_rows(queries, q + q_start, at_q.token, n_queries, side);
    pair_rows(grads, given, token, n_queries, side);
    pair_rows(shares, weight, padded, n_queries, padded);
    for (long i = 0; i < n_queries; i += kRows) {
      const int rows = std::min<long>(kRows, n_queries - i);
      multiply(rows, padded, side / 2, (const pair*)(given + i * token), token / 2, 1, values, scores);
      for (int m = 0; m < rows; ++m) {  // through the softmax: weight * (score - sum of weight * score) * scale
        const half* w = weight + (i + m) * padded;
        const float* s = scores + m * padded;
        __m512 sum = _mm512_setzero_ps();
        for (long n = 0; n < padded; n += kLanes)
          sum = _mm512_fmadd_ps(widen(load(w + n)), _mm512_loadu_ps(s + n), sum);
        const __m512 factor = _mm512_set1_ps(scale), mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) * scale);
        for (long n = 0; n < padded; n += kLanes)
          narrow(slope + m * padded + n,
                 _mm512_mul_ps(widen(load(w + n)), _mm512_fmsub_ps(_mm512_loadu_ps(s + n), factor, mean)));
      }
      pair_rows(slopes + i / 2 * padded, slope, padded, rows, padded);
      multiply(rows, side, padded / 2, (const pair*)slope, padded / 2, 1, keys, sums);
      for (int m = 0; m < rows; ++m)
        narrow(dq + image * at_dq.image + (i + m) * at_dq.token + head * at_dq.head, sums + m * side, side);
    }
    for (long j = 0; j < n_keys; j += kRows) {
      const int rows = std::min<long>(kRows, n_keys - j);
      const long at = image * at_dkv.image + j * at_dkv.token + head * at_dkv.head;
      multiply(rows, side, pairs, slopes + j, 1, padded, queries, sums);
      for (int m = 0; m < rows; ++m) narrow(dk + at + m * at_dkv.token, sums + m * side, side);
      multiply(rows, side, pairs, shares + j, 1, padded, grads, sums);
      for (int m = 0; m < rows; ++m) narrow(dv + at + m * at_dkv.token, sums + m * side, side);
    }
  }
}
