"""Forward pass of a timm encoder over an `EncoderInput`.

A stock ``VisionTransformer``, ``Eva`` or ``SwinTransformer`` is used unmodified: no weight is ever renamed. Few other
files access its blocks, tokens and position embeddings; `tests/test_arrows.py` lists them. `swin` does the same for a
Swin, whose patches are then its units, the areas of the tokens of its last stage. Letters as in
`patchloom.patches.tokens`; d is the width of the encoder and ``prefix`` the number of class and register tokens. An
``Eva``, such as DINOv3, rotates queries and keys by the places of their patches (RoPE); `rotations` has the form of
`patchloom.nets.sparse_attention`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from timm.layers import RotaryEmbeddingDinoV3, RotaryEmbeddingMixed
from timm.layers.pos_embed_sincos import get_mixed_freqs
from timm.models.eva import Eva
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.errors import PatchloomError
from patchloom.nets.compiling import compilable
from patchloom.nets.sparse_attention import (
    Rotations,
    attention_of,
    block_with_mlp,
    identity_rotation,
    query_block,
    run_blocks,
)
from patchloom.nets.swin import (
    Encoder,
    PlainViT,
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
from patchloom.patches.partition import complement
from patchloom.patches.tokens import gather_tokens, patchify
from patchloom.withhold.encoder_input import EncoderInput, all_patches, check_images


def grid_size(vit: Encoder) -> tuple[int, int]:
    """Return rows and columns of patches."""
    return unit_grid(vit) if is_hierarchical(vit) else _grid_size(vit)


def _grid_size(vit: PlainViT) -> tuple[int, int]:
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
    return not isinstance(vit, SwinTransformer) and vit.cls_token is not None


def attention_heads(vit: Encoder) -> int:
    """Return the number of attention heads of a block; for a Swin, of the last stage."""
    return heads_by_stage(vit)[-1]


def heads_by_stage(vit: Encoder) -> list[int]:
    """Return the number of attention heads of a block in each stage; a plain ViT has one stage."""
    if isinstance(vit, SwinTransformer):
        return [blocks_of(stage)[0].attn.num_heads for stage in stages_of(vit)]
    return [attention_of(blocks_of(vit)[0]).num_heads]


def patch_positions(vit: Encoder) -> Tensor | None:
    """Return the position embeddings [n d] of the patches, or None if the model has none.

    A Swin has none; those that its units get if positions are withheld are not part of the model.
    """
    if isinstance(vit, SwinTransformer):
        return unit_positions(vit)
    return None if vit.pos_embed is None else vit.pos_embed[0, -patch_count(vit) :]


def position_kind(vit: Encoder) -> Literal["none", "fixed", "trained"]:
    """Return whether the patches have position embeddings, and whether these are trained; see `patch_positions`."""
    if isinstance(vit, SwinTransformer):
        return "fixed"
    if vit.pos_embed is None:
        return "none"
    return "trained" if vit.pos_embed.requires_grad else "fixed"


def has_positions(vit: Encoder) -> bool:
    """Return whether features depend on the places of patches: by embeddings, rotations, or a Swin's windows."""
    return is_hierarchical(vit) or vit.pos_embed is not None or has_rotations(vit)


def has_rotations(vit: Encoder) -> bool:
    """Return whether an encoder rotates queries and keys by the places of patches (RoPE)."""
    return isinstance(vit, Eva) and vit.rope is not None


# tables of rotations that are not trained, by grid, device and type, of the modules that compute them
_TABLES: WeakKeyDictionary[nn.Module, dict[Any, Tensor]] = WeakKeyDictionary()


def patch_rotations(vit: Encoder) -> Tensor | None:
    """Return the rotations [l h n 2e] of the patches, or None if the model has none.

    l is the number of blocks and h that of heads if the frequencies are trained for each (mixed), else 1.
    """
    if not isinstance(vit, Eva) or vit.rope is None:
        return None
    rope: Any = vit.rope
    grid = _grid_size(vit)
    shape: Any = grid if rope.feat_shape is None else None
    if isinstance(rope, RotaryEmbeddingMixed):
        return rope.get_embed(shape)
    like = next(rope.buffers())
    key, kept = (grid, like.device, like.dtype), _TABLES.setdefault(rope, {})
    if key not in kept:
        # timm computes it on the CPU in every pass if its model takes images of any size
        with torch.inference_mode(False), torch.no_grad():
            table = rope.get_embed(shape).to(like.device)[None, None]
        if type(table) is not Tensor:  # a fake one, of an estimate
            return table
        kept[key] = table
    return kept[key]


def rotations_at(vit: Encoder, places: Tensor) -> Tensor:
    """Return the rotations [l h m 2e] of ``places`` [m 2], in the coordinates of the encoder's own rotations."""
    assert isinstance(vit, Eva) and vit.rope is not None
    rope: Any = vit.rope
    if isinstance(rope, RotaryEmbeddingMixed):
        return get_mixed_freqs(rope.freqs, places[:, 0], places[:, 1])
    dinov3 = type(rope) is RotaryEmbeddingDinoV3
    frequencies: Tensor = 2 * math.pi / rope.periods if dinov3 else rope.bands
    angles = (places[:, :, None].to(frequencies.dtype) * frequencies).flatten(1)
    angles = torch.cat([angles, angles], -1) if rope.rotate_half else angles.repeat_interleave(2, -1)
    return torch.cat([angles.sin(), angles.cos()], -1)[None, None]


def rotations(vit: PlainViT, given: EncoderInput, stand_in: Tensor | None = None) -> Rotations | None:
    """Return the rotations [b h k 2e] of the patches that enter, for each block; None if the model has none.

    Args:
        vit: the encoder.
        given: its input.
        stand_in: rotations of dropped positions, broadcast to [l b h k 2e]; None: by no angle.
    """
    table = patch_rotations(vit)
    if table is None:
        return None
    rows = table[:, :, _orders(given)].transpose(1, 2)
    if given.dropped is not None:
        dropped = given.dropped[:, None, :, None]
        rows = torch.where(dropped, identity_rotation(table[:, None, :, :1]) if stand_in is None else stand_in, rows)
    return rows.unbind() if len(rows) > 1 else rows.unbind() * len(blocks_of(vit))


def _orders(given: EncoderInput) -> Tensor:
    """Return the indices [b k] of the patches that enter; [1 k] if all images share one order, as in `all_patches`."""
    return given.visible[:1] if given.visible.stride(0) == 0 else given.visible


def check_input(vit: Encoder, given: EncoderInput) -> None:
    """Raise an error unless the images of an input are of the encoder's size, channels and type."""
    if not isinstance(given, EncoderInput):
        raise PatchloomError(
            f"the encoder's input is {type(given).__name__}: give an EncoderInput, such as all_patches(images, n)"
        )
    check_images(given.images, input_channels(vit), input_size(vit), "the encoder")


def embed_content(vit: PlainViT, given: EncoderInput) -> Tensor:
    """Return the embeddings [b k d] of the patches that enter, without positions."""
    check_input(vit, given)
    project = vit.patch_embed.proj
    patches = patchify(given.images, patch_size(vit), given.visible)
    tokens = vit.patch_embed.norm(F.linear(patches, project.weight.flatten(1), project.bias))
    return tokens.to(project.weight.dtype)  # full precision, because the blocks add to it


def embed(
    vit: PlainViT,
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
    tokens = embed_content(vit, given)
    if given.blank is not None:
        content = required_stand_in("mask_token", mask_token)
        tokens = torch.where(given.blank[..., None], content, tokens)
    table = patch_positions(vit)
    if table is not None:
        positions = table[_orders(given)]
        if given.dropped is not None:
            place = required_stand_in("position_token", position_token)
            positions = torch.where(given.dropped[..., None], place, positions)
        tokens = tokens + positions
    first: list[Tensor] = [token for token in (vit.cls_token, vit.reg_token) if token is not None]
    if first:
        prefix = torch.cat(first, dim=1)
        if vit.pos_embed is not None and not vit.no_embed_class:
            prefix = prefix + vit.pos_embed[:, : vit.num_prefix_tokens]
        tokens = torch.cat([prefix.expand(tokens.shape[0], -1, -1), tokens], dim=1)
    return vit.norm_pre(vit.pos_drop(tokens))


def attend(
    vit: PlainViT,
    tokens: Tensor,
    rotations: Rotations | None,
    context: Tensor | None = None,
    norm: bool = True,
    causal: bool = False,
) -> Tensor:
    """Run the blocks and the final norm over tokens [b prefix+k d].

    Args:
        vit: the encoder.
        tokens: output of `embed`.
        rotations: output of `rotations` for the same input.
        context: [b m] indices of the patches that are keys and values, besides the prefix tokens (MP3 section 3);
            those of the others are never computed. None: all patches.
        norm: False leaves the final norm to the caller (`final_norm`).
        causal: whether every token attends to itself and to earlier ones only.
    """
    keys_values = None
    if context is not None:
        prefix = torch.arange(vit.num_prefix_tokens, device=context.device).expand(len(context), -1)
        keys_values = torch.cat([prefix, context + vit.num_prefix_tokens], dim=1)
    tokens = run_blocks(
        blocks_of(vit),
        tokens,
        rotations=rotations,
        keys_values=keys_values,
        causal=causal,
        checkpointing=vit.grad_checkpointing,
    )
    return vit.norm(tokens) if norm else tokens


def final_norm(vit: Encoder, tokens: Tensor) -> Tensor:
    """Apply the encoder's final norm to anything [... d] computed from tokens without it."""
    return vit.norm(tokens)


def pooled_norm(vit: Encoder, pooled: Tensor) -> Tensor:
    """Apply the norm that some encoders have for pooled tokens [... d]."""
    return pooled if is_hierarchical(vit) else vit.fc_norm(pooled)


def last_norms(vit: Encoder) -> list[nn.Module]:
    """Return the norms of `final_norm` and `pooled_norm`, as far as they have weights."""
    norms = [vit.norm] if is_hierarchical(vit) else [vit.norm, vit.fc_norm]
    return [norm for norm in norms if not isinstance(norm, nn.Identity)]


def attend_each(vit: PlainViT, tokens: Tensor, rotations: Rotations | None) -> Iterator[Tensor]:
    """Yield tokens [b prefix+k d] at every stage of `attend`: as given, after each block, after the final norm.

    `layer_names` has the names of the stages.
    """
    yield tokens
    for i, block in enumerate(blocks_of(vit)):
        rope = None if rotations is None else rotations[i : i + 1]
        tokens = run_blocks([block], tokens, rotations=rope, checkpointing=vit.grad_checkpointing)
        yield tokens
    yield vit.norm(tokens)


def encode_each(vit: PlainViT, given: EncoderInput) -> Iterator[Tensor]:
    """Yield the tokens [b prefix+k d] of an input at every stage of `attend_each`."""
    return attend_each(vit, embed(vit, given), rotations(vit, given))


def encode_layers(vit: PlainViT, given: EncoderInput, wanted: Sequence[int], mlps: bool = False) -> list[Tensor]:
    """Return the tokens [b prefix+k d] at the stages ``wanted`` of `encode_each`, in their order.

    With ``mlps`` a stage is the output of a block's MLP, before it is added to the tokens, counted from 0. Later stages
    are not computed.
    """
    return _encode_layers(vit, given, rotations(vit, given), tuple(wanted), mlps)


@compilable
def _encode_layers(
    vit: PlainViT, given: EncoderInput, ropes: Rotations | None, wanted: tuple[int, ...], mlps: bool
) -> list[Tensor]:
    tokens = embed(vit, given)
    if not mlps:
        stages = islice(attend_each(vit, tokens, ropes), max(wanted) + 1)
        return [stage for i, stage in enumerate(stages) if i in wanted]
    found = []
    for i, block in enumerate(blocks_of(vit)[: max(wanted) + 1]):
        tokens, mixed = block_with_mlp(block, tokens, None if ropes is None else ropes[i])
        if i in wanted:
            found.append(mixed)
    return found


def layer_patterns(vit: Encoder) -> tuple[str, list[tuple[str, tuple[int, ...] | None]]]:
    """Return regular expressions that group parameter names by layer, for layer-wise learning rates in timm."""
    if is_hierarchical(vit):
        return "patch_embed", [(r"layers\.(\d+)\.downsample", (0,)), (r"layers\.(\d+)\.blocks\.(\d+)", None)]
    return "(?:cls_token|reg_token|pos_embed|patch_embed|norm_pre|rope)", [(r"blocks\.(\d+)", None)]


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
    for tokens in encode_each(vit, given):
        yield tokens[:, prefix_count(vit) :].unflatten(1, grid_size(vit))


def encode(
    vit: Encoder,
    given: EncoderInput,
    *,
    mask_token: Tensor | None = None,
    position_token: Tensor | None = None,
    rotation: Tensor | None = None,
    norm: bool = True,
) -> Tensor:
    """Return the features [b prefix+k d] of an input; for `all_patches` they equal timm's ``forward_features``.

    The arguments are those of `embed`, `rotations` and `attend`. The features of a Swin are those of its last stage,
    row by row.
    """
    check_input(vit, given)
    if is_hierarchical(vit):
        if given.context is not None:
            raise ValueError("in a Swin all patches are keys and values: leave out the context")
        if given.causal:
            raise ValueError("windows of a Swin have no order: leave out causal")
        ropes = None
    else:
        ropes = rotations(vit, given, rotation)
    return _encode(vit, given, ropes, mask_token, position_token, norm)


@compilable
def _encode(
    vit: Encoder,
    given: EncoderInput,
    ropes: Rotations | None,
    mask_token: Tensor | None,
    position_token: Tensor | None,
    norm: bool,
) -> Tensor:
    if is_hierarchical(vit):
        tokens = encode_units(vit, given, mask_token=mask_token, position_token=position_token)
        return vit.norm(tokens) if norm else tokens
    tokens = embed(vit, given, mask_token=mask_token, position_token=position_token)
    return attend(vit, tokens, ropes, given.context, norm, given.causal)


def encode_asked(vit: Encoder, images: Tensor, asked: Tensor) -> Tensor:
    """Return the features [b prefix+k d] of whole images [b c h w] for the prefix and the patches ``asked`` [b k].

    They equal those of `encode` for `all_patches`. The last block of a plain ViT computes no others.
    """
    n, prefix = patch_count(vit), prefix_count(vit)
    if is_hierarchical(vit) or has_rotations(vit):
        tokens = encode(vit, all_patches(images, n))
        return torch.cat([tokens[:, :prefix], gather_tokens(tokens, asked + prefix)], dim=1)
    return _encode_asked(vit, images, asked, complement(asked, n))


@compilable
def _encode_asked(vit: PlainViT, images: Tensor, asked: Tensor, others: Tensor) -> Tensor:
    k, prefix = asked.shape[1], vit.num_prefix_tokens
    *blocks, last = blocks_of(vit)
    tokens = run_blocks(blocks, embed(vit, EncoderInput(images, torch.cat([others, asked], dim=1))))
    tokens = torch.cat([tokens[:, prefix:], tokens[:, :prefix]], dim=1)  # those asked together, at the end
    tokens = vit.norm(query_block(last, tokens, others.shape[1]))
    return torch.cat([tokens[:, k:], tokens[:, :k]], dim=1)
