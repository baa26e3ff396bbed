// A transformer block, forward and backward: the part before its attention (norm, queries, keys and values), the
// attention, and the part after it (projection, norm, MLP).
//
// Each thread takes a few rows (tokens) at a time through a part. Everything between two products stays in its
// cache: norms, GELU, bias and residual sums cost arithmetic, but no passes over memory. Weights are float32 and are
// rounded to bfloat16 once a call, in the layout that the products read.

#include "attention.h"
#include "products.h"

#include <utility>

namespace {

constexpr long kTile = 16 * kRows;  // rows that a thread takes at a time

// Calls work(thread, first row, number of rows). The same rows always fall to the same thread, so that sums over rows
// are deterministic.
template <class Work>
void for_tiles(long rows, int threads, Work work) {
  const long each = ((rows + threads - 1) / threads + kRows - 1) / kRows * kRows;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long thread = 0; thread < threads; ++thread) {
    const long end = std::min(rows, (thread + 1) * each);
    for (long row = thread * each; row < end; row += kTile) work(thread, row, std::min(kTile, end - row));
  }
}

// A weight [out in] as the right side of products, in panels of kPanel columns that lie one after another:
// along its inputs, for x W^T (columns are outputs); along its outputs, for the gradient of x (columns are inputs).
enum Along { kInputs, kOutputs };

void pack(pair* to, const float* weight, long outputs, long inputs, Along along, int threads) {
  const long columns = along == kInputs ? outputs : inputs, depth = (along == kInputs ? inputs : outputs) / 2;
  alignas(64) static const uint16_t apart[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i mixed = _mm512_load_si512(apart);
  const __m512i every = _mm512_mullo_epi32(_mm512_set1_epi32(kLanes), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9,
                                                                                       10, 11, 12, 13, 14, 15));
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long n = 0; n < columns; n += kLanes) {
    const long first = n / kPanel * kPanel, across = std::min(kPanel, columns - first);
    pair* panel = to + first * depth + n - first;
    if (along == kOutputs) {
      for (long k = 0; k < depth; ++k) {
        const float* at = weight + 2 * k * inputs + n;
        const __m512i two = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(at + inputs), _mm512_loadu_ps(at));
        _mm512_storeu_si512(panel + k * across, _mm512_permutexvar_epi16(mixed, two));
      }
      continue;
    }
    for (long k = 0; k < depth; k += kLanes) {  // transposes 16 x 16 pairs, or 16 x 8 at the end
      const long some = std::min(kLanes, depth - k);
      alignas(64) pair table[kLanes * kLanes];
      for (long m = 0; m < kLanes; ++m)
        for (long i = 0; i < 2 * some; i += kLanes)
          narrow((half*)(table + m * kLanes) + i, _mm512_loadu_ps(weight + (n + m) * inputs + 2 * k + i));
      for (long i = 0; i < some; ++i)
        _mm512_storeu_si512(panel + (k + i) * across, _mm512_i32gather_epi32(every, table + i, 4));
    }
  }
}

// Product of rows x [rows 2 depth] with a packed weight. Calls then(row, column, width, sums) for pieces of it.
template <class Then>
void product(const half* x, long rows, const pair* packed, long depth, long columns, Then then) {
  alignas(64) float sums[kRows * kPanel];
  for (long n = 0; n < columns; n += kPanel) {
    const long across = std::min(kPanel, columns - n);
    for (long i = 0; i < rows; i += kRows) {
      const int some = std::min<long>(kRows, rows - i);
      const pair* a = (const pair*)(x + i * 2 * depth);
      kTiles[some - 1][across / kLanes - 1](depth, a, depth, 1, packed + n * depth, across, sums, kPanel, false);
      for (int m = 0; m < some; ++m) then(i + m, n, across, sums + m * kPanel);
    }
  }
}

// Calls then(column, numbers) with sums + bias.
template <class Then>
inline void add_bias(const float* sums, const float* bias, long width, Then then) {
  for (long c = 0; c < width; c += kLanes) then(c, _mm512_add_ps(_mm512_loadu_ps(sums + c), _mm512_loadu_ps(bias + c)));
}

inline void add_to(float* sum, __m512 value) { _mm512_storeu_ps(sum, _mm512_add_ps(_mm512_loadu_ps(sum), value)); }

inline void add(float* sums, const float* more, long count) {
  for (long n = 0; n < count; n += kLanes) add_to(sums + n, _mm512_loadu_ps(more + n));
}

// P(normal <= x), within 3e-7: a least-squares fit over |x| <= 5 in 2 (x / 5)^2 - 1; beyond that 0 or 1
constexpr float kEnd = 5.0f;
constexpr float kBelow[] = {5.83948975e-04f,  -1.60107692e-03f, 1.79106439e-03f,  -2.71606981e-03f, 6.34054886e-03f,
                            -1.11368708e-02f, 1.64349023e-02f,  -2.32793447e-02f, 3.14353332e-02f,  -4.04409356e-02f,
                            5.15210368e-02f,  -7.02963546e-02f, 1.41363785e-01f};

inline __m512 below(__m512 x) {
  const __m512 end = _mm512_set1_ps(kEnd), start = _mm512_set1_ps(-kEnd), one = _mm512_set1_ps(1.0f);
  const __m512 inside = _mm512_max_ps(start, _mm512_min_ps(end, x));  // this order keeps nan
  const __m512 at = _mm512_fmsub_ps(_mm512_mul_ps(inside, inside), _mm512_set1_ps(2 / (kEnd * kEnd)), one);
  __m512 y = _mm512_set1_ps(kBelow[0]);
#pragma GCC unroll 12
  for (int i = 1; i < 13; ++i) y = _mm512_fmadd_ps(y, at, _mm512_set1_ps(kBelow[i]));
  y = _mm512_fmadd_ps(y, inside, _mm512_set1_ps(0.5f));
  y = _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, end, _CMP_GT_OQ), one);
  return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, start, _CMP_LT_OQ), _mm512_setzero_ps());
}

// x times the density of the normal distribution
inline __m512 x_density(__m512 x) {
  const __m512 square = _mm512_mul_ps(x, x);
  return _mm512_mul_ps(_mm512_mul_ps(x, _mm512_set1_ps(0.39894228f)),
                       power_of_two(_mm512_mul_ps(square, _mm512_set1_ps(-0.5f * 1.44269504f))));
}

struct Norm {
  const float *weight, *bias;
  float eps;
};

struct Moments {
  __m512 mean, over;  // over: 1 / deviation
};

inline Moments moments(const float* row, long width, float eps) {
  __m512 total = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
  for (long n = 0; n < width; n += kLanes) total = _mm512_add_ps(total, _mm512_loadu_ps(row + n));
  const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(total) / width);
  for (long n = 0; n < width; n += kLanes) {
    const __m512 off = _mm512_sub_ps(_mm512_loadu_ps(row + n), mean);
    squares = _mm512_fmadd_ps(off, off, squares);
  }
  return {mean, _mm512_set1_ps(1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(squares) / width + eps))};
}

inline __m512 normed(const Moments& at, const float* from) {
  return _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(from), at.mean), at.over);
}

inline void norm(half* to, const float* row, long width, const Norm& by) {
  const Moments at = moments(row, width, by.eps);
  for (long n = 0; n < width; n += kLanes)
    narrow(to + n, _mm512_fmadd_ps(normed(at, row + n), _mm512_loadu_ps(by.weight + n), _mm512_loadu_ps(by.bias + n)));
}

// slope += gradient `grad` of the norm's output, taken through the norm of `row`. The output is computed again, in
// `to`; sums [2 width] are those of the gradients of weight and bias.
inline void norm_backward(float* slope, half* to, const float* grad, const float* row, long width, const Norm& by,
                          float* sums) {
  const Moments at = moments(row, width, by.eps);
  __m512 plain = _mm512_setzero_ps(), along = _mm512_setzero_ps();
  for (long n = 0; n < width; n += kLanes) {
    const __m512 g = _mm512_loadu_ps(grad + n), y = normed(at, row + n), w = _mm512_loadu_ps(by.weight + n);
    const __m512 d = _mm512_mul_ps(g, w);
    plain = _mm512_add_ps(plain, d);
    along = _mm512_fmadd_ps(d, y, along);
    add_to(sums + n, _mm512_mul_ps(g, y));
    add_to(sums + width + n, g);
    narrow(to + n, _mm512_fmadd_ps(y, w, _mm512_loadu_ps(by.bias + n)));
  }
  const __m512 level = _mm512_set1_ps(_mm512_reduce_add_ps(plain) / width);
  const __m512 tilt = _mm512_set1_ps(_mm512_reduce_add_ps(along) / width);
  for (long n = 0; n < width; n += kLanes) {
    const __m512 d = _mm512_mul_ps(_mm512_loadu_ps(grad + n), _mm512_loadu_ps(by.weight + n));
    const __m512 rest = _mm512_sub_ps(_mm512_sub_ps(d, level), _mm512_mul_ps(normed(at, row + n), tilt));
    add_to(slope + n, _mm512_mul_ps(rest, at.over));
  }
}

struct Scratch {  // per thread
  std::vector<pair> packed, left, right;
  std::vector<half> normed, hidden;
  std::vector<float> tokens, sums;
};
thread_local Scratch scratch;

// Sums over rows, `count` for each thread, that are added up at the end.
struct Sums {
  long count;
  int threads;
  float* all = room(scratch.sums, count * threads);

  Sums(long count, int threads) : count(count), threads(threads) { std::fill(all, all + count * threads, 0.0f); }
  float* of(long thread) { return all + thread * count; }
  float* add_up() {  // in the first thread's part
    for (int thread = 1; thread < threads; ++thread) add(all, of(thread), count);
    return all;
  }
};

inline long place(const long* index, long row) { return index ? index[row] : row; }

}  // namespace

// A block and the shape of its input x [images tokens width]. Queries are the rows of x at query_places [images
// queries], keys and values those at key_places [images keys]; null: all rows. Weights are float32, those of layers
// [out in]; qkv_bias may be null. All widths are multiples of 16.
struct Block {
  long images, tokens, queries, keys, heads, side, width, hidden;
  const long *query_places, *key_places;
  const float *norm1, *norm1_bias, *qkv, *qkv_bias, *proj, *proj_bias, *norm2, *norm2_bias, *fc1, *fc1_bias, *fc2,
      *fc2_bias;
  float eps1, eps2;
  int threads;

  Norm first_norm() const { return {norm1, norm1_bias, eps1}; }
  Norm second_norm() const { return {norm2, norm2_bias, eps2}; }
  long rows() const { return images * queries; }
  long inner() const { return heads * side; }
  // Queries, keys and values are in one table. An index without rows may be null, too.
  bool joint() const { return !query_places && !key_places && queries == tokens && keys == tokens; }
};

namespace {

// Product in front of the attention: `outputs` rows of the weight from `from` on, for the rows of x at `places`.
struct Part {
  const long* places;
  long rows, from, outputs;
};

// The parts in front of the attention: one [images tokens 3 heads side], or queries [images queries heads side], and
// keys and values [images keys 2 heads side].
inline int parts_of(const Block& at, Part (&parts)[2]) {
  const long inner = at.inner();
  parts[0] = {at.query_places, at.rows(), 0, at.joint() ? 3 * inner : inner};
  parts[1] = {at.key_places, at.images * at.keys, inner, 2 * inner};
  return at.joint() ? 1 : 2;
}

struct Heads {
  Strides at_q, at_kv;
  HeadSizes sizes;
  long k, v;  // where keys and values begin
  float scale;

  explicit Heads(const Block& at) : sizes{at.images, at.heads, at.queries, at.keys, at.side} {
    const long inner = at.inner(), q = at.joint() ? 3 * inner : inner, kv = at.joint() ? q : 2 * inner;
    at_q = {at.queries * q, q, at.side};
    at_kv = {at.keys * kv, kv, at.side};
    k = at.joint() ? inner : 0;
    v = k + inner;
    scale = 1.0f / __builtin_sqrtf(at.side);
  }
};

// out [rows outputs] = norm(x) W^T + bias
void before(const Block& at, const Part& part, const float* x, half* out) {
  const long width = at.width, outputs = part.outputs;
  const float* bias = at.qkv_bias ? at.qkv_bias + part.from : nullptr;
  pair* packed = room(scratch.packed, outputs * width / 2);
  pack(packed, at.qkv + part.from * width, outputs, width, kInputs, at.threads);
  for_tiles(part.rows, at.threads, [&](long, long first, long count) {
    half* some = room(scratch.normed, kTile * width);
    for (long m = 0; m < count; ++m)
      norm(some + m * width, x + place(part.places, first + m) * width, width, at.first_norm());
    product(some, count, packed, width / 2, outputs, [&](long m, long n, long across, const float* sums) {
      half* to = out + (first + m) * outputs + n;
      if (!bias) return narrow(to, sums, across);
      add_bias(sums, bias + n, across, [&](long c, __m512 y) { narrow(to + c, y); });
    });
  });
}

// Backward: dx += the gradient; again [rows width] = norm(x), for the gradient of the weight; sums: those of the
// gradients of the norm's weight and bias [2 width], and of the bias [outputs].
void before_backward(const Block& at, const Part& part, const half* grad, const float* x, float* dx, half* again,
                     Sums& sums) {
  const long width = at.width, outputs = part.outputs;
  pair* packed = room(scratch.packed, outputs * width / 2);
  pack(packed, at.qkv + part.from * width, outputs, width, kOutputs, at.threads);
  for_tiles(part.rows, at.threads, [&](long thread, long first, long count) {
    float* own = sums.of(thread);
    float* slopes = room(scratch.tokens, kTile * width);
    const half* given = grad + first * outputs;
    for (long m = 0; m < count; ++m)
      for (long n = 0; n < outputs; n += kLanes) add_to(own + 2 * width + n, widen(load(given + m * outputs + n)));
    product(given, count, packed, outputs / 2, width, [&](long m, long n, long across, const float* sums) {
      std::copy(sums, sums + across, slopes + m * width + n);
    });
    for (long m = 0; m < count; ++m) {
      const long row = place(part.places, first + m) * width;
      norm_backward(dx + row, again + (first + m) * width, slopes + m * width, x + row, width, at.first_norm(), own);
    }
  });
}

// The weights after the attention, packed.
struct Packed {
  pair *proj, *fc1, *fc2;

  Packed(const Block& at, Along along) {
    const long inner = at.inner(), width = at.width, hidden = at.hidden;
    proj = room(scratch.packed, width * (inner + 2 * hidden) / 2);
    fc1 = proj + width * inner / 2;
    fc2 = fc1 + width * hidden / 2;
    pack(proj, at.proj, width, inner, along, at.threads);
    pack(fc1, at.fc1, hidden, width, along, at.threads);
    pack(fc2, at.fc2, width, hidden, along, at.threads);
  }
};

// middle [rows width] = x + mixed Wproj^T + bias; out = middle + MLP(norm(middle)). active and tilt [rows hidden]: the
// values of GELU, and its slopes there. middle, active and tilt are for backward, and may be null.
void after(const Block& at, const half* mixed, const float* x, float* middle, half* active, half* tilt, float* out) {
  const long width = at.width, inner = at.inner(), hidden = at.hidden;
  const Packed packed(at, kInputs);
  for_tiles(at.rows(), at.threads, [&](long, long first, long count) {
    half* some = room(scratch.normed, kTile * width);
    half* values = active ? active + first * hidden : room(scratch.hidden, kTile * hidden);
    float* tokens = middle ? middle + first * width : room(scratch.tokens, kTile * width);
    product(mixed + first * inner, count, packed.proj, inner / 2, width,
            [&](long m, long n, long across, const float* sums) {
              const float* from = x + place(at.query_places, first + m) * width + n;
              add_bias(sums, at.proj_bias + n, across, [&](long c, __m512 y) {
                _mm512_storeu_ps(tokens + m * width + n + c, _mm512_add_ps(_mm512_loadu_ps(from + c), y));
              });
            });
    for (long m = 0; m < count; ++m) norm(some + m * width, tokens + m * width, width, at.second_norm());
    product(some, count, packed.fc1, width / 2, hidden, [&](long m, long n, long across, const float* sums) {
      add_bias(sums, at.fc1_bias + n, across, [&](long c, __m512 y) {
        const __m512 share = below(y);
        narrow(values + m * hidden + n + c, _mm512_mul_ps(y, share));
        if (tilt) narrow(tilt + (first + m) * hidden + n + c, _mm512_add_ps(share, x_density(y)));
      });
    });
    product(values, count, packed.fc2, hidden / 2, width, [&](long m, long n, long across, const float* sums) {
      const float* from = tokens + m * width + n;
      add_bias(sums, at.fc2_bias + n, across, [&](long c, __m512 y) {
        _mm512_storeu_ps(out + (first + m) * width + n + c, _mm512_add_ps(_mm512_loadu_ps(from + c), y));
      });
    });
  });
}

// Tables in bfloat16 for the gradients of the weights: gradients of the outputs of layers, and outputs of a
// norm.
struct Slopes {
  half *dqkv, *dkv, *dmixed, *dproj, *dfc1, *dfc2, *normed;
};

// Backward of `after`: dx += the gradient; sums: those of the gradients of the norm's weight and bias, the biases of
// proj and fc2 [4 width], and that of fc1 [hidden].
void after_backward(const Block& at, const float* grad, const float* middle, const half* tilt, float* dx,
                    const Slopes& to, Sums& sums) {
  const long width = at.width, inner = at.inner(), hidden = at.hidden;
  const Packed packed(at, kOutputs);
  for_tiles(at.rows(), at.threads, [&](long thread, long first, long count) {
    float* dnorm = sums.of(thread);
    float *dproj_bias = dnorm + 2 * width, *dfc2_bias = dproj_bias + width, *dfc1_bias = dfc2_bias + width;
    float* slopes = room(scratch.tokens, kTile * width);
    half *dfc2 = to.dfc2 + first * width, *dfc1 = to.dfc1 + first * hidden, *dproj = to.dproj + first * width;
    for (long m = 0; m < count; ++m)
      for (long n = 0; n < width; n += kLanes) {
        const __m512 g = _mm512_loadu_ps(grad + (first + m) * width + n);
        narrow(dfc2 + m * width + n, g);
        add_to(dfc2_bias + n, g);
      }
    product(dfc2, count, packed.fc2, width / 2, hidden, [&](long m, long n, long across, const float* sums) {
      for (long c = 0; c < across; c += kLanes) {
        const __m512 slope = widen(load(tilt + (first + m) * hidden + n + c));
        const __m512 d = _mm512_mul_ps(_mm512_loadu_ps(sums + c), slope);
        narrow(dfc1 + m * hidden + n + c, d);
        add_to(dfc1_bias + n + c, d);
      }
    });
    product(dfc1, count, packed.fc1, hidden / 2, width, [&](long m, long n, long across, const float* sums) {
      std::copy(sums, sums + across, slopes + m * width + n);
    });
    for (long m = 0; m < count; ++m) {
      const long row = (first + m) * width;
      float* slope = dx + place(at.query_places, first + m) * width;
      std::copy(grad + row, grad + row + width, slope);  // that of the sum; other rows of dx are zero
      norm_backward(slope, to.normed + row, slopes + m * width, middle + row, width, at.second_norm(), dnorm);
      for (long n = 0; n < width; n += kLanes) {
        const __m512 d = _mm512_loadu_ps(slope + n);
        narrow(dproj + m * width + n, d);
        add_to(dproj_bias + n, d);
      }
    }
    product(dproj, count, packed.proj, width / 2, inner, [&](long m, long n, long across, const float* sums) {
      narrow(to.dmixed + (first + m) * inner + n, sums, across);
    });
  });
}

// to [outputs inputs] = grad^T x, the gradient of a weight unless it is null, of grad [rows outputs] and x [rows
// inputs]. Each thread computes some outputs, in blocks of sums that stay in its cache while the rows pass by.
void weight_gradient(const half* grad, const half* x, float* to, long rows, long outputs, long inputs, int threads) {
  if (!to) return;
  if (!rows) std::fill(to, to + outputs * inputs, 0.0f);
  constexpr long kHigh = 336, kBroad = 384, kDeep = 128;  // 0.5 MiB of sums; rows at a time
  const long each = whole_lanes((outputs + threads - 1) / threads), blocks = (each + kHigh - 1) / kHigh;
  const long tall = std::min(kHigh, ((each + blocks - 1) / blocks + 47) / 48 * 48);  // whole lanes and whole tiles
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long thread = 0; thread < threads; ++thread) {
    const long end = std::min(outputs, (thread + 1) * each);
    pair *left = room(scratch.left, kHigh * kDeep / 2), *right = room(scratch.right, kBroad * kDeep / 2);
    for (long n = 0; n < inputs; n += kBroad)
      for (long m = thread * each; m < end; m += tall) {
        const long broad = std::min(kBroad, inputs - n), high = std::min(tall, end - m);
        for (long row = 0; row < rows; row += kDeep) {
          const long deep = std::min(kDeep, rows - row), depth = (deep + 1) / 2;
          pair_rows(left, grad + row * outputs + m, outputs, deep, high);
          for (long c = 0; c < broad; c += kPanel)
            pair_rows(right + c * depth, x + row * inputs + n + c, inputs, deep, std::min(kPanel, broad - c));
          for (long c = 0; c < broad; c += kPanel) {
            const long across = std::min(kPanel, broad - c);
            for (long i = 0; i < high; i += kRows) {
              const int some = std::min<long>(kRows, high - i);
              kTiles[some - 1][across / kLanes - 1](depth, left + i, 1, high, right + c * depth, across,
                                                    to + (m + i) * inputs + n + c, inputs, row > 0);
            }
          }
        }
      }
  }
}

}  // namespace

// y = x + attention(norm(x)) and out = y + MLP(norm(y)). For backward: the heads (kv null: q has all three), what they
// were mixed to, the attention weights, y (middle), and values and slopes of GELU (active, tilt). The last four may be
// null.
extern "C" void block(const Block* at, const float* x, half* q, half* kv, half* mixed, half* weights, float* middle,
                      half* active, half* tilt, float* out) {
  Part parts[2];
  const int count = parts_of(*at, parts);
  half* heads[] = {q, kv};
  for (int i = 0; i < count; ++i) before(*at, parts[i], x, heads[i]);
  const Heads by(*at);
  const half* other = count > 1 ? kv : q;
  attention(q, by.at_q, other + by.k, other + by.v, by.at_kv, mixed, weights, by.sizes, by.scale, at->threads);
  after(*at, mixed, x, middle, active, tilt, out);
}

// The number of bfloat16 numbers that block_backward needs as `space`.
extern "C" long space_for(const Block* at) {
  const long inner = at->inner(), keys = at->images * at->keys;
  return at->rows() * (2 * inner + 3 * at->width + at->hidden) + keys * (2 * inner + at->width);
}

// dx = the gradient of x; that of a weight unless it is null; and of the rest: dbefore [2 width + 3 inner] of the first
// norm's weight and bias and of the bias behind it; dafter [4 width + hidden] of the second norm's weight and bias and
// the biases of proj, fc2 and fc1. Both are zero at the start.
extern "C" void block_backward(const Block* at, const float* grad, const float* x, const half* q, const half* kv,
                               const half* mixed, const half* weights, const float* middle, const half* active,
                               const half* tilt, half* space, float* dx, float* dqkv, float* dproj, float* dfc1,
                               float* dfc2, float* dbefore, float* dafter) {
  const long rows = at->rows(), width = at->width, inner = at->inner(), hidden = at->hidden;
  const long keys = at->images * at->keys, others = std::max(rows, keys);
  const auto take = [&](long count) { return std::exchange(space, space + count); };
  Slopes to;
  to.dqkv = take(rows * inner);  // followed by dkv, if that is a table of its own
  to.dkv = take(keys * 2 * inner);
  to.dmixed = take(rows * inner);
  to.dproj = take(rows * width);
  to.dfc1 = take(rows * hidden);
  to.dfc2 = take(rows * width);
  to.normed = take(others * width);
  if (at->queries < at->tokens || at->query_places) std::fill(dx, dx + at->images * at->tokens * width, 0.0f);
  {
    Sums sums(4 * width + hidden, at->threads);
    after_backward(*at, grad, middle, tilt, dx, to, sums);
    add(dafter, sums.add_up(), 4 * width + hidden);
  }
  weight_gradient(to.dfc2, active, dfc2, rows, width, hidden, at->threads);
  weight_gradient(to.dfc1, to.normed, dfc1, rows, hidden, width, at->threads);
  weight_gradient(to.dproj, mixed, dproj, rows, width, inner, at->threads);
  Part parts[2];
  const int count = parts_of(*at, parts);
  const Heads by(*at);
  const half* other = count > 1 ? kv : q;
  half* slopes[] = {to.dqkv, count > 1 ? to.dkv : to.dqkv};
  attention_backward(to.dmixed, weights, q, by.at_q, other + by.k, other + by.v, by.at_kv, slopes[0], by.at_q,
                     slopes[1] + by.k, slopes[1] + by.v, by.at_kv, by.sizes, by.scale, at->threads);
  for (int i = 0; i < count; ++i) {
    const Part& part = parts[i];
    Sums sums(2 * width + part.outputs, at->threads);
    before_backward(*at, part, slopes[i], x, dx, to.normed, sums);
    float* found = sums.add_up();
    add(dbefore, found, 2 * width);
    add(dbefore + 2 * width + part.from, found + 2 * width, part.outputs);
    weight_gradient(slopes[i], to.normed, dqkv ? dqkv + part.from * width : nullptr, part.rows, part.outputs, width,
                    at->threads);
  }
}
