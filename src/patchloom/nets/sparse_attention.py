"""Forward passes of timm blocks with few queries, or few keys and values; the others are never computed.

Rotations (RoPE) are [b h k 2e]: sines, then cosines, of the e channels of a head, for the k patch tokens; b and h may
be 1. Class and register tokens in front of the patches are never rotated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from timm.layers import Attention, AttentionRope, apply_rot_embed_cat
from timm.models.eva import EvaAttention, EvaBlock
from timm.models.vision_transformer import Block
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from patchloom.patches.tokens import gather_tokens

AnyBlock = Block | EvaBlock
AnyAttention = Attention | EvaAttention | AttentionRope
Rotations = Sequence[Tensor]  # of each block, as above


class BlockKernels(NamedTuple):
    """Kernels of a timm block in place of torch's, set on blocks by `patchloom.nets.performance.use_kernels`.

    Attributes:
        know: whether the kernels implement all parts of a block.
        serve: whether they can compute a block on given tokens now, depending on autocast and the device.
        compute: a block, on tokens [b t d], with ``keys_values`` as in `run_blocks` and ``first`` as in `query_block`.
        missing: short reason why they are not available on this machine, after trying; None: they are.
    """

    know: Callable[[Block], bool]
    serve: Callable[[Any, Tensor], bool]
    compute: Callable[..., Tensor]
    missing: Callable[[], str | None]


def kernels_of(block: AnyBlock, tokens: Tensor) -> BlockKernels | None:
    """Return the kernels that can compute a block on ``tokens`` now; None: torch's."""
    kernels: BlockKernels | None = getattr(block, "kernels", None)
    return kernels if kernels is not None and kernels.serve(block, tokens) else None


def run_blocks(
    blocks: Iterable[AnyBlock],
    tokens: Tensor,
    *,
    rotations: Rotations | None = None,
    keys_values: Tensor | None = None,
    causal: bool = False,
    checkpointing: bool = False,
) -> Tensor:
    """Run tokens [b t d] through all blocks.

    Args:
        blocks: timm blocks.
        tokens: [b t d].
        rotations: those of the patch tokens, for each block; None: none.
        keys_values: [b m] indices of the tokens that are keys and values; None: all.
        causal: whether every token attends to itself and to earlier ones only; not with ``keys_values``.
        checkpointing: recompute activations inside the blocks in backward instead of keeping them.
    """
    blocks = list(blocks)
    if causal and keys_values is not None:
        raise ValueError("causal attention has all earlier tokens as keys and values: leave out keys_values")
    for block, rope in zip(blocks, [None] * len(blocks) if rotations is None else rotations, strict=True):
        arguments: dict[str, Any] = {} if rope is None else {"rope": rope}
        if causal:
            arguments["is_causal"] = True  # no table of scores: fused kernels pass over what nothing attends to
        step: Callable[[Tensor], Tensor] = partial(block, **arguments) if arguments else block
        kernels = None if causal else kernels_of(block, tokens)  # the kernels have no mask
        if kernels is not None:
            step = partial(kernels.compute, block, keys_values=keys_values)
        elif keys_values is not None:
            step = partial(context_block, block, keys_values=keys_values, rope=rope)
        tokens = checkpoint(step, tokens, use_reentrant=False) if checkpointing else step(tokens)
    return tokens


def context_block(block: AnyBlock, tokens: Tensor, keys_values: Tensor, rope: Tensor | None = None) -> Tensor:
    """Run a block over tokens [b t d]; only those at ``keys_values`` [b m] are keys and values (MP3)."""
    attn, normed = attention_of(block), block.norm1(tokens)
    ropes = None
    if rope is not None:
        queries = _of_all_tokens(attn, rope)
        ropes = queries, queries.take_along_dim(keys_values[:, None, :, None], 2)
    return _after_attention(block, tokens, cross_attention(attn, normed, gather_tokens(normed, keys_values), ropes))


def query_block(block: AnyBlock, tokens: Tensor, first: int) -> Tensor:
    """Return a block's output for ``tokens[:, first:]`` [b t-first d], with all tokens [b t d] as keys and values.

    For a last block whose other outputs are not used; nothing is rotated.
    """
    if (kernels := kernels_of(block, tokens)) is not None:
        return kernels.compute(block, tokens, first=first)
    normed = block.norm1(tokens)
    return _after_attention(block, tokens[:, first:], cross_attention(attention_of(block), normed[:, first:], normed))


def attention_of(block: AnyBlock) -> AnyAttention:
    """Return a block's attention, which timm declares as a Module."""
    return cast(Attention, block.attn)


def heads_of(attn: AnyAttention, queries: Tensor, keys_values: Tensor) -> tuple[Tensor, Tensor]:
    """Compute queries [b t h d] of ``queries`` [b t w], keys and values [b m 2 h d] of ``keys_values`` [b m w]."""
    heads, side = attn.num_heads, attn.head_dim
    if attn.qkv is None:
        kv = torch.cat([attn.k_proj(keys_values), attn.v_proj(keys_values)], dim=-1)
        return attn.q_proj(queries).unflatten(-1, (heads, side)), kv.unflatten(-1, (2, heads, side))
    parts = [heads * side, 2 * heads * side]
    weights = attn.qkv.weight.split(parts)
    bias: Tensor | None = attn.qkv.bias
    if isinstance(attn, EvaAttention) and attn.q_bias is not None:
        assert attn.k_bias is not None  # a buffer of zeros
        bias = torch.cat([attn.q_bias, attn.k_bias, attn.v_bias])
    biases = (None, None) if bias is None else bias.split(parts)
    q = F.linear(queries, weights[0], biases[0]).unflatten(-1, (heads, side))
    return q, F.linear(keys_values, weights[1], biases[1]).unflatten(-1, (2, heads, side))


def identity_rotation(rope: Tensor) -> Tensor:
    """Return rotations by no angle, in the shape of ``rope`` [... 2e]: sines 0, cosines 1."""
    sin, cos = rope.chunk(2, -1)
    return torch.cat([torch.zeros_like(sin), torch.ones_like(cos)], -1)


def rotate(attn: AnyAttention, heads: Tensor, rope: Tensor) -> Tensor:
    """Rotate queries or keys [b h k e] of patches."""
    return apply_rot_embed_cat(heads, rope, half=cast(bool, attn.rotate_half))


def rotate_patches(attn: AnyAttention, heads: Tensor, rope: Tensor) -> Tensor:
    """Rotate queries or keys [b h t e] of all tokens; class and register tokens stay."""
    prefix = cast(int, attn.num_prefix_tokens)
    return torch.cat([heads[:, :, :prefix], rotate(attn, heads[:, :, prefix:], rope)], dim=2)


def _of_all_tokens(attn: AnyAttention, rope: Tensor) -> Tensor:
    """Return rotations [b h t 2e] of all tokens: none for class and register tokens."""
    unrotated = identity_rotation(rope[:, :, :1]).expand(-1, -1, cast(int, attn.num_prefix_tokens), -1)
    return torch.cat([unrotated, rope], dim=2)


def _after_attention(block: AnyBlock, tokens: Tensor, attended: Tensor) -> Tensor:
    """Run the part of a block after its attention."""
    tokens = tokens + _attention_residual(block, attended)
    return tokens + _mlp_residual(block, tokens)


def _attention_residual(block: AnyBlock, attended: Tensor) -> Tensor:
    scaled = _scaled(attended, block.gamma_1) if isinstance(block, EvaBlock) else block.ls1(attended)
    return block.drop_path1(scaled)


def _mlp_residual(block: AnyBlock, tokens: Tensor) -> Tensor:
    mixed = block.mlp(block.norm2(tokens))
    return block.drop_path2(_scaled(mixed, block.gamma_2) if isinstance(block, EvaBlock) else block.ls2(mixed))


def block_with_mlp(block: AnyBlock, tokens: Tensor, rope: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return a block's output for tokens [b t d], and the output of its MLP [b t d], which that contains."""
    attn, normed = attention_of(block), block.norm1(tokens)
    ropes = None if rope is None else (_of_all_tokens(attn, rope),) * 2
    tokens = tokens + _attention_residual(block, cross_attention(attn, normed, normed, ropes))
    mixed = _mlp_residual(block, tokens)
    return tokens + mixed, mixed


def _scaled(tokens: Tensor, gamma: Tensor | None) -> Tensor:
    return tokens if gamma is None else gamma * tokens


def cross_attention(
    attn: AnyAttention, queries: Tensor, keys_values: Tensor, ropes: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Return timm's attention [b t d] with queries from ``queries`` [b t d], keys, values from ``keys_values`` [b m d].

    ``ropes`` are the rotations of the queries [b h t 2e] and keys [b h m 2e], class and register tokens included.
    """
    q, kv = heads_of(attn, queries, keys_values)
    q, (k, v) = q.transpose(1, 2), kv.permute(2, 0, 3, 1, 4)
    q, k = attn.q_norm(q), attn.k_norm(k)
    if ropes is not None:
        q, k = (rotate(attn, heads, rope).type_as(v) for heads, rope in zip((q, k), ropes, strict=True))
    if attn.fused_attn:
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=attn.attn_drop.p if attn.training else 0.0)
    else:  # in bfloat16 on CPUs the fused kernel is slower
        mixed = attn.attn_drop((q * attn.scale @ k.mT).softmax(-1)) @ v
    mixed = attn.norm(mixed.transpose(1, 2).flatten(2))
    return attn.proj_drop(attn.proj(mixed))
