"""Forward pass of a timm encoder over an `EncoderInput`.

A stock ``VisionTransformer`` or ``SwinTransformer`` is used unmodified: no weight is ever renamed. Few other files
access its blocks, tokens and position embeddings; `tests/test_arrows.py` lists them. `swin` does the same for a Swin,
whose patches are then its units, the areas of the tokens of its last stage. Letters as in `patchloom.patches.tokens`; d
is the width of the encoder and ``prefix`` the number of class and register tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn import functional as F

from patchloom.errors import PatchloomError
from patchloom.nets.sparse_attention import attention_of, run_blocks
from patchloom.nets.swin import (
    Encoder,
    blocks_of,
    encode_units,
    is_hierarchical,
    level_count,
    patch_embedding,
    required_stand_in,
    stages_of,
    unit_grid,
    unit_positions,
    unit_side,
)
from patchloom.patches.tokens import patchify
from patchloom.withhold.encoder_input import EncoderInput, all_patches


def grid_size(vit: Encoder) -> tuple[int, int]:
    """Return rows and columns of patches."""
    return unit_grid(vit) if is_hierarchical(vit) else _grid_size(vit)


def _grid_size(vit: VisionTransformer) -> tuple[int, int]:
    rows, columns = patch_embedding(vit).grid_size
    return rows, columns


def patch_size(vit: Encoder) -> tuple[int, int]:
    """Return rows and columns p of pixels of a patch."""
    if is_hierarchical(vit):
        return unit_side(vit), unit_side(vit)
    rows, columns = patch_embedding(vit).patch_size
    return rows, columns


def patch_side(vit: Encoder) -> int:
    """Return the side of a square patch in pixels."""
    rows, columns = patch_size(vit)
    if rows != columns:
        raise PatchloomError(
            f"patches of {rows}x{columns} pixels are not square, which dense predictions need: give an encoder of "
            "square patches"
        )
    return rows


def patch_count(vit: Encoder) -> int:
    """Return the number n of patches of an image."""
    rows, columns = grid_size(vit)
    return rows * columns


def input_size(vit: Encoder) -> tuple[int, int]:
    """Return height and width of the images in pixels."""
    height, width = patch_embedding(vit).img_size
    return height, width


def input_channels(vit: Encoder) -> int:
    """Return the number of channels of the images."""
    return patch_embedding(vit).proj.in_channels


def width(vit: Encoder) -> int:
    """Return the width d of the output tokens."""
    return vit.num_features


def entry_width(vit: Encoder) -> int:
    """Return the width of embedded patches, and so of the stand-ins for their content or position."""
    return patch_embedding(vit).proj.out_channels


def prefix_count(vit: Encoder) -> int:
    """Return the number of class and register tokens in front of the patch tokens."""
    return 0 if isinstance(vit, SwinTransformer) else vit.num_prefix_tokens


def has_class_token(vit: Encoder) -> bool:
    """Return whether the first token is a class token."""
    return not isinstance(vit, SwinTransformer) and vit.has_class_token


def attention_heads(vit: Encoder) -> int:
    """Return the number of attention heads of a block; for a Swin, of the last stage."""
    if isinstance(vit, SwinTransformer):
        return blocks_of(stages_of(vit)[-1])[0].attn.num_heads
    return attention_of(blocks_of(vit)[0]).num_heads


def patch_positions(vit: Encoder) -> Tensor | None:
    """Return the position embeddings [n d] of the patches, or None if the model has none.

    A Swin has none; those that its units get if positions are withheld are not part of the model.
    """
    if isinstance(vit, SwinTransformer):
        return unit_positions(vit)
    return None if vit.pos_embed is None else vit.pos_embed[0, -patch_count(vit) :]


def has_positions(vit: Encoder) -> bool:
    """Return whether features depend on the places of patches: by position embeddings, or by a Swin's windows."""
    return is_hierarchical(vit) or vit.pos_embed is not None


def _prefix_tokens(vit: VisionTransformer) -> list[Tensor]:
    """Return class and register tokens [1 prefix d], with position embeddings if they have any."""
    tokens: list[Tensor] = [token for token in (vit.cls_token, vit.reg_token) if token is not None]
    if not tokens:
        return []
    prefix = torch.cat(tokens, dim=1)
    if vit.pos_embed is None or vit.no_embed_class:
        return [prefix]
    return [prefix + vit.pos_embed[:, : vit.num_prefix_tokens]]


def embed(
    vit: VisionTransformer,
    given: EncoderInput,
    *,
    mask_token: Tensor | None = None,
    position_token: Tensor | None = None,
) -> Tensor:
    """Embed the patches that enter: tokens [b prefix+k d].

    Args:
        vit: the encoder.
        given: its input.
        mask_token: stand-in for blank content, broadcast to [b k d]; required with ``given.blank``.
        position_token: stand-in for dropped positions, broadcast to [b k d]; required with ``given.dropped``.
    """
    project = vit.patch_embed.proj
    patches = patchify(given.images, patch_size(vit), given.visible)
    tokens = vit.patch_embed.norm(F.linear(patches, project.weight.flatten(1), project.bias))
    tokens = tokens.to(project.weight.dtype)  # full precision, because the blocks add to it
    if given.blank is not None:
        content = required_stand_in("mask_token", mask_token)
        tokens = torch.where(given.blank[..., None], content, tokens)
    table = patch_positions(vit)
    if table is not None:
        positions = table[given.visible]
        if given.dropped is not None:
            place = required_stand_in("position_token", position_token)
            positions = torch.where(given.dropped[..., None], place, positions)
        tokens = tokens + positions
    prefix = [token.expand(len(tokens), -1, -1) for token in _prefix_tokens(vit)]
    return vit.norm_pre(vit.pos_drop(torch.cat([*prefix, tokens], dim=1)))


def attend(vit: VisionTransformer, tokens: Tensor, context: Tensor | None = None, norm: bool = True) -> Tensor:
    """Run the blocks and the final norm over tokens [b prefix+k d].

    Args:
        vit: the encoder.
        tokens: output of `embed`.
        context: [b m] indices of the patches that are keys and values, besides the prefix tokens (MP3 section 3);
            those of the others are never computed. None: all patches.
        norm: False leaves the final norm to the caller (`final_norm`).
    """
    keys_values = None
    if context is not None:
        prefix = torch.arange(vit.num_prefix_tokens, device=context.device).expand(len(context), -1)
        keys_values = torch.cat([prefix, context + vit.num_prefix_tokens], dim=1)
    tokens = run_blocks(blocks_of(vit), tokens, keys_values=keys_values, checkpointing=vit.grad_checkpointing)
    return vit.norm(tokens) if norm else tokens


def final_norm(vit: Encoder, tokens: Tensor) -> Tensor:
    """Apply the encoder's final norm to anything [... d] computed from tokens without it."""
    return vit.norm(tokens)


def pooled_norm(vit: Encoder, pooled: Tensor) -> Tensor:
    """Apply the norm that some encoders have for pooled tokens [... d]."""
    return pooled if is_hierarchical(vit) else vit.fc_norm(pooled)


def attend_each(vit: VisionTransformer, tokens: Tensor) -> Iterator[Tensor]:
    """Yield tokens [b prefix+k d] at every stage of `attend`: as given, after each block, after the final norm.

    `layer_names` has the names of the stages.
    """
    yield tokens
    for block in blocks_of(vit):
        tokens = block(tokens)
        yield tokens
    yield vit.norm(tokens)


def layer_patterns(vit: Encoder) -> tuple[str, list[tuple[str, tuple[int, ...] | None]]]:
    """Return regular expressions that group parameter names by layer, for layer-wise learning rates in timm."""
    if is_hierarchical(vit):
        return "patch_embed", [(r"layers\.(\d+)\.downsample", (0,)), (r"layers\.(\d+)\.blocks\.(\d+)", None)]
    return "(?:cls_token|reg_token|pos_embed|patch_embed|norm_pre)", [(r"blocks\.(\d+)", None)]


def layer_names(vit: Encoder) -> tuple[str, ...]:
    """Return the names of the items of `attend_each` and `patch_layers`."""
    if is_hierarchical(vit):
        return ("embedding", *(f"stage {i}" for i in range(1, level_count(vit) + 1)), "norm")
    return ("embedding", *(f"block {i}" for i in range(1, level_count(vit) + 1)), "norm")


def patch_layers(vit: Encoder, images: Tensor) -> Iterator[Tensor]:
    """Yield patch tokens of whole images [b c h w] as maps [b rows columns d], one per layer of `layer_names`.

    Class and register tokens are left out. The side of a Swin's maps halves from stage to stage, by patch merging.
    """
    if is_hierarchical(vit):
        tokens = vit.patch_embed(images)
        yield tokens
        for stage in stages_of(vit):
            tokens = stage(tokens)
            yield tokens
        yield vit.norm(tokens)
        return
    given = all_patches(images, patch_count(vit))
    for tokens in attend_each(vit, embed(vit, given)):
        yield tokens[:, prefix_count(vit) :].unflatten(1, grid_size(vit))


def encode(
    vit: Encoder,
    given: EncoderInput,
    *,
    mask_token: Tensor | None = None,
    position_token: Tensor | None = None,
    norm: bool = True,
) -> Tensor:
    """Return the features [b prefix+k d] of an input; for `all_patches` they equal timm's ``forward_features``.

    The arguments are those of `embed` and `attend`. The features of a Swin are those of its last stage, row by row.
    """
    if is_hierarchical(vit):
        if given.context is not None:
            raise ValueError("in a Swin all patches are keys and values: leave out the context")
        tokens = encode_units(vit, given, mask_token=mask_token, position_token=position_token)
        return vit.norm(tokens) if norm else tokens
    tokens = embed(vit, given, mask_token=mask_token, position_token=position_token)
    return attend(vit, tokens, given.context, norm)
