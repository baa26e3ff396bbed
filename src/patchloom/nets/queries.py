"""Queries of some tokens, keys and values of others."""

from __future__ import annotations

from timm.layers import Attention
from torch import Tensor
from torch.nn import functional as F


def heads_of(attn: Attention, queries: Tensor, keys_values: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [b t h d] of ``queries`` [b t w], keys and values [b m 2 h d] of ``keys_values`` [b m w]."""
    heads, side = attn.num_heads, attn.head_dim
    parts = [heads * side, 2 * heads * side]
    weights = attn.qkv.weight.split(parts)
    biases = (None, None) if attn.qkv.bias is None else attn.qkv.bias.split(parts)
    q = F.linear(queries, weights[0], biases[0]).unflatten(-1, (heads, side))
    return q, F.linear(keys_values, weights[1], biases[1]).unflatten(-1, (2, heads, side))
