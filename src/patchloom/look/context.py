"""What every picture of an encoder is made of: encoders, images, and a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from patchloom.data.loader import plain_batches
from patchloom.data.modality import Modality
from patchloom.data.source import Source
from patchloom.data.stats import normalize
from patchloom.errors import PatchloomError
from patchloom.look.image_grid import Title, brightness, channels_shown, to_pixels
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.encode import (
    encode,
    grid_size,
    input_channels,
    input_size,
    layer_names,
    patch_count,
    patch_size,
    prefix_count,
)
from patchloom.nets.heads import InstanceHead
from patchloom.nets.swin import Encoder, is_hierarchical
from patchloom.questions.question import Sheet
from patchloom.withhold.encoder_input import all_patches

UNTRAINED = "untrained"
HeadChoice = Literal["each", "mean"]
QUERIES = 4  # patches at most of which attention is drawn together, as in ExtreMA's Fig. 1


class NamedEncoder(NamedTuple):
    """An encoder in eval mode at the size at which it is looked at.

    Attributes:
        name: above its pictures and beside its curves.
        vit: the encoder; `input_size` and `patch_size` of it are true.
        card: tells how images become its input. Its ``spec`` may have another size.
        head: the class attention beside it, of ExtreMA; None without one.
    """

    name: str
    vit: Encoder
    card: EncoderCard
    head: InstanceHead | None = None

    @property
    def modality(self) -> Modality:
        """What its pictures are of."""
        return self.card.modality


class ImagePoint(NamedTuple):
    """A point of an image: pixels from the left, and from the top, of what the encoder is given."""

    x: float
    y: float


@dataclass(frozen=True)
class LookRequest:
    """What a user wants to see, as each picture is given it.

    Attributes:
        encoder: of which the pictures are.
        beside: others for curves: by default its untrained twin, and whatever the user named.
        source: images, or recordings as the encoder hears them.
        folder: where the pictures go.
        images: how many are drawn, 1 to 8, evenly spread over ``source``.
        seed: of whatever is drawn by lot.
        query: of which patch something is asked; None: the picture chooses.
        queries: of which patches attention is drawn as the mean of all heads; none: the picture chooses.
        heads: whether attention is drawn of each head, or as their mean.
        exemplar: file of an image whose like retrieval looks for in each image; None: crops of the images ask.
        blocks: numbers, from 1, of the blocks that are drawn; None: the picture chooses.
        steps: of a fit; None: as many as the paper has, or, on a CPU, as are done within minutes.
        device: on which all is computed; the encoders are there.
    """

    encoder: NamedEncoder
    source: Source
    folder: Path
    beside: tuple[NamedEncoder, ...] = ()
    images: int = 8
    seed: int = 0
    query: ImagePoint | None = None
    queries: tuple[ImagePoint, ...] = ()
    heads: HeadChoice = "each"
    exemplar: Path | None = None
    blocks: tuple[int, ...] | None = None
    steps: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def pictures(self, most: int | None = None, of: NamedEncoder | None = None, times: int = 1) -> Tensor:
        """Images [b c h w], normalised as the encoder wants them, on the device, evenly spread over the source."""
        count = min(len(self.source), self.images if most is None else most)
        places = np.unique(np.linspace(0, len(self.source) - 1, count).round().astype(int))
        one = of or self.encoder
        some = self.source.subset(places)
        size = (times * input_size(one.vit)[0], times * input_size(one.vit)[1])
        batches = plain_batches(some, size, 32, channels=input_channels(one.vit), device=self.device)
        return torch.cat([normalize(batch.views[0], one.card.mean, one.card.std) for batch in batches])

    def all_encoders(self) -> tuple[NamedEncoder, ...]:
        """The one that was asked for, and those beside it."""
        return (self.encoder, *self.beside)

    def title(self, what: str) -> Title:
        """What stands above a sheet."""
        return Title(f"{self.encoder.name}: {what}")


def refuse_swin(vit: Encoder, what: str) -> VisionTransformer:
    """Return a plain ViT, and refuse for a Swin what makes no sense on windows that are merged from stage to stage."""
    if is_hierarchical(vit):
        raise PatchloomError(f"{what} is of encoders whose patches all attend to one another, which a Swin is not")
    return vit


# draws one kind of picture, and returns the files
Draw = Callable[[LookRequest], Sequence[Path]]


# A task's sheet as people see it.


def sheet_as_drawn(
    sheet: Sheet, modality: Modality, mean: Sequence[float], std: Sequence[float]
) -> tuple[Sheet, Sequence[float], Sequence[float]]:
    """A sheet of normalised pictures [b c h w] in the colours in which they are drawn, with its mean and deviation."""
    drawn = {name: modality.colours(images, mean, std) for name, images in sheet.columns.items()}
    for _, drawn_mean, drawn_std in drawn.values():  # all alike
        mean, std = drawn_mean, drawn_std
    columns = {name: images for name, (images, _, _) in drawn.items()}
    return sheet._replace(caption=" ".join(filter(None, [sheet.caption, modality.axes])), columns=columns), mean, std


# What all pictures of an encoder draw alike: its images, its patches in them, and the words for them.


def output_of(one: NamedEncoder, images: Tensor) -> Tensor:
    """What an encoder gives for the patches of whole images [b c h w], after its last norm: [b rows columns d]."""
    with torch.inference_mode():
        tokens = encode(one.vit, all_patches(images, patch_count(one.vit)))
    return check_finite(one, tokens[:, prefix_count(one.vit) :].unflatten(1, grid_size(one.vit)).float().cpu())


def check_finite(one: NamedEncoder, features: Tensor) -> Tensor:
    """The same features."""
    if not features.isfinite().all():
        raise PatchloomError(f"{one.name} gives features that are not finite: its training has diverged")
    return features


def to_pictures(one: NamedEncoder, images: Tensor, beside: Tensor | None = None) -> np.ndarray:
    """Colours uint8 [b h w 3] of normalised images [b c h w]; recordings with the first row at the bottom.

    If images are dark, they are drawn brighter, and parts of images as those ``beside`` which they are drawn.
    """
    drawn, mean, std = _in_colours(one, images)
    return to_pixels(drawn, mean, std, brightness(drawn if beside is None else _in_colours(one, beside)[0], mean, std))


def _in_colours(one: NamedEncoder, images: Tensor) -> tuple[Tensor, Sequence[float], Sequence[float]]:
    return one.modality.colours(images, one.card.mean, one.card.std)


def orient_rows(one: NamedEncoder, values: Tensor) -> np.ndarray:
    """What belongs to patches [b rows columns ...], as their picture has them: of recordings the first row last."""
    shown = values.detach().cpu().float()
    return (shown if one.modality.top_down else shown.flip(1)).numpy()


def full_caption(one: NamedEncoder, text: str, images: Tensor) -> str:
    """A caption with what is to be said of how the images are shown.

    Args:
        one: the encoder.
        text: the caption.
        images: [b c h w] that `to_pictures` shows; if they are dark, it is said how much brighter they are drawn.
    """
    gain, noun = brightness(*_in_colours(one, images)), one.modality.noun
    brighter = "" if gain == 1 else f"The {noun} are dark: they are drawn {gain:,.3g} times as bright as they are."
    return " ".join(filter(None, [text, one.modality.axes, channels_shown(len(one.card.mean)), brighter]))


def patch_at(one: NamedEncoder, place: ImagePoint) -> int:
    """Number of the patch, row by row, at a point of an image."""
    (rows, columns), (tall, wide) = grid_size(one.vit), patch_size(one.vit)
    row, column = int(place.y // tall), int(place.x // wide)
    if not (0 <= row < rows and 0 <= column < columns):
        raise PatchloomError(
            f"the point {place.x:g},{place.y:g} is outside of the image: {one.name} is given images of "
            f"{columns * wide} pixels from left to right and {rows * tall} from top to bottom"
        )
    return row * columns + column


def patch_box(grid: tuple[int, int], patch: int) -> tuple[float, float, float, float]:
    """Top, left, height and width of a patch, as shares of the image."""
    row, column = divmod(patch, grid[1])
    return row / grid[0], column / grid[1], 1 / grid[0], 1 / grid[1]


def mark_of(one: NamedEncoder, patch: int) -> tuple[float, float, float, float]:
    """Top, left, height and width of a patch, as shares of the image as it is drawn."""
    top, left, tall, wide = patch_box(grid_size(one.vit), patch)
    return (top if one.modality.top_down else 1 - top - tall), left, tall, wide


def chosen_layers(asked: LookRequest, count: int) -> list[int]:
    """Numbers, from 1, of blocks, or stages of a Swin: those that were asked for, or ``count``, the last among them."""
    last = len(layer_names(asked.encoder.vit)) - 2
    if asked.blocks is None:
        evenly = torch.linspace(0, last, count + 1)[1:].round().int().tolist()
        return sorted({max(1, one) for one in evenly})
    wrong = [one for one in asked.blocks if not 1 <= one <= last]
    if wrong:
        kind = layer_names(asked.encoder.vit)[1].split()[0]
        raise PatchloomError(f"{asked.encoder.name} has no {kind} {wrong[0]}: its {kind}s are numbered 1 to {last}")
    return sorted(set(asked.blocks))
