"""Attention weights of stock timm blocks, recomputed beside them; the blocks themselves run unchanged.

A fused kernel does not return its weights. So they are computed again here from the block's input and its queries and
keys, while the tokens go through the untouched block. Letters as in `patchloom.nets.encode`; t is the number of tokens,
class and register tokens included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from timm.models.cait import ClassAttn, LayerScaleBlockClassAttn
from torch import Tensor

from patchloom.nets.finetune import RelativeAttention
from patchloom.nets.heads import InstanceHead
from patchloom.nets.sparse_attention import Rotations, attention_of, heads_of, rotate_patches
from patchloom.nets.swin import PlainViT, blocks_of


def attention_each(vit: PlainViT, tokens: Tensor, rotations: Rotations | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Compute the attention weights of each block, and its output as in `attend_each`, which has the same arguments.

    Yields:
        Weights [b heads t t] in float32, each row sums to 1, class and register tokens first; and the tokens [b t d]
        after the block, without the final norm.
    """
    for i, block in enumerate(blocks_of(vit)):
        rope = None if rotations is None else rotations[i]
        attn, normed = attention_of(block), block.norm1(tokens)
        q, keys_values = heads_of(attn, normed, normed)
        q, k = attn.q_norm(q.transpose(1, 2)), attn.k_norm(keys_values[:, :, 0].transpose(1, 2))
        if rope is not None:
            q, k = rotate_patches(attn, q, rope), rotate_patches(attn, k, rope)
        scores = attn.scale * q.float() @ k.float().mT
        if isinstance(attn, RelativeAttention):
            scores = scores + attn.rel_pos.get_bias()
        weights = scores.softmax(-1)
        tokens = block(tokens) if rope is None else block(tokens, rope=rope)
        yield weights, tokens


def class_attention_each(head: InstanceHead, patches: Tensor) -> Iterator[Tensor]:
    """Compute the attention weights [b heads t] of the class token in each block of a head (CaiT; ExtreMA section 3).

    Args:
        head: in eval mode.
        patches: [b n d] patch tokens before the final norm.
    """
    token = head.token.expand(len(patches), -1, -1)
    for block in cast(Iterable[LayerScaleBlockClassAttn], head.layers):
        attn, tokens = cast(ClassAttn, block.attn), block.norm1(torch.cat([token, patches], dim=1))
        both = attn.q(tokens[:, :1]), attn.k(tokens)
        q, k = (one.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2).float() for one in both)
        yield (attn.scale * q @ k.mT).softmax(-1)[:, :, 0]
        token = block(patches, token)
