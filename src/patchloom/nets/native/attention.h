// Attention of given queries, keys and values.

#pragma once

#include "bfloat16.h"

// Strides of heads: `image`, `token` and `head` are the distances between neighbours, in numbers.
struct Strides {
  long image, token, head;
};
struct HeadSizes {
  long images, heads, n_queries, n_keys, side;
};

// out [images n_queries heads side], weights [images heads n_queries padded] or null
void attention(const half* q, Strides at_q, const half* k, const half* v, Strides at_kv, half* out,
               half* weights, HeadSizes size, float scale, int threads);

// grad [images n_queries heads side]; dq has the layout of q, dk and dv that of k and v, each with its own strides
void attention_backward(const half* grad, const half* weights, const half* q, Strides at_q, const half* k,
                        const half* v, Strides at_kv, half* dq, Strides at_dq, half* dk, half* dv,
                        Strides at_dkv, HeadSizes size, float scale, int threads);
