"""How an encoder and its decoders compute: form of attention, kernels, checkpointing, compiling.

No result depends on it, but for last digits.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TypeGuard

import torch
from timm.layers import Attention
from timm.models.cait import ClassAttn
from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock, WindowAttention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from patchloom.errors import PatchloomError
from patchloom.nets.sparse_attention import BlockKernels, attention_of
from patchloom.nets.swin import Encoder, blocks_of, is_hierarchical, patch_embedding, stages_of
from patchloom.system.hardware import attention_gain, fused_gain, memory, when

NATIVE: BlockKernels | None = None
with suppress(ImportError):  # both lines may go, and nets/native with them: all else works on torch's kernels
    from patchloom.nets.native import KERNELS as NATIVE

_WORTH = 1.05  # less than that is noise
_MAX_STORED = 0.25  # of the memory, by attention weights that a fused kernel would not store
_NOT_SERVED = "native ones are for plain blocks, whose heads have a multiple of 16 channels"
_ABSENT = "native kernels cannot be had here, since this installation has no patchloom/nets/native"


def attention_shape(vit: Encoder) -> tuple[int, int, int]:
    """Heads, tokens that attend to each other, and width of a head: of a whole image, or a window of most blocks."""
    if isinstance(vit, SwinTransformer):
        window = blocks_of(max(stages_of(vit), key=lambda stage: len(blocks_of(stage))))[0].attn
        return window.num_heads, window.window_area, window.qkv.out_features // (3 * window.num_heads)
    attn = attention_of(blocks_of(vit)[0])
    return attn.num_heads, vit.num_prefix_tokens + patches_of(vit), attn.head_dim


def weights_bytes(vit: VisionTransformer, images: int) -> int:
    """Of the bfloat16 attention weights that all blocks keep for the way back, where no fused kernel does without."""
    heads, tokens, _ = attention_shape(vit)
    return 2 * images * len(vit.blocks) * heads * tokens**2


def patches_of(vit: Encoder) -> int:
    """Patches of a whole image that attend in the first block."""
    return patch_embedding(vit).num_patches


def kept_bytes(vit: Encoder, images: int, fused: bool) -> int:
    """Bytes that the blocks keep of whole images for the way back in float32, by a rule that is rather too high."""
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
    """Choose the form of every timm attention inside ``net``: fused, or an explicit softmax (same mathematics).

    `patchloom.system.hardware.fused_gain` measures which one is faster.
    """
    for module in net.modules():
        if isinstance(module, Attention | ClassAttn | WindowAttention):
            module.fused_attn = fused  # type: ignore[misc]  # Final for TorchScript alone


def use_kernels(net: nn.Module, kernels: str) -> None:
    """Have the blocks inside ``net`` run on "torch" kernels, or on "native" ones wherever these serve.

    Native ones serve where a CPU computes in bfloat16. Blocks that have more to them than the kernels know stay on
    torch's, and so do all where `missing_kernels` gives a reason.
    """
    chosen = None if missing_kernels(kernels) or kernels == "torch" else NATIVE
    for module in net.modules():
        if isinstance(module, Block):
            served: Any = module  # an attribute that timm's class does not have
            served.kernels = chosen if chosen is not None and chosen.know(module) else None


def missing_kernels(kernels: str) -> str | None:
    """Return why "torch" or "native" kernels cannot be had on this machine, after trying; None if they can."""
    if kernels == "torch":
        return None
    return _ABSENT if NATIVE is None else NATIVE.missing()


def choose_kernels(vit: Encoder, device: str, bfloat16: bool, images: int) -> tuple[str, str]:
    """Return "torch" or "native", and why: our own where this machine has them, and their attention is faster."""
    if device != "cpu" or not bfloat16:
        return "torch", "native ones are for bfloat16 on a CPU"
    if NATIVE is None:
        return "torch", _ABSENT
    if not _knows(vit, NATIVE):
        return "torch", _NOT_SERVED
    stored = weights_bytes(vit, images) / 2**30
    if stored > _MAX_STORED * memory(device)[1]:
        return "torch", f"native ones would keep {stored:,.0f} GiB of attention weights"
    if reason := NATIVE.missing():
        return "torch", reason
    shape = device, "bfloat16", *attention_shape(vit)
    ours = attention_gain("native", NATIVE.attend, *shape)
    gain = ours / max(1.0, fused_gain(*shape))
    return ("native" if gain > _WORTH else "torch"), f"native attention is ×{gain:.2f} as fast here{when(ours)}"


def check_native(vit: Encoder, device: str, bfloat16: bool) -> None:
    """Refuse native kernels where they cannot be had, or would do nothing."""
    if NATIVE is not None and (device != "cpu" or not bfloat16):
        raise PatchloomError("--kernels native is for bfloat16 on a CPU: add --precision bfloat16, or leave it out")
    if NATIVE is not None and not _knows(vit, NATIVE):
        raise PatchloomError(f"--kernels native does not fit this model, since {_NOT_SERVED}: use --kernels torch")
    if reason := missing_kernels("native"):
        raise PatchloomError(f"{reason}: use --kernels torch")


def _knows(vit: Encoder, kernels: BlockKernels) -> TypeGuard[VisionTransformer]:
    """Whether every block of an encoder would run on some kernels; none of a Swin would."""
    return isinstance(vit, VisionTransformer) and all(map(kernels.know, blocks_of(vit)))


def checkpoint_gradients(net: nn.Module, enabled: bool) -> None:
    """Have every encoder and decoder inside ``net`` compute its activations again on the way back, and keep none."""
    module: Any
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
