"""How an encoder and its decoders compute: form of attention, checkpointing, compiling. No result depends on it."""

from __future__ import annotations

import torch
from timm.layers import Attention
from timm.models.cait import ClassAttn
from timm.models.swin_transformer import SwinTransformerBlock, WindowAttention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from patchloom.nets.swin import Encoder, is_hierarchical


def attention_shape(vit: Encoder) -> tuple[int, int, int]:
    """Heads, tokens that attend to each other, and width of a head: of a whole image, or a window of most blocks."""
    if is_hierarchical(vit):
        attn = max(vit.layers, key=lambda stage: len(stage.blocks)).blocks[0].attn
        return attn.num_heads, attn.window_area, attn.qkv.out_features // (3 * attn.num_heads)
    attn = vit.blocks[0].attn
    return attn.num_heads, vit.num_prefix_tokens + vit.patch_embed.num_patches, attn.head_dim


def weights_bytes(vit: VisionTransformer, images: int) -> int:
    """Of the bfloat16 attention weights that all blocks keep for the way back, where no fused kernel does without."""
    heads, tokens, _ = attention_shape(vit)
    return 2 * images * len(vit.blocks) * heads * tokens**2


def patches_of(vit: Encoder) -> int:
    """Patches of a whole image that attend in the first block."""
    return vit.patch_embed.num_patches


def kept_bytes(vit: Encoder, images: int, fused: bool) -> int:
    """Bytes that the blocks keep of whole images for the way back in float32, by a rule that is rather too high."""
    if is_hierarchical(vit):
        kept = 0
        for i, stage in enumerate(vit.layers):
            attn = stage.blocks[0].attn
            each = 40 * attn.dim + (0 if fused else 3 * attn.num_heads * attn.window_area)
            kept += len(stage.blocks) * patches_of(vit) // 4**i * each
        return 4 * images * kept
    heads, tokens, _ = attention_shape(vit)
    each = 40 * vit.embed_dim + (0 if fused else 3 * heads * tokens)
    return 4 * images * len(vit.blocks) * tokens * each


def fuse_attention(net: nn.Module, fused: bool) -> None:
    """Choose the form of every timm attention inside ``net``: fused, or an explicit softmax (same mathematics).

    `patchloom.system.hardware.fused_gain` measures which one is faster.
    """
    for module in net.modules():
        if isinstance(module, Attention | ClassAttn | WindowAttention):
            module.fused_attn = fused


def checkpoint_gradients(net: nn.Module, enabled: bool) -> None:
    """Have every encoder and decoder inside ``net`` compute its activations again on the way back, and keep none."""
    for module in net.modules():
        if hasattr(module, "grad_checkpointing"):
            module.grad_checkpointing = enabled


def compile_blocks(net: nn.Module, enabled: bool = True) -> None:
    """Have torch.compile write kernels for the transformer blocks inside ``net``, one for each shape that they meet.

    The blocks are where the time goes. What is drawn, and what depends on the progress of a run, stays outside, so that
    no later step compiles anything again.
    """
    # shapes of training, teacher, decoder and measures: more than the 8 after which torch would give up
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    for module in net.modules():
        if not isinstance(module, Block | SwinTransformerBlock):
            continue
        if enabled:
            module.compile(dynamic=False)
        else:
            module._compiled_call_impl = None
