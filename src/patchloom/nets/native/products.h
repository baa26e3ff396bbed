// Products of small tables of bfloat16 numbers with float32 sums, on the registers of one core, and their layouts.

#pragma once

#include "bfloat16.h"

namespace {

constexpr int kRows = 6, kWide = 4;  // 24 sums, 4 numbers and 1 factor in 32 registers
constexpr long kPanel = kWide * kLanes;

// c[M][16 N] = a b, or its sum with c if `more`. a: the pair of row m and step k lies at m * row + k * step. b has rows
// of `across` pairs, c of `width` numbers.
// Loops over M or N are unrolled by pragma; otherwise the compiler keeps the sums in memory before and after the loop.
template <int M, int N>
void tile(long depth, const pair* a, long row, long step, const pair* b, long across, float* c, long width, bool more) {
  __m512 sums[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sums[m][n] = more ? _mm512_loadu_ps(c + m * width + n * kLanes) : _mm512_setzero_ps();
  for (long k = 0; k < depth; ++k) {
    __m512bh right[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) right[n] = (__m512bh)_mm512_loadu_si512(b + k * across + n * kLanes);
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

using Tile = void (*)(long, const pair*, long, long, const pair*, long, float*, long, bool);
#define TILES(M) {tile<M, 1>, tile<M, 2>, tile<M, 3>, tile<M, 4>}
constexpr Tile kTiles[kRows][kWide] = {TILES(1), TILES(2), TILES(3), TILES(4), TILES(5), TILES(6)};

// The same for `rows` rows, at most kRows, and any number of whole lanes; b and c have rows of the same length.
inline void multiply(int rows, long width, long depth, const pair* a, long row, long step, const pair* b, float* c) {
  for (long n = 0; n < width; n += kPanel) {
    const int wide = std::min<long>(kWide, (width - n) / kLanes);
    kTiles[rows - 1][wide - 1](depth, a, row, step, b + n, width, c + n, width, false);
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

}  // namespace
