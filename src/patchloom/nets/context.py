"""A timm block in which all tokens ask and only some answer (MP3 section 3): the others cost no keys and values."""

from __future__ import annotations

import torch
from timm.layers import Attention
from timm.models.vision_transformer import Block
from torch import Tensor
from torch.nn import functional as F


def context_block(block: Block, tokens: Tensor, serving: Tensor) -> Tensor:
    """A block over tokens [b t d] in which those at the indices ``serving`` [b m] alone are keys and values."""
    normed = block.norm1(tokens)
    rows = torch.arange(len(serving), device=serving.device)[:, None]
    attended = _context_attention(block.attn, normed, normed[rows, serving])
    tokens = tokens + block.drop_path1(block.ls1(attended))
    return tokens + block.drop_path2(block.ls2(block.mlp(block.norm2(tokens))))


def _context_attention(attn: Attention, asking: Tensor, serving: Tensor) -> Tensor:
    """timm's attention with queries from ``asking`` [b t d], keys and values from ``serving`` [b m d]."""
    heads, side = attn.num_heads, attn.head_dim
    parts = [heads * side, 2 * heads * side]
    weights = attn.qkv.weight.split(parts)
    biases = (None, None) if attn.qkv.bias is None else attn.qkv.bias.split(parts)
    q = F.linear(asking, weights[0], biases[0]).unflatten(-1, (heads, side)).transpose(1, 2)
    k, v = F.linear(serving, weights[1], biases[1]).unflatten(-1, (2, heads, side)).permute(2, 0, 3, 1, 4)
    q, k = attn.q_norm(q), attn.k_norm(k)
    if attn.fused_attn:
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=attn.attn_drop.p if attn.training else 0.0)
    else:  # in bfloat16 on CPUs the fused kernel is the slower one
        mixed = attn.attn_drop((q * attn.scale @ k.mT).softmax(-1)) @ v
    mixed = attn.norm(mixed.transpose(1, 2).flatten(2))
    return attn.proj_drop(attn.proj(mixed))
