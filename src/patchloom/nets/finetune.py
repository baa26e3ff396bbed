"""An encoder as fine-tuning wants it: other positions, a class token, drop path. Weights keep timm's names."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Literal, cast

import timm
import torch
from timm.layers import Attention
from timm.layers.pos_embed_rel import RelPosBias
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchloom.errors import PatchloomError
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.checkpoints.resize import resize_input
from patchloom.nets.encode import grid_size, input_size, patch_count, patch_positions, patch_side
from patchloom.nets.swin import Encoder, blocks_of, is_hierarchical, resize_swin, stages_of
from patchloom.patches.positions import sincos_2d

# what MP3 compares (section 4.2.3, Table 3), and what the encoder has
Variant = Literal["keep", "fixed", "learned", "relative", "none"]


class RelativeAttention(Attention):
    """timm's attention with a 2-d relative position bias; its weights have the names of timm's `RelPosAttention`."""

    rel_pos: RelPosBias

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attention over tokens [b t d]; the bias takes the mask's place."""
        return super().forward(x, attn_mask=self.rel_pos.get_bias())


def with_variant(
    vit: Encoder,
    card: EncoderCard,
    positions: Variant = "keep",
    class_token: bool = False,
    drop_path: float = 0.0,
    dropout: float = 0.0,
) -> Encoder:
    """A copy of an encoder with other positions, a class token, drop path or dropout; random numbers are torch's."""
    copy = _varied(vit, card, positions, class_token, drop_path)
    for name, module in copy.named_modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0 if name.endswith("attn_drop") else dropout
    return copy


def _varied(vit: Encoder, card: EncoderCard, positions: Variant, class_token: bool, drop_path: float) -> Encoder:
    if is_hierarchical(vit):
        return _vary_swin(vit, card, positions, class_token, drop_path)
    table = patch_positions(vit)
    absolute = positions in ("fixed", "learned") or (positions == "keep" and table is not None)
    arguments = {"model_name": card.timm_name, "num_classes": 0} if card.spec is None else card.spec.timm_arguments()
    arguments |= {"drop_path_rate": drop_path, "pos_embed": "learn" if absolute else "none"}
    arguments["img_size"] = input_size(vit)  # perhaps another than when it was built
    if class_token:
        arguments["class_token"] = True
    copy = cast(VisionTransformer, timm.create_model(**arguments))
    state = vit.state_dict()
    known = state.pop("pos_embed", None)
    if class_token and not vit.has_class_token:
        state["cls_token"] = torch.empty(1, 1, vit.embed_dim).normal_(std=0.02)
    if absolute:
        parameter = copy.get_parameter("pos_embed")
        state["pos_embed"] = _positions(vit, positions, known, parameter.shape[1])
        kept = positions == "keep" and not vit.get_parameter("pos_embed").requires_grad
        parameter.requires_grad_(positions != "fixed" and not kept)
    copy.load_state_dict(state, strict=True)
    if positions == "relative":
        _relate(copy)
    return copy


def _vary_swin(
    swin: SwinTransformer, card: EncoderCard, positions: Variant, class_token: bool, drop_path: float
) -> SwinTransformer:
    if class_token:
        raise PatchloomError("a Swin has no class token and can be given none: use --pooling mean")
    if positions != "keep":
        raise PatchloomError(f"a Swin keeps its own relative positions: leave out --positions {positions}")
    arguments = {"model_name": card.timm_name, "num_classes": 0} if card.spec is None else card.spec.timm_arguments()
    copy = cast(SwinTransformer, timm.create_model(**arguments | {"drop_path_rate": drop_path}))
    copy.load_state_dict(swin.state_dict(), strict=True)
    return copy


def _positions(vit: VisionTransformer, variant: Variant, known: Tensor | None, length: int) -> Tensor:
    """Position embeddings [1 length d] of class and register tokens, if they have any, and patches."""
    d, n = vit.embed_dim, patch_count(vit)
    if variant == "fixed":
        if d % 4:
            raise PatchloomError(
                f"fixed sine-cosine positions need a width that 4 divides, not {d}: use --positions learned"
            )
        return torch.cat([torch.zeros(length - n, d), sincos_2d(d, grid_size(vit))])[None]
    if known is None:
        return torch.empty(1, length, d).normal_(std=0.02)
    # a class token that is new stands in front, and begins without a position as MAE's
    return torch.cat([known.new_zeros(1, length - known.shape[1], d), known], dim=1)


def _relate(vit: VisionTransformer) -> None:
    prefix = vit.num_prefix_tokens
    if prefix > 1:
        raise PatchloomError("relative positions cannot be given to register tokens: use --positions keep")
    for module in list(vit.modules()):
        if type(module) is Attention:
            module.__class__ = RelativeAttention  # in place: it keeps its weights and whatever options it has
            module.rel_pos = RelPosBias(grid_size(vit), module.num_heads, prefix_tokens=prefix)
            nn.init.zeros_(module.rel_pos.relative_position_bias_table)


def at_size(
    vit: Encoder, card: EncoderCard, size: tuple[int, int], variant: Variant = "keep", drop_path: float = 0.0
) -> Encoder:
    """A copy of an encoder for images of another size, with other positions or drop path as `with_variant` gives them.

    A table of positions, fixed or learned, is resampled (bicubic, as timm does it); what ``variant`` makes anew is made
    for the new grid. A Swin keeps its windows and their biases.
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


# Training the last blocks of an encoder alone, so that a large one can be adapted on a small machine.


def block_count(vit: Encoder) -> int:
    """Blocks of an encoder; of a Swin, those of all its stages."""
    return len(_blocks(vit))


def train_last_blocks(vit: Encoder, count: int) -> None:
    """Let only the last ``count`` blocks of an encoder be trained, and its last norm."""
    for name in kept_names(vit, count):
        vit.get_parameter(name).requires_grad_(False)


def kept_names(vit: Encoder, count: int) -> list[str]:
    """Names of the parameters that stay as they are if only the last ``count`` blocks are trained, and the last norm.

    Those that are never trained, such as fixed positions, are not among them.
    """
    blocks = _blocks(vit)
    if count > len(blocks):
        raise PatchloomError(
            f"--train_blocks {count} is more than the {len(blocks)} blocks of the encoder: give fewer, or leave it out "
            "to train all of the encoder"
        )
    last = [part for parts in blocks[len(blocks) - count :] for part in parts]
    trained = {id(weight) for part in (*last, vit.norm) for weight in part.parameters()}
    return [name for name, weight in vit.named_parameters() if weight.requires_grad and id(weight) not in trained]


def _blocks(vit: Encoder) -> list[tuple[nn.Module, ...]]:
    """An encoder's blocks, first to last. A Swin's stage begins by merging patches, which its first block brings."""
    if isinstance(vit, VisionTransformer):
        return [(block,) for block in blocks_of(vit)]
    return [
        (stage.downsample, block) if i == 0 else (block,)
        for stage in stages_of(vit)
        for i, block in enumerate(blocks_of(stage))
    ]
