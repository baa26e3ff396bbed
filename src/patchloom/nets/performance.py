"""Computation of an encoder and its decoders: form of attention, kernels, checkpointing, compiling.

Results are the same except for the last digits.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TypeGuard

import torch
from timm.layers import Attention, AttentionRope
from timm.models.cait import ClassAttn
from timm.models.eva import EvaAttention, EvaBlock
from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock, WindowAttention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from patchloom.errors import PatchloomError
from patchloom.nets.decoders import CrossBlock
from patchloom.nets.sparse_attention import BlockKernels, attention_of
from patchloom.nets.swin import Encoder, blocks_of, is_hierarchical, patch_embedding, stages_of
from patchloom.system.hardware import attention_gain, fused_gain, memory, when

NATIVE: BlockKernels | None = None
with suppress(ImportError):  # nets/native is optional: without it everything runs on torch's kernels
    from patchloom.nets.native import KERNELS as NATIVE

_WORTH = 1.05  # a smaller gain is noise
_MAX_STORED = 0.25  # of the memory: limit for attention weights that a fused kernel would not store
_NOT_SERVED = "native kernels are for plain blocks whose heads have a multiple of 16 channels"
_ABSENT = "native kernels are not available, because this installation has no patchloom/nets/native"


def attention_shape(vit: Encoder) -> tuple[int, int, int]:
    """Return heads, number of attending tokens, and width of a head, for whole images or most windows of a Swin."""
    if isinstance(vit, SwinTransformer):
        window = blocks_of(max(stages_of(vit), key=lambda stage: len(blocks_of(stage))))[0].attn
        return window.num_heads, window.window_area, window.qkv.out_features // (3 * window.num_heads)
    attn = attention_of(blocks_of(vit)[0])
    return attn.num_heads, vit.num_prefix_tokens + patches_of(vit), attn.head_dim


def weights_bytes(vit: VisionTransformer, images: int) -> int:
    """Return the bytes of the bfloat16 attention weights that all blocks keep for backward without a fused kernel."""
    heads, tokens, _ = attention_shape(vit)
    return 2 * images * len(vit.blocks) * heads * tokens**2


def patches_of(vit: Encoder) -> int:
    """Return the number of patches of a whole image in the first block."""
    return patch_embedding(vit).num_patches


def kept_bytes(vit: Encoder, images: int, fused: bool) -> int:
    """Estimate, rather too high, the bytes that the blocks keep of whole images for backward in float32."""
    if is_hierarchical(vit):
        kept = 0
        for i, stage in enumerate(stages_of(vit)):
            attn = blocks_of(stage)[0].attn
            each = 40 * attn.dim + (0 if fused else 3 * attn.num_heads * attn.window_area)
            kept += len(stage.blocks) * patches_of(vit) // 4**i * each
        return 4 * images * kept
    heads, tokens, _ = attention_shape(vit)
    each = 40 * vit.embed_dim + (0 if fused else 3 * heads * tokens)
    return 4 * images * len(blocks_of(vit)) * tokens * each


def fuse_attention(net: nn.Module, fused: bool) -> None:
    """Choose fused attention or an explicit softmax (same result) in every attention inside ``net``.

    `patchloom.system.hardware.fused_gain` measures which one is faster.
    """
    for module in net.modules():
        if isinstance(module, Attention | EvaAttention | AttentionRope | ClassAttn | WindowAttention | CrossBlock):
            module.fused_attn = fused  # type: ignore[misc]  # Final only for TorchScript


def use_kernels(net: nn.Module, kernels: str) -> None:
    """Run the blocks inside ``net`` on "torch" kernels, or on "native" ones where they support it.

    Native kernels support bfloat16 on a CPU. Blocks with parts that the kernels do not implement stay on torch's
    kernels, and so do all blocks if `missing_kernels` returns a reason.
    """
    chosen = None if missing_kernels(kernels) or kernels == "torch" else NATIVE
    for module in net.modules():
        if isinstance(module, Block):
            served: Any = module  # timm's class lacks the attribute
            served.kernels = chosen if chosen is not None and chosen.know(module) else None


def missing_kernels(kernels: str) -> str | None:
    """Return the reason why "torch" or "native" kernels are not available on this machine, after trying; else None."""
    if kernels == "torch":
        return None
    return _ABSENT if NATIVE is None else NATIVE.missing()


def choose_kernels(vit: Encoder, device: str, bfloat16: bool, images: int) -> tuple[str, str]:
    """Return "torch" or "native", and the reason: native kernels if available and with faster attention."""
    if device != "cpu" or not bfloat16:
        return "torch", "native kernels are for bfloat16 on a CPU"
    if NATIVE is None:
        return "torch", _ABSENT
    if not _knows(vit, NATIVE):
        return "torch", _NOT_SERVED
    stored = weights_bytes(vit, images) / 2**30
    if stored > _MAX_STORED * memory(device)[1]:
        return "torch", f"native kernels would keep {stored:,.0f} GiB of attention weights"
    if reason := NATIVE.missing():
        return "torch", reason
    shape = device, "bfloat16", *attention_shape(vit)
    ours = attention_gain("native", NATIVE.attend, *shape)
    gain = ours / max(1.0, fused_gain(*shape))
    return ("native" if gain > _WORTH else "torch"), f"native attention is ×{gain:.2f} as fast here{when(ours)}"


def check_native(vit: Encoder, device: str, bfloat16: bool) -> None:
    """Raise an error if native kernels are not available, or would have no effect."""
    if NATIVE is not None and (device != "cpu" or not bfloat16):
        raise PatchloomError(
            "--kernels native needs bfloat16 on a CPU: add --precision bfloat16, or use --kernels torch"
        )
    if NATIVE is not None and not _knows(vit, NATIVE):
        raise PatchloomError(f"--kernels native does not fit this model, because {_NOT_SERVED}: use --kernels torch")
    if reason := missing_kernels("native"):
        raise PatchloomError(f"{reason}: use --kernels torch")


def _knows(vit: Encoder, kernels: BlockKernels) -> TypeGuard[VisionTransformer]:
    """Return whether kernels support every block of an encoder; they support no Swin or Eva."""
    return isinstance(vit, VisionTransformer) and all(isinstance(b, Block) and kernels.know(b) for b in blocks_of(vit))


def checkpoint_gradients(net: nn.Module, enabled: bool) -> None:
    """Enable or disable gradient checkpointing in every encoder and decoder inside ``net``."""
    module: Any
    for module in net.modules():
        if hasattr(module, "grad_checkpointing"):
            module.grad_checkpointing = enabled


def compile_blocks(net: nn.Module, enabled: bool = True) -> None:
    """Compile the transformer blocks inside ``net`` with torch.compile, once for each input shape.

    Most of the time is spent in the blocks. Random draws, and anything that depends on the progress of a run, stay
    outside, so that no later step recompiles.
    """
    # training, teacher, decoder and measures have more shapes than torch's limit of 8
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    for module in net.modules():
        if not isinstance(module, Block | EvaBlock | SwinTransformerBlock | CrossBlock):
            continue
        if enabled:
            module.compile(dynamic=False)
        else:
            module._compiled_call_impl = None
