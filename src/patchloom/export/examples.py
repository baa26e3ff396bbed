"""What features are compared on: images of the run, or recordings, or noise where they are not to be had."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from patchloom.audio.compatibility import first_waves, with_encoder_sound
from patchloom.data.decode import read_image, to_channels
from patchloom.data.loader import plain_batches
from patchloom.data.source import Data, Source
from patchloom.data.sources.in_memory import DataLike
from patchloom.data.sources.open import open_data, open_stored
from patchloom.data.stats import normalize
from patchloom.errors import PatchloomError
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.checkpoints.load import kind_of
from patchloom.runs.folder import RunFolder

_IMAGES = 16
_WHOLE = 4  # of these, as they are read: they may be large
# what Pillow reads as patchloom does; TIFFs are read by more than Pillow, and of what is deeper it drops bits
_BY_PILLOW = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif"}


@dataclass(frozen=True)
class Examples:
    """Images or recordings.

    Attributes:
        given: images [b c h w] in [0, 1], of the encoder's size, or waveforms [b n] in [-1, 1].
        whole: a few of the images [c h w] as they are read, uint8 or in [0, 1]; () of recordings.
        files: where those lie, if all are files that Pillow reads as patchloom does; else ().
        why_noise: a sentence if they are noise, else "".
    """

    given: Tensor
    whole: Sequence[Tensor] = ()
    files: Sequence[Path] = ()
    why_noise: str = ""

    def by_file(self) -> bool:
        """Whether files can hold them that Pillow reads: 8 bits, grey or colour."""
        return bool(self.whole) and all(one.dtype == torch.uint8 and len(one) in (1, 3) for one in self.whole)

    def in_files(self, folder: Path) -> Sequence[Path]:
        """Files of `whole`: the images' own, else PNG files that are written to ``folder``."""
        if self.files:
            return self.files
        written = [folder / f"{i}.png" for i in range(len(self.whole))]
        for path, image in zip(written, self.whole, strict=True):
            pixels = image.permute(1, 2, 0).contiguous().numpy()
            Image.fromarray(pixels[..., 0] if len(image) == 1 else pixels).save(path)
        return written


def make_examples(run: str | Path, data: DataLike | None, card: EncoderCard) -> Examples:
    """What users have, or noise."""
    noun = card.modality.noun
    if data is not None:
        return _real(open_data(data), card)
    if not Path(run).is_dir() or kind_of(run) == "hub":
        why = f"{run} does not tell which {noun} it was trained on"
    else:
        stored = RunFolder(run).read_config().data
        try:
            return _real(open_stored(stored, os.fspath(run), f"--data {noun.upper()}"), card)
        except PatchloomError as problem:
            why = f"the {noun} of the run are not to be had ({problem})"
    generator = torch.Generator().manual_seed(0)
    if card.sound is not None:
        said = f"Compared on noise, since {why}: --data RECORDINGS compares on recordings."
        waves = (0.1 * torch.randn(_IMAGES, card.sound.samples, generator=generator)).clamp(-1, 1)
        return Examples(waves, why_noise=said)
    said = f"Compared on noise, since {why}: --data PHOTOS compares on images."
    h, w = card.own_spec.img_size
    # whole images are larger, and of another shape, so that cropping and resizing are compared, too
    whole = (_noise(card, _WHOLE, (h + h // 2, 2 * w), generator) * 255).round().to(torch.uint8)
    return Examples(_noise(card, _IMAGES, (h, w), generator), tuple(whole), why_noise=said)


def _noise(card: EncoderCard, count: int, size: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Images [count c h w] in [0, 1] of the data's statistics, so that the normalisation is compared where it is used.

    They are of patches of 4 pixels of one colour, which resizing does not average away.
    """
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (card.mean, card.std))
    coarse = torch.randn(count, card.own_spec.channels, *(-(-side // 4) for side in size), generator=generator)
    noise = coarse.repeat_interleave(4, 2).repeat_interleave(4, 3)[..., : size[0], : size[1]]
    return (mean + std * noise).clamp(0, 1)


def _real(opened: Data, card: EncoderCard) -> Examples:
    channels = card.own_spec.channels
    source = with_encoder_sound(opened, card.sound, card.name).train
    if card.sound is not None:
        return Examples(first_waves(source, _IMAGES))
    batch = next(plain_batches(source, card.own_spec.img_size, _IMAGES, channels=channels))
    given = normalize(batch.views[0], (0.0,) * channels, (1.0,) * channels)
    chosen = batch.indices[:_WHOLE].tolist()
    files = [_file_of(source, i) for i in chosen]
    own = tuple(path for path in files if path is not None)
    if len(own) == len(files) and all(read_image(path).dtype == torch.uint8 for path in own):
        return Examples(given, tuple(map(read_image, own)), own)
    # what is written to files has the encoder's channels, which are then read back as they are
    return Examples(given, tuple(to_channels(source.read(i), channels).contiguous() for i in chosen))


def _file_of(source: Source, i: int) -> Path | None:
    """The file of image ``i`` if it is one that Pillow reads as patchloom does."""
    path = Path(source.describe(i))
    return path if source.place(i) is not None and path.suffix.lower() in _BY_PILLOW and path.is_file() else None


def largest_difference(what: str, ours: Tensor, theirs: Tensor, by: str = "the code that uses timm") -> float:
    """The largest absolute difference of features."""
    found = (theirs - ours).abs().max().item()
    if not found <= 1e-3 * ours.abs().max().item():  # true of nan too
        raise PatchloomError(f"{what} by {by} differ by {found:.2e}: this is a bug, please report it")
    return found


def vectors_of_files(
    examples: Examples, folder: Path, ours: Callable[[Tensor], Tensor], embed: Callable[[str], Tensor]
) -> tuple[Tensor, Tensor]:
    """Our vectors [n d] of image files, and those that ``embed`` makes of their names.

    Args:
        examples: of which files there are, or are written to ``folder``.
        folder: an empty one.
        ours: the vector [d] of an image [c h w] as it is read.
        embed: that of a file's name.
    """
    paths = examples.in_files(folder)
    theirs = [torch.as_tensor(embed(str(path))) for path in paths]
    return torch.stack([ours(read_image(path)) for path in paths]), torch.stack(theirs)


def describe_files(examples: Examples) -> str:
    """Which files `vectors_of_files` takes, as the end of a sentence."""
    count = len(examples.whole)
    return f"{count} of its files" if examples.files else f"{count} images in PNG files"
