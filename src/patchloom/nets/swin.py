"""Forward pass of Swin, a hierarchical encoder, over an `EncoderInput`; timm's modules and weights are unmodified.

A unit is the area of one token of the last stage: 2^(stages-1) patches a side, 32 pixels for Swin-T. Tasks and
questions treat a unit as a patch: it is masked, blanked and placed as a whole. Patch merging joins 2x2 neighbours
within a unit, so only attention mixes the contents of units. There are three ways to attend:

- All units, no position withheld: timm's ``forward_features`` with shifted windows.
- One unit of each 2x2 cell (uniform masking; UM-MAE, Li et al. 2022): the units form a grid of half the side, and the
  same windows, at most as large as it, run over that grid. Relative position biases follow the places in it.
- Positions are withheld (DropPos): windows, shifts and biases of a grid would reveal the places of units. So patches
  attend within their unit if a window is no larger than a unit, else to those of all units; biases are kept between
  patches of the same unit only, where they do not depend on its place. The order of the units only orders the outputs.
  Units with a known position get a fixed sine-cosine embedding of it, because a Swin has no position embeddings.

Letters: b batch, k units that enter, s patches along a unit, d width of a stage, g windows, t patches of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast, overload

import torch
from timm.layers import PatchEmbed
from timm.models.eva import Eva, EvaBlock
from timm.models.swin_transformer import (
    PatchMerging,
    SwinTransformer,
    SwinTransformerBlock,
    SwinTransformerStage,
    WindowAttention,
)
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from typing_extensions import TypeIs

from patchloom.errors import PatchloomError
from patchloom.patches.positions import sincos_2d
from patchloom.patches.tokens import patchify
from patchloom.sizes import Sides
from patchloom.withhold.encoder_input import EncoderInput

PlainViT = VisionTransformer | Eva  # global attention over one sequence of tokens
Encoder = PlainViT | SwinTransformer


def is_hierarchical(net: nn.Module) -> TypeIs[SwinTransformer]:
    """Return whether an encoder is a Swin."""
    return isinstance(net, SwinTransformer)


# timm declares all of these as Module only.


def patch_embedding(net: Encoder) -> PatchEmbed:
    """Return the patch embedding."""
    return cast(PatchEmbed, net.patch_embed)


def stages_of(swin: SwinTransformer) -> Sequence[SwinTransformerStage]:
    """Return the stages of a Swin."""
    return cast(Sequence[SwinTransformerStage], swin.layers)


@overload
def blocks_of(net: PlainViT) -> Sequence[Block | EvaBlock]: ...


@overload
def blocks_of(net: SwinTransformerStage) -> Sequence[SwinTransformerBlock]: ...


def blocks_of(
    net: PlainViT | SwinTransformerStage,
) -> Sequence[Block | EvaBlock] | Sequence[SwinTransformerBlock]:
    """Return the blocks of a ViT, or of a Swin's stage."""
    return cast(Sequence[Block], net.blocks)


def patches_along_unit(swin: SwinTransformer) -> int:
    """Return the number s of patches along a unit in the first stage, 2^(stages-1)."""
    return 2 ** (len(swin.layers) - 1)


def unit_side(swin: SwinTransformer) -> int:
    """Return the side of a unit in pixels."""
    return int(patch_embedding(swin).patch_size[0]) * patches_along_unit(swin)


def unit_grid(swin: SwinTransformer) -> Sides:
    """Return rows and columns of units."""
    rows, columns = (side // patches_along_unit(swin) for side in patch_embedding(swin).grid_size)
    return rows, columns


def unit_positions(swin: SwinTransformer) -> Tensor:
    """Return fixed 2-d sine-cosine embeddings [n d] of the units' places, where d is the width of the first stage.

    They are not part of the encoder, and are added only if positions of some units are withheld.
    """
    weight = patch_embedding(swin).proj.weight
    # on the weight's device, to avoid a blocking copy, except on Apple GPUs, which have no float64
    device = None if weight.device.type == "mps" else weight.device
    return sincos_2d(len(weight), unit_grid(swin), device).to(weight.device)


def check_hierarchical(swin: nn.Module, name: str) -> None:
    """Raise an error for a Swin whose forward pass would not be reproduced here."""
    if type(swin) is not SwinTransformer:
        raise PatchloomError(
            f"{name} is a {type(swin).__name__}: choose timm's plain Swin, no other hierarchical encoder is supported"
        )
    stages, embedding = stages_of(swin), patch_embedding(swin)
    blocks = [block for stage in stages for block in blocks_of(stage)]
    unknown = [type(one).__name__ for stage in stages[1:] if type(one := stage.downsample) is not PatchMerging]
    unknown += [type(block).__name__ for block in blocks if type(block) is not SwinTransformerBlock]
    unknown += ["windows over the whole grid" for block in blocks if block.always_partition]
    if unknown:
        raise PatchloomError(f"{name} has {unknown[0]} inside, which patchloom does not support: choose a plain Swin")
    if len(set(embedding.patch_size)) > 1:
        raise PatchloomError(f"{name} has patches of {embedding.patch_size} pixels: choose a Swin with square patches")
    p, (h, w) = unit_side(swin), embedding.img_size
    if h % p or w % p:
        raise PatchloomError(
            f"units of {p} pixels, one for each token of the last stage of {name}, do not divide images of {h}x{w}: "
            f"choose an image size that is a multiple of {p}, preferably of {2 * p}"
        )
    if (d := embedding.proj.out_channels) % 4:
        raise PatchloomError(f"{name} needs a width divisible by 4, not {d}: give another --model.embed_dim")


def refuse_hierarchical(net: Encoder, what: str, instead: str) -> PlainViT:
    """Return a plain ViT; raise an error for a Swin, which ``what`` cannot use, with the remedy ``instead``."""
    if is_hierarchical(net):
        raise PatchloomError(f"{what} needs the tokens of a plain ViT, and this is a Swin: {instead}")
    return net


def encode_units(
    swin: SwinTransformer,
    given: EncoderInput,
    *,
    mask_token: Tensor | None = None,
    position_token: Tensor | None = None,
) -> Tensor:
    """Compute the tokens [b k d] of the last stage, one per unit, without the final norm.

    Args:
        swin: the encoder.
        given: its input; all units in grid order, or one of each 2x2 cell in the order of the cells; with withheld
            positions any units in any order.
        mask_token: stand-in for blank content, after the patch embedding; broadcast to [b k d].
        position_token: stand-in for dropped positions; broadcast to [b k d].
    """
    tokens = _embed(swin, given, mask_token, position_token)
    k, s = given.visible.shape[1], patches_along_unit(swin)
    grid = None
    if given.dropped is None:  # all units, or one of each 2x2 cell, form a grid
        rows, columns = unit_grid(swin)
        grid = next((one for one in ((rows, columns), (rows // 2, columns // 2)) if one[0] * one[1] == k), None)
        if grid is None:
            raise ValueError(f"windows need all {rows * columns} units, or one of each 2x2, not {k}")
    for stage in stages_of(swin):
        if not isinstance(stage.downsample, nn.Identity):
            units = tokens.reshape(-1, s, s, tokens.shape[-1])
            # full precision, because the blocks add to it
            tokens = stage.downsample(units).to(tokens.dtype).reshape(len(tokens), -1, stage.downsample.out_dim)
            s //= 2
        made: dict[tuple[Sides, Sides], _Windows] = {}
        for block in blocks_of(stage):
            sides = block.window_size, block.shift_size
            if sides not in made:
                made[sides] = _of_units(k, s, sides[0], tokens) if grid is None else _of_grid(grid, s, *sides, tokens)
            step = partial(window_block, block, windows=made[sides])
            tokens = checkpoint(step, tokens, use_reentrant=False) if stage.grad_checkpointing else step(tokens)
    return tokens


_WITHHELD = {"mask_token": "blanks patches", "position_token": "drops positions"}


def required_stand_in(name: str, token: Tensor | None) -> Tensor:
    """Return a stand-in; raise an error if the input needs it and the task gives none."""
    if token is None:
        raise PatchloomError(
            f"the task {_WITHHELD[name]}, but its placeholders() returns no {name}: return "
            f'{{"{name}": self.{name}}}, for example an nn.Parameter of self.geometry.token_width zeros'
        )
    return token


def _embed(
    swin: SwinTransformer, given: EncoderInput, mask_token: Tensor | None, position_token: Tensor | None
) -> Tensor:
    """Embed the patches [b k*s*s d] of the units that enter, unit after unit."""
    embedding = patch_embedding(swin)
    s, p = patches_along_unit(swin), embedding.patch_size[0]
    project, c = embedding.proj, given.images.shape[1]
    units = patchify(given.images, (s * p, s * p), given.visible).unflatten(-1, (c, s, p, s, p))
    patches = units.permute(0, 1, 3, 5, 2, 4, 6).flatten(4).flatten(2, 3)  # [b k s*s c*p*p]
    tokens = embedding.norm(F.linear(patches, project.weight.flatten(1), project.bias)).to(project.weight.dtype)
    if given.blank is not None:
        content = required_stand_in("mask_token", mask_token)
        tokens = torch.where(given.blank[..., None, None], content[..., None, :], tokens)
    if given.dropped is not None:
        place = required_stand_in("position_token", position_token)
        positions = unit_positions(swin)[given.visible]
        tokens = tokens + torch.where(given.dropped[..., None], place, positions)[:, :, None]
    return tokens.flatten(1, 2)


class _Windows(NamedTuple):
    """Windows of patches that attend to each other, and their relative position biases.

    Attributes:
        size: number t of patches of a window.
        members: [g t] indices of each window's patches among all N, where N itself is padding; None: in order.
        places: [N] index of each patch among the members.
        bias: [t t] or [s*s s*s] rows of the table of relative biases; the row after the last is zero: no bias.
        units: number of consecutive units; the bias is repeated for each, and there is none between them.
        apart: [1 t t] or [g t t] True where two patches must not attend to each other; None: nowhere.
    """

    size: int
    members: Tensor | None
    places: Tensor | None
    bias: Tensor
    units: int = 1
    apart: Tensor | None = None


def _offsets(sides: Sides, window: Sides, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return, between patches of a rectangle, rows [t t] of a ``window``'s table of biases, and where it has one."""
    at = [torch.arange(side, device=like.device) for side in sides]
    y, x = (one.flatten() for one in torch.meshgrid(*at, indexing="ij"))
    down, along = y[:, None] - y, x[:, None] - x
    (h, w), there = window, (down.abs() < window[0]) & (along.abs() < window[1])
    rows = (down + h - 1) * (2 * w - 1) + along + w - 1
    return torch.where(there, rows, (2 * h - 1) * (2 * w - 1)), there


def _of_grid(grid: Sides, s: int, table: Sides, shift: Sides, like: Tensor) -> _Windows:
    """Return timm's windows over a ``grid`` of units of s x s patches, which come unit after unit.

    As in timm, a window is no larger than the grid, and nothing is shifted if a window covers it.
    """
    (rows, columns), device = grid, like.device
    h, w = rows * s, columns * s
    window = min(table[0], h), min(table[1], w)
    shift = 0 if h <= window[0] else shift[0], 0 if w <= window[1] else shift[1]
    n = h * w
    where = torch.arange(n, device=device).view(rows, columns, s, s).transpose(1, 2).reshape(h, w)
    where = where.roll((-shift[0], -shift[1]), (0, 1))
    padding = 0, -w % window[1], 0, -h % window[0]
    members = _cut(F.pad(where, padding, value=n), window)
    apart = None
    if any(shift):
        # only the shift makes different regions of a side neighbours
        regions_along = []
        for side, one, by in zip((h + padding[3], w + padding[1]), window, shift, strict=True):
            at = torch.arange(side, device=device)
            regions_along.append((at >= side - one).long() + (at >= side - by).long() if by else torch.zeros_like(at))
        down, along = regions_along
        regions = _cut(3 * down[:, None] + along, window)
        apart = regions[:, :, None] != regions[:, None]
    places = members.flatten().argsort()[:n]  # padding has the largest index, and comes last
    return _Windows(window[0] * window[1], members, places, _offsets(window, table, like)[0], apart=apart)


def _cut(values: Tensor, window: Sides) -> Tensor:
    """Cut a grid [h w] of values into windows [g t]."""
    (h, w), (rows, columns) = values.shape, window
    return values.view(h // rows, rows, w // columns, columns).transpose(1, 2).reshape(-1, rows * columns)


def _of_units(k: int, s: int, window: Sides, like: Tensor) -> _Windows:
    """Return windows that do not depend on the places of units: each unit, or all if a window is larger than a unit."""
    bias, there = _offsets((s, s), window, like)
    if max(window) > s:
        return _Windows(k * s * s, None, None, bias, units=k)
    return _Windows(s * s, None, None, bias, apart=~there[None])


def window_block(block: SwinTransformerBlock, tokens: Tensor, windows: _Windows) -> Tensor:
    """Run a timm block over tokens [b N d] with the given windows."""
    normed = block.norm1(tokens)
    if windows.members is None:
        attended = _attention(block.attn, normed.unflatten(1, (-1, windows.size)), windows).flatten(1, 2)
    else:
        padded = F.pad(normed, (0, 0, 0, 1))  # as in timm: zeros, which are attended to
        attended = _attention(block.attn, padded[:, windows.members], windows).flatten(1, 2)[:, windows.places]
    tokens = tokens + block.drop_path1(attended)
    return tokens + block.drop_path2(block.mlp(block.norm2(tokens)))


def _attention(attn: WindowAttention, tokens: Tensor, windows: _Windows) -> Tensor:
    """Compute timm's attention within each window of tokens [b g t d]."""
    b, g, t, _ = tokens.shape
    q, k, v = attn.qkv(tokens).view(b * g, t, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
    # mask [1 or g heads t t]: relative position biases, and -inf between separated patches
    bias = F.pad(attn.relative_position_bias_table, (0, 0, 0, 1))[windows.bias].permute(2, 0, 1)[None]
    if windows.units > 1:
        unit = torch.arange(windows.size, device=bias.device) // windows.bias.shape[0]
        bias = torch.where(unit[:, None] == unit, bias.repeat(1, 1, windows.units, windows.units), 0)
    if windows.apart is not None:
        bias = bias.masked_fill(windows.apart[:, None], float("-inf"))
    if len(bias) > 1:
        bias = bias.repeat(b, 1, 1, 1)
    if attn.fused_attn:
        drop = attn.attn_drop.p if attn.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype), dropout_p=drop, scale=attn.scale)
    else:
        mixed = attn.attn_drop((q * attn.scale @ k.mT + bias).softmax(-1)) @ v
    return attn.proj_drop(attn.proj(mixed.transpose(1, 2).reshape(b, g, t, -1)))


def resize_swin(swin: SwinTransformer, size: tuple[int, int]) -> None:
    """Resize a Swin's input to ``size`` (h, w) in place; it keeps its windows."""
    embedding = patch_embedding(swin)
    embedding.set_input_size(img_size=size)
    rows, columns = embedding.grid_size
    for i, stage in enumerate(stages_of(swin)):
        before = 2 ** max(0, i - 1)
        window: Any = blocks_of(stage)[0].window_size  # (rows, columns), although timm declares an int
        stage.set_input_size((rows // before, columns // before), window_size=window)


def level_count(vit: Encoder) -> int:
    """Return the number of blocks of a ViT, or of stages of a Swin."""
    return len(stages_of(vit)) if is_hierarchical(vit) else len(blocks_of(vit))
