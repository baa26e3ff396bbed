"""Computation of an encoder and its decoders: form of attention, kernels, checkpointing.

Results are the same except for the last digits.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from timm.layers import Attention, AttentionRope
from timm.models.cait import ClassAttn
from timm.models.eva import EvaAttention
from timm.models.swin_transformer import WindowAttention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from patchloom.errors import PatchloomError
from patchloom.nets.decoders import CrossBlock
from patchloom.nets.sparse_attention import BlockKernels, attention_of
from patchloom.nets.swin import Encoder, blocks_of, is_hierarchical, patch_embedding, stages_of
from patchloom.system.device import memory

NATIVE: BlockKernels | None = None
with suppress(ImportError):  # nets/native is optional: without it everything runs on torch's kernels
    from patchloom.nets.native import KERNELS as NATIVE

_MAX_STORED = 0.25  # of the memory: limit for attention weights, which a fused kernel does not store
_NOT_SERVED = "native kernels are for plain blocks whose heads have a multiple of 16 channels"
_ABSENT = "native kernels are not available, because this installation has no patchloom/nets/native"


def _attention_sizes(vit: Encoder) -> list[tuple[int, int, int]]:
    """Return tokens of a whole image in all blocks, their width, and weights of a token, for each stage of a Swin."""
    patches = patch_embedding(vit).num_patches
    if is_hierarchical(vit):
        sizes = []
        for i, stage in enumerate(stages_of(vit)):
            attn, count = blocks_of(stage)[0].attn, len(blocks_of(stage))
            sizes.append((count * (patches // 4**i), attn.dim, attn.num_heads * attn.window_area))
        return sizes
    blocks, tokens = blocks_of(vit), vit.num_prefix_tokens + patches
    return [(len(blocks) * tokens, vit.embed_dim, attention_of(blocks[0]).num_heads * tokens)]


def kept_bytes(vit: Encoder, images: int, fused: bool) -> int:
    """Estimate, rather too high, the bytes that the blocks keep of whole images for backward in float32."""
    each = (tokens * (40 * width + 3 * weights * (not fused)) for tokens, width, weights in _attention_sizes(vit))
    return 4 * images * sum(each)


def _unaffordable_weights(vit: Encoder, images: int) -> str:
    """Return the GiB of bfloat16 attention weights that blocks would keep for backward, if too many; otherwise ""."""
    stored = 2 * images * sum(tokens * weights for tokens, _, weights in _attention_sizes(vit)) / 2**30
    return f"{stored:,.0f} GiB of attention weights" if stored > _MAX_STORED * memory("cpu")[1] else ""


def fuse_attention(net: nn.Module, fused: bool) -> None:
    """Choose fused attention or an explicit softmax (same result) in every attention inside ``net``."""
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


def choose_attention(vit: Encoder, device: str, bfloat16: bool, images: int) -> tuple[str, str]:
    """Return "fused" or "explicit" for torch's kernels, and the reason.

    In bfloat16, torch's fused kernel for CPUs is slower for all sizes that were measured (benchmarks/README.md). It
    keeps no attention weights for backward.

    Args:
        vit: encoder, possibly on the meta device.
        device: device.
        bfloat16: whether products are computed in bfloat16.
        images: images of a step on this machine.
    """
    if device != "cpu":
        return "fused", "the usual choice on a GPU"
    if not bfloat16:
        return "fused", "the faster form on a CPU in float32"
    if stored := _unaffordable_weights(vit, images):
        return "fused", f"an explicit softmax would keep {stored}"
    return "explicit", "the faster form on a CPU in bfloat16"


def choose_kernels(vit: Encoder, device: str, bfloat16: bool, images: int) -> tuple[str, str]:
    """Return "torch" or "native", and the reason: native kernels where available; arguments as in `choose_attention`.

    They were faster than both of torch's forms for all sizes that were measured (benchmarks/README.md).
    """
    if device != "cpu" or not bfloat16:
        return "torch", "native kernels are for bfloat16 on a CPU"
    if NATIVE is None:
        return "torch", _ABSENT
    if not _serves_native(vit):
        return "torch", _NOT_SERVED
    if stored := _unaffordable_weights(vit, images):
        return "torch", f"native kernels would keep {stored}"
    if reason := NATIVE.missing():
        return "torch", reason
    return "native", "faster attention, GELU and norms in bfloat16"


def check_native(vit: Encoder, device: str, bfloat16: bool) -> None:
    """Raise an error if native kernels are not available, or would have no effect."""
    if NATIVE is not None and (device != "cpu" or not bfloat16):
        raise PatchloomError(
            "--kernels native needs bfloat16 on a CPU: add --precision bfloat16, or use --kernels torch"
        )
    if NATIVE is not None and not _serves_native(vit):
        raise PatchloomError(f"--kernels native does not fit this model, because {_NOT_SERVED}: use --kernels torch")
    if reason := missing_kernels("native"):
        raise PatchloomError(f"{reason}: use --kernels torch")


def _serves_native(vit: Encoder) -> bool:
    """Return whether native kernels support every block of an encoder; they support no Swin or Eva."""
    if NATIVE is None or not isinstance(vit, VisionTransformer):
        return False
    return all(isinstance(block, Block) and NATIVE.know(block) for block in blocks_of(vit))


def checkpoint_gradients(net: nn.Module, enabled: bool) -> None:
    """Enable or disable gradient checkpointing in every encoder and decoder inside ``net``."""
    module: Any
    for module in net.modules():
        if hasattr(module, "grad_checkpointing"):
            module.grad_checkpointing = enabled
