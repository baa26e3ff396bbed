// Attention of one head of one image at a time, so that its tables stay in the cache: exact softmax, float32 sums.
//
// The table of attention weights is kept for backward, in bfloat16 with rows padded to whole lanes, as an explicit
// softmax keeps it. Queries, keys and values are read in place from the linear layer's output, by strides.

#include "attention.h"
#include "products.h"

#include <limits>

namespace {

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

void attention(const half* q, Strides at_q, const half* k, const half* v, Strides at_kv, half* out,
               half* weights, HeadSizes size, float scale, int threads) {
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

void attention_backward(const half* grad, const half* weights, const half* q, Strides at_q, const half* k,
                        const half* v, Strides at_kv, half* dq, Strides at_dq, half* dk, half* dv,
                        Strides at_dkv, HeadSizes size, float scale, int threads) {
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
