"""Common parts of the pictures of an encoder: the request, image preparation, patch positions and captions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchloom.data.loader import plain_batches
from patchloom.data.modality import Modality
from patchloom.data.source import Source
from patchloom.data.sources.in_memory import evenly_spaced
from patchloom.data.stats import normalize
from patchloom.errors import PatchloomError
from patchloom.look.sheet import Box, Title, brightness, channels_shown, said_of_brightness, to_pixels
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.encode import (
    encode,
    grid_size,
    input_channels,
    input_size,
    patch_count,
    patch_size,
    prefix_count,
)
from patchloom.nets.heads import InstanceHead
from patchloom.nets.swin import Encoder, level_count
from patchloom.options.verbs import HeadChoice
from patchloom.withhold.encoder_input import all_patches

_BATCH = 32
QUERIES = 4  # largest number of patches whose attention is drawn together, as in ExtreMA's Fig. 1


class NamedEncoder(NamedTuple):
    """Encoder in eval mode at the input size of its pictures.

    Attributes:
        name: name in titles and legends.
        vit: the encoder; `input_size` and `patch_size` of it are authoritative.
        card: describes how images become its input. The size in its ``spec`` may differ.
        head: class attention of ExtreMA; None without one.
    """

    name: str
    vit: Encoder
    card: EncoderCard
    head: InstanceHead | None = None

    @property
    def modality(self) -> Modality:
        """Kind of data that it encodes."""
        return self.card.modality

    def batches(
        self, source: Source, device: torch.device | str = "cpu", size: tuple[int, int] | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield indices [b] and normalised images [b c h w] of a source, of the encoder's size or another."""
        channels = input_channels(self.vit)
        for batch in plain_batches(source, size or input_size(self.vit), _BATCH, channels=channels, device=device):
            yield batch.indices, normalize(batch.views[0], self.card.mean, self.card.std)


class ImagePoint(NamedTuple):
    """Point in the encoder's input: pixels from the left and from the top."""

    x: float
    y: float


@dataclass(frozen=True)
class LookRequest:
    """Request for pictures of an encoder.

    Attributes:
        encoder: the encoder to show.
        source: images, or recordings in the encoder's format.
        folder: folder for the pictures.
        beside: encoders for comparison: by default an untrained one, and those that the user gave.
        images: number of images drawn, 1 to 8, evenly spread over ``source``.
        seed: random seed.
        queries: points whose patches are examined; empty: the picture chooses. Only the mean attention of all heads
            takes several.
        heads: whether attention is drawn for each head, or averaged over heads.
        exemplar: image file that retrieval searches for; None: crops of the images are used.
        blocks: numbers, from 1, of the blocks to draw; None: the picture chooses.
        steps: optimisation steps; None: as in the paper, or fewer on a CPU.
        device: device of the encoders and of all computations.
    """

    encoder: NamedEncoder
    source: Source
    folder: Path
    beside: tuple[NamedEncoder, ...] = ()
    images: int = 8
    seed: int = 0

    queries: tuple[ImagePoint, ...] = ()
    heads: HeadChoice = "each"
    exemplar: Path | None = None
    blocks: tuple[int, ...] | None = None
    steps: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def pictures(self, most: int | None = None, of: NamedEncoder | None = None, times: int = 1) -> Tensor:
        """Load images [b c h w], evenly spread over the source, normalised for the encoder, on the device."""
        places = evenly_spaced(len(self.source), self.images if most is None else most)
        one = of or self.encoder
        h, w = input_size(one.vit)
        batches = one.batches(self.source.subset(places), self.device, (times * h, times * w))
        return torch.cat([images for _, images in batches])

    def title(self, what: str) -> Title:
        """Return the title of a sheet."""
        return Title(f"{self.encoder.name}: {what}")


# Helpers shared by all pictures of an encoder: features, display colours, patch positions and captions.


def output_of(one: NamedEncoder, images: Tensor) -> Tensor:
    """Return the patch features [b rows columns d] of images [b c h w] after the last norm."""
    with torch.inference_mode():
        tokens = encode(one.vit, all_patches(images, patch_count(one.vit)))
    return check_finite(one, tokens[:, prefix_count(one.vit) :].unflatten(1, grid_size(one.vit)).float().cpu())


def check_finite(one: NamedEncoder, features: Tensor) -> Tensor:
    """Return the features if they are finite."""
    if not features.isfinite().all():
        raise PatchloomError(f"{one.name} gives features that are not finite: its training has diverged")
    return features


def to_pictures(one: NamedEncoder, images: Tensor, beside: Tensor | None = None) -> np.ndarray:
    """Convert normalised images [b c h w] to uint8 [b h w 3]; spectrograms have their first row at the bottom.

    Dark images are brightened; crops are brightened like the images ``beside`` them.
    """
    drawn, mean, std = _in_colours(one, images)
    return to_pixels(drawn, mean, std, brightness(drawn if beside is None else _in_colours(one, beside)[0], mean, std))


def _in_colours(one: NamedEncoder, images: Tensor) -> tuple[Tensor, Sequence[float], Sequence[float]]:
    return one.modality.colours(images, one.card.mean, one.card.std)


def orient_rows(one: NamedEncoder, values: Tensor) -> np.ndarray:
    """Orient values per patch [b rows columns ...] like the picture: spectrograms have their first row last."""
    shown = values.detach().cpu().float()
    return (shown if one.modality.top_down else shown.flip(1)).numpy()


def full_caption(one: NamedEncoder, text: str, images: Tensor) -> str:
    """Append to a caption how the images are displayed: axes, channels and brightness.

    Args:
        one: the encoder.
        text: the caption.
        images: [b c h w], as given to `to_pictures`.
    """
    brighter = said_of_brightness(brightness(*_in_colours(one, images)), one.modality.noun)
    return " ".join(filter(None, [text, one.modality.axes, channels_shown(len(one.card.mean)), brighter]))


def patch_at(one: NamedEncoder, place: ImagePoint) -> int:
    """Return the number of the patch, row by row, at a point of an image."""
    (_, columns), (tall, wide) = grid_size(one.vit), patch_size(one.vit)
    return int(place.y // tall) * columns + int(place.x // wide)


def patch_box(grid: tuple[int, int], patch: int) -> Box:
    """Return top, left, height and width of a patch as fractions of the image."""
    row, column = divmod(patch, grid[1])
    return row / grid[0], column / grid[1], 1 / grid[0], 1 / grid[1]


def mark_of(one: NamedEncoder, patch: int) -> Box:
    """Return top, left, height and width of a patch as fractions of the drawn image."""
    top, left, tall, wide = patch_box(grid_size(one.vit), patch)
    return (top if one.modality.top_down else 1 - top - tall), left, tall, wide


def chosen_layers(asked: LookRequest, count: int) -> list[int]:
    """Return the numbers, from 1, of the requested blocks (stages of a Swin), or of ``count`` that include the last."""
    if asked.blocks is None:
        evenly = torch.linspace(0, level_count(asked.encoder.vit), count + 1)[1:].round().int().tolist()
        return sorted({max(1, one) for one in evenly})
    return [*asked.blocks]
