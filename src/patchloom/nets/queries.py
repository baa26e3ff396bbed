"""Queries of some tokens, keys and values of others."""

from __future__ import annotations

from timm.layers import Attention
from torch import Tensor
from torch.nn import functional as F


def heads_of(attn: Attention, asking: Tensor, serving: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [b t h d] of ``asking`` [b t w], keys and values [b m 2 h d] of ``serving`` [b m w]."""
    heads, side = attn.num_heads, attn.head_dim
    parts = [heads * side, 2 * heads * side]
    weights = attn.qkv.weight.split(parts)
    biases = (None, None) if attn.qkv.bias is None else attn.qkv.bias.split(parts)
    q = F.linear(asking, weights[0], biases[0]).unflatten(-1, (heads, side))
    return q, F.linear(serving, weights[1], biases[1]).unflatten(-1, (2, heads, side))
