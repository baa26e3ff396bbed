"""An encoder for images of another size, and the maps of its features that dense heads read.

Letters: b batch, c channels, h w height and width of images in pixels, d width, p side of a patch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from torch import Tensor, nn

from patchloom.errors import PatchloomError
from patchloom.nets.dense.blocks import (
    even_blocks,
    has_relative_positions,
    stages_after,
    tokens_after,
)
from patchloom.nets.dense.windows import Windows, window_for
from patchloom.nets.encode import (
    embed,
    final_norm,
    grid_size,
    patch_count,
    patch_side,
    pooled_norm,
    prefix_count,
    width,
)
from patchloom.nets.hierarchical import Encoder, is_hierarchical, level_count
from patchloom.withhold.encoder_input import all_patches

TARGETS = (4, 8, 16, 32)  # strides that heads want, in pixels


def four_levels(encoder: Encoder) -> tuple[int, ...]:
    """Numbers of four blocks, or stages of a Swin, for maps of strides 4, 8, 16 and 32.

    Of a ViT four evenly spaced ones; of a Swin those of the nearest strides, its last one again where it has too few.
    """
    count = level_count(encoder)
    if not is_hierarchical(encoder):
        return even_blocks(count)
    strides = [_stage_stride(encoder, number) for number in range(1, count + 1)]
    return tuple(1 + strides.index(min(strides, key=lambda one: abs(math.log2(one / wanted)))) for wanted in TARGETS)


def _stage_stride(encoder: Encoder, number: int) -> int:
    """Pixels along which a token of a Swin's stage stands."""
    return patch_side(encoder) >> (level_count(encoder) - number)


class FeatureMaps(nn.Module):
    """Maps of an encoder's features at places of its patches, from all of an image; no class or register token.

    Parameters of the encoder that take no part, such as its final norm where blocks are asked for, and blocks after
    those, are frozen: they would get no gradient.

    Args:
        encoder: at the images' size; it is not copied.
        blocks: numbers, from 1, of blocks after which a map is taken as it is, or of a Swin's stages, after each of
            which a norm of its own follows, as in the authors' segmentation. None: the last one with the final norm.
        window: side of windows in patches in which all blocks attend but the last of each quarter (ViTDet); None: all
            attend to all.

    Raises:
        ValueError: no block has such a number.
        PatchloomError: windows for an encoder that can have none.

    Attributes:
        strides: of each map, in pixels.
        widths: of each map.
        grids: rows and columns of each map.
        unused: names of the encoder's parameters that were frozen, since they take no part.
    """

    def __init__(self, encoder: Encoder, blocks: Sequence[int] | None = None, window: int | None = None) -> None:
        super().__init__()
        count = level_count(encoder)
        self.encoder, self.final = encoder, blocks is None
        self.numbers = (count,) if blocks is None else tuple(blocks)
        if not self.numbers or not 1 <= min(self.numbers) <= max(self.numbers) <= count:
            raise ValueError(f"blocks are 1 to {count}, not {self.numbers}")
        self.windows = None if window is None else _windows(encoder, window)
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
        """Maps [b d rows columns] of normalised images [b c h w], in the order of the blocks asked for."""
        vit = self.encoder
        if is_hierarchical(vit):
            found = stages_after(vit, images, self.numbers)
        else:
            tokens = embed(vit, all_patches(images, patch_count(vit)))
            found = tokens_after(vit, tokens, self.numbers, self.windows)
            prefix = prefix_count(vit)
            found = {number: one[:, prefix:].unflatten(1, grid_size(vit)) for number, one in found.items()}
        if self.final:
            found = {number: pooled_norm(vit, final_norm(vit, one)) for number, one in found.items()}
        for number, norm in self.norms.items():
            found[int(number)] = norm(found[int(number)])
        return [found[number].permute(0, 3, 1, 2) for number in self.numbers]


def window_of(encoder: Encoder, pretrained_grid: tuple[int, int]) -> int | None:
    """What `window_for` gives for an encoder at its size; None too where it can have no windows."""
    if is_hierarchical(encoder) or has_relative_positions(encoder):
        return None
    return window_for(grid_size(encoder), pretrained_grid)


def _windows(encoder: Encoder, window: int) -> Windows:
    if is_hierarchical(encoder):
        raise PatchloomError("a Swin attends in windows of its own: leave out windows of another size")
    if has_relative_positions(encoder):
        raise PatchloomError(
            "relative positions are between the patches of a whole image, so windows cannot have them: use --positions "
            "keep, or no windows"
        )
    return Windows(grid_size(encoder), window, prefix_count(encoder))
