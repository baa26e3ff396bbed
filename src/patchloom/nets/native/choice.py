"""Which kernels serve an encoder best: torch's or our own."""

from __future__ import annotations

from timm.models.vision_transformer import VisionTransformer

from patchloom.nets import native
from patchloom.nets.native.blocks import supports_native
from patchloom.nets.performance import attention_shape, weights_bytes
from patchloom.system.hardware import attention_gain, fused_gain, memory, when

_WORTH = 1.05  # less than that is noise
_MAX_STORED = 0.25  # of the memory, by attention weights that a fused kernel would not store
NOT_SERVED = "native ones are for plain blocks, whose heads have a multiple of 16 channels"


def choose_kernels(vit: VisionTransformer, device: str, bfloat16: bool, images: int) -> tuple[str, str]:
    """ "torch" or "native", and why: our own where they can be had, and are faster for the encoder's attention."""
    if device != "cpu" or not bfloat16:
        return "torch", "native ones are for bfloat16 on a CPU"
    if not supports_native(vit):
        return "torch", NOT_SERVED
    stored = weights_bytes(vit, images) / 2**30
    if stored > _MAX_STORED * memory(device)[1]:
        return "torch", f"native ones would keep {stored:,.0f} GiB of attention weights"
    if reason := native.missing():
        return "torch", reason
    shape = device, "bfloat16", *attention_shape(vit)
    ours = attention_gain("native", native.attention, *shape)
    gain = ours / max(1.0, fused_gain(*shape))
    return ("native" if gain > _WORTH else "torch"), f"native attention is ×{gain:.2f} as fast here{when(ours)}"
