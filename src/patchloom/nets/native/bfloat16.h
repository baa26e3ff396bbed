// Common parts of the kernels: bfloat16 numbers, 16 at a time.
//
// Everything is for processors with AVX512-BF16, whose instruction multiplies two pairs of bfloat16 numbers in each of
// 16 lanes and adds both products to a float32 number. So tables are stored as pairs of numbers.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <vector>

using half = uint16_t;  // a bfloat16
using pair = uint32_t;  // two of them, neighbours in memory

constexpr long kLanes = 16;

inline long whole_lanes(long n) { return (n + kLanes - 1) / kLanes * kLanes; }

inline __m512 widen(__m256i halves) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

inline __m256i load(const half* from) { return _mm256_loadu_si256((const __m256i*)from); }

inline void narrow(half* to, __m512 from) {  // rounds to nearest
  _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(from));
}

inline void narrow(half* to, const float* from, long count) {
  for (long n = 0; n < count; n += kLanes) narrow(to + n, _mm512_loadu_ps(from + n));
}

// Buffer that a thread keeps, so that no step allocates memory.
template <class T>
T* room(std::vector<T>& kept, long count) {
  if ((long)kept.size() < count) kept.resize(count);
  return kept.data();
}
