// Kernels bound by memory rather than arithmetic: GELU, and the norm of a sum, each in one pass over its numbers.

#include "bfloat16.h"

namespace {

// The polynomials are least-squares fits over |x| <= 5 in 2 (x / 5)^2 - 1. Beyond that both functions are 0 or 1,
// within 3e-7 and 7e-6.
constexpr float kEnd = 5.0f;

// P(normal <= x), within 3e-7
constexpr float kBelow[] = {5.83948975e-04f,  -1.60107692e-03f, 1.79106439e-03f,  -2.71606981e-03f, 6.34054886e-03f,
                            -1.11368708e-02f, 1.64349023e-02f,  -2.32793447e-02f, 3.14353332e-02f,  -4.04409356e-02f,
                            5.15210368e-02f,  -7.02963546e-02f, 1.41363785e-01f};
// the derivative of x P(normal <= x), within 4e-6
constexpr float kSlope[] = {9.74944700e-03f,  -2.44127661e-02f, 1.91222765e-02f,  -1.84961073e-02f, 4.99572381e-02f,
                            -7.67445192e-02f, 8.13052729e-02f,  -8.21321011e-02f, 8.00737664e-02f,  -7.20449761e-02f,
                            6.65920824e-02f,  -7.51012564e-02f, 1.42133534e-01f};

// 1/2 + x polynomial(x^2)
inline __m512 odd(const float (&factors)[13], __m512 x) {
  const __m512 end = _mm512_set1_ps(kEnd), start = _mm512_set1_ps(-kEnd), one = _mm512_set1_ps(1.0f);
  const __m512 inside = _mm512_max_ps(start, _mm512_min_ps(end, x));  // this order keeps nan
  const __m512 at = _mm512_fmsub_ps(_mm512_mul_ps(inside, inside), _mm512_set1_ps(2 / (kEnd * kEnd)), one);
  __m512 y = _mm512_set1_ps(factors[0]);
#pragma GCC unroll 12
  for (int i = 1; i < 13; ++i) y = _mm512_fmadd_ps(y, at, _mm512_set1_ps(factors[i]));
  y = _mm512_fmadd_ps(y, inside, _mm512_set1_ps(0.5f));
  y = _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, end, _CMP_GT_OQ), one);
  return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, start, _CMP_LT_OQ), _mm512_setzero_ps());
}

// Sums over rows per thread, `width` of them for each of `kinds`; zero at the start.
inline float* own_sums(float* sums, long thread, int kinds, long width) { return sums + thread * kinds * width; }

inline void add_to(float* sum, __m512 value) { _mm512_storeu_ps(sum, _mm512_add_ps(_mm512_loadu_ps(sum), value)); }

}  // namespace

// out = y P(normal <= y) with y = x + bias. Here and below rows have `width` numbers, a multiple of 16.
extern "C" void gelu(const half* x, const float* bias, half* out, long rows, long width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long row = 0; row < rows; ++row)
    for (long n = 0; n < width; n += kLanes) {
      const __m512 y = _mm512_add_ps(widen(load(x + row * width + n)), _mm512_loadu_ps(bias + n));
      narrow(out + row * width + n, _mm512_mul_ps(y, odd(kBelow, y)));
    }
}

// sums [threads width]: each thread's part of the gradient of the bias. Rows are assigned to threads explicitly, here
// and below, so that sums are deterministic.
extern "C" void gelu_backward(const half* grad, const half* x, const float* bias, half* dx, float* sums, long rows,
                              long width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long thread = 0; thread < threads; ++thread) {
    float* dbias = own_sums(sums, thread, 1, width);
    for (long row = rows * thread / threads; row < rows * (thread + 1) / threads; ++row)
      for (long n = 0; n < width; n += kLanes) {
        const long at = row * width + n;
        const __m512 y = _mm512_add_ps(widen(load(x + at)), _mm512_loadu_ps(bias + n));
        const __m512 d = _mm512_mul_ps(widen(load(grad + at)), odd(kSlope, y));
        narrow(dx + at, d);
        add_to(dbias + n, d);
      }
  }
}

// sum = x + more + shift, out = norm(sum) * weight + bias, stats [rows 2] = mean and 1 / deviation of the rows of sum.
// more, shift and sum may be null: then the norm is that of x itself.
extern "C" void norm(const float* x, const half* more, const float* shift, const float* weight, const float* bias,
                     float* sum, half* out, float* stats, long rows, long width, float eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long row = 0; row < rows; ++row) {
    const float* at = x + row * width;
    __m512 total = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
    if (more) {
      float* to = sum + row * width;
      for (long n = 0; n < width; n += kLanes) {
        const __m512 both = _mm512_add_ps(widen(load(more + row * width + n)), _mm512_loadu_ps(shift + n));
        _mm512_storeu_ps(to + n, _mm512_add_ps(_mm512_loadu_ps(at + n), both));
      }
      at = to;
    }
    for (long n = 0; n < width; n += kLanes) total = _mm512_add_ps(total, _mm512_loadu_ps(at + n));
    const float mean = _mm512_reduce_add_ps(total) / width;
    const __m512 middle = _mm512_set1_ps(mean);
    for (long n = 0; n < width; n += kLanes) {
      const __m512 off = _mm512_sub_ps(_mm512_loadu_ps(at + n), middle);
      squares = _mm512_fmadd_ps(off, off, squares);
    }
    const float over = 1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(squares) / width + eps);
    const __m512 factor = _mm512_set1_ps(over);
    for (long n = 0; n < width; n += kLanes) {
      const __m512 normed = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(at + n), middle), factor);
      narrow(out + row * width + n,
             _mm512_fmadd_ps(normed, _mm512_loadu_ps(weight + n), _mm512_loadu_ps(bias + n)));
    }
    stats[2 * row] = mean;
    stats[2 * row + 1] = over;
  }
}

// dx = beyond + gradient through the norm; dmore is dx in bfloat16; sums [threads 3 width] are each thread's parts of
// the gradients of weight, bias and shift. beyond, the gradient of the sum itself, and dmore may be null.
extern "C" void norm_backward(const half* grad, const float* beyond, const float* sum, const float* stats,
                              const float* weight, float* dx, half* dmore, float* sums, long rows, long width,
                              int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long thread = 0; thread < threads; ++thread) {
    float* dweight = own_sums(sums, thread, 3, width);
    float *dbias = dweight + width, *dshift = dbias + width;
    for (long row = rows * thread / threads; row < rows * (thread + 1) / threads; ++row) {
      const long at = row * width;
      const __m512 mean = _mm512_set1_ps(stats[2 * row]), over = _mm512_set1_ps(stats[2 * row + 1]);
      const auto normed = [&](long n) { return _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(sum + at + n), mean), over); };
      __m512 plain = _mm512_setzero_ps(), along = _mm512_setzero_ps();
      for (long n = 0; n < width; n += kLanes) {
        const __m512 g = widen(load(grad + at + n)), y = normed(n);
        const __m512 slope = _mm512_mul_ps(g, _mm512_loadu_ps(weight + n));
        plain = _mm512_add_ps(plain, slope);
        along = _mm512_fmadd_ps(slope, y, along);
        add_to(dweight + n, _mm512_mul_ps(g, y));
        add_to(dbias + n, g);
      }
      const __m512 level = _mm512_set1_ps(_mm512_reduce_add_ps(plain) / width);
      const __m512 tilt = _mm512_set1_ps(_mm512_reduce_add_ps(along) / width);
      for (long n = 0; n < width; n += kLanes) {
        const __m512 slope = _mm512_mul_ps(widen(load(grad + at + n)), _mm512_loadu_ps(weight + n));
        __m512 d = _mm512_mul_ps(_mm512_sub_ps(_mm512_sub_ps(slope, level), _mm512_mul_ps(normed(n), tilt)), over);
        if (beyond) d = _mm512_add_ps(d, _mm512_loadu_ps(beyond + at + n));
        _mm512_storeu_ps(dx + at + n, d);
        if (!dmore) continue;
        narrow(dmore + at + n, d);
        add_to(dshift + n, d);
      }
    }
  }
}
