"""A timm block on the native kernels."""

from __future__ import annotations

from typing import cast

import torch
from timm.layers import Attention, Mlp
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from patchloom.nets.native import ops
from patchloom.nets.sparse_attention import attention_of


def knows_block(block: Block) -> bool:
    """Return whether the kernels implement all parts of a block."""
    attn, mlp = attention_of(block), block.mlp
    if type(attn) is not Attention or type(mlp) is not Mlp:  # a subclass may compute more, such as a position bias
        return False
    nothing = attn.q_norm, attn.k_norm, attn.norm, mlp.norm, block.ls1, block.ls2, block.drop_path1, block.drop_path2
    products = cast(tuple[nn.Linear, ...], (attn.qkv, attn.proj, mlp.fc1, mlp.fc2))
    if any(type(layer).forward is not nn.Linear.forward for layer in products):  # low-rank updates keep the method
        return False
    shifted = block.norm1, block.norm2, *products[1:]
    widths = attn.head_dim, attn.qkv.in_features, products[2].out_features
    return (
        all(isinstance(part, nn.Identity) for part in nothing)
        and getattr(attn, "gate", None) is None
        and not any(part._forward_hooks or part._forward_pre_hooks for part in block.modules())
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


def native_block(block: Block, tokens: Tensor, keys_values: Tensor | None = None, first: int = 0) -> Tensor:
    """Run a block on the native kernels.

    Args:
        block: timm block.
        tokens: [b t d] float32.
        keys_values: [b m] indices of the tokens that are keys and values; None: all.
        first: index of the first token of the output.

    Returns:
        [b t-first d] float32.
    """
    attn, mlp = attention_of(block), block.mlp
    norm1, norm2 = cast(nn.LayerNorm, block.norm1), cast(nn.LayerNorm, block.norm2)
    layers = norm1, attn.qkv, attn.proj, norm2, cast(nn.Linear, mlp.fc1), cast(nn.Linear, mlp.fc2)
    weights = ops.BlockWeights(*(weight for layer in layers for weight in (layer.weight, layer.bias)))
    return ops.block(tokens, keys_values, first, attn.num_heads, (norm1.eps, norm2.eps), weights)
