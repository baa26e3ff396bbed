"""Changes of an encoder for fine-tuning: positions, class token, drop path. Weights keep timm's names."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Literal, cast

import timm
import torch
from timm.layers import Attention
from timm.layers.pos_embed_rel import RelPosBias
from timm.models.eva import Eva
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn

from patchloom.errors import PatchloomError
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.checkpoints.resize import resize_input
from patchloom.nets.encode import (
    grid_size,
    has_class_token,
    has_rotations,
    input_size,
    patch_count,
    patch_positions,
    patch_side,
)
from patchloom.nets.lora import add_adapters
from patchloom.nets.swin import Encoder, PlainViT, blocks_of, is_hierarchical, resize_swin, stages_of
from patchloom.options.pretrain import Adapt, Target
from patchloom.patches.positions import sincos_2d

# MP3's variants (section 4.2.3, Table 3), and the encoder's own positions
Variant = Literal["keep", "fixed", "learned", "relative", "none"]


class RelativeAttention(Attention):
    """timm's attention with a 2-d relative position bias; weights have the names of timm's `RelPosAttention`."""

    rel_pos: RelPosBias

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Compute attention over tokens [b t d] with the bias as the mask."""
        return super().forward(x, attn_mask=self.rel_pos.get_bias())


def with_variant(
    vit: Encoder,
    card: EncoderCard,
    positions: Variant = "keep",
    class_token: bool = False,
    drop_path: float = 0.0,
    dropout: float = 0.0,
    train_positions: bool = False,
) -> Encoder:
    """Copy an encoder with other positions, a class token, drop path or dropout; new weights use torch's generator.

    With ``train_positions``, kept position embeddings are trained even if they were fixed.
    """
    copy = _varied(vit, card, positions, class_token, drop_path, train_positions)
    for name, module in copy.named_modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0 if name.endswith("attn_drop") else dropout
    return copy


def without_last_norm(vit: Encoder) -> Encoder:
    """Copy an encoder without its last norm, of tokens and of pooled features."""
    copy = deepcopy(vit)
    for name in ("norm", "fc_norm"):
        if hasattr(copy, name):
            setattr(copy, name, nn.Identity())
    return copy


def _varied(
    vit: Encoder, card: EncoderCard, positions: Variant, class_token: bool, drop_path: float, train_positions: bool
) -> Encoder:
    arguments = {"model_name": card.timm_name, "num_classes": 0} if card.spec is None else card.spec.timm_arguments()
    arguments |= {"drop_path_rate": drop_path}
    if is_hierarchical(vit):
        if class_token:
            raise PatchloomError("a Swin cannot have a class token: use --pooling mean")
        if positions != "keep":
            raise PatchloomError(f"a Swin keeps its own relative positions: leave out --positions {positions}")
        swin = cast(SwinTransformer, timm.create_model(**arguments))
        swin.load_state_dict(vit.state_dict(), strict=True)
        return swin
    table = patch_positions(vit)
    if has_rotations(vit) and positions in ("relative", "none"):
        raise PatchloomError(f"an encoder with rotations keeps them: leave out --positions {positions}")
    absolute = positions in ("fixed", "learned") or (positions == "keep" and table is not None)
    if isinstance(vit, Eva):
        arguments["use_abs_pos_emb"] = absolute
    else:
        arguments["pos_embed"] = "learn" if absolute else "none"
    arguments["img_size"] = input_size(vit)  # may differ from the size it was built with
    if class_token:
        arguments["class_token"] = True
    copy = cast(PlainViT, timm.create_model(**arguments))
    state = vit.state_dict()
    known = state.pop("pos_embed", None)
    if class_token and not has_class_token(vit):
        state["cls_token"] = torch.empty(1, 1, vit.embed_dim).normal_(std=0.02)
    if absolute:
        parameter = copy.get_parameter("pos_embed")
        state["pos_embed"] = _positions(vit, positions, known, parameter.shape[1])
        kept = positions == "keep" and not (train_positions or vit.get_parameter("pos_embed").requires_grad)
        parameter.requires_grad_(positions != "fixed" and not kept)
    copy.load_state_dict(state, strict=True)
    if positions != "relative":
        return copy
    prefix = copy.num_prefix_tokens
    if prefix > 1:
        raise PatchloomError("relative positions cannot be given to register tokens: use --positions keep")
    for module in list(copy.modules()):
        if type(module) is Attention:
            module.__class__ = RelativeAttention  # in place: keeps weights and options
            module.rel_pos = RelPosBias(grid_size(copy), module.num_heads, prefix_tokens=prefix)
            nn.init.zeros_(module.rel_pos.relative_position_bias_table)
    return copy


def _positions(vit: PlainViT, variant: Variant, known: Tensor | None, length: int) -> Tensor:
    """Return position embeddings [1 length d] of class and register tokens, if they have any, and patches."""
    d, n = vit.embed_dim, patch_count(vit)
    if variant == "fixed":
        if d % 4:
            raise PatchloomError(
                f"fixed sine-cosine positions need a width divisible by 4, not {d}: use --positions learned"
            )
        return torch.cat([torch.zeros(length - n, d), sincos_2d(d, grid_size(vit))])[None]
    if known is None:
        return torch.empty(1, length, d).normal_(std=0.02)
    # a new class token stands in front, and starts without a position as in MAE
    return torch.cat([known.new_zeros(1, length - known.shape[1], d), known], dim=1)


def at_size(
    vit: Encoder, card: EncoderCard, size: tuple[int, int], variant: Variant = "keep", drop_path: float = 0.0
) -> Encoder:
    """Copy an encoder for images of another size, with other positions or drop path as in `with_variant`.

    Position embeddings, fixed or learned, are resampled (bicubic, as in timm); new ones of ``variant`` are for the new
    grid. A Swin keeps its windows and their biases.
    """
    p, (h, w) = patch_side(vit), size
    if h % p or w % p or min(size) < p:
        below, above = ([max(1, step(side / p)) * p for side in size] for step in (math.floor, math.ceil))
        nearest = " or ".join(dict.fromkeys(f"{rows}x{columns}" for rows, columns in (below, above)))
        kind = "units" if is_hierarchical(vit) else "patches"
        raise PatchloomError(f"{kind} of {p} pixels do not divide images of {h}x{w}: choose {nearest}")
    if is_hierarchical(vit):
        copy = with_variant(vit, card, variant, drop_path=drop_path)
        resize_swin(cast(SwinTransformer, copy), size)
        return copy
    if input_size(vit) != size:
        vit = deepcopy(vit)
        resize_input(vit, size)
    return with_variant(vit, card, variant, drop_path=drop_path)


# Training a part of an encoder, so that a large one can be adapted on a small machine, and little is forgotten.


def block_count(vit: Encoder) -> int:
    """Return the number of blocks of an encoder; for a Swin, of all stages."""
    return len(_blocks(vit))


def freeze_for(vit: Encoder, adapt: Adapt, count: int | None) -> None:
    """Freeze the weights of `frozen_names`."""
    for name in frozen_names(vit, adapt, count):
        vit.get_parameter(name).requires_grad_(False)


def frozen_names(vit: Encoder, adapt: Adapt, count: int | None) -> list[str]:
    """Return the names of the parameters that an adaptation freezes.

    All of them for lora; but the last ``count`` blocks and the norm are trained, if it is given. Parameters that are
    never trained, such as fixed positions, are not listed.
    """
    if count is None and adapt == "all":
        return []
    blocks, trained = _blocks(vit), set[int]()
    if count is not None and count > len(blocks):
        raise PatchloomError(
            f"--train_blocks {count} is more than the {len(blocks)} blocks of the encoder: give fewer, or --adapt all "
            "to train the whole encoder"
        )
    if count is not None:
        last = [part for parts in blocks[len(blocks) - count :] for part in parts]
        trained = {id(weight) for part in (*last, vit.norm) for weight in part.parameters()}
    return [name for name, weight in vit.named_parameters() if weight.requires_grad and id(weight) not in trained]


def add_low_rank(vit: Encoder, rank: int, target: Target, count: int | None) -> None:
    """Add low-rank updates to all blocks of an encoder, but not to the last ``count``, which are trained whole."""
    blocks = _blocks(vit)
    add_adapters([parts[-1] for parts in blocks[: len(blocks) - (count or 0)]], rank, target)


def _blocks(vit: Encoder) -> list[tuple[nn.Module, ...]]:
    """Return an encoder's blocks, first to last; the first block of a Swin's stage comes with its patch merging."""
    if not is_hierarchical(vit):
        return [(block,) for block in blocks_of(vit)]
    return [
        (stage.downsample, block) if i == 0 else (block,)
        for stage in stages_of(vit)
        for i, block in enumerate(blocks_of(stage))
    ]
