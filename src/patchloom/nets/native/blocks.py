"""A timm block on the native kernels."""

from __future__ import annotations

from typing import cast

import torch
from timm.layers import Attention, Mlp
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.nets.native import ops
from patchloom.nets.sparse_attention import attention_of, heads_of
from patchloom.patches.tokens import gather_tokens


def knows_block(block: Block) -> bool:
    """Return whether the kernels implement all parts of a block."""
    attn, mlp = attention_of(block), block.mlp
    if type(attn) is not Attention or type(mlp) is not Mlp:  # a subclass may compute more, such as a position bias
        return False
    nothing = attn.q_norm, attn.k_norm, attn.norm, mlp.norm, block.ls1, block.ls2, block.drop_path1, block.drop_path2
    shifted = block.norm1, block.norm2, attn.proj, mlp.fc1, mlp.fc2
    widths = attn.head_dim, attn.qkv.in_features, cast(nn.Linear, mlp.fc1).out_features
    return (
        all(isinstance(part, nn.Identity) for part in nothing)
        and not any(drop.p for drop in (attn.attn_drop, attn.proj_drop, mlp.drop1, mlp.drop2))
        and all(isinstance(norm, nn.LayerNorm) for norm in shifted[:2])
        and all(getattr(part, "bias", None) is not None for part in shifted)
        and isinstance(mlp.act, nn.GELU)
        and mlp.act.approximate == "none"
        and not any(width % ops.LANES for width in widths)
    )


def runs_native(block: Block, tokens: Tensor) -> bool:
    """Return whether the kernels can compute a block now: on float32 tokens under bfloat16 autocast on a CPU."""
    return (
        tokens.device.type == "cpu"
        and tokens.dtype == block.norm1.weight.dtype == torch.float32
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
    )


def native_block(
    block: Block,
    tokens: Tensor,
    more: Tensor | None = None,
    shift: Tensor | None = None,
    keys_values: Tensor | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a block on the native kernels. Sums are computed with the next norm, so inputs and outputs are their parts.

    Args:
        block: timm block.
        tokens: [b t d] float32.
        more: [b t d] bfloat16, to be added to ``tokens``; None: nothing.
        shift: [d] float32, to be added as well; None with ``more``.
        keys_values: [b m] indices of the tokens that are keys and values; None: all.
        first: index of the first token of the output.
    """
    attn, mlp = attention_of(block), block.mlp
    fc1, fc2 = cast(nn.Linear, mlp.fc1), cast(nn.Linear, mlp.fc2)
    norm1, norm2 = cast(nn.LayerNorm, block.norm1), cast(nn.LayerNorm, block.norm2)
    tokens, normed = ops.add_norm(tokens, more, shift, norm1)
    if keys_values is None and not first:
        mixed = ops.attention(attn.qkv(normed).unflatten(-1, (3, attn.num_heads, attn.head_dim)))
    else:
        others = normed if keys_values is None else gather_tokens(normed, keys_values)
        mixed = ops.attention(*heads_of(attn, normed[:, first:], others))
    attended = F.linear(mixed.flatten(2), attn.proj.weight)
    tokens, normed = ops.add_norm(tokens[:, first:], attended, attn.proj.bias, norm2)
    hidden = ops.gelu(F.linear(normed, fc1.weight), fc1.bias)
    return tokens, F.linear(hidden, fc2.weight), fc2.bias
