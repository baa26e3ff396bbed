"""An encoder for images of another size, and the maps of its features that dense heads read.

Letters: b batch, c channels, h w height and width of images in pixels, d width, p side of a patch.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from patchloom.errors import PatchloomError
from patchloom.nets.encode import (
    embed,
    final_norm,
    grid_size,
    patch_count,
    patch_side,
    pooled_norm,
    prefix_count,
    rotations,
    width,
)
from patchloom.nets.sparse_attention import Rotations, run_blocks
from patchloom.nets.swin import Encoder, PlainViT, blocks_of, is_hierarchical, level_count, patch_embedding, stages_of
from patchloom.withhold.encoder_input import all_patches

# Windows of an image's patches, for attention that would cost too much over all of them (ViTDet, section 3).


_LARGER = 1.5  # so much longer a grid's side may be than in pre-training, before windows are worth it


def window_for(grid: tuple[int, int], pretrained_grid: tuple[int, int]) -> int | None:
    """Return the side of windows, in patches, for an encoder that was pre-trained on another grid."""
    side = math.sqrt(math.prod(pretrained_grid))
    if math.sqrt(math.prod(grid)) <= _LARGER * side:
        return None
    both = math.gcd(*grid)

    def factor(one: int) -> float:
        return max(one / side, side / one)

    near = min((one for one in range(1, both + 1) if both % one == 0), key=factor)
    return near if factor(near) <= _LARGER else round(side)


class Windows(nn.Module):
    """Attention of a block in windows of patches without padding: if ``side`` does not divide, sizes differ by one.

    A side of 37 patches in windows of 16 is cut into 19 and 18; windows of the same size run as one batch. Each window
    gets a copy of the prefix tokens; their mean over the windows is the result. Stochastic depth is drawn separately
    for each window.

    Args:
        grid: rows and columns of patches.
        side: side of a window, in patches.
        prefix: number of class and register tokens.
    """

    order: Tensor
    back: Tensor

    def __init__(self, grid: tuple[int, int], side: int, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix
        by_shape = defaultdict(list)
        whole = torch.arange(math.prod(grid)).view(grid)
        for rows in whole.split(_parts(grid[0], side)):
            for one in rows.split(_parts(grid[1], side), dim=1):
                by_shape[tuple(one.shape)].append(one.flatten())
        members = [torch.stack(windows) for windows in by_shape.values()]
        self.sizes = [(len(one), one.shape[1]) for one in members]
        order = torch.cat([one.flatten() for one in members])
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("back", order.argsort(), persistent=False)

    def forward(self, run: Callable[..., Tensor], tokens: Tensor, rope: Tensor | None = None) -> Tensor:
        """Apply ``run``, a block over tokens [b t d], to tokens [b prefix+n d], window by window.

        ``rope`` [1 h n 2e] are the rotations of the patches; ``run`` takes those of windows, a list of [b h t 2e].
        """
        b, p = tokens.shape[0], self.prefix
        front, patches = tokens[:, :p], tokens[:, p:][:, self.order]
        counts = [g * t for g, t in self.sizes]
        ropes = [None] * len(counts) if rope is None else rope[:, :, self.order].split(counts, dim=2)
        fronts, made = [], []
        for some, turned, (g, t) in zip(patches.split(counts, dim=1), ropes, self.sizes, strict=True):
            windows = some.unflatten(1, (g, t))
            given = torch.cat([front[:, None].expand(b, g, -1, -1), windows], dim=2).flatten(0, 1)
            each: list[Tensor] | None = None
            if turned is not None:
                each = [turned[0].unflatten(1, (g, t)).transpose(0, 1).repeat(b, 1, 1, 1)]  # [b*g h t 2e]
            out = (run(given) if each is None else run(given, rotations=each)).unflatten(0, (b, g))
            fronts.append(out[:, :, :p])
            made.append(out[:, :, p:].flatten(1, 2))
        return torch.cat([torch.cat(fronts, dim=1).mean(1), torch.cat(made, dim=1)[:, self.back]], dim=1)


def _parts(length: int, side: int) -> list[int]:
    """Return nearly equal lengths of the parts of a side of the grid."""
    count = max(1, round(length / side))
    return [length // count + (i < length % count) for i in range(count)]


# An encoder's blocks over the whole of an image, and what it looks like after some of them.


def even_blocks(depth: int) -> tuple[int, int, int, int]:
    """Return the numbers, from 1, of four evenly spaced blocks: depth/4, depth/2, 3/4 depth and depth, rounded up.

    With fewer than four blocks, some occur more than once.
    """
    first, second, third, last = (-(-quarter * depth // 4) for quarter in (1, 2, 3, 4))
    return first, second, third, last


def has_relative_positions(vit: Encoder) -> bool:
    """Return whether the blocks of a ViT have bias tables between the patches of the whole grid."""
    return not is_hierarchical(vit) and any(hasattr(block.attn, "rel_pos") for block in blocks_of(vit))


def tokens_after(
    vit: PlainViT,
    tokens: Tensor,
    numbers: Sequence[int],
    windows: Windows | None = None,
    turns: Rotations | None = None,
) -> dict[int, Tensor]:
    """Return tokens [b prefix+n d] after the blocks ``numbers``, from 1; later blocks do not run."""
    last, kept = max(numbers), vit.grad_checkpointing
    whole = set(range(1, last + 1) if windows is None else even_blocks(len(vit.blocks)))
    found, done = {}, 0
    while done < last:
        until, all_of_them = done + 1, done + 1 in whole
        while all_of_them and until not in numbers and until + 1 in whole:
            until += 1
        some = None if turns is None else turns[done:until]
        if windows is None or all_of_them:
            tokens = run_blocks(blocks_of(vit)[done:until], tokens, rotations=some, checkpointing=kept)
        else:
            run = partial(run_blocks, blocks_of(vit)[done:until], checkpointing=kept)
            tokens = windows(run, tokens, None if some is None else some[0])
        done = until
        if done in numbers:
            found[done] = tokens
    return found


_TARGETS = (4, 8, 16, 32)  # strides that heads want, in pixels


def four_levels(encoder: Encoder) -> tuple[int, ...]:
    """Return the numbers of four blocks, or stages of a Swin, for maps of strides 4, 8, 16 and 32.

    A ViT has four evenly spaced ones, a Swin those of the nearest strides; its last one is repeated if it has too few.
    """
    count = level_count(encoder)
    if not is_hierarchical(encoder):
        return even_blocks(count)
    strides = [_stage_stride(encoder, number) for number in range(1, count + 1)]
    return tuple(1 + strides.index(min(strides, key=lambda one: abs(math.log2(one / wanted)))) for wanted in _TARGETS)


def _stage_stride(encoder: Encoder, number: int) -> int:
    """Return the stride, in pixels, of the tokens of a Swin's stage."""
    return patch_side(encoder) >> (level_count(encoder) - number)


class FeatureMaps(nn.Module):
    """Feature maps of an encoder for whole images, without class and register tokens.

    Unused parameters of the encoder, such as its final norm and later blocks if ``blocks`` are given, are frozen,
    because they would get no gradient.

    Args:
        encoder: encoder at the size of the images; it is not copied.
        blocks: numbers, from 1, of the blocks whose output is a map, or of a Swin's stages, each followed by a separate
            norm, as in the authors' segmentation. None: the last one with the final norm.
        window: side in patches of the attention windows of all blocks except the last of each quarter (ViTDet); None:
            global attention.

    Attributes:
        strides: stride of each map, in pixels.
        widths: number of channels of each map.
        grids: rows and columns of each map.
        unused: names of the frozen parameters of the encoder.
    """

    def __init__(self, encoder: Encoder, blocks: Sequence[int] | None = None, window: int | None = None) -> None:
        super().__init__()
        count = level_count(encoder)
        self.encoder, self.final = encoder, blocks is None
        self.numbers = (count,) if blocks is None else tuple(blocks)
        if not self.numbers or not 1 <= min(self.numbers) <= max(self.numbers) <= count:
            raise ValueError(f"blocks are 1 to {count}, not {self.numbers}")
        self.windows: Windows | None = None
        if window is not None and is_hierarchical(encoder):
            raise PatchloomError("a Swin has fixed attention windows: leave out windows of another size")
        if window is not None and has_relative_positions(encoder):
            raise PatchloomError(
                "relative positions are between the patches of a whole image, so windows cannot have them: use "
                "--positions keep, or no windows"
            )
        if window is not None:
            self.windows = Windows(grid_size(encoder), window, prefix_count(encoder))
        (rows, columns), p, d = grid_size(encoder), patch_side(encoder), width(encoder)
        self.norms = nn.ModuleDict()
        if is_hierarchical(encoder):
            finer = [count - number for number in self.numbers]
            self.strides = tuple(float(_stage_stride(encoder, number)) for number in self.numbers)
            self.widths = tuple(d >> by for by in finer)
            self.grids = tuple((rows << by, columns << by) for by in finer)
            if not self.final:
                norms = {str(number): nn.LayerNorm(d) for number, d in zip(self.numbers, self.widths, strict=True)}
                self.norms.update(norms)
        else:
            maps = len(self.numbers)
            self.strides, self.widths, self.grids = (float(p),) * maps, (d,) * maps, ((rows, columns),) * maps
        self.unused = tuple(name for name, _ in encoder.named_parameters() if self._takes_no_part(name))
        for name in self.unused:
            encoder.get_parameter(name).requires_grad_(False)

    def _takes_no_part(self, name: str) -> bool:
        layer = re.match(r"(?:blocks|layers)\.(\d+)\.", name)
        if layer:
            return int(layer[1]) >= max(self.numbers)
        return name.startswith(("head.", "attn_pool.", *(() if self.final else ("norm.", "fc_norm."))))

    def forward(self, images: Tensor) -> list[Tensor]:
        """Return maps [b d rows columns] of normalised images [b c h w], in the order of ``blocks``."""
        vit = self.encoder
        if is_hierarchical(vit):
            embedding, found = patch_embedding(vit), dict[int, Tensor]()
            tokens = embedding(images)
            kept = embedding.proj.weight.dtype
            for number, stage in enumerate(stages_of(vit)[: max(self.numbers)], 1):
                tokens = stage.downsample(tokens).to(kept)  # autocast or not, what the blocks add to is kept in full
                for block in blocks_of(stage):
                    again = stage.grad_checkpointing
                    tokens = checkpoint(block, tokens, use_reentrant=False) if again else block(tokens)
                if number in self.numbers:
                    found[number] = tokens
        else:
            given = all_patches(images, patch_count(vit))
            found = tokens_after(vit, embed(vit, given), self.numbers, self.windows, rotations(vit, given))
            prefix = prefix_count(vit)
            found = {number: one[:, prefix:].unflatten(1, grid_size(vit)) for number, one in found.items()}
        if self.final:
            found = {number: pooled_norm(vit, final_norm(vit, one)) for number, one in found.items()}
        for name, norm in self.norms.items():
            found[int(name)] = norm(found[int(name)])
        return [found[number].permute(0, 3, 1, 2) for number in self.numbers]


def window_of(encoder: Encoder, pretrained_grid: tuple[int, int]) -> int | None:
    """Return `window_for` for an encoder at its size; None also if it cannot have windows."""
    if is_hierarchical(encoder) or has_relative_positions(encoder):
        return None
    return window_for(grid_size(encoder), pretrained_grid)


# Pyramids: maps of strides 4, 8, 16 and 32 made of those that an encoder gives.


class _Pyramid(nn.Module):
    """Levels at given strides, each from a separate map, or all from the only map.

    Attributes:
        strides: stride of each level in pixels.
        grids: rows and columns of each level.
        widths: number of channels of each level.
    """

    widths: tuple[int, ...]

    def __init__(self, maps: FeatureMaps) -> None:
        super().__init__()
        if len(maps.strides) not in (1, len(_TARGETS)):
            raise ValueError(f"a pyramid is made of one map or of {len(_TARGETS)}, not of {len(maps.strides)}")
        self.sources = tuple(min(i, len(maps.strides) - 1) for i in range(len(_TARGETS)))
        strides = [maps.strides[source] for source in self.sources]
        self.doublings = tuple(
            round(math.log2(stride / wanted)) for stride, wanted in zip(strides, _TARGETS, strict=True)
        )
        self.strides = tuple(stride / 2**by for stride, by in zip(strides, self.doublings, strict=True))
        self.grids = tuple(
            (_scaled(maps.grids[source][0], by), _scaled(maps.grids[source][1], by))
            for source, by in zip(self.sources, self.doublings, strict=True)
        )
        self.levels = nn.ModuleList()

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """Return levels [b width rows columns], the finest first, from the maps [b d rows columns]."""
        return [level(maps[source]) for level, source in zip(self.levels, self.sources, strict=True)]


def _scaled(side: int, doublings: int) -> int:
    return side << doublings if doublings >= 0 else -(-side >> -doublings)


def _scaling(widths: list[int], norm: Callable[[int], nn.Module]) -> list[nn.Module]:
    """Return transposed convolutions from each width to the next, each with stride 2; between them norm and GELU."""
    layers: list[nn.Module] = []
    for narrow, wide in zip(widths[1:], widths, strict=False):
        if layers:
            layers += [norm(wide), nn.GELU()]
        layers.append(nn.ConvTranspose2d(wide, narrow, 2, 2))
    return layers


def _pooling(doublings: int) -> list[nn.Module]:
    return [nn.MaxPool2d(2**-doublings, ceil_mode=True)] if doublings < 0 else []


class SimpleFeaturePyramid(_Pyramid):
    """ViTDet's pyramid (arXiv 2203.16527, section 3 and appendix A.2): every level comes from the last map.

    Transposed convolutions, which halve the width, with LayerNorm and GELU between them, or max pooling; then 1x1 and
    3x3 convolutions, each followed by a LayerNorm. Each stage of a Swin gives the level of its stride.

    Args:
        maps: one map, or one for each level.
        width: number of channels of every level.
    """

    def __init__(self, maps: FeatureMaps, width: int = 256) -> None:
        super().__init__(maps)
        for source, by in zip(self.sources, self.doublings, strict=True):
            widths = [max(1, maps.widths[source] >> i) for i in range(max(0, by) + 1)]
            convolutions = [
                *(nn.Conv2d(widths[-1], width, 1, bias=False), LayerNorm2d(width)),
                *(nn.Conv2d(width, width, 3, padding=1, bias=False), LayerNorm2d(width)),
            ]
            self.levels.append(nn.Sequential(*_scaling(widths, LayerNorm2d), *_pooling(by), *convolutions))
        self.widths = (width,) * len(_TARGETS)


class MultiLevel(_Pyramid):
    """Levels for UPerNet, the k-th from the k-th map, as in BEiT's and MAE's segmentation; widths are kept.

    Transposed convolutions with BatchNorm and GELU between them, the unchanged map, or max pooling.

    Args:
        maps: one for each level.
    """

    def __init__(self, maps: FeatureMaps) -> None:
        super().__init__(maps)
        self.widths = tuple(maps.widths[source] for source in self.sources)
        for d, by in zip(self.widths, self.doublings, strict=True):
            self.levels.append(nn.Sequential(*_scaling([d] * (max(0, by) + 1), nn.BatchNorm2d), *_pooling(by)))
