"""An encoder's blocks over the whole of an image, and what it looks like after some of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from patchloom.nets.dense.windows import Windows
from patchloom.nets.hierarchical import Encoder, is_hierarchical
from patchloom.nets.partial import run_blocks


def even_blocks(depth: int) -> tuple[int, int, int, int]:
    """Numbers, from 1, of four evenly spaced blocks, the last one among them: depth/4, depth/2, 3/4 depth, depth.

    Rounded up, and of fewer than four blocks some more than once.
    """
    first, second, third, last = (-(-quarter * depth // 4) for quarter in (1, 2, 3, 4))
    return first, second, third, last


def has_relative_positions(vit: Encoder) -> bool:
    """Whether the blocks of a ViT have tables of biases between the patches of its whole grid."""
    return not is_hierarchical(vit) and any(hasattr(block.attn, "rel_pos") for block in vit.blocks)


def tokens_after(
    vit: VisionTransformer, tokens: Tensor, numbers: Sequence[int], windows: Windows | None = None
) -> dict[int, Tensor]:
    """Tokens [b prefix+n d] after the blocks ``numbers``, from 1; later blocks do not run.

    Args:
        vit: the encoder.
        tokens: [b prefix+n d] of all patches.
        numbers: of blocks, in any order.
        windows: in which most blocks attend; the last block of each quarter attends to all (ViTDet, section 3).
    """
    last, kept = max(numbers), vit.grad_checkpointing
    whole = set(range(1, last + 1) if windows is None else even_blocks(len(vit.blocks)))
    found, done = {}, 0
    while done < last:
        until, all_of_them = done + 1, done + 1 in whole
        while all_of_them and until not in numbers and until + 1 in whole:
            until += 1
        run = partial(run_blocks, vit.blocks[done:until], checkpointing=kept)
        tokens = run(tokens) if all_of_them else windows(run, tokens)
        done = until
        if done in numbers:
            found[done] = tokens
    return found


def stages_after(swin: SwinTransformer, images: Tensor, numbers: Sequence[int]) -> dict[int, Tensor]:
    """What timm's stages make of images [b c h w], after those of ``numbers``, from 1: [b rows columns d] each."""
    tokens = swin.patch_embed(images)
    kept, found = swin.patch_embed.proj.weight.dtype, {}
    for number, stage in enumerate(swin.layers[: max(numbers)], 1):
        tokens = stage.downsample(tokens).to(kept)  # autocast or not, what the blocks add to is kept in full
        for block in stage.blocks:
            tokens = checkpoint(block, tokens, use_reentrant=False) if stage.grad_checkpointing else block(tokens)
        if number in numbers:
            found[number] = tokens
    return found
