"""The encoder is a guest from timm: its blocks, tokens and table of positions are met here and in few other files.

A stock ``VisionTransformer`` or ``SwinTransformer`` comes in, is fed an `EncoderInput`, and goes home unchanged: no
weight is ever renamed. `tests/test_arrows.py` lists those files. `swin` does the same for a Swin;
its patches are then its units, of which each token of its last stage stands for one. Letters as in
`patchloom.patches.tokens`; d is the width of the encoder and ``prefix`` the number of class and register tokens.
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
    stages_of,
    unit_grid,
    unit_positions,
    unit_side,
)
from patchloom.patches.tokens import patchify
from patchloom.withhold.encoder_input import EncoderInput, all_patches


def grid_size(vit: Encoder) -> tuple[int, int]:
    """Rows and columns of patches."""
    return unit_grid(vit) if is_hierarchical(vit) else _grid_size(vit)


def _grid_size(vit: VisionTransformer) -> tuple[int, int]:
    rows, columns = patch_embedding(vit).grid_size
    return rows, columns


def patch_size(vit: Encoder) -> tuple[int, int]:
    """Rows and columns p of pixels of a patch."""
    if is_hierarchical(vit):
        return unit_side(vit), unit_side(vit)
    rows, columns = patch_embedding(vit).patch_size
    return rows, columns


def patch_side(vit: Encoder) -> int:
    """Side of a patch in pixels, for what is made for square ones."""
    rows, columns = patch_size(vit)
    if rows != columns:
        raise PatchloomError(
            f"patches of {rows}x{columns} pixels are not square, as dense predictions need them: give an encoder of "
            "square patches"
        )
    return rows


def patch_count(vit: Encoder) -> int:
    """Number n of patches of an image."""
    rows, columns = grid_size(vit)
    return rows * columns


def input_size(vit: Encoder) -> tuple[int, int]:
    """Height and width of its images in pixels."""
    height, width = patch_embedding(vit).img_size
    return height, width


def input_channels(vit: Encoder) -> int:
    """Channels of its images."""
    return patch_embedding(vit).proj.in_channels


def width(vit: Encoder) -> int:
    """Width d of the tokens that it gives."""
    return vit.num_features


def entry_width(vit: Encoder) -> int:
    """Width of what patches are embedded to, and so of what stands for their content or position."""
    return patch_embedding(vit).proj.out_channels


def prefix_count(vit: Encoder) -> int:
    """Class and register tokens in front of the patch tokens."""
    return 0 if isinstance(vit, SwinTransformer) else vit.num_prefix_tokens


def has_class_token(vit: Encoder) -> bool:
    """Whether the first of the tokens in front is a class token."""
    return not isinstance(vit, SwinTransformer) and vit.has_class_token


def attention_heads(vit: Encoder) -> int:
    """Attention heads of its blocks; of a Swin, those of the last stage."""
    if isinstance(vit, SwinTransformer):
        return blocks_of(stages_of(vit)[-1])[0].attn.num_heads
    return attention_of(blocks_of(vit)[0]).num_heads


def patch_positions(vit: Encoder) -> Tensor | None:
    """The position embeddings [n d] of the patches alone, or None if the model has none.

    A Swin has none of its own; those that its units get where positions are withheld are no part of it.
    """
    if isinstance(vit, SwinTransformer):
        return unit_positions(vit)
    return None if vit.pos_embed is None else vit.pos_embed[0, -patch_count(vit) :]


def has_positions(vit: Encoder) -> bool:
    """Whether what the encoder gives depends on where patches are: by a table, or by a Swin's windows and biases."""
    return is_hierarchical(vit) or vit.pos_embed is not None


def _prefix_tokens(vit: VisionTransformer) -> list[Tensor]:
    """Class and register tokens [1 prefix d] with what position embedding they have."""
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
    """Tokens [b prefix+k d] of what is given: only the patches that enter are embedded.

    Args:
        vit: the encoder.
        given: what of the images.
        mask_token: stands for blank content; broadcast to [b k d]. Needed if ``given.blank`` is given.
        position_token: stands for dropped positions; broadcast to [b k d]. Needed if ``given.dropped`` is given.
    """
    project = vit.patch_embed.proj
    patches = patchify(given.images, patch_size(vit), given.visible)
    tokens = vit.patch_embed.norm(F.linear(patches, project.weight.flatten(1), project.bias))
    tokens = tokens.to(project.weight.dtype)  # autocast or not, what the blocks add to is kept in full
    if given.blank is not None:
        assert mask_token is not None  # wanted by what is blank
        tokens = torch.where(given.blank[..., None], mask_token, tokens)
    table = patch_positions(vit)
    if table is not None:
        positions = table[given.visible]
        if given.dropped is not None:
            assert position_token is not None  # wanted by what is dropped
            positions = torch.where(given.dropped[..., None], position_token, positions)
        tokens = tokens + positions
    prefix = [token.expand(len(tokens), -1, -1) for token in _prefix_tokens(vit)]
    return vit.norm_pre(vit.pos_drop(torch.cat([*prefix, tokens], dim=1)))


def attend(vit: VisionTransformer, tokens: Tensor, context: Tensor | None = None, norm: bool = True) -> Tensor:
    """Run the blocks and the final norm over tokens [b prefix+k d].

    Args:
        vit: the encoder.
        tokens: what `embed` gave.
        context: [b m] indices of the patches that serve as keys and values beside the prefix tokens (MP3 section 3);
            keys and values of the others are never computed. None: all serve.
        norm: False leaves the final norm to the caller (`final_norm`).
    """
    keys_values = None
    if context is not None:
        prefix = torch.arange(vit.num_prefix_tokens, device=context.device).expand(len(context), -1)
        keys_values = torch.cat([prefix, context + vit.num_prefix_tokens], dim=1)
    tokens = run_blocks(blocks_of(vit), tokens, keys_values=keys_values, checkpointing=vit.grad_checkpointing)
    return vit.norm(tokens) if norm else tokens


def final_norm(vit: Encoder, tokens: Tensor) -> Tensor:
    """The encoder's last norm, for what was made from tokens [... d] that `attend` left without it."""
    return vit.norm(tokens)


def pooled_norm(vit: Encoder, pooled: Tensor) -> Tensor:
    """The norm that some encoders have for pooled tokens [... d]."""
    return pooled if is_hierarchical(vit) else vit.fc_norm(pooled)


def attend_each(vit: VisionTransformer, tokens: Tensor) -> Iterator[Tensor]:
    """What `attend` makes of tokens [b prefix+k d] on its way: as they came, after each block, after the final norm.

    `layer_names` tells what they are called.
    """
    yield tokens
    for block in blocks_of(vit):
        tokens = block(tokens)
        yield tokens
    yield vit.norm(tokens)


def layer_patterns(vit: Encoder) -> tuple[str, list[tuple[str, tuple[int, ...] | None]]]:
    """Patterns of weights' names for learning rates by layer, as timm groups them."""
    if is_hierarchical(vit):
        return "patch_embed", [(r"layers\.(\d+)\.downsample", (0,)), (r"layers\.(\d+)\.blocks\.(\d+)", None)]
    return "(?:cls_token|reg_token|pos_embed|patch_embed|norm_pre)", [(r"blocks\.(\d+)", None)]


def layer_names(vit: Encoder) -> tuple[str, ...]:
    """A name for each of what `attend_each` gives, and `patch_layers`."""
    if is_hierarchical(vit):
        return ("embedding", *(f"stage {i}" for i in range(1, level_count(vit) + 1)), "norm")
    return ("embedding", *(f"block {i}" for i in range(1, level_count(vit) + 1)), "norm")


def patch_layers(vit: Encoder, images: Tensor) -> Iterator[Tensor]:
    """Patch tokens of whole images [b c h w] on their way, as maps [b rows columns d]: a layer of `layer_names` each.

    Class and register tokens are left out. A Swin's maps halve from stage to stage, as its patches are merged.
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
    """Features [b prefix+k d] of what the encoder is given; of `all_patches`, timm's ``forward_features``.

    The arguments are those of `embed` and `attend`. Of a Swin the features are those of its last stage, row by row.
    """
    if is_hierarchical(vit):
        if given.context is not None:
            raise ValueError("in a Swin all patches serve as keys and values: no context can be given")
        tokens = encode_units(vit, given, mask_token=mask_token, position_token=position_token)
        return vit.norm(tokens) if norm else tokens
    tokens = embed(vit, given, mask_token=mask_token, position_token=position_token)
    return attend(vit, tokens, given.context, norm)
